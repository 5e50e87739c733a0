"""What the TPU compiler makes of the kernel and of full steps, for chips that are not there: `-m aot`.

scripts/tpu_aot compiles in an environment of its own (the first call downloads libtpu). Each row that
it reports carries its fault: an error of the compiler, a pool that is not updated in place, a copy as
large as the pool, chips that exchange more than two all-reduces a layer; a control over a 192-wide pool
is a fault if its copies are not seen.
"""

import collections
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxserve.device import aot
from scripts.aot import report

# A Llama-3-8B layer serving 256 sequences, SmolLM2, and every variant; ask the script for more.
SHAPES = ["--heads=smollm2-135m,llama-3.1-8b", "--steps=serve-256x8192"]
# A whole step takes the compiler half a minute, most of it for the sampler, and all page copies of a
# chip as much: only one chip has everything.
FEW_COPIES = ",".join(f"{name} tpu tpu 8/128 bfloat16" for name in ("copy", "gather", "scatter"))
CHIPS = {
    "v5e": ["--models=llama-3-8b", "--devices=1,8"],
    "v5p": ["--models=llama-3-70b", "--devices=8", f"--copies={FEW_COPIES}"],
    "v6e": ["--models=llama-3-8b", "--devices=8", f"--copies={FEW_COPIES}"],
}


@pytest.fixture(scope="module")
def rows_by_chip(repository):
    # First the controls alone, which makes the environment where there is none yet.
    nothing = [f"--{what}=" for what in ("heads", "variants", "copies", "models")]
    command = [sys.executable, "scripts/tpu_aot", "--chips=v5e", *nothing]
    subprocess.run(command, cwd=repository, capture_output=True, check=True)

    def compile_on(chip):
        options = ["--json", f"--chips={chip}", "--layers=1", *SHAPES, *CHIPS[chip]]
        command = [sys.executable, "scripts/tpu_aot", *options]
        done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
        found = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
        faults = {name: row["fault"] for name, row in found.items() if row["fault"]}
        assert done.returncode == bool(faults), done.stderr
        return found

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(CHIPS, pool.map(compile_on, CHIPS), strict=True))


@pytest.fixture(params=CHIPS)
def chip(request):
    return request.param


@pytest.fixture
def rows(rows_by_chip, chip):
    return rows_by_chip[chip]


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_everything_compiles_with_the_pool_in_place_and_no_copy_of_it(rows):
    assert {name: row["fault"] for name, row in rows.items() if row["fault"]} == {}
    assert len(rows) >= 18


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_the_copies_of_a_192_wide_pool_are_seen(rows):
    control = rows["control: 192 wide"]
    assert control["fault"] == ""  # of a control: seen
    assert control["temp_mib"] > 256  # they are real: a pool of 256 MiB and more


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_temporaries_are_small_beside_a_pool(rows):
    calls = [row for name, row in rows.items() if "control" not in name and "layers" not in name]
    assert all(row["temp_mib"] < 32 for row in calls)


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_eight_chips_share_a_model_by_two_all_reduces_a_layer(rows):
    shared = [row for name, row in rows.items() if name.endswith("layers tp8")]
    assert len(shared) == 1
    assert shared[0]["collectives"].startswith("layers 2 all-reduce, ")
    assert 0 < shared[0]["vmem_mib"] < 16
    assert 0 < shared[0]["smem_kib"] < 960


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_an_eighth_of_a_model_needs_less_than_all_of_it(rows_by_chip):
    rows = rows_by_chip["v5e"]
    one, shared = (rows[f"llama-3-8b 1 of 32 layers{n}"] for n in ("", " tp8"))
    assert one["collectives"] == "none"
    assert shared["full_gib"] < one["full_gib"] / 2
    assert shared["vmem_mib"] < one["vmem_mib"]


def test_other_exchanges_are_faults():
    counted = {"layers": collections.Counter({"all-reduce": 4})}
    assert aot.exchange_faults(counted, 2, 8) == []
    assert aot.exchange_faults(counted, 2, 1) != []
    counted["layers"]["all-gather"] += 1
    assert aot.exchange_faults(counted, 2, 8) == [
        "layers: {'all-reduce': 4, 'all-gather': 1} exchanged, not {'all-reduce': 4}"
    ]


def test_the_table_shows_every_column():
    columns = [("chip", "{}"), ("name", "{}"), ("hbm_mib", "{:.1f}"), ("fault", "{}")]
    rows = [
        {"chip": "v5e", "name": "a", "fault": "", "hbm_mib": 1.26},
        {"chip": "v5e", "name": "longer", "fault": "2 copies"},
    ]
    lines = report.table(rows, columns).splitlines()
    assert lines[0].split() == [name for name, _ in columns]
    assert lines[1].split() == ["v5e", "a", "1.3"]
    assert lines[2].endswith("-        2 copies")


def test_a_worker_that_dies_leaves_a_fault(tmp_path):
    worker = tmp_path / "worker.py"
    worker.write_text('print(\'{"name": "a", "fault": ""}\', flush=True)\nraise SystemExit("died")')
    rows = report.run_worker(sys.executable, "worker", [], {"PYTHONPATH": str(tmp_path)})
    assert rows == [
        {"name": "a", "fault": ""},
        {"name": "worker", "fault": "exit code 1: died"},
    ]


def test_an_unknown_chip_is_refused(repository):
    command = [sys.executable, "scripts/tpu_aot", "--chips=v5e,v9"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--chips=v5e,v9: known are v5e, v5p, v6e" in done.stderr
