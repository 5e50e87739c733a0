"""An engine inside a caller's process: what it shares, what it leaves alone, what it gives back."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import (
    EngineConfig,
    ModelConfig,
    Request,
    SamplingParams,
    build_engine,
    full_forward,
    init_params,
)
from jaxserve.device.compile_counter import CompileCounter
from jaxserve.errors import ConfigError
from jaxserve.request import merge_outputs

MODEL = ModelConfig(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=80,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    max_position_embeddings=64,
)
OTHER_MODEL = ModelConfig(
    vocab_size=80,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    head_dim=32,
    max_position_embeddings=64,
    tie_word_embeddings=True,
)
OPTIONS = {
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "token_buckets": (8,),
    "row_buckets": (2,),
    "num_pages": 24,
    "page_size": 8,
    "host_kv_gib": 0.001,
}
PROMPT = [3, 5, 9, 11, 40]
MAX_TOKENS = 16  # of a text here
ATOL = 1e-4


@functools.partial(jax.jit, static_argnames="model_config")
def forward(params, ids, *, model_config):
    """f32[T, V] logprobs of one text."""
    return jax.nn.log_softmax(full_forward(params, ids, model_config=model_config))[0]


def random_params(seed, model=MODEL):
    return init_params(model, jax.random.key(seed), scale=0.3)


def built(params, model=MODEL, **options):
    config = EngineConfig.from_options(OPTIONS | options)
    return build_engine(params=params, model_config=model, config=config)


def add(engine, name, prompt=PROMPT, num_tokens=10):
    params = SamplingParams(max_tokens=num_tokens, temperature=0, logprobs=True, ignore_eos=True)
    engine.add(Request(id=name, prompt_token_ids=prompt, sampling_params=params))


def steps(engine, count, parts):
    for _ in range(count):
        for output in engine.step():
            parts.setdefault(output.request_id, []).append(output)


def finish(*engines, parts=None):
    """The first outputs of all that is in flight, by request, the engines stepped in turns."""
    parts = {} if parts is None else parts
    while any(engine.has_work() for engine in engines):
        for engine in engines:
            steps(engine, int(engine.has_work()), parts)
    return {name: merge_outputs(some).outputs[0] for name, some in parts.items()}


def run(engine):
    add(engine, "run")
    return finish(engine)["run"]


def check_logprobs(output, weights, model=MODEL, prompt=PROMPT):
    """Tokens and logprobs are those of a training forward by the weights that each of them names."""
    ids = np.zeros((1, MAX_TOKENS), np.int32)
    ids[0, : len(prompt) + len(output.token_ids)] = [*prompt, *output.token_ids]
    for version in set(output.weights_versions):
        logprobs = forward(weights[version], ids, model_config=model)
        for i, token in enumerate(output.token_ids):
            if output.weights_versions[i] == version:
                row = logprobs[len(prompt) + i - 1]
                assert int(jnp.argmax(row)) == token
                assert abs(float(row[token]) - output.logprobs[i]) < ATOL


@pytest.fixture(scope="module")
def params():
    """By version."""
    return [random_params(seed) for seed in range(3)]


@pytest.fixture(scope="module", params=["auto", "xla"])
def engine(request, params):
    return built(params[0], attention_backend=request.param)


@pytest.fixture
def fresh(engine, params):
    """The engine with the first weights, by whatever version; leaves it so and idle."""
    yield engine
    for name in list(engine.requests.in_flight):
        engine.abort(name)
    if engine.weights_version:
        engine.update_params(params[0])
    engine.wake()


def test_logprobs_are_those_of_the_training_forward(fresh, params):
    version = fresh.weights_version
    check_logprobs(run(fresh), {version: params[0]})
    with pytest.raises(AssertionError):  # control
        check_logprobs(run(fresh), {version: params[1]})


def test_weights_change_under_requests_in_flight_and_nothing_compiles(fresh, params):
    counter = CompileCounter()
    before = fresh.weights_version
    weights = {before: params[0], before + 1: params[1], before + 2: params[2]}
    add(fresh, "a")
    add(fresh, "b", [7, 8])
    parts = {}
    for mode, one in (("continue", params[1]), ("finish_old", params[2])):
        steps(fresh, 4, parts)
        fresh.update_params(one, mode=mode)
    add(fresh, "new")
    outputs = finish(fresh, parts=parts)
    num_compiled = counter.count
    assert num_compiled == 0
    assert set(outputs["a"].weights_versions) == {before, before + 1}
    assert outputs["new"].weights_versions == [before + 2] * 10
    check_logprobs(outputs["a"], weights)
    check_logprobs(outputs["b"], weights, prompt=[7, 8])
    check_logprobs(outputs["new"], weights)


def test_weights_of_another_form_are_refused_and_those_in_flight_go_on(fresh, params):
    add(fresh, "a")
    parts = {}
    steps(fresh, 1, parts)
    wrong = params[1] | {"norm": {"scale": jnp.ones(7)}}
    with pytest.raises(ConfigError, match=r"params\['norm'\]\['scale'\]: expected float32\[64\]"):
        fresh.update_params(wrong)
    check_logprobs(finish(fresh, parts=parts)["a"], {fresh.weights_version: params[0]})


def live_bytes():
    return sum(array.nbytes for array in jax.live_arrays())


def test_asleep_it_has_no_memory_and_awake_it_goes_on(fresh, params):
    undisturbed = run(fresh)
    counter = CompileCounter()
    add(fresh, "a")
    parts = {}
    steps(fresh, 4, parts)
    shapes = fresh.executor._shapes
    page_bytes = sum(array.nbytes for pages in fresh.executor._kv_pages for array in pages.data)
    assert page_bytes >= 2 * shapes.num_pages * shapes.page_size * MODEL.head_dim * 4
    before = live_bytes()
    fresh.sleep()
    asleep = live_bytes()
    assert before - asleep >= page_bytes
    fresh.wake()
    assert live_bytes() - asleep >= page_bytes
    output = finish(fresh, parts=parts)["a"]
    assert output.token_ids == undisturbed.token_ids
    np.testing.assert_allclose(output.logprobs, undisturbed.logprobs, atol=1e-5)
    assert counter.count == 0


def test_weights_can_be_given_up_too(fresh, params):
    add(fresh, "a")
    parts = {}
    steps(fresh, 3, parts)
    version = fresh.weights_version
    fresh.sleep(level=2)
    assert not jax.tree.leaves(fresh.executor._params)
    with pytest.raises(RuntimeError, match="update_params has to come first"):
        fresh.wake()
    fresh.update_params(params[1])
    fresh.wake()
    output = finish(fresh, parts=parts)["a"]
    assert set(output.weights_versions) == {version, version + 1}
    check_logprobs(output, {version: params[0], version + 1: params[1]})


def test_two_engines_side_by_side(engine, params):
    """Of the same model with other weights and settings, and of another model, stepped in turns."""
    other = random_params(5, OTHER_MODEL)
    second = built(params[1], num_pages=12, seed=7)
    third = built(other, OTHER_MODEL)
    for one, name in ((engine, "first"), (second, "second"), (third, "third")):
        add(one, name)
    outputs = finish(engine, second, third)
    check_logprobs(outputs["first"], {engine.weights_version: params[0]})
    check_logprobs(outputs["second"], {0: params[1]})
    check_logprobs(outputs["third"], {0: other}, OTHER_MODEL)


def test_params_are_shared_and_donating_them_is_found_out(params):
    """A training step may donate a copy of its own. If it donates what the engine has, that is said."""
    mine = jax.tree.map(jnp.copy, params[0])
    engine = built(mine, attention_backend="xla")
    shared = engine.executor._params["layers"][1]["mlp"]["up"]["kernel"]
    own = mine["layers"][1]["mlp"]["up"]["kernel"]
    assert shared.unsafe_buffer_pointer() == own.unsafe_buffer_pointer()
    train = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0.5, tree), donate_argnums=0)
    train(jax.tree.map(jnp.copy, mine))
    check_logprobs(run(engine), {0: params[0]})
    trained = train(mine)
    add(engine, "a")
    with pytest.raises(
        RuntimeError, match=r"params\['embed'\]\['embedding'\] was donated or deleted"
    ):
        finish(engine)
    kept = jax.tree.map(jnp.copy, trained)
    engine.update_params(trained)
    check_logprobs(finish(engine)["a"], {1: kept})


def test_nothing_of_the_process_is_changed(params):
    def settings():
        return dict(jax.config.values), dict(os.environ)

    config, environment = settings()
    engine = built(params[0])
    run(engine)
    engine.update_params(params[1])
    engine.sleep(level=2)
    engine.update_params(params[0])
    engine.wake()
    run(engine)
    found, found_environment = settings()
    assert {name: found[name] for name in config} == config
    assert found_environment == environment
