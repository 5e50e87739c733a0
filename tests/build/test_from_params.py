"""`build_engine`: an engine from a caller's own params, in the caller's process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxserve
from jaxserve import EngineConfig, Request, SamplingParams, build_engine
from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.weights.load_model import load_model
from tests.checkpoints import make_random_llama

OPTIONS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "token_buckets": (2, 8),
    "row_buckets": (2,),
    "max_model_len": 64,
    "num_pages": 20,
    "page_size": 8,
}
CONFIG = EngineConfig.from_options(OPTIONS)
EMPTY_MESH = jax.sharding.Mesh(np.empty((), object), ())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(params of numpy arrays, their ModelConfig)"""
    folder = make_random_llama(
        tmp_path_factory.mktemp("model"), {"eos_token_id": 7}, initializer_range=0.3
    )
    loaded = load_model(str(folder), CONFIG)
    return loaded.params, loaded.config


def built(model, **changes):
    params, config = model
    return build_engine(**{"params": params, "model_config": config, "config": CONFIG} | changes)


def run(engine, prompt, num_tokens=6, **fields):
    params = SamplingParams(max_tokens=num_tokens, temperature=0, **fields)
    engine.add(Request(id="a", prompt_token_ids=prompt, sampling_params=params))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    return [i for output in outputs for i in output.outputs[0].token_ids]


@pytest.fixture(scope="module")
def engine(model):
    return built(model)


def test_ids_in_and_ids_out_without_a_tokenizer(engine):
    ids = run(engine, [3, 5, 9], ignore_eos=True)
    assert len(ids) == 6
    assert run(engine, [3, 5, 9], ignore_eos=True) == ids
    with pytest.raises(InvalidRequestError, match="stop strings need a tokenizer"):
        run(engine, [3], stop=["x"])


def test_the_end_set_is_the_models_or_the_callers(model, engine):
    assert engine.eos_token_ids == {7}
    assert built(model, eos_token_ids=[np.int32(4)]).eos_token_ids == {4}


def test_padding_ids_are_never_sampled(model):
    engine = built(model, num_token_ids=5)
    assert engine.vocab_size == 5
    assert max(run(engine, [1, 2], ignore_eos=True)) < 5
    with pytest.raises(InvalidRequestError):
        run(engine, [5])


def test_dtype_auto_is_that_of_the_params(model):
    params, config = model
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), params)
    assert built((half, config)).stats().dtype == "bfloat16"
    with pytest.raises(ConfigError, match=r"\['embedding'\] must be one of .* found float16"):
        built((jax.tree.map(lambda leaf: leaf.astype(np.float16), params), config))


def test_numpy_params_may_be_written_to_afterwards(model):
    params, config = model
    mine = jax.tree.map(np.copy, params)
    engine = built((mine, config))
    before = run(engine, [3, 5, 9], ignore_eos=True)
    for leaf in jax.tree.leaves(mine):
        leaf[...] = np.nan
    engine.reset_prefix_cache()
    assert run(engine, [3, 5, 9], ignore_eos=True) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_config": {"hidden_size": 48}},
            "model_config must be of type ModelConfig, got {'hid",
        ),
        ({"config": {"max_num_seqs": 2}}, "config must be of type EngineConfig, got {'max"),
        ({"eos_token_ids": [96]}, r"eos_token_ids: 96 is no integer in \[0, 95\]"),
        ({"eos_token_ids": ["</s>"]}, "eos_token_ids: '</s>' is no integer"),
        ({"num_token_ids": 97}, r"num_token_ids: 97 is no integer in \[1, 96\]"),
        ({"eos_token_ids": 7}, "eos_token_ids must be a list of token ids, got 7"),
        ({"kv_scales": 1.5}, "kv_scales must be GivenKVScales or None, got 1.5"),
        ({"mesh": EMPTY_MESH}, "mesh must have one device or more, got an empty one"),
        ({"params": [1]}, "params: expected a dict, found a list"),
        ({"params": {"embed": 1}}, r"params\['lm_head'\]: expected a dict, found nothing"),
    ],
)
def test_what_is_wrong_is_named(model, changes, message):
    with pytest.raises(ConfigError, match=message):
        built(model, **changes)


def test_a_param_without_values_is_named(model, engine):
    params, config = model
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    deleted = jax.tree.map(jnp.array, params)
    deleted["norm"]["scale"].delete()
    for given, message in (
        (abstract, "expected an array, found a ShapeDtypeStruct"),
        (deleted, r"params\['norm'\]\['scale'\]: .*found one that was donated or deleted"),
    ):
        with pytest.raises(ConfigError, match=message):
            built((given, config))
        with pytest.raises(ConfigError, match=message):
            engine.update_params(given)
    assert engine.weights_version == 0


def test_positions_are_refused():
    with pytest.raises(TypeError, match="takes 0 positional arguments"):
        build_engine(CONFIG, None)  # type: ignore[misc]


def test_it_is_exported():
    assert jaxserve.build_engine is build_engine
