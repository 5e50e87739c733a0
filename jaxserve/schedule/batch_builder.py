"""From a plan to the arrays of its step. Used by the step loop, by replays and tests.

While the same sequences go on in the same order, what does not change from one step to the next is
the same array as in the batch before: batches are read-only, so they may share it.

Invariant: a batch depends on its plan alone; `build_batch`, which remembers nothing, gives equal arrays.
Only of sequences with penalties the builder remembers where the device counts their tokens: what a batch
loads into which slot depends on the batches before it, what is sampled does not.
"""

from array import array
from typing import Any

import numpy as np

from jaxserve.pages.page_table import PageTable
from jaxserve.schedule.batch import (
    CountLoad,
    DeviceBatch,
    LogitBias,
    Penalties,
    bias_arrays,
    no_pairs,
    penalty_arrays,
    sampling_arrays,
)
from jaxserve.schedule.buckets import Buckets
from jaxserve.schedule.penalties import PenaltySlots
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
        self._sampling_arrays: dict[str, Any] = {}
        # Rows and sequences that ask for more than a draw; mostly there are none.
        self._penalized: list[tuple[int, Sequence]] = []
        self._constrained: list[tuple[int, Sequence]] = []
        self._penalties: Penalties | None = None
        self._logit_bias: LogitBias | None = None
        self._slots = PenaltySlots(self._max_seqs)

    def forget(self) -> None:
        """What was sent is void, and so is what the device counted."""
        self._slots.forget()

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
        penalties, loads = self._place_penalties(output_positions, plan.num_steps)
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
            **_scoring_arrays(plan, cu_q_lens),
            moves_out=_pairs(plan.moves_out),
            copies=_pairs(plan.copies),
            moves_in=_pairs(plan.moves_in),
            output_positions=output_positions,
            penalties=penalties,
            count_loads=tuple(loads),
            logit_bias=self._logit_bias,
            awaits_masks=any(
                seq.needs_mask(int(output_positions[row])) for row, seq in self._constrained
            ),
            **self._sampling_arrays,
        )

    def _place_penalties(
        self, output_positions: np.ndarray, num_steps: int
    ) -> tuple[Penalties | None, list[CountLoad]]:
        """The penalties of the rows with their slots, and what these lack."""
        if self._penalties is None:
            return None, []
        rows = [(seq, int(output_positions[row])) for row, seq in self._penalized]
        found, loads = self._slots.place(rows, num_steps)
        slots = self._penalties.slots.copy()
        slots[[row for row, _ in self._penalized]] = found
        return self._penalties._replace(slots=slots), loads

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
        self._wants_candidates = any(
            seq.wants_candidates or seq.num_top_logprobs > 0 for seq in sampling
        )
        rows = list(enumerate(sampling))
        self._constrained = [(row, seq) for row, seq in rows if seq.constraints]
        self._penalized = [
            (row, seq) for row, seq in rows if seq.request.sampling_params.wants_penalties
        ]
        self._penalties = None
        if self._penalized:
            self._penalties = penalty_arrays(sampling, num_rows, self._max_seqs)
        self._logit_bias = bias_arrays(sampling, num_rows)
        self._num_rows = num_rows


def build_batch(plan: StepPlan, buckets: Buckets, max_pages: int) -> DeviceBatch:
    """The batch of one plan; arguments as of `BatchBuilder`. Of sequences with penalties all tokens
    have to be known.
    """
    return BatchBuilder(buckets, max_pages)(plan)


def _token_ids(plan: StepPlan, num_single: int) -> np.ndarray:
    """i32[T]. The first `num_single` slices, most of them, have one token: nothing is cut out there."""
    ids = array("i", [one.seq.token_ids[one.start] for one in plan.slices[:num_single]])
    for one in plan.slices[num_single:]:
        ids.extend(one.seq.token_ids[one.start : one.start + one.num_tokens])
    token_ids = np.zeros(plan.bucket.num_tokens, np.int32)
    token_ids[: plan.num_tokens] = ids
    return token_ids


def _scoring_arrays(plan: StepPlan, cu_q_lens: np.ndarray) -> dict[str, Any]:
    """The fields of a batch that say what is scored; none where nothing is."""
    if not plan.scored:
        return {}
    rows, targets = array("i"), array("i")
    for index, first, end in plan.scored:
        one = plan.slices[index]
        begin = int(cu_q_lens[index]) + first - 1 - one.start
        rows.extend(range(begin, begin + end - first))
        targets.extend(one.seq.token_ids[first:end])
    return {
        "score_rows": np.array(rows, np.int32),
        "score_targets": np.array(targets, np.int32),
        "wants_score_top": any(
            scores is not None and scores.num_top > 0
            for scores in (plan.slices[index].seq.scores for index, _, _ in plan.scored)
        ),
    }


def _pairs(pairs: tuple[tuple[int, int], ...]) -> np.ndarray:
    return np.array(pairs, np.int32).T.copy() if pairs else no_pairs()
