"""The test bed itself: what it promises to catch is caught."""

import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import pytest

from tests.conftest import FIRST, pytest_collection_modifyitems


def test_mixed_dtypes_raise():
    with pytest.raises(jax.dtypes.TypePromotionError, match="promotion"):
        jnp.zeros(2, jnp.float32) + jnp.zeros(2, jnp.bfloat16)


def test_silent_rank_promotion_raises():
    with pytest.raises(ValueError, match="rank"):
        jnp.zeros((2, 2)) + jnp.zeros(2)


@pytest.mark.parametrize("package", ["jaxserve.model", "jaxserve.sample", "pallas_kernels"])
def test_annotations_are_checked(package):
    from jaxtyping._import_hook import _JaxtypingFinder

    finders = [finder for finder in sys.meta_path if isinstance(finder, _JaxtypingFinder)]
    assert any(finder.should_instrument(f"{package}.anything") for finder in finders)


def test_the_files_that_take_longest_come_first(repository, request):
    assert all((repository / name).is_file() for name in FIRST)
    items: list = [
        types.SimpleNamespace(path=repository / name, get_closest_marker=lambda marker: None)
        for name in ("a.py", *FIRST[::-1], "b.py")
    ]
    pytest_collection_modifyitems(request.config, items)
    assert [str(one.path.relative_to(repository)) for one in items] == [*FIRST, "a.py", "b.py"]
    assert "--no-loadscope-reorder" in (repository / "scripts" / "test").read_text()


def test_the_package_itself_loads_nothing(repository):
    """`import jaxserve` is light, and a name of it is loaded when it is used."""
    code = (
        "import sys; before = set(sys.modules); import jaxserve; dir(jaxserve); "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} & {*sys.argv[1:]})); "
        "print(jaxserve.EngineConfig().seed, 'jax' in sys.modules)"
    )
    heavy = ["jax", "flax", "numpy", "tokenizers", "jinja2", "huggingface_hub", "absl", "rich"]
    arguments = [sys.executable, "-c", code, *heavy]
    done = subprocess.run(arguments, cwd=repository, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n0 False\n", done.stderr


def test_weights_are_read_before_the_model_is_imported(repository):
    """`LLM` starts to read while the slow modules are still to come, and Pallas never is."""
    code = (
        "import sys, jaxserve.llm; print({'flax', 'jaxserve.device.executor'} & set(sys.modules)); "
        "import jaxserve.build.from_params; print('jax.experimental.pallas' in sys.modules)"
    )
    arguments = [sys.executable, "-c", code]
    done = subprocess.run(arguments, cwd=repository, capture_output=True, text=True, check=False)
    assert done.stdout == "set()\nFalse\n", done.stderr


def test_the_host_side_loads_without_jax(repository):
    """The control of the layer rule at run time: the brain, the text and the plan need no jax."""
    code = (
        "import sys, jaxserve, jaxserve.engine, jaxserve.schedule.build, jaxserve.pages.kv_manager, "
        "jaxserve.text.watcher, jaxserve.plan.capacity, pallas_kernels.page_bytes; "
        "print(sorted({'jax', 'jaxlib', 'flax', 'transformers', 'torch'} & set(sys.modules)))"
    )
    arguments = [sys.executable, "-c", code]
    done = subprocess.run(arguments, cwd=repository, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
