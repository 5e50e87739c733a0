"""What ptxas makes of the Hopper kernels, for an H200 that is not there: run with `-m aot`.

scripts/gpu_aot compiles in an environment of its own (the first call downloads the CUDA plugin). Each
row that it reports carries its fault: an error of the compiler, a spill, more registers or shared memory
than two blocks have, a pool that is not updated in place, a copy as large as the pool. A control is a
fault if its own fault is not caught.
"""

import json
import runpy
import subprocess
import sys

import pytest

from scripts.aot.kernel_dumps import Kernel, KernelDumps, faults

# A Llama-3-8B layer serving 256 sequences, SmolLM2, every variant, and the whole step.
SHAPES = ["--heads=smollm2-135m,llama-3.1-8b", "--steps=serve-256x8192", "--layers=4"]
ONE, SHARED = "llama-3-8b 4 of 32 layers", "llama-3-8b 4 of 32 layers tp8"


@pytest.fixture(scope="module")
def rows(repository):
    command = [sys.executable, "scripts/gpu_aot", "--json", *SHAPES]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    found = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    faults = {name: row["fault"] for name, row in found.items() if row["fault"]}
    assert done.returncode == bool(faults), done.stderr
    return found


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_everything_compiles_within_its_limits(rows):
    assert {name: row["fault"] for name, row in rows.items() if row["fault"]} == {}
    assert len(rows) >= 16


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_the_figures_are_those_of_real_kernels(rows):
    row = rows["llama-3.1-8b serve-256x8192 bfloat16"]
    decode = row["kernels"].split().index("paged_decode")
    assert 8 < int(row["registers"].split()[decode]) <= 64
    assert 32 < float(row["smem_kib"].split()[decode]) <= 113
    assert row["target"] == "sm_90a"


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_faulty_programs_are_caught(rows):
    controls = {name: row for name, row in rows.items() if name.startswith("control")}
    assert len(controls) == 3
    assert all(row["fault"] == "" for row in controls.values())  # of a control: caught
    assert int(rows["control: spills"]["spill_bytes"]) > 0


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_gpus_exchange_two_all_reduces_a_layer(rows):
    assert rows[ONE]["collectives"] == "none"
    assert rows[SHARED]["collectives"].startswith("layers 8 all-reduce, ")
    assert rows[SHARED]["full_gib"] < rows[ONE]["full_gib"] / 2


def kernel(**changed) -> Kernel:
    return Kernel(
        **{"registers": 64, "spill_bytes": 0, "smem_bytes": 1024, "target": "sm_90a"} | changed
    )


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({}, []),
        ({"registers": 65}, ["k: 65 registers, more than 64"]),
        ({"smem_bytes": 115713}, ["k: 115713 bytes of shared memory, more than 115712"]),
        ({"spill_bytes": 4}, ["k: 4 bytes of spills"]),
        ({"target": "sm_100a"}, ["k: assembly for sm_100a, not sm_90a"]),
    ],
)
def test_each_limit_bites(changed, fault):
    assert faults({"k": kernel(**changed)}, resident=("k",)) == fault


def test_limits_of_two_blocks_hold_for_named_kernels_only():
    assert faults({"k": kernel(registers=255, smem_bytes=200_000)}, resident=("other",)) == []


def write_dump(folder, name, registers):
    (folder / f"{name}_0.ptx").write_text(".version 8.7\n.target sm_90a\n")
    (folder / f"{name}_0.ptxas").write_text(
        "    0 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 16 barriers, 1 bytes smem\n"
    )
    (folder / f"{name}_0.resources.txt").write_text("Resources(smem_scratch_bytes=2048, x=0)")


def call_text(name, digest):
    return (
        f'  %m = f32[8] custom-call(%a), custom_call_target="mosaic_gpu_v2", '
        f'metadata={{op_name="jit(f)/{name}/mpmd_map" id=1}}, '
        f'backend_config={{kernel_hash = "{digest}", module = "x"}}\n'
    )


def test_a_kernel_that_is_compiled_once_is_known_in_later_programs(tmp_path):
    dumps = KernelDumps()
    write_dump(tmp_path, "decode_rows", 40)
    text = call_text("decode_rows", "\\E4a")
    expected = Kernel(registers=40, spill_bytes=12, smem_bytes=2048, target="sm_90a")
    assert dumps.read(tmp_path, text) == {"decode_rows": expected}
    empty = tmp_path / "empty"
    empty.mkdir()
    assert dumps.read(empty, text) == {"decode_rows": expected}
    with pytest.raises(ValueError, match="kernel decode_rows: nothing was written"):
        dumps.read(empty, call_text("decode_rows", "\\E4b"))


def test_without_tools_their_wheel_is_asked_for(repository, tmp_path, monkeypatch):
    script = runpy.run_path(str(repository / "scripts" / "gpu_aot"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not script["tools_on_path"]()
    for tool in script["TOOLS"]:
        (tmp_path / tool).touch(mode=0o755)
    assert script["tools_on_path"]()
    python = tmp_path / "bin" / "python"
    with pytest.raises(FileNotFoundError, match="nvidia/cu13/bin/ptxas"):
        script["tool_settings"](python)
    tools = tmp_path / "lib" / "python3.12" / "site-packages" / "nvidia" / "cu13" / "bin"
    tools.mkdir(parents=True)
    (tools / "ptxas").touch()
    settings = script["tool_settings"](python)
    assert settings["CUDA_ROOT"] == str(tools.parent)
    assert settings["PATH"].startswith(f"{tools}:")
