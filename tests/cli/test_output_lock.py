"""Two runs never write one output, and a lock leaves nothing behind."""

import os
import signal
import time

import pytest

from jaxserve.cli.output_files import OutputError, meta_path
from jaxserve.cli.output_lock import OutputLock
from tests.cli.conftest import read_records
from tests.cli.fake_llm import expected_text
from tests.cli.test_run import write_lines


def test_the_second_lock_is_refused_and_names_the_output(tmp_path):
    output = tmp_path / "o.jsonl"
    with OutputLock(output):
        with (
            pytest.raises(OutputError, match=rf"another run is writing {output}"),
            OutputLock(output),
        ):
            pass
        assert output.exists(), "the refused one removed the other's file"
    assert not output.exists()
    with OutputLock(output):
        pass


def test_links_are_the_same_output(tmp_path):
    output, link = tmp_path / "o.jsonl", tmp_path / "link"
    link.symlink_to(output)
    with OutputLock(link):  # to a file that is not there yet
        assert output.exists()
        with pytest.raises(OutputError, match="another run"), OutputLock(output):
            pass
    assert link.is_symlink()
    assert not output.exists()


def test_only_a_file_that_was_made_for_the_lock_is_removed(tmp_path):
    old, kept, written = (tmp_path / name for name in ("old", "kept", "written"))
    old.touch()
    with OutputLock(old):
        pass
    with OutputLock(kept) as lock:
        lock.keep()
    with OutputLock(written):
        written.write_text("x")
    assert all(path.exists() for path in (old, kept, written))


def test_a_file_that_goes_between_opening_and_locking_is_made_again(tmp_path, monkeypatch):
    output = tmp_path / "o.jsonl"
    output.touch()
    open_file, removed = os.open, []

    def open_and_lose(path, flags, *mode):
        descriptor = open_file(path, flags, *mode)
        if not flags & os.O_EXCL and not removed:
            removed.append(path)
            os.unlink(path)
        return descriptor

    monkeypatch.setattr(os, "open", open_and_lose)
    with OutputLock(output):
        assert removed
        assert output.exists()
        with pytest.raises(OutputError, match="another run"), OutputLock(output):
            pass


def test_an_output_that_cannot_be_opened_is_named(tmp_path):
    (tmp_path / "file").touch()
    lock = OutputLock(tmp_path / "file" / "o")
    with pytest.raises(OutputError, match=r"cannot write --output=.*: Not a directory"), lock:
        pass


@pytest.mark.parametrize("extra", [[], ["--resume"], ["--overwrite"]])
def test_two_runs_at_once(start, tmp_path, extra):
    lines = [{"prompt": f"p{i}", "max_tokens": 1 + i % 3} for i in range(30)]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    flags = [f"--input={source}", f"--output={output}", "--max-num-seqs=2", *extra]
    first = start(0.02, *flags, load_s=2)
    while not output.exists():
        time.sleep(0.01)
    second = start(0, *flags)
    _, err = second.communicate(timeout=30)
    assert second.returncode == 2
    assert err.count("\n") == 1
    assert f"another run is writing {output}" in err
    _, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    texts = [record["text"] for record in read_records(output)]
    assert texts == [expected_text(x["prompt"], x["max_tokens"]) for x in lines]


def test_a_kill_gives_the_lock_back(start, tmp_path):
    output = tmp_path / "out.jsonl"
    flags = [f"--output={output}", "--max-tokens=2", "hello"]
    process = start(60, *flags)
    while not meta_path(output).exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    process = start(0, *flags, "--resume")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0, err
    assert len(read_records(output)) == 1
