"""What a config.json says of rope: `RopeConfig`, in the spellings of transformers 4 and 5.

Used by `read.py`. Invariant: a key that changes the frequencies is computed or refused.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError, shown
from jaxserve.field_checks import is_real
from jaxserve.hf_config.families import Family
from jaxserve.hf_config.keys import Keys
from jaxserve.rope_config import ROPE_TYPES, RopeConfig

# Keys that any type may carry; then those of one type.
_COMMON = frozenset(
    {
        "rope_type",
        "type",
        "rope_theta",
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
        "partial_rotary_factor",
    }
)
_OWN = {
    "yarn": frozenset(
        {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    ),
    "longrope": frozenset({"attention_factor", "short_factor", "long_factor"}),
}
_MAX_FACTORS = 2**16


def read_rope(keys: Keys, family: Family) -> RopeConfig:
    """rope_parameters (transformers 5), else rope_theta + rope_scaling (4); both only where they agree.

    Args:
        keys: of config.json.
        family: of the model.

    Raises:
        CheckpointError: names source, key, value and limit.
    """
    new, old = keys.get("rope_parameters"), keys.get("rope_scaling")
    # Absent or {}: nothing is said. Anything else that is no object is refused, [] and 0 as well.
    if new is None or new == {}:
        return _Reader(keys, family).read({} if old is None else old, "rope_scaling.")
    rope = _Reader(keys, family).read(new, "rope_parameters.")
    if old is not None and old != {}:
        other = _Reader(keys, family, theta=rope.theta).read(old, "rope_scaling.")
        if other != rope:
            raise CheckpointError(
                f"{keys.source}: rope_parameters and rope_scaling must agree, "
                f"got {shown(new)} and {shown(old)}"
            )
    return rope


class _Reader:
    """Reads one of the two objects, beside the keys that stand outside it."""

    def __init__(self, outer: Keys, family: Family, theta: float | None = None):
        self.outer = outer
        self.family = family
        default = family.default("rope_theta")
        self.theta = outer.real("rope_theta", default) if theta is None else theta
        self.max_positions = outer.integer(
            "max_position_embeddings", family.default("max_position_embeddings")
        )

    def read(self, values: Mapping[str, Any], prefix: str) -> RopeConfig:
        keys = Keys(values, self.outer.source, prefix)
        rope_type = self._type(keys)
        for key, value in values.items():
            # An unknown key changes the frequencies in a way this project does not compute.
            if key not in _COMMON | _OWN.get(rope_type, frozenset()) and value is not None:
                raise keys.error(key, f"absent for rope_type {rope_type!r}")
        common = {
            "theta": keys.real("rope_theta", self.theta),
            "rope_type": rope_type,
            "partial_rotary_factor": self._partial(keys),
        }
        if rope_type == "default":
            return RopeConfig(**common)
        if rope_type == "linear":
            return RopeConfig(**common, factor=keys.real("factor", None))
        return RopeConfig(**common, **getattr(self, f"_{rope_type}")(keys))

    def _type(self, keys: Keys) -> str:
        type_key = "type" if keys.get("rope_type") is None else "rope_type"
        rope_type = "default" if keys.get(type_key) is None else keys.get(type_key)
        if keys.get("type") not in (None, rope_type):
            raise keys.error("type", f"the same as rope_type ({rope_type!r})")
        if rope_type in ("su", "yarn") and self.family.class_name == "Phi3ForCausalLM":
            rope_type = "longrope"  # what early files of Phi-3 call it
        if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
            raise keys.error(type_key, f"one of: {', '.join(ROPE_TYPES)}")
        return rope_type

    def _partial(self, keys: Keys) -> float:
        outer = self.outer.real("partial_rotary_factor", 1.0)
        factor = keys.real("partial_rotary_factor", outer)
        if factor != 1.0 and not self.family.rotates_partly:
            own = keys if keys.get("partial_rotary_factor") is not None else self.outer
            raise own.error("partial_rotary_factor", "1.0")
        return factor

    def _original(self, keys: Keys, default: int | None) -> int:
        """original_max_position_embeddings, which may stand inside or outside."""
        name = "original_max_position_embeddings"
        inner, outer = keys.optional_integer(name), self.outer.optional_integer(name)
        if inner is not None and outer is not None and inner != outer:
            raise keys.error(name, f"the same as outside of it ({outer})")
        found = inner or outer or default
        if found is None:
            raise keys.error(name, f"given for rope_type {self._type(keys)!r}")
        return found

    def _dynamic(self, keys: Keys) -> dict[str, Any]:
        original = self._original(keys, self.max_positions)
        if original != self.max_positions:
            raise keys.error(
                "original_max_position_embeddings",
                f"max_position_embeddings ({self.max_positions}) for rope_type 'dynamic'",
            )
        return {
            "factor": keys.real("factor", None),
            "original_max_position_embeddings": original,
            "context_len": original,
        }

    def _llama3(self, keys: Keys) -> dict[str, Any]:
        return {
            "factor": keys.real("factor", None),
            "low_freq_factor": keys.real("low_freq_factor", None),
            "high_freq_factor": keys.real("high_freq_factor", None),
            "original_max_position_embeddings": self._original(keys, None),
        }

    def _yarn(self, keys: Keys) -> dict[str, Any]:
        original = self._original(keys, self.max_positions)
        factor = keys.real("factor", self.max_positions / original)
        attention = keys.optional_real("attention_factor")
        if attention is None:
            above, below = keys.real("mscale", 0.0), keys.real("mscale_all_dim", 0.0)
            attention = _mscale(factor, above or 1.0)
            if above and below:
                attention /= _mscale(factor, below)
            else:
                attention = _mscale(factor, 1.0)
        return {
            "factor": factor,
            "attention_factor": attention,
            "beta_fast": keys.real("beta_fast", 32.0) or 32.0,
            "beta_slow": keys.real("beta_slow", 1.0) or 1.0,
            "truncate": keys.boolean("truncate", True),
            "original_max_position_embeddings": original,
        }

    def _longrope(self, keys: Keys) -> dict[str, Any]:
        original = self._original(keys, self.family.default_original or self.max_positions)
        factor = keys.real("factor", self.max_positions / original)
        attention = keys.optional_real("attention_factor")
        if attention is None:
            stretched = factor > 1.0 and original > 1
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if stretched else 1.0
        return {
            "attention_factor": attention,
            "short_factors": _factors(keys, "short_factor"),
            "long_factors": _factors(keys, "long_factor"),
            "original_max_position_embeddings": original,
            "context_len": self.max_positions,
        }


def _mscale(factor: float, weight: float) -> float:
    """How much longer queries and keys of a stretched context are. Source: Peng et al. 2023, "YaRN"."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _factors(keys: Keys, key: str) -> tuple[float, ...]:
    values = keys.get(key)
    if not (
        isinstance(values, list)
        and len(values) <= _MAX_FACTORS
        and all(is_real(value) and value > 0 for value in values)
    ):
        raise keys.error(key, "a list of finite numbers > 0")
    return tuple(float(value) for value in values)
