"""What a checkpoint recommends for sampling: the fields of generation_config.json that requests start from.

Read by `LLM` and the command line. As in vLLM (`--generation-config=auto`) five fields are read, and
max_new_tokens as max_tokens; `do_sample`, beams and all others are not. Other than there, a value counts
also where it is the default of transformers, and max_new_tokens is a default and no limit.
"""

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import CheckpointError, ConfigError, InvalidRequestError
from jaxserve.sampling_params import SamplingParams

MODES = ("auto", "none")
FILE = "generation_config.json"
# Field of the file -> field of SamplingParams.
_FIELDS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


def sampling_defaults(generation_config: Mapping[str, Any], mode: str = "auto") -> dict[str, Any]:
    """Fields of `SamplingParams` that a checkpoint sets.

    Args:
        generation_config: the object of its generation_config.json; {} without one.
        mode: "auto", or "none" for {}.

    Raises:
        ConfigError: another mode.
        CheckpointError: a value that `SamplingParams` refuses.
    """
    if mode not in MODES:
        raise ConfigError(f"generation_config must be one of {', '.join(MODES)}, got {mode!r}")
    if mode == "none":
        return {}
    fields = {
        ours: generation_config[theirs]
        for theirs, ours in _FIELDS.items()
        if generation_config.get(theirs) is not None
    }
    for name, value in fields.items():
        try:
            SamplingParams(**{name: value})
        except InvalidRequestError as error:
            raise CheckpointError(
                f"{FILE}: {error.message} (generation_config none reads nothing of it)"
            ) from None
    return fields
