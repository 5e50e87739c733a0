"""`FakeEngineClient`: an EngineClient in the test's own event loop, over a real `Engine` and no model.

Two of them: `FakeEngineClient()` runs tests/fakes.py's tokens, `FakeEngineClient(script="...")` says the
given text, token by token, and then its end token. Scheduler, pages, stop strings, grammars and clamping
are the real ones.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import numpy as np

from jaxserve.async_engine.protocol import ServedModel
from jaxserve.async_engine.report import EngineReport, ReportCollector
from jaxserve.constraints.constraint import allows
from jaxserve.constraints.grammar import GrammarCompiler
from jaxserve.engine import Engine
from jaxserve.errors import EngineDeadError
from jaxserve.request import Request, RequestOutput, merge_outputs
from jaxserve.sampling_params import SamplingParams
from jaxserve.stats import EngineStats
from jaxserve.structured_outputs import StructuredOutputs
from jaxserve.text.tokenizer import Tokenizer
from jaxserve.text.watcher import StopWatcher
from tests.fakes import NUM_CANDIDATES, VOCAB_SIZE, FakeExecutor, make_engine

TINY = Path(__file__).parent.parent.parent / "checkpoints" / "tiny_llama"


class ScriptExecutor(FakeExecutor):
    """Samples the ids of `script`, one after the other, whatever the prompt was; behind them `end_id`.

    A token of the script is made certain (logprob near 0). Where a grammar forbids it, the next id that
    is allowed takes its place.
    """

    script: Sequence[int] = ()
    end_id = 0

    def _sample(self, batch, contexts, finite, masks):
        sampled = super()._sample(batch, contexts, finite, None)
        ids = np.zeros((batch.num_rows, NUM_CANDIDATES), np.int32)
        for row in range(batch.num_rows):
            position = int(batch.output_positions[row])
            wanted = self.script[position] if position < len(self.script) else self.end_id
            order = [wanted, *((wanted + 1 + i) % VOCAB_SIZE for i in range(VOCAB_SIZE - 1))]
            allowed = [i for i in order if masks is None or allows(masks[row], i)]
            ids[row] = (allowed * NUM_CANDIDATES)[:NUM_CANDIDATES]
        logprobs = np.full(ids.shape, -30, np.float32)
        logprobs[:, 0] = -1e-6
        wants = batch.wants_candidates
        return type(sampled)(
            token_ids=ids[:, :1],
            num_tokens=np.ones(len(ids), np.int32),
            logprobs=logprobs[:, :1],
            finite=finite,
            candidate_ids=ids[:, None] if wants else None,
            candidate_logprobs=logprobs[:, None] if wants else None,
        )


class FakeEngineClient:
    """Meets `EngineClient`.

    Args:
        script: a text to say; None = tokens that follow from the context (`fakes.next_token`).
        tokenizer: tiny_llama's unless given.
        defaults: of requests that say nothing else, as a checkpoint's generation_config.
        options: of `fakes.make_engine`.

    Attributes:
        running: clear it, and no step runs until it is set again.
        engine: the real engine, to look at its pages and queues.
        requests: everything that `generate` was called with.
    """

    def __init__(
        self,
        script: str | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        defaults: SamplingParams | None = None,
        **options: object,
    ) -> None:
        self.tokenizer = tokenizer or Tokenizer.from_directory(TINY)
        self._defaults = defaults or SamplingParams()
        end_ids = self.tokenizer.eos_token_ids
        options = {"num_pages": 256, "max_model_len": 512, "eos_token_ids": end_ids} | options
        kind = FakeExecutor if script is None else ScriptExecutor
        self._max_num_seqs = int(options.get("max_num_seqs", 8))  # type: ignore[call-overload]
        self.engine: Engine = make_engine(executor_class=kind, **options)
        self._collector = ReportCollector(self.engine)
        self.running = asyncio.Event()
        self.running.set()
        self.requests: list[Request] = []
        self.is_started = False
        self._failure: str | None = None
        self._failed = asyncio.Event()
        self._inboxes: dict[str, asyncio.Queue[RequestOutput | Exception]] = {}
        self._loop: asyncio.Task[None] | None = None
        self._compiler: GrammarCompiler | None = None
        if script is not None:
            self.say(script)

    def say(self, text: str) -> None:
        """The text of all outputs from here on."""
        executor = self.engine.executor
        assert isinstance(executor, ScriptExecutor)
        executor.script = self.tokenizer.encode(text, add_special_tokens=False)
        executor.end_id = self.tokenizer.eos_token_ids[0]

    @property
    def model(self) -> ServedModel:
        assert self.is_started
        return ServedModel(
            path="models/fake",
            max_model_len=self.engine.max_model_len,
            vocab_size=self.engine.vocab_size,
            num_slots=self.engine.scheduler.kv.num_slots,
            max_num_seqs=self._max_num_seqs,
            eos_token_ids=tuple(sorted(self.engine.eos_token_ids)),
            default_sampling_params=self._defaults,
            tokenizer=self.tokenizer,
        )

    async def start(self) -> None:
        self.is_started = True

    async def generate(self, request: Request) -> AsyncGenerator[RequestOutput]:
        if self._failure is not None:
            raise EngineDeadError(self._failure)
        self.requests.append(request)
        params = request.sampling_params
        watchers = [
            StopWatcher(
                self.tokenizer,
                stop=params.stop,
                include_stop_str_in_output=params.include_stop_str_in_output,
                skip_special_tokens=params.skip_special_tokens,
                min_tokens=params.min_tokens,
            )
            for _ in range(params.n)
        ]
        self.engine.add(request, None if request.beam else watchers, self._grammars(params))
        inbox = self._inboxes[request.id] = asyncio.Queue()
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        try:
            while True:
                parts = [await inbox.get()]
                while not inbox.empty():
                    parts.append(inbox.get_nowait())
                outputs = [part for part in parts if isinstance(part, RequestOutput)]
                if outputs:
                    yield merge_outputs(outputs)
                    if outputs[-1].finished:
                        return
                for part in parts:
                    if isinstance(part, Exception):
                        raise part
        finally:
            del self._inboxes[request.id]
            self.engine.abort(request.id)

    def _grammars(self, params: SamplingParams):
        if params.structured_outputs is None:
            return None
        self._compiler = self._compiler or GrammarCompiler(
            self.tokenizer.to_json(),
            end_ids=self.engine.eos_token_ids,
            vocab_size=self.engine.vocab_size,
        )
        wanted = StructuredOutputs.from_value(params.structured_outputs)
        return [self._compiler.constraint(wanted) for _ in range(params.n)]

    async def _run(self) -> None:
        while self.engine.has_work():
            await self.pause()  # whoever reads gets his turn between two steps
            await self.running.wait()
            try:
                outputs = self.engine.step()
            except Exception as error:
                self.fail(f"{type(error).__name__}: {error}")
                raise
            for output in outputs:
                if output.request_id in self._inboxes:
                    self._inboxes[output.request_id].put_nowait(output)

    async def pause(self) -> None:
        """What comes between two steps."""
        await asyncio.sleep(0)

    async def abort(self, request_id: str) -> None:
        output = self.engine.abort(request_id)
        if output is not None and request_id in self._inboxes:
            self._inboxes[request_id].put_nowait(output)

    async def stats(self) -> EngineStats:
        return self.engine.stats()

    async def report(self, *, since_step: int = 0, with_pages: bool = False) -> EngineReport:
        return self._collector.report(since_step=since_step, with_pages=with_pages)

    async def reset_prefix_cache(self) -> None:
        self.engine.scheduler.kv.clear_cache()

    def fail(self, reason: str) -> None:
        """The engine dies: every generation ends with EngineDeadError, and so does every new one."""
        self._failure = reason
        self._failed.set()
        for inbox in self._inboxes.values():
            inbox.put_nowait(EngineDeadError(reason))

    @property
    def failure(self) -> str | None:
        return self._failure

    async def wait_failed(self) -> str:
        await self._failed.wait()
        assert self._failure is not None
        return self._failure

    async def shutdown(self, *, timeout_s: float = 0.0) -> None:
        for request_id in list(self._inboxes):
            await self.abort(request_id)
        if self._failure is None:
            self._failure = "it was shut down"
