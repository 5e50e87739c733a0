"""docs/planning.md: its commands run, its figures are those that they print, its Python runs, its names are
those of the code.
"""

import json
import re
import shlex

from jaxserve.cli.main import main
from jaxserve.cli.plan import plan_flags
from jaxserve.plan.chips import CHIPS
from tests.cli.conftest import ROOT
from tests.llms import shared_llm
from tests.test_readme import blocks, commands

TEXT = (ROOT / "docs" / "planning.md").read_text()
ROW = re.compile(r"^\| `(--chip=\S+ --num_chips=\d+)` \| (.*) \|$", re.MULTILINE)


def test_commands(capsys):
    own = [command for command in commands(TEXT) if command.startswith(".venv/bin/jaxserve ")]
    own = [command for command in own if "--aot" not in command]  # of tests/cli/test_plan_aot.py
    assert len(own) == 2
    codes = [main(shlex.split(command)[1:]) for command in own]
    assert codes == [0, 1]
    assert "does not fit: each chip lacks " in capsys.readouterr().out


def test_figures_are_those_of_the_command(capsys):
    rows = ROW.findall(TEXT)
    assert {flags.split()[0] for flags, _ in rows} == {"--chip=v5e", "--chip=v5p", "--chip=h100"}
    for flags, written in rows:
        assert main(["plan", "--model=llama-3-70b", *flags.split(), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert written == " | ".join(
            [
                f"{found['chip_memory']['weight_bytes'] / 1e9:.2f}",
                f"{found['num_pages']:,} of {found['page_size']}",
                f"{found['max_concurrency']:,}",
                f"{found['decode_tokens_per_s']:,.0f} at {found['decode_batch']}",
                f"{found['prefill_tokens_per_s']:,.0f}",
            ]
        ), flags


def test_the_page_size_follows_from_the_context(capsys):
    assert "with `--max_model_len=8192` pages have 32 tokens and not 256" in TEXT
    sizes = []
    for limit in ([], ["--max_model_len=8192"]):
        main(["plan", "--model=llama-3-70b", "--chip=v5e", "--num_chips=16", "--json", *limit])
        sizes.append(json.loads(capsys.readouterr().out)["page_size"])
    assert sizes == [256, 32]


def test_python_block(capsys):
    (block,) = blocks("python", TEXT)
    llm = shared_llm()
    code, changes = re.subn(r'LLM\("checkpoints/.*?"\)', "small", block)
    code, more = re.subn(r"measure_ceilings\(\)", "measure_ceilings(repetitions=1)", code)
    assert (changes, more) == (1, 1)
    exec(compile(code, "planning.md", "exec"), {"small": llm})
    share = float(capsys.readouterr().out)
    assert share > 0
    roofline = llm.engine.stats().roofline
    assert roofline is not None
    assert roofline.roofline_share == share
    llm.engine.meter.set_peaks(bytes_per_s=None, flops_per_s=None)
    assert llm.engine.stats().roofline.roofline_share is None


def test_names_are_those_of_the_code(capsys):
    flags = set(re.findall(r"`--(\w+)[=`]", TEXT))
    assert flags <= set(plan_flags())
    assert all(f"`{chip}`" in TEXT for chip in CHIPS)
    assert main(["plan", "--model=smollm2-135m", "--chip=cpu", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    keys = set(re.findall(r"`(\w+)`", TEXT.partition("## Keys of --json")[2]))
    bound = record["decode"][0].keys()
    assert keys <= record.keys() | bound | {"aot", "sweep", "max_num_seqs"}
    assert record.keys() - {"shape"} <= keys | {
        *("model", "chip", "num_chips", "dtype", "kv_cache_dtype", "attention_backend"),
        *(
            "page_layout",
            "page_size",
            "kv_heads_per_chip",
            "num_prompt_tokens",
            "num_output_tokens",
        ),
    }
