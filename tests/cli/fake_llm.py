"""`FakeLLM`: the real engine and scheduler over `FakeExecutor`, with a tokenizer of one id per character.

As a program (`python -m tests.cli.fake_llm STEP_S LOAD_S run ...`) it is the command line over that fake,
with so many seconds a step and for loading: something to interrupt and kill that starts at once.
"""

import functools
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.cli import text_engine
from jaxserve.cli.main import main
from jaxserve.config import EngineConfig
from jaxserve.errors import CheckpointError
from jaxserve.request import Request, RequestOutput, SamplingParams
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.watcher import StopWatcher
from tests.fakes import VOCAB_SIZE, expected_tokens, make_engine

HOST_PAGES_PER_GIB = 100
TINY = Path(__file__).parents[2] / "checkpoints" / "tiny_llama"
BREAKS_THE_ENGINE = "break the engine"


@dataclass(frozen=True)
class FakeStartup:
    load_s: float = 0.1
    compile_s: float = 0.2
    warm_s: float = 0.3


def encode(text: str) -> list[int]:
    return [ord(char) % VOCAB_SIZE for char in text]


def decode(token_ids: Sequence[int]) -> str:
    return "".join(f"<{token_id}>" for token_id in token_ids)


def expected_text(prompt: str, num_tokens: int) -> str:
    return decode(expected_tokens(encode(prompt), num_tokens))


class FakeLLM:
    """Stands where `LLM` does."""

    step_s = 0.0
    load_s = 0.0
    poison: Sequence[int] = ()  # token ids that make the logits behind them NaN

    def __init__(self, model: str, **options: object):
        if not Path(model).exists():
            raise CheckpointError(f"{model}: no such checkpoint")
        fakes = {"dtype", "kv_cache_dtype"} if options.get("dtype") == "int64" else set()
        config = EngineConfig.from_options({k: v for k, v in options.items() if k not in fakes})
        scheduler, cache = vars(config.scheduler), vars(config.cache)
        self.engine = make_engine(
            **scheduler,
            **{name: cache[name] for name in ("enable_prefix_caching", "eviction")},
            max_model_len=config.max_model_len or 128,
            page_size=config.cache.page_size or 4,
            num_pages=config.cache.num_pages or 512,
            num_host_pages=int(config.cache.host_kv_gib * HOST_PAGES_PER_GIB),
            seed=config.seed,
            poison=self.poison,
        )
        time.sleep(self.load_s)
        self.startup = FakeStartup()
        self.most_requests = 0
        self._is_broken = False

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """tiny_llama's, for OpenAI batch files: they are encoded by one."""
        return Tokenizer.from_directory(TINY)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        return encode(prompt) if isinstance(prompt, str) else list(prompt)

    def encode_chat(
        self,
        messages: Sequence[dict[str, object]],
        tools: Sequence[dict[str, object]] | None = None,
    ) -> list[int]:
        named = "".join(f"{tool['function']['name']}()\n" for tool in tools or ())
        return encode(named + "".join(f"{m['role']}: {m['content']}\n" for m in messages))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return decode(token_ids)

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        request = Request(
            id=request_id,
            prompt_token_ids=prompt_token_ids,
            sampling_params=params,
            priority=priority,
            cache_salt=cache_salt,
        )
        self._is_broken |= list(prompt_token_ids) == encode(BREAKS_THE_ENGINE)
        watchers = [
            StopWatcher(
                decode,
                stop=params.stop,  # type: ignore[arg-type]
                include_stop_str_in_output=params.include_stop_str_in_output,
            )
            for _ in range(params.n)
        ]
        self.engine.add(request, watchers)
        stats = self.engine.stats()
        self.most_requests = max(self.most_requests, stats.num_running + stats.num_waiting)

    def step(self) -> list[RequestOutput]:
        if self._is_broken and self.engine.stats().num_steps > 3:
            raise RuntimeError("the device is gone\nwith a long story")
        time.sleep(self.step_s)
        return self.engine.step()


def load_fake(model: str, options: Mapping[str, object]) -> FakeLLM:
    """Stands where `text_engine.load_llm` does."""
    return FakeLLM(model, **options)


if __name__ == "__main__":
    FakeLLM.step_s, FakeLLM.load_s = float(sys.argv.pop(1)), float(sys.argv.pop(1))
    text_engine.load_llm = load_fake
    raise SystemExit(main())
