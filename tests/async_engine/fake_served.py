"""Engines over a `FakeExecutor`, as a loop takes them: in this process, and as a process to start.

Run as a module by `ProcessEngine(child=...)`: its `main` is an engine's process; the name of the model is
the options as JSON.
"""

import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxserve.async_engine.engine_loop import Served
from jaxserve.async_engine.messages import Settings
from jaxserve.async_engine.protocol import ServedModel
from jaxserve.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.prepare import Preparer
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule.batch import DeviceBatch
from jaxserve.text.tokenizer import Tokenizer
from tests.fakes import FakeExecutor, FakeHandle, make_engine

TINY = Path(__file__).parent.parent.parent / "checkpoints" / "tiny_llama"  # tests.llms imports jax
HANGS, DIES, RAISES = 990, 991, 992  # prompts that begin with these make a step do so
end_of_hang = threading.Event()  # for threads, which nobody can kill


class Mishap(RuntimeError):
    """What a step raises."""


class NastyExecutor(FakeExecutor):
    """Does to a step what the first id of one of its prompts says; sleeps `step_s` in each."""

    step_s = 0.0
    num_to_raise = 10**9

    def submit(self, batch: DeviceBatch) -> FakeHandle:
        if self.step_s:
            time.sleep(self.step_s)
        ids = set(batch.token_ids[batch.positions == 0].tolist())
        if HANGS in ids:
            end_of_hang.wait(1000)
        if DIES in ids:
            os._exit(3)
        if RAISES in ids and self.num_to_raise > 0:
            self.num_to_raise -= 1
            raise Mishap("this step cannot be computed")
        return super().submit(batch)


def serve_fake(options: Mapping[str, Any] | None = None) -> Served:
    """An engine over a fake device.

    Args:
        options: of `make_engine`; "step_s", how long each step takes; "num_to_raise"; "tokenizer", whether
            it has that of tiny_llama; "fails", how its start fails.
    """
    rest = dict(options or {})
    step_s, num_to_raise = rest.pop("step_s", 0.0), rest.pop("num_to_raise", 10**9)
    fails = rest.pop("fails", None)
    if fails == "ConfigError":
        raise ConfigError("no such thing")
    if fails == "hangs":
        time.sleep(1000)
    if fails is not None:
        raise RuntimeError(fails)
    tokenizer = Tokenizer.from_directory(TINY) if rest.pop("tokenizer", False) else None
    rest["eos_token_ids"] = () if tokenizer is None else tokenizer.eos_token_ids
    engine = make_engine(executor_class=NastyExecutor, async_scheduling=True, **rest)
    assert isinstance(engine.executor, NastyExecutor)
    engine.executor.step_s, engine.executor.num_to_raise = step_s, num_to_raise
    return served_engine(engine, tokenizer)


def served_engine(engine: Engine, tokenizer: Tokenizer | None = None) -> Served:
    preparer = Preparer(tokenizer, eos_token_ids=engine.eos_token_ids, vocab_size=engine.vocab_size)
    model = ServedModel(
        path="fake",
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        num_slots=engine.scheduler.kv.num_slots,
        max_num_seqs=engine.scheduler.buckets.max_num_seqs,
        eos_token_ids=tuple(sorted(engine.eos_token_ids)),
        default_sampling_params=SamplingParams(max_tokens=16, temperature=0.5),
        tokenizer=tokenizer,
    )
    return Served(engine, preparer, model)


def main(arguments: Sequence[str]) -> None:
    from jaxserve.async_engine import process_main

    def make(settings: Settings) -> Served:
        return serve_fake(json.loads(settings.model))

    process_main.main(arguments, make)
