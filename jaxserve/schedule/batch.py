"""The arrays of one step, as numpy: what goes to the device (`DeviceBatch`) and what comes back
(`SampledTokens`).

`batch_builder` turns a plan into arrays; the executor sends them. The arrays of a batch are made
read-only here: on CPU jax may use a numpy buffer in place, so an array changed after `submit` would
change the running step. Writing to a submitted batch raises instead.
"""

from collections.abc import Sequence as Several
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxserve.sampling_params import MAX_LOGIT_BIAS
from jaxserve.schedule.buckets import Bucket, Buckets

if TYPE_CHECKING:
    from jaxserve.schedule.sequence import Sequence


MAX_CANDIDATES = 64  # likeliest tokens that a step can return for a row


class Penalties(NamedTuple):
    """Penalties of each logit row, and where its tokens are counted."""

    slots: np.ndarray  # i32[R]        row of the count table; S = none
    repetition: np.ndarray  # f32[R]   1 = off
    frequency: np.ndarray  # f32[R]    0 = off
    presence: np.ndarray  # f32[R]     0 = off

    @classmethod
    def off(cls, num_rows: int, max_num_seqs: int) -> "Penalties":
        """R rows without any."""
        zeros = np.zeros(num_rows, np.float32)
        slots = np.full(num_rows, max_num_seqs, np.int32)
        return cls(slots, np.ones(num_rows, np.float32), zeros, zeros.copy())


class LogitBias(NamedTuple):
    """What is added to the logits of some tokens of each row; padded with (0, 0)."""

    token_ids: np.ndarray  # i32[R, B]
    values: np.ndarray  # f32[R, B]

    @classmethod
    def off(cls, num_rows: int) -> "LogitBias":
        """R rows without any."""
        shape = (num_rows, MAX_LOGIT_BIAS)
        return cls(np.zeros(shape, np.int32), np.zeros(shape, np.float32))


class CountLoad(NamedTuple):
    """A row of the count table, made anew.

    Args:
        slot: which row.
        token_ids: i32[n], tokens to count; one may come twice.
        amounts: i32[n], what to add for each: 1 for a token of the prompt, 2 for each time it was
            sampled.
    """

    slot: int
    token_ids: np.ndarray
    amounts: np.ndarray


def no_pairs() -> np.ndarray:
    """i32[2, 0]: nothing to move."""
    return np.zeros((2, 0), np.int32)


def no_ids() -> np.ndarray:
    """i32[0]: nothing to score."""
    return np.zeros(0, np.int32)


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """One step's inputs. T, R from the bucket; S = max_num_seqs; P = pages a sequence; all padded
    with zeros.

    Rows (sequences) are ordered by num_scheduled_tokens; the tokens of a row are contiguous and
    rows follow each other, so `cu_q_lens` gives each row's range of tokens.
    """

    bucket: Bucket
    num_rows: int  # live logit rows; the rest of R is padding
    # what the model reads
    token_ids: np.ndarray  # i32[T]     -1 - r: what logit row r of the batch before sampled last
    positions: np.ndarray  # i32[T]
    page_table: np.ndarray  # i32[S * P]
    kv_lens: np.ndarray  # i32[S]      context length including this step's tokens
    kv_starts: np.ndarray  # i32[S]    absolute position of the row's first page, 0 normally
    cu_q_lens: np.ndarray  # i32[S + 1] padded rows repeat the last value
    ranges: np.ndarray  # i32[3]       rows with one token, the same again, rows in all
    logit_rows: np.ndarray  # i32[S]   token index of each logit row
    # what the sampler reads, per logit row
    temperature: np.ndarray  # f32[R]  0 = greedy
    top_k: np.ndarray  # i32[R]        0 = all
    top_p: np.ndarray  # f32[R]
    min_p: np.ndarray  # f32[R]
    seeds: np.ndarray  # u32[R, 2]     high and low word
    wants_logprobs: np.ndarray  # bool[R]  somebody is told how likely the token was
    reports_processed: np.ndarray  # bool[R]  logprobs of what is sampled from, not of raw logits
    output_positions: np.ndarray  # i32[R]  how many output tokens the sequence has already
    num_steps: int = 1  # run so often, each time with the tokens that were sampled before
    wants_candidates: bool = False  # some row wants the likeliest tokens, not just a sampled one
    penalties: Penalties | None = None  # where some row has any
    count_loads: tuple[CountLoad, ...] = ()  # done before the logits are processed
    logit_bias: LogitBias | None = None  # where some row has any
    awaits_masks: bool = False  # what rows may sample is handed in while the layers run
    # what is scored: the token at score_rows[i] says how likely token id score_targets[i] is next
    score_rows: np.ndarray = field(default_factory=no_ids)  # i32[n], n differs from step to step
    score_targets: np.ndarray = field(default_factory=no_ids)  # i32[n]
    wants_score_top: bool = False  # and which tokens are likeliest there
    # pages to move before the step, in this order; n differs from field to field
    moves_out: np.ndarray = field(default_factory=no_pairs)  # i32[2, n] device pages -> host pages
    copies: np.ndarray = field(default_factory=no_pairs)  # i32[2, n] device pages -> device pages
    moves_in: np.ndarray = field(default_factory=no_pairs)  # i32[2, n] host pages -> device pages

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            for part in value if isinstance(value, Penalties | LogitBias) else (value,):
                if isinstance(part, np.ndarray):
                    part.flags.writeable = False

    @classmethod
    def padding(
        cls, bucket: Bucket, buckets: Buckets, max_pages: int, *, num_rows: int
    ) -> "DeviceBatch":
        """A batch of padding alone, in a bucket's shapes: for compiling and for warming up.

        Args:
            bucket: T and R.
            buckets: gives S.
            max_pages: P.
            num_rows: logit rows to count as live; their tokens mean nothing.
        """
        max_seqs = buckets.max_num_seqs
        return cls(
            bucket=bucket,
            num_rows=num_rows,
            token_ids=np.zeros(bucket.num_tokens, np.int32),
            positions=np.zeros(bucket.num_tokens, np.int32),
            page_table=np.zeros(max_seqs * max_pages, np.int32),
            kv_lens=np.zeros(max_seqs, np.int32),
            kv_starts=np.zeros(max_seqs, np.int32),
            cu_q_lens=np.zeros(max_seqs + 1, np.int32),
            ranges=np.zeros(3, np.int32),
            logit_rows=np.zeros(max_seqs, np.int32),
            num_steps=1,
            wants_candidates=False,
            output_positions=np.zeros(bucket.num_rows, np.int32),
            **sampling_arrays([], bucket.num_rows),
        )

    def following(self) -> "DeviceBatch":
        """The batch of the next of its `num_steps`: each row goes on with the token it sampled.

        Raises:
            ValueError: a row computes more than one token, or samples none; masks are awaited, which
                only the host can make.
        """
        num_rows = self.num_rows
        if not num_rows == self.ranges[0] == self.ranges[2]:
            raise ValueError("only a batch whose rows all sample after one token has a next step")
        if self.awaits_masks:
            raise ValueError("a batch that awaits masks has no next step")
        live = np.arange(num_rows, dtype=np.int32)
        token_ids, positions = self.token_ids.copy(), self.positions.copy()
        kv_lens, output_positions = self.kv_lens.copy(), self.output_positions.copy()
        token_ids[:num_rows] = -1 - live
        positions[:num_rows] += 1
        kv_lens[:num_rows] += 1
        output_positions[:num_rows] += 1
        return replace(
            self,
            num_steps=self.num_steps - 1,
            token_ids=token_ids,
            positions=positions,
            kv_lens=kv_lens,
            output_positions=output_positions,
            count_loads=(),
            moves_out=no_pairs(),
            copies=no_pairs(),
            moves_in=no_pairs(),
        )


class TokenScores(NamedTuple):
    """How likely the scored tokens of a step were.

    Args:
        logprobs: f32[n], natural logs under the raw logits.
        ranks: i32[n], 1 + how many tokens are likelier.
        top_ids: i32[n, K], the likeliest tokens, best first, when the batch wanted them; K =
            min(MAX_LOGPROBS, vocabulary).
        top_logprobs: f32[n, K], theirs.
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None

    def part(self, begin: int, end: int) -> "TokenScores":
        """Of the tokens [begin, end) of the n."""
        parts: list[Any] = [None if one is None else one[begin:end] for one in self]
        return TokenScores(*parts)


@dataclass(frozen=True, kw_only=True)
class SampledTokens:
    """What a step sampled: one row per slice that samples, in plan order; M tokens, as many as the
    batch had steps.

    Args:
        token_ids: i32[S, M].
        num_tokens: i32[S], how many of the M are there.
        logprobs: f32[S, M], natural log of each token's probability under the raw logits; zeros where
            no row of the batch wanted any.
        finite: bool[number of slices], in plan order and for every slice, also those that sample
            nothing: False where hidden states or logits of the slice are NaN or infinite. Nothing
            that such a slice wrote may be used by anybody.
        candidate_ids: i32[S, M, K], the likeliest tokens where each token was sampled, best first,
            when the batch wanted them; K = min(MAX_CANDIDATES, vocabulary).
        candidate_logprobs: f32[S, M, K], theirs.
        scores: of the rows that the batch wanted scored, in its order; None without any.
    """

    token_ids: np.ndarray
    num_tokens: np.ndarray
    logprobs: np.ndarray
    finite: np.ndarray
    candidate_ids: np.ndarray | None = None
    candidate_logprobs: np.ndarray | None = None
    scores: TokenScores | None = None


def sampling_arrays(seqs: "Several[Sequence]", num_rows: int) -> dict[str, Any]:
    """What the sampler reads of sequences and does not change from step to step, padded.

    Args:
        seqs: one per live logit row.
        num_rows: R.
    """
    params = [seq.request.sampling_params for seq in seqs]

    def column(values: list, dtype: type, fill: float) -> np.ndarray:
        filled = np.full(num_rows, fill, dtype)
        filled[: len(values)] = values
        return filled

    seeds = np.zeros((num_rows, 2), np.uint32)
    words = np.array([seq.seed for seq in seqs], np.uint64)
    seeds[: len(seqs), 0], seeds[: len(seqs), 1] = words >> 32, words & 0xFFFFFFFF
    return {
        "temperature": column([_f32_temperature(p.temperature) for p in params], np.float32, 0.0),
        "top_k": column([max(p.top_k, 0) for p in params], np.int32, 0),
        "top_p": column([p.top_p for p in params], np.float32, 1.0),
        "min_p": column([p.min_p for p in params], np.float32, 0.0),
        "seeds": seeds,
        "wants_logprobs": column([p.wants_logprobs for p in params], np.bool_, False),
        "reports_processed": column([p.processed_logprobs for p in params], np.bool_, False),
    }


def penalty_arrays(seqs: "Several[Sequence]", num_rows: int, max_num_seqs: int) -> Penalties:
    """The penalties of sequences, one per live logit row; slots are not given yet."""
    penalties = Penalties.off(num_rows, max_num_seqs)
    for row, params in enumerate(seq.request.sampling_params for seq in seqs):
        penalties.repetition[row] = params.repetition_penalty
        penalties.frequency[row] = params.frequency_penalty
        penalties.presence[row] = params.presence_penalty
    return penalties


def bias_arrays(seqs: "Several[Sequence]", num_rows: int) -> LogitBias | None:
    """The logit_bias of sequences, one per live logit row; None where none has any."""
    pairs = [seq.request.sampling_params.bias_pairs for seq in seqs]
    if not any(pairs):
        return None
    bias = LogitBias.off(num_rows)
    for row, own in enumerate(pairs):
        for index, (token_id, value) in enumerate(own):
            bias.token_ids[row, index] = token_id
            bias.values[row, index] = value
    return bias


def _f32_temperature(temperature: float) -> float:
    """Below 1e-30 the logits' differences overflow float32 and only the argmax is left: greedy.

    1e30 is uniform.
    """
    return 0.0 if temperature < 1e-30 else min(temperature, 1e30)
