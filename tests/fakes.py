"""A device without a device: `FakeExecutor` runs batches over remembered token ids.

It reads its context back through the page table exactly as attention would, so a wrong slot, a page
used twice or a row built wrongly changes the output or trips an assertion.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from jaxserve.config import SchedulerConfig
from jaxserve.engine import Engine
from jaxserve.schedule.batch import DeviceBatch, SampledTokens
from jaxserve.schedule.build import build_scheduler

VOCAB_SIZE = 1000
UNWRITTEN = -1


def next_token(context: Sequence[int]) -> int:
    """The fake model: any change of the context changes the token."""
    digest = hashlib.blake2b(np.asarray(context, np.int64).tobytes(), digest_size=4).digest()
    return int.from_bytes(digest, "big") % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a request must produce, whatever happens around it."""
    ids = list(prompt)
    for _ in range(num_tokens):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class FakeHandle:
    def __init__(self, sampled: SampledTokens):
        self._sampled = sampled

    def result(self) -> SampledTokens:
        return self._sampled


class FakeExecutor:
    """Meets `jaxserve.executor.Executor`; `batches` keeps what it was sent."""

    def __init__(self, *, num_pages: int, page_size: int):
        self.slots = np.full((num_pages, page_size), UNWRITTEN, np.int64)
        self.page_size = page_size
        self.num_steps = 0
        self.last_batch: DeviceBatch | None = None

    @property
    def description(self) -> dict[str, object]:
        return {
            "attention_backend": "fake",
            "attention_interpret": False,
            "dtype": "int64",
            "kv_cache_dtype": "int64",
        }

    def warm_up(self) -> None:
        pass

    def reset(self) -> None:
        self.slots[:] = UNWRITTEN

    def submit(self, batch: DeviceBatch) -> FakeHandle:
        self.num_steps += 1
        self.last_batch = batch
        num_rows = int(batch.ranges[2])
        assert batch.bucket.num_tokens == len(batch.token_ids)
        assert batch.cu_q_lens[num_rows] <= batch.bucket.num_tokens
        assert (batch.cu_q_lens[num_rows:] == batch.cu_q_lens[num_rows]).all()
        lengths = np.diff(batch.cu_q_lens)[:num_rows]
        assert (lengths >= 1).all()
        assert (np.diff(lengths) >= 0).all(), "rows are not ordered by their number of tokens"
        assert batch.ranges[0] == (lengths == 1).sum()
        table = batch.page_table.reshape(len(batch.kv_lens), -1)
        self._check_pages_are_not_shared(table[:num_rows], batch.kv_lens[:num_rows])
        last_tokens = {}
        for row in range(num_rows):
            begin, end = batch.cu_q_lens[row], batch.cu_q_lens[row + 1]
            kv_len = int(batch.kv_lens[row])
            positions = np.arange(kv_len - (end - begin), kv_len)
            assert (batch.positions[begin:end] == positions).all()
            pages = table[row][positions // self.page_size]
            assert (pages != 0).all(), "a live token would be written to the null page"
            self.slots[pages, positions % self.page_size] = batch.token_ids[begin:end]
            all_positions = np.arange(kv_len)
            context = self.slots[
                table[row][all_positions // self.page_size], all_positions % self.page_size
            ]
            assert (context != UNWRITTEN).all(), "attention would read a slot that nobody wrote"
            last_tokens[int(end) - 1] = next_token(context)
        ids = np.array([last_tokens[t] for t in batch.logit_rows[: batch.num_rows]], np.int32)
        return FakeHandle(
            SampledTokens(
                token_ids=ids[:, None],
                num_tokens=np.ones(len(ids), np.int32),
                logprobs=np.full((len(ids), 1), -1.0, np.float32),
            )
        )

    def _check_pages_are_not_shared(self, table: np.ndarray, kv_lens: np.ndarray) -> None:
        used = [
            p
            for row, kv_len in zip(table, kv_lens, strict=True)
            for p in row[: -(-int(kv_len) // self.page_size)]
        ]
        assert len(set(used)) == len(used), "two rows share a page"


def make_engine(
    *,
    num_pages: int = 64,
    page_size: int = 4,
    max_model_len: int = 128,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    scheduling: str = "continuous",
    **engine_options: object,
) -> Engine:
    """An engine over a `FakeExecutor`."""
    config = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        scheduling=scheduling,
    )
    return Engine(
        executor=FakeExecutor(num_pages=num_pages, page_size=page_size),
        scheduler=build_scheduler(
            config, num_pages=num_pages, page_size=page_size, max_model_len=max_model_len
        ),
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        **engine_options,  # type: ignore[arg-type]
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
