"""What the TPU compiler makes of tpu.py, for chips that are not there: run with `-m aot`.

scripts/tpu_aot compiles in an environment of its own (the first call downloads libtpu). Each row that
it reports carries its fault: an error of the compiler, a pool that is not updated in place, a copy as
large as the pool; a control over a 192-wide pool is a fault if its copies are not seen.
"""

import json
import runpy
import subprocess
import sys

import pytest

# A Llama-3-8B layer serving 256 sequences, SmolLM2, and every variant; ask the script for more.
SHAPES = ["--heads=smollm2-135m,llama-3.1-8b", "--steps=serve-256x8192"]


@pytest.fixture(scope="module", params=["v5e", "v5p", "v6e"])
def rows(request, repository):
    command = [sys.executable, "scripts/tpu_aot", "--json", f"--chips={request.param}", *SHAPES]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    found = {row["name"]: row for row in map(json.loads, done.stdout.splitlines())}
    faults = {name: row["fault"] for name, row in found.items() if row["fault"]}
    assert done.returncode == bool(faults), done.stderr
    return found


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_everything_compiles_with_the_pool_in_place_and_no_copy_of_it(rows):
    assert {name: row["fault"] for name, row in rows.items() if row["fault"]} == {}
    assert len(rows) >= 16


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_the_copies_of_a_192_wide_pool_are_seen(rows):
    control = rows["control: 192 wide"]
    assert control["fault"] == ""  # of a control: seen
    assert control["temp_mib"] > 256  # they are real: a pool of 256 MiB and more


@pytest.mark.aot
@pytest.mark.timeout(900)
def test_temporaries_are_small_beside_a_pool(rows):
    assert all(row["temp_mib"] < 32 for name, row in rows.items() if "control" not in name)


def test_the_table_shows_every_column(repository):
    script = runpy.run_path(str(repository / "scripts" / "tpu_aot"))
    rows = [
        {"chip": "v5e", "name": "a", "fault": "", "hbm_mib": 1.26},
        {"chip": "v5e", "name": "longer", "fault": "2 copies"},
    ]
    lines = script["table"](rows).splitlines()
    assert lines[0].split() == [name for name, _ in script["COLUMNS"]]
    assert lines[1].split() == ["v5e", "a", "1.3", "-", "-", "-", "-", "-"]
    assert lines[2].endswith("2 copies")


def test_an_unknown_chip_is_refused(repository):
    command = [sys.executable, "scripts/tpu_aot", "--chips=v5e,v9"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--chips=v5e,v9: known are v5e, v5p, v6e" in done.stderr
