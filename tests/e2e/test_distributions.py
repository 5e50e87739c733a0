"""Every option, and every pair of values of two, through the whole engine: each drawn token's processed
log-probability is that of the exact distribution after its own history, and draws follow it.
"""

import numpy as np
import pytest

from jaxserve.llm import LLM
from jaxserve.request import SamplingParams
from tests.checkpoints import make_bigram
from tests.llms import shared_llm
from tests.sample.covering import LOGITS, covering_rows, distribution, limit

PROMPT = [1, 3, 9]
NUM_CHOICES, NUM_TOKENS = 32, 6
ROWS = covering_rows()


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    logits = dict(enumerate(LOGITS.tolist()))
    folder = make_bigram(
        tmp_path_factory.mktemp("bigram"), {}, vocab_size=len(LOGITS), default=logits
    )
    return shared_llm(folder, max_num_seqs=32, row_buckets=(32,), token_buckets=(32,))


def test_every_draw_is_from_the_exact_distribution(llm):
    """All rows in one batch, so that they are neighbours too."""
    params = [
        SamplingParams(
            n=NUM_CHOICES,
            max_tokens=NUM_TOKENS,
            seed=number,
            ignore_eos=True,
            logprobs=True,
            processed_logprobs=True,
            **row,  # type: ignore[arg-type]
        )
        for number, row in enumerate(ROWS)
    ]
    for row, output in zip(ROWS, llm.generate([PROMPT] * len(ROWS), params), strict=True):
        difference, variance = np.zeros(len(LOGITS)), np.zeros(len(LOGITS))
        for one in output.outputs:
            for place, token in enumerate(one.token_ids):
                probs = distribution(LOGITS, row, PROMPT, one.token_ids[:place])
                assert probs[token] > 0, (row, one.token_ids, place)
                assert one.logprobs[place] == pytest.approx(np.log(probs[token]), abs=1e-4), row
                difference[token] += 1
                difference -= probs
                variance += probs * (1 - probs)
        many = variance > 4
        squares = (difference[many] ** 2 / variance[many]).sum()
        assert squares <= limit(2 * int(many.sum())), (row, difference, variance)


def test_a_stream_gives_what_a_batch_gives(llm):
    """Ids, log-probabilities and likeliest tokens, of every choice."""
    for number, row in enumerate(ROWS[::4]):
        params = SamplingParams(
            n=2, max_tokens=NUM_TOKENS, seed=number, ignore_eos=True, logprobs=3, **row
        )
        (whole,) = llm.generate([PROMPT], params)
        parts: dict[int, list] = {0: [], 1: []}
        for part in llm.stream(PROMPT, params):
            for one in part.outputs:
                parts[one.index].append(one)
        for one in whole.outputs:
            mine = parts[one.index]
            assert [i for p in mine for i in p.token_ids] == one.token_ids
            joined = [x for p in mine for x in p.logprobs]
            assert joined == pytest.approx(one.logprobs, abs=1e-5)
            tops = [[i for i, _ in top] for p in mine for top in p.top_logprobs]
            assert tops == [[i for i, _ in top] for top in one.top_logprobs]
            assert mine[-1].finish_reason == one.finish_reason
