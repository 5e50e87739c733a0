"""A device without a device: `FakeExecutor` runs batches over remembered token ids.

It reads its context back through the page table exactly as attention would, so a wrong slot, a page
used twice or a row built wrongly changes the output or trips an assertion.
"""

import dataclasses
import functools
import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Sequence

import numpy as np

from jaxserve.config import CacheConfig, SchedulerConfig
from jaxserve.constraints.constraint import allows
from jaxserve.engine import Engine
from jaxserve.executor import StepCosts
from jaxserve.sampling_params import BeamParams, SamplingParams
from jaxserve.schedule.batch import DeviceBatch, SampledTokens, TokenScores
from jaxserve.schedule.beam import BeamSearch, path_tokens
from jaxserve.schedule.build import build_scheduler
from jaxserve.schedule.sequence import Candidates

VOCAB_SIZE = 1000
UNWRITTEN = -1
NUM_CANDIDATES = 8


def next_token(context: Sequence[int]) -> int:
    """The fake model: any change of the context changes the token."""
    digest = hashlib.blake2b(np.asarray(context, np.int64).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCAB_SIZE


def fake_candidates(context: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest tokens, i32[K], and their logprobs, f32[K]; how sure it is depends on the
    context too."""
    best = next_token(context)
    ids = (best + 7 * np.arange(NUM_CANDIDATES, dtype=np.int32)) % VOCAB_SIZE
    spread = 0.1 + best % 5 / 4
    return ids, np.float32(-1) - np.float32(spread) * np.arange(NUM_CANDIDATES, dtype=np.float32)


def fake_score(context: Sequence[int], token_id: int) -> tuple[float, int]:
    """(logprob, rank) of a token after a context: any change of the context changes both."""
    drawn = next_token([*context, token_id])
    return -0.5 - drawn / 100, 1 + drawn


def _one_behind_the_other(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    return None if a is None or b is None else np.concatenate([a, b], axis=1)


def expected_tokens(prompt: Sequence[int], num_tokens: int, seed: int | None = None) -> list[int]:
    """What a request must produce, whatever happens around it.

    Args:
        prompt: its prompt.
        num_tokens: how many it produces.
        seed: of its draws, from an executor that draws; None = greedy.
    """
    ids = list(prompt)
    for position in range(num_tokens):
        drawn = [] if seed is None else [seed >> 32, seed & 0xFFFFFFFF, position]
        ids.append(next_token([*ids, *drawn]))
    return ids[len(prompt) :]


def expected_beams(
    prompt: Sequence[int], params: BeamParams, stop_ids: Collection[int] = ()
) -> list[tuple[list[int], float, str]]:
    """(token ids, score, finish_reason) of what a beam search must produce, best first: the same
    search with nothing but token ids behind it."""
    assert params.max_tokens is not None
    search = BeamSearch(params=params, stop_ids=stop_ids, max_tokens=params.max_tokens)
    while not search.is_done:
        contexts = [[*prompt, *path_tokens(beam.path)[0]] for beam in search.beams]
        search, _ = search.advance([Candidates(*fake_candidates(c)) for c in contexts])
    return [(path_tokens(h.path)[0], h.score, h.finish_reason) for h in search.hypotheses]


def add_counts(context: Sequence[int], counts: np.ndarray, options: Sequence[float]) -> list[int]:
    """A context that a fake token with penalties depends on: the counts of all tokens said before,
    and the penalties."""
    said = np.flatnonzero(counts)
    return [*context, *said, *counts[said], *(round(1000 * one) for one in options)]


def expected_penalised(
    prompt: Sequence[int], num_tokens: int, params: SamplingParams, seed: int | None = None
) -> list[int]:
    """What a request with penalties must produce, from counts made anew for each token."""
    output: list[int] = []
    options = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    for position in range(num_tokens):
        counts = np.zeros(VOCAB_SIZE, np.int32)
        counts[list(set(prompt))] = 1
        np.add.at(counts, output, 2)
        drawn = [] if seed is None else [seed >> 32, seed & 0xFFFFFFFF, position]
        output.append(next_token([*add_counts([*prompt, *output], counts, options), *drawn]))
    return output


class FakeHandle:
    """A step that was run; of one that awaits masks, one that runs with `give_masks`."""

    def __init__(
        self, sampled: SampledTokens | None, run: Callable[..., SampledTokens] | None = None
    ):
        self._sampled = sampled
        self._run = run

    def give_masks(self, masks: np.ndarray) -> None:
        assert self._sampled is None, "a step that awaits no masks got some, or got them twice"
        assert self._run is not None
        self._sampled = self._run(masks)

    def is_ready(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def result(self) -> SampledTokens:
        assert self._sampled is not None, "a step awaits masks"
        return self._sampled


class FakeExecutor:
    """Meets `jaxserve.executor.Executor`; `last_batch` keeps what it was sent.

    Args:
        num_pages, page_size: of the pool.
        num_host_pages: of the host tier.
        poison: token ids whose keys and values are NaN: whoever has one in its context fails.
        draws: rows whose temperature is not 0 depend on seed and output position too.
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        num_host_pages: int = 0,
        poison: Sequence[int] = (),
        draws: bool = False,
    ):
        self.page_size = page_size
        self._num_pages, self._num_host_pages = num_pages, num_host_pages
        self._make_slots()
        self.poison = frozenset(poison)
        self.draws = draws
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.weights: int | None = 0
        self.last_batch: DeviceBatch | None = None
        self._last_ids = np.zeros(0, np.int32)  # what the rows of the last batch sampled
        self._counts: np.ndarray | None = None  # i32[S, V], once a batch has penalties

    @property
    def description(self) -> dict[str, object]:
        return {
            "attention_backend": "fake",
            "attention_interpret": False,
            "dtype": "int64",
            "kv_cache_dtype": "int64",
        }

    @property
    def costs(self) -> StepCosts:
        return StepCosts(token_s=1e-4, page_move_s=1e-4)

    def warm_up(self) -> None:
        pass

    def _make_slots(self) -> None:
        self.slots = np.full((self._num_pages, self.page_size), UNWRITTEN, np.int64)
        self.host_slots = np.full((self._num_host_pages, self.page_size), UNWRITTEN, np.int64)

    def reset(self) -> None:
        self._make_slots()
        self._last_ids = np.zeros(0, np.int32)
        self._counts = None

    def prepare_params(self, params: object) -> int:
        """The number by which every token of the context is shifted."""
        assert isinstance(params, int)
        return params

    def use_params(self, prepared: int) -> None:
        self.weights = prepared

    def release(self, *, params: bool) -> None:
        """Whoever needs a page or the weights now fails."""
        self.slots = self.host_slots = np.zeros((0, self.page_size), np.int64)
        if params:
            self.weights = None

    def submit(self, batch: DeviceBatch) -> FakeHandle:
        """Runs all steps of a batch at once; nobody sees what came of them before `result`."""
        run = functools.partial(self._run, batch)
        if batch.awaits_masks:
            return FakeHandle(None, run)
        sampled = run()
        while batch.num_steps > 1:
            batch = batch.following()
            more = self._run(batch)
            sampled = dataclasses.replace(
                sampled,
                token_ids=np.concatenate([sampled.token_ids, more.token_ids], axis=1),
                logprobs=np.concatenate([sampled.logprobs, more.logprobs], axis=1),
                num_tokens=sampled.num_tokens + more.num_tokens,
                finite=sampled.finite & more.finite,
                candidate_ids=_one_behind_the_other(sampled.candidate_ids, more.candidate_ids),
                candidate_logprobs=_one_behind_the_other(
                    sampled.candidate_logprobs, more.candidate_logprobs
                ),
            )
        return FakeHandle(sampled, run)

    def _run(self, batch: DeviceBatch, masks: np.ndarray | None = None) -> SampledTokens:
        self.num_steps += 1
        batch = self._with_known_tokens(batch)
        self.last_batch = batch
        self._move_pages(batch)
        num_rows = int(batch.ranges[2])
        assert batch.bucket.num_tokens == len(batch.token_ids)
        assert batch.cu_q_lens[num_rows] <= batch.bucket.num_tokens
        assert (batch.cu_q_lens[num_rows:] == batch.cu_q_lens[num_rows]).all()
        lengths = np.diff(batch.cu_q_lens)[:num_rows]
        assert (lengths >= 1).all()
        assert (np.diff(lengths) >= 0).all(), "rows are not ordered by their number of tokens"
        assert batch.ranges[0] == (lengths == 1).sum()
        self.num_computed_tokens += int(lengths.sum())
        table = batch.page_table.reshape(len(batch.kv_lens), -1)
        self._write(batch, table, lengths)
        contexts = {}  # by the token index of each row's last token
        for row in range(num_rows):
            positions = np.arange(int(batch.kv_lens[row]))
            pages = table[row][positions // self.page_size]
            context = self.slots[pages, positions % self.page_size]
            assert (context != UNWRITTEN).all(), "attention would read a slot that nobody wrote"
            contexts[int(batch.cu_q_lens[row + 1]) - 1] = context
        finite = [self.poison.isdisjoint(context.tolist()) for context in contexts.values()]
        sampled = self._sample(batch, contexts, np.array(finite, bool), masks)
        if len(batch.score_rows):
            sampled = dataclasses.replace(sampled, scores=self._score(batch, contexts))
        if batch.num_rows:
            self._last_ids = sampled.token_ids[:, 0]
        return sampled

    def _with_known_tokens(self, batch: DeviceBatch) -> DeviceBatch:
        """With the tokens that only the device knows."""
        token_ids = batch.token_ids.copy()
        unknown = token_ids < 0
        token_ids[unknown] = self._last_ids[-1 - token_ids[unknown]]
        return dataclasses.replace(batch, token_ids=token_ids)

    def _move_pages(self, batch: DeviceBatch) -> None:
        device, host = batch.moves_out
        self.host_slots[host] = self.slots[device]
        # As pallas_kernels.page_copy.check_copies, without its jax: processes start with this module.
        source, target = batch.copies
        assert len(set(target.tolist())) == len(target), "a page is copied to twice"
        assert not set(target.tolist()) & set(source.tolist()), "a page is copied to and from"
        assert ((batch.copies > 0) & (batch.copies < len(self.slots))).all(), "no page of the pool"
        self.slots[target] = self.slots[source]
        host, device = batch.moves_in
        assert not set(device.tolist()) & set(target.tolist()), "two moves into one page"
        self.slots[device] = self.host_slots[host]

    def _write(self, batch: DeviceBatch, table: np.ndarray, lengths: np.ndarray) -> None:
        """Puts the tokens of every row into its slots; nobody else may see the pages written."""
        readers: Counter[int] = Counter()
        for row in range(len(lengths)):
            num_pages = -(-int(batch.kv_lens[row]) // self.page_size)
            readers.update(set(table[row][:num_pages].tolist()))
        for row, length in enumerate(lengths.tolist()):
            begin, end = batch.cu_q_lens[row], batch.cu_q_lens[row + 1]
            kv_len = int(batch.kv_lens[row])
            positions = np.arange(kv_len - length, kv_len)
            assert (batch.positions[begin:end] == positions).all()
            pages = table[row][positions // self.page_size]
            assert (pages != 0).all(), "a live token would be written to the null page"
            assert all(readers[p] == 1 for p in set(pages.tolist())), "a shared page is written"
            ids = batch.token_ids[begin:end].astype(np.int64)
            assert self.weights is not None, "there are no weights"
            self.slots[pages, positions % self.page_size] = ids + self.weights

    def _sample(
        self,
        batch: DeviceBatch,
        contexts: dict[int, np.ndarray],
        finite: np.ndarray,
        masks: np.ndarray | None,
    ) -> SampledTokens:
        sampling = [contexts[t] for t in batch.logit_rows[: batch.num_rows].tolist()]
        if batch.penalties is not None:
            sampling = self._counted(batch, sampling)
        if self.draws:
            sampling = [
                [*context, *batch.seeds[row].tolist(), batch.output_positions[row]]
                if batch.temperature[row] > 0
                else context
                for row, context in enumerate(sampling)
            ]
        best = [fake_candidates(context) for context in sampling]
        ids = np.array([one[0] for one in best], np.int32).reshape(-1, NUM_CANDIDATES)
        logprobs = np.array([one[1] for one in best], np.float32).reshape(-1, NUM_CANDIDATES)
        for row in range(len(ids) if masks is not None else 0):
            steps = (int(ids[row, 0]) + np.arange(VOCAB_SIZE, dtype=np.int32)) % VOCAB_SIZE
            ids[row, 0] = next(i for i in steps if allows(masks[row], int(i)))
        if batch.penalties is not None:
            assert self._counts is not None
            slots = batch.penalties.slots[: len(ids)]
            counted = slots < len(self._counts)
            np.add.at(self._counts, (slots[counted], ids[counted, 0]), 2)
        return SampledTokens(
            token_ids=ids[:, :1],
            num_tokens=np.ones(len(ids), np.int32),
            logprobs=logprobs[:, :1],
            finite=finite,
            candidate_ids=ids[:, None] if batch.wants_candidates else None,
            candidate_logprobs=logprobs[:, None] if batch.wants_candidates else None,
        )

    def _score(self, batch: DeviceBatch, contexts: dict[int, np.ndarray]) -> TokenScores:
        """As `fake_score` says of each scored token and what attention would read before it."""
        ends = sorted(contexts)  # of the rows, each by its last token
        found, best = [], []
        for token, target in zip(
            batch.score_rows.tolist(), batch.score_targets.tolist(), strict=True
        ):
            end = ends[np.searchsorted(ends, token)]
            context = contexts[end][: len(contexts[end]) - (end - token)]
            found.append(fake_score(context, target))
            best.append(fake_candidates(context))
        return TokenScores(
            logprobs=np.array([one[0] for one in found], np.float32),
            ranks=np.array([one[1] for one in found], np.int32),
            top_ids=np.array([one[0] for one in best]) if batch.wants_score_top else None,
            top_logprobs=np.array([one[1] for one in best]) if batch.wants_score_top else None,
        )

    def _counted(self, batch: DeviceBatch, contexts: Sequence[Sequence[int]]) -> list:
        """The contexts of rows with penalties, with what the table counts for them."""
        if self._counts is None:
            self._counts = np.full((len(batch.kv_lens), VOCAB_SIZE), 7, np.int32)  # never read
        assert batch.penalties is not None
        for load in batch.count_loads:
            self._counts[load.slot] = 0
            np.add.at(self._counts[load.slot], load.token_ids, load.amounts)
        slots, *options = (column.tolist() for column in batch.penalties)
        live = [slot for slot in slots[: len(contexts)] if slot < len(self._counts)]
        assert len(set(live)) == len(live), "two rows are counted in one slot"
        return [
            add_counts(context, self._counts[slots[row]], [one[row] for one in options])
            if slots[row] < len(self._counts)
            else context
            for row, context in enumerate(contexts)
        ]


def make_engine(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_model_len: int = 128,
    num_host_pages: int = 0,
    poison: Sequence[int] = (),
    draws: bool = False,
    executor_class: type[FakeExecutor] = FakeExecutor,
    **options: object,
) -> Engine:
    """An engine over a `FakeExecutor`; `options` are fields of the configs, else of the engine."""
    # One step at a time unless asked for: most tests look at what is there between two steps.
    options = {"async_scheduling": False} | options
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 32} | options
    configs = []
    for kind in (SchedulerConfig, CacheConfig):
        names = {field.name for field in dataclasses.fields(kind)} & options.keys()
        configs.append(kind(**{name: options.pop(name) for name in names}))
    executor = executor_class(
        num_pages=num_pages,
        page_size=page_size,
        num_host_pages=num_host_pages,
        poison=poison,
        draws=draws,
    )
    scheduler = build_scheduler(
        *configs,
        num_pages=num_pages,
        page_size=page_size,
        max_model_len=max_model_len,
        num_host_pages=num_host_pages,
        costs=executor.costs,
    )
    return Engine(
        executor=executor,
        scheduler=scheduler,
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        async_scheduling=configs[0].async_scheduling,
        **options,  # type: ignore[arg-type]
    )


def drain(engine: Engine, max_steps: int = 10_000) -> dict[str, list]:
    """Steps until nothing is left, checking every invariant; the released parts by request id."""
    parts: dict[str, list] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            return parts
        for output in engine.step():
            parts.setdefault(output.request_id, []).append(output)
        engine.check_invariants()
    raise AssertionError(f"not done after {max_steps} steps")
