"""What the packages import is what pyproject.toml installs without extras; nothing heavy comes along."""

import ast
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


def declared() -> set[str]:
    """Names of the distributions that `pip install jaxserve` brings, in normal form."""
    names = [re.match(r"[\w.-]+", line) for line in PROJECT["dependencies"]]
    return {re.sub(r"[-_.]+", "-", name[0]).lower() for name in names if name}


def undeclared(source: str) -> list[str]:
    """Third-party modules that a source imports and that no declared distribution holds."""
    imported: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module.partition(".")[0])
    holders = importlib.metadata.packages_distributions()
    third_party = imported - OWN - set(sys.stdlib_module_names)
    return [
        name
        for name in sorted(third_party)
        if not {re.sub(r"[-_.]+", "-", d).lower() for d in holders.get(name, [])} & declared()
    ]


@pytest.mark.parametrize("module", sorted(MODULES))
def test_every_import_is_declared(module):
    assert undeclared(MODULES[module]) == []


def test_an_undeclared_import_is_found():
    assert undeclared("import pytest, numpy, os\nfrom hypothesis import given\n") == [
        "hypothesis",
        "pytest",
    ]


# What another library needs for something that we call, and does not require by itself.
USED_THROUGH = {"flatbuffers": r"\bjax\.export\.export\("}


def test_every_dependency_is_imported_somewhere_and_explained():
    everything = "\n".join(MODULES.values())
    architecture = (Path(__file__).parent.parent / "ARCHITECTURE.md").read_text()
    for name in declared():
        module = {"absl-py": "absl"}.get(name, name).replace("-", "_")
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
