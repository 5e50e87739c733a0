"""The strict test bed: it is set up here, before any module under test is imported.

- Mixed dtypes and silent broadcasts between ranks raise in every jax.numpy operation.
- The functions of the model, the sampler and the kernels are checked against their jaxtyping annotations.
- Warnings are errors (pyproject.toml).
"""

import gc
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Engines of different tests share many programs: each is compiled once in a run.
COMPILED = tempfile.TemporaryDirectory(prefix="jaxserve-test-programs-")
jax.config.update("jax_compilation_cache_dir", COMPILED.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)

# The hook rewrites modules as they are imported; without this line their annotations would only be comments.
install_import_hook(["jaxserve.model", "jaxserve.sample", "pallas_kernels"], "beartype.beartype")

REPOSITORY = Path(__file__).parent.parent
REAL_MODEL = REPOSITORY / "checkpoints" / "smollm2-135m-instruct"

# Files that take longest, or wait longest: where several processes share the files, they begin with these, so
# that none of them is left alone with one at the end.
FIRST = (
    "tests/pallas_kernels/test_attention.py",
    "tests/e2e/test_golden.py",
    "tests/test_readme.py",
    "tests/server/test_live.py",
    "tests/e2e/test_options.py",
    "tests/e2e/test_kv_8bit.py",
    "tests/cli/test_on_tiny_llama.py",
    "tests/scripts/test_device_check.py",
    "tests/scripts/test_parity_report.py",
    "tests/e2e/test_structured_outputs.py",
    "tests/server/test_serve.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts the files of FIRST there. Skips, with the reason, what this machine cannot run and what must be
    asked for.
    """
    places = {REPOSITORY / name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))
    asked = config.getoption("markexpr") or ""
    on_request = {
        "aot": pytest.mark.skip(reason="compiles for minutes: ask with -m aot"),
        "gpu_interpret": pytest.mark.skip(reason="runs for minutes: ask with -m gpu_interpret"),
    }
    no_model = pytest.mark.skip(reason="run `jaxserve fetch smollm2-135m-instruct` first")
    no_gpu = pytest.mark.skip(reason="no GPU")
    has_model = (REAL_MODEL / "config.json").is_file()
    for item in items:
        if item.get_closest_marker("real_model") and not has_model:
            item.add_marker(no_model)
        for marker, not_asked in on_request.items():
            if item.get_closest_marker(marker) and marker not in asked:
                item.add_marker(not_asked)
        if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
            item.add_marker(no_gpu)


def pytest_collection_finish() -> None:
    """What was imported by now stays: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _free_programs() -> Iterator[None]:
    """What a module compiled goes with it, but for engines that are shared: a process that keeps every
    program runs out of memory mappings, and XLA then crashes.
    """
    yield
    gc.collect()
    jax.clear_caches()


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the repository."""
    return REPOSITORY


@pytest.fixture(scope="session")
def real_model_directory() -> Path:
    """The fetched checkpoint of SmolLM2-135M-Instruct, for tests marked real_model."""
    return REAL_MODEL
