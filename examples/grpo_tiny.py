"""Reinforcement learning with an engine in the training process: a small GRPO loop on a CPU.

    python examples/grpo_tiny.py

A model of random weights learns to say even token ids. Each iteration:

    rollouts      the engine samples a group of outputs for each prompt, with their log probabilities
    sleep         it gives its memory back: its pages, and its hold on the weights
    training      one step of optax on the group's advantages; params and optimiser state are donated
    update, wake  it goes on with the new weights, and nothing is compiled

The engine's log probabilities are those of the training forward (within 1e-4, checked in every iteration),
so the ratio of the two policies is 1 in the first step and needs no correction for another sampler.

Source: Shao et al. 2024, "DeepSeekMath", section 4.1 (GRPO).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxserve import (
    Engine,
    EngineConfig,
    ModelConfig,
    Request,
    SamplingParams,
    build_engine,
    full_forward,
    init_params,
)

MODEL = ModelConfig(
    vocab_size=32,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=32,
    max_position_embeddings=32,
)
CONFIG = EngineConfig.from_options(
    {
        "max_num_seqs": 32,
        "max_num_batched_tokens": 32,
        "token_buckets": (32,),
        "row_buckets": (32,),
        "num_pages": 40,
        "page_size": 16,
    }
)
PROMPTS = [[1, 2, 3], [9, 8], [17, 4, 4, 30], [25]]
GROUP = 8  # outputs for each prompt
OUTPUT_TOKENS = 12
MAX_TOKENS = 16  # of the longest text
ITERATIONS = 10
LEARNING_RATE = 1e-2
CLIP = 0.2
ATOL = 1e-4

optimizer = optax.adam(LEARNING_RATE)


class Rollouts(NamedTuple):
    """What the engine sampled: B = prompts * GROUP texts of T tokens, padded behind their end.

    Args:
        token_ids: i32[B, T], prompt and output.
        is_output: bool[B, T], the tokens that were sampled.
        logprobs: f32[B, T], of each of them under the weights that sampled it; 0 elsewhere.
        advantages: f32[B], the reward against those of the same prompt.
        reward: mean over all.
    """

    token_ids: np.ndarray
    is_output: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    reward: float


def reward_of(token_ids: list[int]) -> float:
    """The share of even ids."""
    return sum(i % 2 == 0 for i in token_ids) / len(token_ids)


def roll_out(engine: Engine, iteration: int) -> Rollouts:
    """Samples a group for each prompt."""
    for number, prompt in enumerate(PROMPTS):
        params = SamplingParams(
            n=GROUP, max_tokens=OUTPUT_TOKENS, temperature=1.0, logprobs=True, seed=iteration
        )
        request = Request(id=str(number), prompt_token_ids=prompt, sampling_params=params)
        engine.add(request)
    shape = (len(PROMPTS) * GROUP, MAX_TOKENS)
    token_ids, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    is_output = np.zeros(shape, bool)
    ends = np.repeat([len(prompt) for prompt in PROMPTS], GROUP)
    for row, end in enumerate(ends):
        token_ids[row, :end] = PROMPTS[row // GROUP]
    while engine.has_work():
        for output in engine.step():
            for piece in output.outputs:
                row = int(output.request_id) * GROUP + piece.index
                new = slice(ends[row], ends[row] + len(piece.token_ids))
                token_ids[row, new], logprobs[row, new] = piece.token_ids, piece.logprobs
                is_output[row, new] = True
                ends[row] = new.stop
                assert set(piece.weights_versions) <= {engine.weights_version}
    rewards = np.array(
        [reward_of(ids[one].tolist()) for ids, one in zip(token_ids, is_output, strict=True)]
    ).reshape(len(PROMPTS), GROUP)
    spread = rewards.std(axis=1, keepdims=True) + 1e-4
    advantages = (rewards - rewards.mean(axis=1, keepdims=True)) / spread
    flat = advantages.reshape(-1).astype(np.float32)
    return Rollouts(token_ids, is_output, logprobs, flat, float(rewards.mean()))


def logprobs_of(params: Any, token_ids: jax.Array) -> jax.Array:
    """f32[B, T]: how likely each token is after those before it; 0 for the first."""
    logits = full_forward(params, token_ids, model_config=MODEL)
    logprobs = jax.nn.log_softmax(logits[:, :-1])
    found = jnp.take_along_axis(logprobs, token_ids[:, 1:, None], axis=-1)[..., 0]
    return jnp.pad(found, ((0, 0), (1, 0)))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def train(params: Any, state: Any, rollouts: Rollouts) -> tuple[Any, Any, jax.Array]:
    """One step on the clipped objective.

    Returns:
        (params, optimiser state, the largest difference between the engine's logprobs and these).
    """

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        logprobs = logprobs_of(params, jnp.asarray(rollouts.token_ids))
        change = jnp.where(rollouts.is_output, logprobs - rollouts.logprobs, 0.0)
        ratio = jnp.exp(change)
        advantages = rollouts.advantages[:, None]
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
        num_tokens = rollouts.is_output.sum()
        return -(gain * rollouts.is_output).sum() / num_tokens, jnp.abs(change).max()

    gradients, difference = jax.grad(loss, has_aux=True)(params)
    updates, state = optimizer.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, difference


def main() -> list[float]:
    """Trains; returns the mean reward of each iteration."""
    params = init_params(MODEL, jax.random.key(0), scale=0.1)
    state = optimizer.init(params)
    engine = build_engine(params=params, model_config=MODEL, config=CONFIG)
    rewards = []
    for iteration in range(ITERATIONS):
        rollouts = roll_out(engine, iteration)
        engine.sleep(level=2)  # so that nobody but us has the weights, and we may donate them
        params, state, difference = train(params, state, rollouts)
        version = engine.update_params(params)
        engine.wake()
        assert engine.weights_version == version == iteration + 1
        assert difference <= ATOL, f"engine and training differ by {difference}"
        rewards.append(rollouts.reward)
        print(f"{iteration}: reward {rollouts.reward:.3f}, logprobs within {difference:.1e}")
    assert rewards[-1] > rewards[0] + 0.25, "the reward did not rise"
    return rewards


if __name__ == "__main__":
    main()
