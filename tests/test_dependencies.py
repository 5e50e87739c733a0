"""What the packages import is what pyproject.toml installs without extras, and for the server with the extra
`serve`; nothing heavy comes along.
"""

import ast
import functools
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.test_layers import MODULES

PROJECT = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
OWN = {"jaxserve", "pallas_kernels"}
# Modules that are only imported where the server is used may import what its extra brings.
SERVED = ("jaxserve.server", "jaxserve.async_engine")


def declared(module: str = "") -> set[str]:
    """Names of the distributions that `pip install jaxserve` brings, in normal form; for a module of the
    server with what the extra `serve` adds."""
    lines = [*PROJECT["dependencies"]]
    if module.startswith(SERVED):
        lines += PROJECT["optional-dependencies"]["serve"]
    names = [re.match(r"[\w.-]+", line) for line in lines]
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in names if name}


@functools.cache
def holders() -> dict[str, set[str]]:
    """Module -> the distributions that hold it, in normal form. Read once: there are many files."""
    found = importlib.metadata.packages_distributions()
    return {name: {re.sub(r"[-_.]+", "-", d).lower() for d in each} for name, each in found.items()}


def undeclared(source: str, module: str = "") -> list[str]:
    """Third-party modules that a source imports and that no declared distribution holds."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
    third_party = imported - OWN - set(sys.stdlib_module_names)
    return [
        name for name in sorted(third_party) if not holders().get(name, set()) & declared(module)
    ]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_import_is_declared(module):
    assert undeclared(MODULES[module], module) == []


def test_an_undeclared_import_is_found():
    assert undeclared("import pytest, numpy, os\nfrom hypothesis import given\n") == [
        "hypothesis",
        "pytest",
    ]


def test_what_the_extra_brings_is_for_the_server_alone():
    assert undeclared("import starlette\n", "jaxserve.server.app") == []
    assert undeclared("import starlette\n", "jaxserve.llm") == ["starlette"]


# What another library needs for something that we call, and does not require by itself.
USED_THROUGH = {
    "flatbuffers": r"\bjax\.export\.export\(",
    "httptools": r"\bhttptools_impl\b",
    "uvloop": r"\buvloop\b",
}


def test_every_dependency_is_imported_somewhere_and_explained():
    everything = "\n".join(MODULES.values())
    architecture = (Path(__file__).parent.parent / "ARCHITECTURE.md").read_text()
    for name in declared("jaxserve.server"):
        module = {"absl-py": "absl", "orbax-checkpoint": "orbax"}.get(name, name).replace("-", "_")
        used = USED_THROUGH.get(name, rf"^\s*(import|from) {module}\b")
        assert re.search(used, everything, re.MULTILINE), name
        assert re.search(rf"\| .*\b{re.escape(name)}\b.* \|", architecture.replace("_", "-")), name


def test_import_is_light():
    """`import jaxserve` and its pure names bring no jax; the control, and last: LLM does."""
    names = ["SamplingParams", "EngineConfig", "Request", "Engine", "LLM"]
    code = f"import sys, jaxserve\nfor name in {names}:\n  getattr(jaxserve, name)\n"
    code += "  print(name, 'jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name} {name == 'LLM'}" for name in names]
