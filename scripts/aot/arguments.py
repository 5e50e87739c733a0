"""The command line of the workers, checked before anything is compiled.

Called by compile_tpu and compile_gpu. Invariant: what it lets pass names only what there is, so a
mistyped name ends at once and not after what stands before it.
"""

import argparse

from jaxserve.model import sharding
from pallas_kernels.ragged_paged_attention import arg_specs
from scripts.aot import attention_cases, full_step
from scripts.aot.page_copy_cases import page_copies

KV_DTYPES = ("bfloat16", "float32", "int8", "float8_e4m3fn", "float8_e5m2")


def parse(parser: argparse.ArgumentParser, backend: str) -> argparse.Namespace:
    """The flags of this process; ends it with 2 and a line that names the flag where one is wrong.

    Args:
        parser: with the flags heads, steps, kv_dtypes, variants, copies, models, layers, devices.
        backend: "tpu" or "gpu": whose variants and page copies there are.
    """
    flags = parser.parse_args()
    known = {
        "heads": arg_specs.HEADS,
        "steps": attention_cases.STEPS,
        "kv_dtypes": dict.fromkeys(KV_DTYPES),
        "variants": attention_cases.VARIANTS[backend],
        "copies": page_copies(backend),
        "models": full_step.MODELS,
    }
    for flag, entries in known.items():
        try:
            attention_cases.chosen(getattr(flags, flag), entries)
        except ValueError as error:
            parser.error(f"--{flag}={getattr(flags, flag)}: {error}")
    if flags.layers != "all" and not _is_count(flags.layers):
        parser.error(f"--layers={flags.layers}: expected a number from 1 up, or all")
    if not all(map(_is_count, flags.devices.split(","))):
        parser.error(f"--devices={flags.devices}: expected numbers from 1 up")
    for name, config in attention_cases.chosen(flags.models, full_step.MODELS).items():
        for num_devices in map(int, flags.devices.split(",")):
            try:
                sharding.shared_config(config, sharding.Shares.even(num_devices))
            except ValueError as error:
                parser.error(f"--devices={flags.devices}: {name}: {error}")
    return flags


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and int(text) > 0
