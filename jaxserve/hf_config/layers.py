"""Which layers of a config.json have a sliding window, and which turn queries and keys.

Used by `read.py`. Invariant: what a file says of its layers is served or refused, never ignored.
"""

from jaxserve.field_checks import is_int
from jaxserve.hf_config.families import Family
from jaxserve.hf_config.keys import Keys

_SLIDING, _FULL = "sliding_attention", "full_attention"


def rope_layers(keys: Keys, family: Family, num_layers: int) -> tuple[bool, ...] | None:
    """Whether each layer turns queries and keys; None where every one does.

    Args:
        keys: of config.json.
        family: of the model.
        num_layers: L.

    Raises:
        CheckpointError: names key, value and limit.
    """
    if not family.has_unturned_layers:
        if keys.get("no_rope_layers") is not None:
            raise keys.error("no_rope_layers", "absent for this model_type")
        return None
    given = keys.entries("no_rope_layers", num_layers, exact=False)
    if given is None:
        interval = keys.integer("no_rope_layer_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    if not all(value in (0, 1) for value in given):
        raise keys.error("no_rope_layers", "a list of 1 (the layer has rope) and 0 (it has none)")
    return tuple(bool(value) for value in given[:num_layers])


def layer_windows(
    keys: Keys, family: Family, num_layers: int, rope: tuple[bool, ...] | None
) -> tuple[int | None, ...] | None:
    """The sliding window of each layer in tokens; None where no layer has one.

    Args:
        keys: of config.json.
        family: of the model.
        num_layers: L.
        rope: from `rope_layers`.

    Raises:
        CheckpointError: names key, value and limit.
    """
    window = _window(keys, family)
    types = keys.entries("layer_types", num_layers)
    if types is not None:
        if not all(kind in (_SLIDING, _FULL) for kind in types):
            raise keys.error("layer_types", f"a list of {_SLIDING!r} and {_FULL!r}")
        if window is None and _SLIDING in types:
            raise keys.error("layer_types", f"{_FULL!r} throughout, for no window is in use")
        slides = [kind == _SLIDING for kind in types]
    elif family.windows == "switched":
        first = _max_window_layers(keys)
        slides = [layer >= first for layer in range(num_layers)]
    elif family.windows == "unturned":
        slides = [not turned for turned in rope or ()]
    else:
        slides = [True] * num_layers
    if window is None or not any(slides):
        return None
    return tuple(window if one else None for one in slides)


def _window(keys: Keys, family: Family) -> int | None:
    """The window that is in use, whichever layers have it."""
    given = keys.optional_integer("sliding_window")
    if family.windows == "none":
        if given is not None:
            raise keys.error("sliding_window", "absent or null for this model_type")
        return None
    if family.windows != "all" and not keys.boolean("use_sliding_window", False):
        return None
    return given if "sliding_window" in keys.values else family.default_window


def _max_window_layers(keys: Keys) -> int:
    """The first layer that has a window. 0 is meant: every one has."""
    value = keys.get("max_window_layers")
    if value is None:
        return 28
    if not (is_int(value) and value >= 0):
        raise keys.error("max_window_layers", "an integer >= 0")
    return value
