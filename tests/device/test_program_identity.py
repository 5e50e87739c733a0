"""What kept programs are told apart by."""

import dataclasses

import jax
import pytest

from jaxserve.device import program_identity
from jaxserve.device.program_identity import PACKAGES, describe, identity, source_digest
from tests.device.executors import shared_pages


@pytest.fixture(scope="module")
def shapes():
    return shared_pages("auto")._shapes


def test_it_is_the_same_again(shapes):
    assert identity(shapes) == identity(dataclasses.replace(shapes))


def test_model_kernel_and_shapes_are_in_it(shapes):
    model = shapes.model
    other_config = dataclasses.replace(model.config, rms_norm_eps=0.25)
    other_kernel = dataclasses.replace(model.kernel, backend="reference")
    others = [
        dataclasses.replace(shapes, num_pages=shapes.num_pages + 1),
        dataclasses.replace(shapes, model=dataclasses.replace(model, config=other_config)),
        dataclasses.replace(shapes, model=dataclasses.replace(model, kernel=other_kernel)),
    ]
    assert len({identity(one) for one in [shapes, *others]}) == 4


def test_settings_of_jax_and_versions_are_in_it(shapes, monkeypatch):
    before = identity(shapes)
    with jax.default_matmul_precision("float32"):
        assert identity(shapes) != before
    monkeypatch.setattr(program_identity, "version", lambda name: f"{name} 99")
    assert identity(shapes) != before


def test_what_was_built_is_in_it(shapes, monkeypatch):
    before = identity(shapes)
    monkeypatch.setattr(program_identity, "missing", lambda: "nothing was built here")
    assert identity(shapes) != before


def test_an_edit_of_the_source_changes_it(tmp_path):
    def written(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return source_digest([tmp_path])

    digests = [
        written("a.py", "x = 1\n"),
        written("a.py", "x = 2\n"),
        written("b.py", ""),
    ]
    (tmp_path / "b.py").rename(tmp_path / "c.py")
    digests.append(source_digest([tmp_path]))
    assert len(set(digests)) == 4
    assert written("notes.txt", "no code") == digests[-1]


def test_both_packages_are_read():
    found = {path.name for folder in PACKAGES for path in folder.iterdir()}
    assert {"model", "device", "sample", "ragged_paged_attention", "native"} <= found


def test_what_has_no_lasting_description_is_refused():
    with pytest.raises(TypeError, match="function has no lasting description"):
        describe({"a": [lambda: None]})
