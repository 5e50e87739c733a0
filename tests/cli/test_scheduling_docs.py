"""docs/scheduling.md: its commands run (over the fake engine), its Python runs (on the tiny model), and its
names are those of the code.
"""

import ast
import dataclasses
import re
import shlex

from jaxserve.cli.main import main
from jaxserve.cli.run import run_flags
from jaxserve.config import ADMISSION, EVICTION, PREEMPTION_MODES
from jaxserve.schedule.preemption import MAX_PREEMPTIONS
from jaxserve.schedule.prefix_wait import MAX_STEPS
from jaxserve.schedule.queue import LPM_WINDOW, PATIENCE
from jaxserve.stats import GROUPS, EngineStats
from tests.cli.conftest import ROOT, read_records
from tests.cli.test_run import write_lines
from tests.e2e.test_memory import CACHED
from tests.llms import shared_llm
from tests.test_readme import blocks, commands

TEXT = (ROOT / "docs" / "scheduling.md").read_text()


def test_commands(made, model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_lines(
        tmp_path / "prompts.jsonl", [{"prompt": f"hello {i}", "max_tokens": 4} for i in range(5)]
    )
    for command in commands(TEXT):
        program, *arguments = shlex.split(command)
        assert program == ".venv/bin/jaxserve"
        assert main([a.replace("smollm2-135m-instruct", str(model)) for a in arguments]) == 0
    assert capsys.readouterr().out.startswith("the same 20 tokens in ")
    assert len(read_records(tmp_path / "answers.jsonl")) == 5
    assert read_records(tmp_path / "stats.jsonl")[-1]["pages"]["num_pages"] == 200


def test_python_blocks(capsys):
    names: dict[str, object] = {"small": shared_llm(**CACHED)}
    shown = []
    for block in blocks("python", TEXT):
        code, changes = re.subn(r'LLM\("checkpoints/.*?"\)', "small", block)
        assert changes == (0 if shown else 1)
        exec(compile(code, "scheduling.md", "exec"), names)
        shown.append(capsys.readouterr().out)
    choices, beams = (ast.literal_eval(line) for line in shown[0].splitlines())
    assert len(choices) == 4
    assert [score for _, score in beams] == sorted((score for _, score in beams), reverse=True)
    assert re.fullmatch(r"root(\.[012]){1,3}\n", shown[1])
    stats = shared_llm(**CACHED).engine.stats()
    assert stats.num_owned_pages == stats.num_held == 0


def test_names_are_those_of_the_code():
    flags = set(re.findall(r"`--(\w+)[=`]", TEXT))
    assert flags <= set(run_flags()) | {"page_size"}
    for names in (ADMISSION, EVICTION, PREEMPTION_MODES):
        assert all(f"`{name}`" in TEXT for name in names)
    figures = {name for names in GROUPS.values() for name in names} | set(GROUPS)
    figures |= {field.name for field in dataclasses.fields(EngineStats)}
    for name in ("kv_utilisation", "hit_rate", "padding_waste", "last_step", "prefix_cache"):
        assert name in figures
        assert f"`{name}`" in TEXT


def test_numbers_are_those_of_the_code():
    assert f"among the oldest {LPM_WINDOW} " in TEXT
    assert f"at most {MAX_STEPS} steps" in TEXT
    assert PATIENCE == 4, "every fourth admission"
    assert MAX_PREEMPTIONS == 4, "preempted four times"
