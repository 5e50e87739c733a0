"""What lies in a checkpoint under a name that is read, and is no file, is an error and not absent."""

import json
import shutil
from pathlib import Path

import pytest

from jaxserve.errors import CheckpointError
from jaxserve.weights.hf_directory import open_hf_directory, read_generation_config
from tests.llms import TINY

NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(TINY, tmp_path / "model")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["folder", "link to nothing"])
def test_what_is_no_file_is_no_absence(checkpoint, name, kind):
    path = checkpoint / name
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(checkpoint / "nowhere")
    with pytest.raises(CheckpointError, match=name):
        open_hf_directory(checkpoint)
    if name == "generation_config.json":
        with pytest.raises(CheckpointError, match=f"{name}: must be a file, and is "):
            read_generation_config(checkpoint)


@pytest.mark.parametrize("name", NAMES)
def test_a_link_to_a_file_is_as_good_as_the_file(checkpoint, name):
    path = checkpoint / name
    if path.exists():
        path.rename(checkpoint / "elsewhere")
        path.symlink_to(checkpoint / "elsewhere")
    assert open_hf_directory(checkpoint).config.vocab_size == 512


@pytest.mark.parametrize("name", NAMES[1:])
def test_most_files_may_be_absent(checkpoint, name):
    (checkpoint / name).unlink(missing_ok=True)
    open_hf_directory(checkpoint)
    assert read_generation_config(checkpoint / "model.safetensors") == {}


@pytest.mark.parametrize("value", [True, 2.0, "2", -1, [2, True], {"id": 2}, [[2]], 2**70])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_an_end_id_of_another_type_is_refused(checkpoint, file, value):

    path = checkpoint / file
    found = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(found | {"eos_token_id": value}))
    with pytest.raises(CheckpointError, match=rf"{file}.*eos_token_id must be a token id, a list"):
        open_hf_directory(checkpoint)
