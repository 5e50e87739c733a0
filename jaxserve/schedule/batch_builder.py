"""From a plan to the arrays of its step. Used by the step loop, by replays and tests.

While the same sequences go on in the same order, what does not change from one step to the next is
the same array as in the batch before: batches are read-only, so they may share it.

Invariant: a batch depends on its plan alone; `build_batch`, which remembers nothing, gives equal arrays.
"""

from array import array

import numpy as np

from jaxserve.pages.page_table import PageTable
from jaxserve.schedule.batch import DeviceBatch, no_pairs, sampling_arrays
from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.plan import StepPlan
from jaxserve.schedule.sequence import Sequence


class BatchBuilder:
    """Makes the batch of each plan in turn.

    Args:
        buckets: gives S.
        max_pages: pages that a sequence of max_model_len tokens needs (P).
    """

    def __init__(self, buckets: Buckets, max_pages: int):
        self._max_seqs = buckets.max_num_seqs
        self._max_pages = max_pages
        self._kv_starts = np.zeros(self._max_seqs, np.int32)
        # Of the last batch: its page tables and how they were, its sequences, the arrays made of them.
        self._tables: list[PageTable] = []
        self._versions: list[int] = []
        self._table = np.zeros(self._max_seqs * max_pages, np.int32)
        self._sampling: list[Sequence] = []
        self._num_rows = -1
        self._num_prompt_tokens = np.zeros(0, np.int32)
        self._wants_candidates = False
        self._sampling_arrays: dict[str, np.ndarray] = {}

    def __call__(self, plan: StepPlan) -> DeviceBatch:
        """Fills the arrays of a plan's bucket.

        Args:
            plan: slices in kernel order, pages taken.
        """
        slices, max_seqs, num_seqs = plan.slices, self._max_seqs, len(plan.slices)
        starts = np.array([one.start for one in slices], np.int32)
        counts = np.array([one.num_tokens for one in slices], np.int32)
        num_samples = np.array([one.num_samples for one in slices], np.int32)
        seqs = [one.seq for one in slices]
        samples = num_samples > 0
        sampling = seqs if samples.all() else [one.seq for one in slices if one.num_samples]
        ends = starts + counts  # i32[number of slices]
        cu_q_lens = np.full(max_seqs + 1, plan.num_tokens, np.int32)
        cu_q_lens[0] = 0
        np.cumsum(counts, out=cu_q_lens[1 : num_seqs + 1])
        positions = np.zeros(plan.bucket.num_tokens, np.int32)
        positions[: plan.num_tokens] = np.arange(plan.num_tokens, dtype=np.int32)
        positions[: plan.num_tokens] += np.repeat(starts - cu_q_lens[:num_seqs], counts)
        kv_lens = np.zeros(max_seqs, np.int32)
        kv_lens[:num_seqs] = ends
        logit_rows = np.zeros(max_seqs, np.int32)
        logit_rows[: len(sampling)] = cu_q_lens[1 : num_seqs + 1][samples] - 1
        num_single = int(np.count_nonzero(counts == 1))
        self._take_sampling(sampling, plan.bucket.num_rows)
        output_positions = np.zeros(plan.bucket.num_rows, np.int32)
        output_positions[: len(sampling)] = ends[samples] - self._num_prompt_tokens
        return DeviceBatch(
            bucket=plan.bucket,
            num_rows=len(sampling),
            num_steps=plan.num_steps,
            token_ids=_token_ids(plan, num_single),
            positions=positions,
            page_table=self._page_table([seq.page_table for seq in seqs]),
            kv_lens=kv_lens,
            kv_starts=self._kv_starts,
            cu_q_lens=cu_q_lens,
            ranges=np.array([num_single, num_single, num_seqs], np.int32),
            logit_rows=logit_rows,
            wants_candidates=self._wants_candidates,
            moves_out=_pairs(plan.moves_out),
            copies=_pairs(plan.copies),
            moves_in=_pairs(plan.moves_in),
            output_positions=output_positions,
            **self._sampling_arrays,
        )

    def _page_table(self, tables: list[PageTable]) -> np.ndarray:
        """i32[S * P], made anew only where a page table has changed."""
        versions = [table.version for table in tables]
        are_the_same = tables == self._tables
        if are_the_same and versions == self._versions:
            return self._table
        if are_the_same:
            rows = self._table.reshape(self._max_seqs, self._max_pages).copy()
            changed = [i for i, old in enumerate(self._versions) if old != versions[i]]
        else:
            rows = np.zeros((self._max_seqs, self._max_pages), np.int32)
            changed = range(len(tables))
        for index in changed:
            pages = tables[index].row
            rows[index] = 0
            rows[index, : len(pages)] = pages
        # What is remembered is right or is not used, should this be cut short.
        self._tables = []
        self._versions, self._table = versions, rows.reshape(-1)
        self._tables = tables
        return self._table

    def _take_sampling(self, sampling: list[Sequence], num_rows: int) -> None:
        """Remembers what the sampler reads of these sequences."""
        if sampling == self._sampling and num_rows == self._num_rows:
            return
        self._num_rows = -1  # until all of it is stored
        self._sampling = sampling
        self._sampling_arrays = sampling_arrays(sampling, num_rows)
        self._num_prompt_tokens = np.array([s.num_prompt_tokens for s in sampling], np.int32)
        self._wants_candidates = any(s.wants_candidates for s in sampling)
        self._num_rows = num_rows


def build_batch(plan: StepPlan, buckets: Buckets, max_pages: int) -> DeviceBatch:
    """The batch of one plan; arguments as of `BatchBuilder`."""
    return BatchBuilder(buckets, max_pages)(plan)


def _token_ids(plan: StepPlan, num_single: int) -> np.ndarray:
    """i32[T]. The first `num_single` slices, most of them, have one token: nothing is cut out there."""
    ids = array("i", [one.seq.token_ids[one.start] for one in plan.slices[:num_single]])
    for one in plan.slices[num_single:]:
        ids.extend(one.seq.token_ids[one.start : one.start + one.num_tokens])
    token_ids = np.zeros(plan.bucket.num_tokens, np.int32)
    token_ids[: plan.num_tokens] = ids
    return token_ids


def _pairs(pairs: tuple[tuple[int, int], ...]) -> np.ndarray:
    return np.array(pairs, np.int32).T.copy() if pairs else no_pairs()
