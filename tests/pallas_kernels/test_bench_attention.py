"""scripts/bench_attention runs and prints what it says."""

import json
import runpy
import sys


def test_prints_json_for_each_arm(monkeypatch, capsys, repository):
    script = repository / "scripts" / "bench_attention"
    flags = "--layers=1 --steps=decode-b1-c512 --repetitions=1 --backends=xla,reference".split()  # noqa: SIM905
    monkeypatch.setattr(sys, "argv", [str(script), *flags])
    runpy.run_path(str(script), run_name="__main__")
    report = json.loads(capsys.readouterr().out)
    step = report["steps"]["decode-b1-c512"]
    assert step["xla"]["ratio"] == 1.0
    assert step["reference"]["median_ms"] > 0
    assert step["bytes_ms"] > 0
