"""`EngineStats`: counters and gauges of an engine, as `Engine.stats` gives them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """A snapshot; the `num_` totals count since the engine was made."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_free_pages: int
    page_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_steps: int
    num_preemptions: int
    num_scheduled_tokens: int
    num_padding_tokens: int
    num_prompt_tokens: int
    num_output_tokens: int
    attention_backend: str
    attention_interpret: bool
    dtype: str
    kv_cache_dtype: str
