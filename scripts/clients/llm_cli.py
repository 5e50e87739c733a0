"""The command `llm` against the server, as a person would use it.

Run by `scripts/run_clients` with the client's own Python; its settings lie in a folder of their own.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scripts.clients.checks import equal, require, run_checks, server_of_arguments

SERVER = server_of_arguments()
LLM = Path(sys.executable).parent / "llm"
HOME = Path(tempfile.mkdtemp(prefix="jaxserve-llm-"))
MODELS = f"""\
- model_id: here
  model_name: {json.dumps(SERVER.model)}
  api_base: {json.dumps(SERVER.base_url)}
  api_key_name: here
  supports_schema: true
  supports_tools: true
- model_id: here-completions
  model_name: {json.dumps(SERVER.model)}
  api_base: {json.dumps(SERVER.base_url)}
  api_key_name: here
  completion: true
"""


def llm(*arguments: str) -> str:
    done = subprocess.run(
        [LLM, *arguments],
        env=os.environ | {"LLM_USER_PATH": str(HOME)},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    require(done.returncode == 0, f"llm {arguments}: {done.stderr[-400:]}")
    return done.stdout


def prompt() -> None:
    options = ("-m", "here", "-o", "temperature", "0", "-o", "max_tokens", "12")
    whole = llm(*options, "--no-stream", "-s", "Be brief.", "Zürich 🙂")
    equal(llm(*options, "-s", "Be brief.", "Zürich 🙂"), whole, "streamed text")
    logged = json.loads(llm("logs", "-n", "1", "--json"))
    require(logged[0]["input_tokens"] > 0, "usage is logged")


def completion() -> None:
    options = ("-m", "here-completions", "-o", "temperature", "0", "-o", "max_tokens", "8")
    equal(llm(*options, "hello"), llm(*options, "--no-stream", "hello"), "streamed text")


def schema() -> None:
    wanted = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
              "additionalProperties": False}  # fmt: skip
    for more in ((), ("--no-stream",)):
        text = llm(
            "-m", "here", "-o", "max_tokens", "40", *more, "--schema", json.dumps(wanted), "x"
        )
        require(json.loads(text)["n"] in (1, 2), f"JSON of the schema: {text}")


def tools() -> None:
    function = "def double(n: int) -> int:\n    'twice n'\n    return 2 * n\n"
    llm("-m", "here", "-o", "max_tokens", "12", "--functions", function, "double 4")


(HOME / "extra-openai-models.yaml").write_text(MODELS, "utf-8")
(HOME / "keys.json").write_text(json.dumps({"here": SERVER.key}), "utf-8")
run_checks({f.__name__: f for f in (prompt, completion, schema, tools)})
