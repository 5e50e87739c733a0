"""Other weights for a running executor."""

import re

import jax
import numpy as np
import pytest

from jaxserve.device.compile_counter import CompileCounter
from jaxserve.errors import ConfigError
from jaxserve.model.registry import ModelFunctions
from jaxserve.weights.loader import load_params, open_checkpoint
from tests import numpy_llama
from tests.device.executors import (
    Slice,
    make_batch,
    shared_executor,
    untied_checkpoint,
    update_params,
)

PROMPT = [3, 5, 9, 60]
NAMES = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight"}


@pytest.fixture
def executor():
    executor = shared_executor(untied_checkpoint())
    yield executor
    update_params(executor, params())


def params():
    return load_params(open_checkpoint(untied_checkpoint()), np.dtype(np.float32))[0]


def logprobs(executor):
    batch = make_batch(Slice(PROMPT, [1]), wants_candidates=True)
    return executor.submit(batch).result().candidate_logprobs[:, 0]


def expected(embedding, scale):
    checkpoint = open_checkpoint(untied_checkpoint())
    tensors = {_swapped(name): array for name, array in checkpoint.tensors()}
    tensors |= {NAMES["embed"]: embedding, NAMES["norm"]: scale}
    logits = numpy_llama.forward((checkpoint.config, tensors), PROMPT)[-1]
    return np.sort(numpy_llama.log_softmax(logits))[::-1][None, :64]


def _swapped(name):
    """The same tensor of the other of the two layers."""
    return re.sub(r"layers\.([01])", lambda found: f"layers.{1 - int(found.group(1))}", name)


def other_params():
    """Other embeddings, another last norm, and the two layers in the other order."""
    found = params()
    found["layers"] = {0: found["layers"][1], 1: found["layers"][0]}
    rng = np.random.default_rng(5)
    found["embed"]["embedding"] = _aligned(rng.normal(size=found["embed"]["embedding"].shape))
    found["norm"]["scale"] = _aligned(rng.normal(size=found["norm"]["scale"].shape))
    return found


def _aligned(values):
    """f32 at an address that jax uses in place on CPU."""
    room = np.empty(values.size * 4 + 64, np.uint8)
    begin = -room.ctypes.data % 64
    array = room[begin : begin + values.size * 4].view(np.float32).reshape(values.shape)
    array[:] = values
    return array


def test_other_weights_serve_from_the_next_step_on_and_nothing_compiles(executor):
    before = logprobs(executor)
    counter = CompileCounter()
    found = other_params()
    wanted = expected(found["embed"]["embedding"], found["norm"]["scale"])
    update_params(executor, found)
    np.testing.assert_allclose(logprobs(executor), wanted, atol=1e-3)
    update_params(executor, params())
    np.testing.assert_array_equal(logprobs(executor), before)
    assert counter.count == 0
    assert np.abs(wanted - before).max() > 0.01


def test_arrays_of_the_caller_may_change_afterwards(executor):
    found = other_params()
    update_params(executor, found)
    wanted = logprobs(executor)
    for leaf in jax.tree.leaves(found):
        if leaf.flags.writeable:
            leaf[:] = 0
    np.testing.assert_array_equal(logprobs(executor), wanted)


def test_weights_of_another_form_are_refused_by_name_and_the_old_ones_stay(executor):
    before = logprobs(executor)
    found = params()
    del found["layers"][1]["attn"]["k"]["kernel"]
    name = r"params\['layers'\]\[1\]\['attn'\]\['k'\]\['kernel'\]: .* found nothing"
    with pytest.raises(ConfigError, match=name):
        update_params(executor, found)
    wrong = params() | {"norm": {"scale": np.ones(7, np.float32)}}
    with pytest.raises(
        ConfigError, match=r"\['scale'\]: expected float32\[48\], found float32\[7\]"
    ):
        update_params(executor, wrong)
    np.testing.assert_array_equal(logprobs(executor), before)


@pytest.mark.parametrize("method", ["layer_params", "head_params"])
def test_cut_short_it_leaves_the_old_weights_whole(executor, monkeypatch, method):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = logprobs(executor)
    with monkeypatch.context() as patch:
        patch.setattr(ModelFunctions, method, interrupt)
        with pytest.raises(KeyboardInterrupt):
            update_params(executor, other_params())
    np.testing.assert_array_equal(logprobs(executor), before)


def test_not_while_a_step_is_under_way(executor):
    first, second = (executor.submit(make_batch(Slice(PROMPT, [1]))) for _ in range(2))
    first.result()
    with pytest.raises(RuntimeError, match="a step is under way"):
        update_params(executor, params())
    second.result()
    update_params(executor, params())
    executor.submit(make_batch(Slice(PROMPT, [1])))
    executor.reset()  # nobody will ask for that step's result
    update_params(executor, params())
