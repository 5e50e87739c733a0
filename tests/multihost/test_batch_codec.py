import dataclasses
import json

import numpy as np
import pytest

from jaxserve.multihost.batch_codec import decode_batch, encode_batch
from jaxserve.multihost.wire import WireError, frame, parse
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from jaxserve.schedule.batch import CountLoad, DeviceBatch, LogitBias, Penalties
from jaxserve.schedule.buckets import Bucket, Buckets
from tests.fakes import FakeExecutor, drain, make_engine

BUCKETS = Buckets.make(max_num_seqs=4, max_num_batched_tokens=8, tokens=None, rows=None)


def travelled(batch: DeviceBatch) -> DeviceBatch:
    fields, arrays = encode_batch(batch)
    data = b"".join(frame("submit", fields, arrays))
    num_header = int.from_bytes(data[4:8], "little")
    message = parse(data[16 : 16 + num_header], bytearray(data[16 + num_header :]))
    return decode_batch(message.fields, message.arrays)


def assert_equal(a, b):
    assert type(a) is type(b)
    if isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert (a == b).all()
        assert not b.flags.writeable
    elif isinstance(a, tuple):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            assert_equal(one, other)
    else:
        assert a == b


def assert_same_batch(a: DeviceBatch, b: DeviceBatch):
    for field in dataclasses.fields(DeviceBatch):
        assert_equal(getattr(a, field.name), getattr(b, field.name))


def padding(**changes) -> DeviceBatch:
    batch = DeviceBatch.padding(Bucket(8, 4), BUCKETS, 5, num_rows=2)
    return dataclasses.replace(batch, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"penalties": Penalties.off(4, 4), "awaits_masks": True, "wants_candidates": True},
        {"logit_bias": LogitBias.off(4)},
        {
            "count_loads": (
                CountLoad(2, np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32)),
            )
        },
        {"moves_out": np.array([[1, 2], [3, 4]], np.int32), "num_steps": 3},
        {"score_rows": np.arange(2, dtype=np.int32), "wants_score_top": True},
    ],
)
def test_a_batch_arrives_as_it_was(changes):
    batch = padding(**changes)
    assert_same_batch(batch, travelled(batch))


def test_every_batch_of_an_engine_arrives_as_it_was():
    seen = []

    class Watching(FakeExecutor):
        def submit(self, batch):
            seen.append(batch)
            return super().submit(travelled(batch))

    engine = make_engine(executor_class=Watching, num_pages=12, num_host_pages=8)
    for i in range(6):
        params = SamplingParams(
            max_tokens=8,
            ignore_eos=True,
            presence_penalty=float(i % 2),
            logit_bias={5: 1.0} if i % 3 else None,
            allowed_token_ids=list(range(100 * i, 100 * i + 50)) if i == 4 else None,
            prompt_logprobs=1 if i == 5 else None,
        )
        engine.add(Request(id=str(i), prompt_token_ids=[*range(i, 9 + i)], sampling_params=params))
    drain(engine)
    for batch in seen:
        assert_same_batch(batch, travelled(batch))
    assert any(batch.penalties is not None for batch in seen)
    assert any(batch.logit_bias is not None for batch in seen)
    assert any(batch.awaits_masks for batch in seen)
    assert any(len(batch.score_rows) for batch in seen)


@pytest.mark.parametrize(
    "changes",
    [
        {"bucket": {"of": "Popen", "values": ["ls"]}},
        {"bucket": {"of": "Bucket", "values": [1, 2, 3]}},
        {"token_ids": {"array": 99}},
        {"token_ids": {"array": "x"}},
        {"token_ids": {}},
        {"no_such_field": 1},
    ],
)
def test_what_is_no_batch_is_refused(changes):
    fields, arrays = encode_batch(padding())
    json.dumps(fields)
    with pytest.raises(WireError):
        decode_batch(fields | changes, arrays)


def test_what_a_batch_cannot_hold_is_not_sent():
    with pytest.raises(TypeError, match="cannot be sent"):
        encode_batch(padding(num_steps="x"))
