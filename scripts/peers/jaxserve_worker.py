"""jaxserve as a worker of `scripts/bench_peers`, see protocol.py: what `jaxserve bench offline` does,
behind the same protocol as its peers.

Run by the project's Python, as a module, with the checkout as the working directory and the engine flags
of `jaxserve bench offline`.
"""

import sys
from importlib.metadata import version
from typing import Any

from jaxserve import __version__
from jaxserve.cli.arguments import parse_arguments
from jaxserve.cli.bench_arm import Arm, Counter, build_arm, make_compile_counter
from jaxserve.cli.bench_offline import offline_flags
from jaxserve.cli.flags import configure_logging, engine_options
from jaxserve.cli.request_line import RequestLine
from jaxserve.device.ceilings import measure_ceilings
from jaxserve.plan.models import ModelSpec
from jaxserve.request import SamplingParams
from jaxserve.weights.loader import open_checkpoint, resolve_model
from scripts.peers.protocol import Outcome, Prompt, claim_stdout, serve


def generate(arm: Arm, compiles: Counter, prompts: list[Prompt], prefix_caching: bool) -> Outcome:
    """Replays the requests once."""
    lines = [
        RequestLine(
            index=index,
            prompt=prompt.token_ids,
            params=SamplingParams(
                max_tokens=prompt.max_tokens, temperature=0, ignore_eos=True, seed=0
            ),
        )
        for index, prompt in enumerate(prompts)
    ]
    num_compiles = arm.num_compiles
    arm.measure(lines, compiles, share_prefixes=prefix_caching)
    replayed = arm.repetitions.pop()
    return Outcome(
        replayed.wall_s,
        [one.token_ids for one in replayed.timelines],
        [one.release_s[0] for one in replayed.timelines],
        {
            "num_compiles": arm.num_compiles - num_compiles,
            "num_cached_tokens": sum(one.num_cached_tokens for one in replayed.timelines),
        },
    )


def roofline(model: str) -> dict[str, Any]:
    """What the machine can do now, and the bytes that a decode step of one float32 sequence reads."""
    ceilings = measure_ceilings()
    spec = ModelSpec.from_config(open_checkpoint(resolve_model(model)).config)
    weights = spec.num_layer_matmul_params + spec.num_head_params
    return {
        **vars(ceilings),
        "weight_bytes": 4 * weights,
        "kv_bytes_per_token": spec.kv_bytes_per_token(4),
    }


def main() -> None:
    replies = claim_stdout()
    values = offline_flags()
    parse_arguments(sys.argv[1:], values)
    given = values.flag_values_dict()
    configure_logging(given["verbosity"])
    options = {**engine_options(values), "scheduling": given["scheduling"][0]}
    arm = build_arm(given["model"], options)
    compiles = make_compile_counter()
    serve(
        replies,
        {"jaxserve": __version__, "jax": version("jax")},
        lambda prompts, prefix_caching: generate(arm, compiles, prompts, prefix_caching),
        {"roofline": lambda: roofline(given["model"])},
    )


if __name__ == "__main__":
    main()
