"""Named real shapes, shared by tests, benchmarks and tuning.

Invariant: a name means the same shapes everywhere, so that a number measured under it can be compared.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadSpec:
    """The attention heads of one model.

    Args:
        num_heads: H, query heads.
        num_kv_heads: K.
        head_dim: D.
        num_layers: L.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSpec:
    """One step: rows that are all alike.

    Args:
        num_rows: live rows.
        num_tokens: new tokens in each.
        context: tokens of context in each, the new ones included.
    """

    num_rows: int
    num_tokens: int
    context: int


HEADS = {
    "smollm2-135m": HeadSpec(num_heads=9, num_kv_heads=3, head_dim=64, num_layers=30),
    "smollm2-360m": HeadSpec(num_heads=15, num_kv_heads=5, head_dim=64, num_layers=32),
    "llama-3.2-1b": HeadSpec(num_heads=32, num_kv_heads=8, head_dim=64, num_layers=16),
    "llama-3.1-8b": HeadSpec(num_heads=32, num_kv_heads=8, head_dim=128, num_layers=32),
    "tiny": HeadSpec(num_heads=9, num_kv_heads=3, head_dim=64, num_layers=2),
}

STEPS = {
    "decode-b1-c512": StepSpec(num_rows=1, num_tokens=1, context=512),
    "decode-b16-c256": StepSpec(num_rows=16, num_tokens=1, context=256),
    "decode-b32-c256": StepSpec(num_rows=32, num_tokens=1, context=256),
    "decode-b16-c1024": StepSpec(num_rows=16, num_tokens=1, context=1024),
    "chunk-512-c512": StepSpec(num_rows=1, num_tokens=512, context=512),
    "chunk-512-c2048": StepSpec(num_rows=1, num_tokens=512, context=2048),
    "chunk-8x64": StepSpec(num_rows=8, num_tokens=64, context=64),
}
