"""Holds the layers and the bans over the whole repository, and shows that each rule bites.

The rules are in tests/layers.py.
"""

from pathlib import Path

import pytest

from tests.layers import circles, faults, level

REPOSITORY = Path(__file__).parent.parent


def module_name(path: Path) -> str:
    parts = path.relative_to(REPOSITORY).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def read_modules() -> dict[str, str]:
    paths = [
        p for root in ("jaxserve", "pallas_kernels") for p in (REPOSITORY / root).rglob("*.py")
    ]
    return {module_name(path): path.read_text(encoding="utf-8") for path in paths}


def read_scripts() -> dict[str, str]:
    folder = REPOSITORY / "scripts"
    paths = [p for p in folder.rglob("*") if p.is_file() and p.suffix in ("", ".py")]
    texts = {p.relative_to(folder): p.read_text(encoding="utf-8") for p in paths}
    return {
        ".".join(("scripts", *path.with_suffix("").parts)): text
        for path, text in texts.items()
        if path.suffix == ".py" or "python" in text.partition("\n")[0]
    }


MODULES = read_modules()
SOURCES = MODULES | read_scripts()


def test_the_walk_sees_the_code():
    assert {"jaxserve", "jaxserve.engine", "jaxserve.text.watcher", "pallas_kernels"} <= set(
        MODULES
    )
    assert {"scripts.bench_peers", "scripts.peers.transformers_worker"} <= set(SOURCES)


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_module_keeps_the_rules(module):
    assert faults(module, SOURCES[module], MODULES) == []


def test_no_import_circles():
    assert circles(MODULES) == []


def inside(statement: str) -> str:
    return f"def f():\n    {statement}\n"


CONTROLS = [
    ("jaxserve.pages.page_pool", "import jaxserve.schedule.sequence", "above it"),
    ("jaxserve.pages.page_pool", "from jaxserve import engine", "above it"),
    ("jaxserve.errors", "from jaxserve import LLM", "above it"),
    ("jaxserve.schedule.scheduler", "from jaxserve.device.executor import Executor", "above it"),
    ("jaxserve.plan.capacity", "import jaxserve.plan.simulate", "above it"),
    ("pallas_kernels.dispatch", "from jaxserve.errors import ConfigError", "above it"),
    ("jaxserve.build", "from jaxserve.llm import LLM", "above it"),
    ("jaxserve.engine", "from jaxserve.build.from_params import build_engine", "above it"),
    ("jaxserve.device.step", "from jaxserve.schedule.scheduler import Scheduler", "only batch"),
    ("jaxserve.device.step", "from jaxserve.schedule import plan", "only batch"),
    ("jaxserve.engine", "import jax", "imports jax"),
    ("jaxserve.engine", "import jax.numpy as jnp", "imports jax"),
    ("jaxserve.text.tokenizer", "from jax import numpy", "imports jax"),
    ("jaxserve.cli.run", "from jax.numpy import zeros", "imports jax"),
    ("pallas_kernels.page_bytes", "import jax", "imports jax"),
    ("jaxserve.model.llama", "from jax._src import core", "imports jax._src"),
    ("pallas_kernels.dispatch", "import jax._src.core", "imports jax._src"),
    ("jaxserve.device.step", "from flax import nnx", "imports flax"),
    ("jaxserve.llm", "from absl import flags", "imports absl"),
    ("jaxserve.llm", "import absl.flags", "imports absl"),
    ("jaxserve.cli.fetch", "import requests", "imports requests"),
    ("jaxserve.cli.serve", "from http.server import HTTPServer", "imports http"),
    ("jaxserve.weights.loader", "import pickle", "imports pickle"),
    ("jaxserve.weights.loader", "from marshal import loads", "imports marshal"),
    ("jaxserve.weights.loader", "import shelve", "imports shelve"),
    ("jaxserve.weights.loader", "import torch", "imports torch"),
    ("jaxserve.text.tokenizer", "import transformers", "imports transformers"),
    ("jaxserve.build", "from tests.fakes import FakeExecutor", "imports tests"),
    ("jaxserve.build", "from . import config", "relative import"),
    ("jaxserve.build", "from .config import EngineConfig", "relative import"),
    ("jaxserve.build", "eval('1')", "calls eval()"),
    ("jaxserve.build", "exec('1')", "calls exec()"),
    ("jaxserve.build", "__import__('jax')", "calls __import__()"),
    ("jaxserve.weights.loader", "np.load(path, allow_pickle=True)", "allows pickle"),
    ("jaxserve.config", "os.environ['HOME']", "os.environ"),
    ("jaxserve.config", "os.getenv('HOME')", "os.getenv"),
    ("pallas_kernels.dispatch", "from os import environ", "os.environ"),
    ("jaxserve.new_room.thing", "import numpy", "no place"),
    ("scripts.convert", "import pickle", "imports pickle"),
    ("scripts.convert", "exec('1')", "calls exec()"),
]


@pytest.mark.parametrize(("module", "statement", "fault"), CONTROLS)
def test_each_rule_bites(module, statement, fault):
    for source in (statement + "\n", inside(statement)):
        found = faults(module, source, MODULES)
        assert any(fault in text for text in found), found


@pytest.mark.parametrize(
    ("module", "statement"),
    [
        ("jaxserve.engine", "from jaxserve.text.watcher import TokenWatcher"),
        ("jaxserve.engine", "from jaxserve.schedule.scheduler import Scheduler"),
        ("jaxserve.device.step", "from jaxserve.schedule import batch, buckets"),
        ("jaxserve.weights.loader", "from jaxserve.model_config import ModelConfig"),
        ("jaxserve.model.llama", "from flax import nnx"),
        ("jaxserve.plan.capacity", "from pallas_kernels.page_bytes import page_bytes"),
        ("jaxserve.cli.flags", "from absl import flags"),
        ("jaxserve.server.http", "import aiohttp"),
        ("pallas_kernels.compat", "from jax._src import core"),
        ("jaxserve.config", "import os; os.path.join('a')"),
        ("jaxserve.weights.loader", "np.load(path, allow_pickle=False)"),
        ("scripts.make_oracles", "import torch, transformers, os; os.environ"),
    ],
)
def test_what_is_allowed_passes(module, statement):
    assert faults(module, statement + "\n", MODULES) == []


def test_circles_are_found_inside_functions_too():
    loop = {"a": "import b\n", "b": inside("from c import x"), "c": "import a\n", "d": "import a\n"}
    assert circles(loop) == [["a", "b", "c"]]
    assert circles({**loop, "c": ""}) == []


@pytest.mark.parametrize(("module", "limit"), [("jaxserve.build", 400), ("pallas_kernels.x", 600)])
def test_long_files_are_found(module, limit):
    assert faults(module, "x = 1\n" * limit) == []
    assert "lines, more than" in faults(module, "x = 1\n" * (limit + 1))[0]


def test_long_functions_are_found():
    assert faults("jaxserve.build", "def f():\n" + "    x = 1\n" * 59) == []
    assert "f() has 61 lines" in faults("jaxserve.build", "def f():\n" + "    x = 1\n" * 60)[0]
    documented = 'def f():\n    """One.\n' + "    More.\n" * 60 + '    """\n    return 1\n'
    assert faults("jaxserve.build", documented) == []


def test_levels_follow_the_longest_name():
    assert level("jaxserve.plan.capacity") == 1
    assert level("jaxserve.plan.simulate") == 5
    assert level("jaxserve.planet") is None
