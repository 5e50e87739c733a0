"""Entries of jax's cache that were cut short are removed, once, and others are left alone."""

import logging
import os
import zlib

import pytest

from jaxserve.device.compiled_entries import is_whole, remove_damaged

WHOLE = zlib.compress(bytes(range(256)) * 40)


@pytest.mark.parametrize(
    ("entry", "whole"),
    [
        (WHOLE, True),
        (WHOLE[:-1], False),
        (WHOLE[:40], False),
        (b"", False),
        (b"\0" * 100, False),
        (WHOLE[:30] + b"?" + WHOLE[31:], False),
    ],
)
def test_an_entry_is_whole_or_not(entry, whole):
    assert is_whole(entry) == whole


def test_damaged_entries_are_removed_and_counted(tmp_path, caplog):
    good, bad, other = (tmp_path / name for name in ("a-cache", "b-cache", "notes"))
    good.write_bytes(WHOLE)
    bad.write_bytes(WHOLE[:-3])
    other.write_bytes(b"")
    with caplog.at_level(logging.WARNING, "jaxserve"):
        assert remove_damaged(tmp_path) == 1
    assert good.exists()
    assert other.exists()
    assert not bad.exists()
    assert "1 compiled programs" in caplog.text


def test_entries_are_read_once(tmp_path):
    path = tmp_path / "a-cache"
    path.write_bytes(WHOLE)
    os.utime(path, (1000, 1000))
    assert remove_damaged(tmp_path) == 0
    path.write_bytes(WHOLE[:-3])
    os.utime(path, (1000, 1000))  # as old as it was: not looked at
    assert remove_damaged(tmp_path) == 0
    os.utime(path)  # written since
    assert remove_damaged(tmp_path) == 1
