"""The work of steps, token by token against the meter's sums, and what `Engine.stats` makes of it."""

import dataclasses
import json

import numpy as np
import pytest

from jaxserve.plan.chips import CHIPS
from jaxserve.plan.models import MODELS, ModelSpec
from jaxserve.plan.work import StepWork
from jaxserve.replicas.merged_stats import merge_stats
from jaxserve.schedule.batch import DeviceBatch
from jaxserve.schedule.buckets import Bucket, Buckets
from jaxserve.schedule.work_meter import WorkMeter
from tests.fakes import drain, make_engine
from tests.schedule.test_schedule_log import add, prompt_of

TINY = ModelSpec(
    vocab_size=10,
    hidden_size=4,
    intermediate_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=2,
    max_position_embeddings=64,
)
MATRICES = 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 8)  # of both layers
HEAD = 10 * 4
KV = 2 * 2 * 1 * 2 * 4  # of a token, float32


def batch_of(*rows: tuple[int, int], num_rows: int, num_steps: int = 1) -> DeviceBatch:
    """A batch with a row (start, num_tokens) each, four rows at most."""
    buckets = Buckets.make(max_num_seqs=4, max_num_batched_tokens=64)
    padding = DeviceBatch.padding(Bucket(64, 4), buckets, 4, num_rows=num_rows)
    ends = [start + count for start, count in rows]
    counts = [count for _, count in rows]
    none = [0] * (4 - len(rows))
    return dataclasses.replace(
        padding,
        kv_lens=np.array([*ends, *none], np.int32),
        cu_q_lens=np.cumsum([0, *counts, *none]).astype(np.int32),
        num_steps=num_steps,
    )


def by_hand(rows, num_rows: int, windows=(None, None)) -> tuple[int, int]:
    """(bytes, operations) of a step, key by key."""
    num_tokens = sum(count for _, count in rows)
    read = pairs = 0
    for window in windows:
        for start, count in rows:
            seen = [
                set(range(max(0, p - (window or 999) + 1), p + 1))
                for p in range(start, start + count)
            ]
            read += len(set().union(*seen)) * KV // 2
            pairs += sum(map(len, seen))
    weights = 4 * (MATRICES + (HEAD if num_rows else 0))
    flops = 2 * MATRICES * num_tokens + 2 * HEAD * num_rows + 4 * 2 * 2 * pairs
    return weights + read + num_tokens * KV, flops


@pytest.mark.parametrize(
    ("rows", "num_rows"),
    [([(0, 5)], 0), ([(7, 1), (0, 9), (30, 6)], 2), ([(40, 1), (1, 1), (2, 1), (63, 1)], 4)],
)
@pytest.mark.parametrize("windows", [(None, None), (3, 3), (None, 8)])
def test_the_sums_are_those_of_every_token(rows, num_rows, windows):
    model = dataclasses.replace(TINY, layer_windows=windows if any(windows) else ())
    meter = WorkMeter(model, dtype="float32")
    meter.step_done(batch_of(*rows, num_rows=num_rows), num_rows, 0.5)
    stats = meter.stats()
    assert (stats.num_bytes, stats.num_flops) == by_hand(rows, num_rows, windows)
    assert (stats.step_s, stats.last_step_s) == (0.5, 0.5)


def test_a_batch_of_several_steps_reads_the_weights_several_times():
    meter = WorkMeter(TINY, dtype="float32")
    rows = [(7, 1), (20, 1)]
    meter.step_done(batch_of(*rows, num_rows=2, num_steps=3), 2, 1.0)
    steps = [by_hand([(start + i, 1) for start, _ in rows], 2) for i in range(3)]
    stats = meter.stats()
    assert (stats.num_bytes, stats.num_flops) == tuple(sum(one) for one in zip(*steps, strict=True))


def test_shares_of_known_peaks():
    meter = WorkMeter(TINY, dtype="float32", peak_bytes_per_s=1e4, peak_flops_per_s=1e5)
    meter.step_done(batch_of((0, 5), num_rows=0), 0, 0.5)
    meter.step_done(batch_of((5, 1), num_rows=1), 1, 1.5)
    (bytes_0, flops_0), (bytes_1, flops_1) = by_hand([(0, 5)], 0), by_hand([(5, 1)], 1)
    stats = meter.stats()
    assert stats.bytes_per_s == (bytes_0 + bytes_1) / 2
    assert stats.bandwidth_share == pytest.approx((bytes_0 + bytes_1) / 2 / 1e4)
    assert stats.flops_share == pytest.approx((flops_0 + flops_1) / 2 / 1e5)
    assert stats.last_bandwidth_share == pytest.approx(bytes_1 / 1.5 / 1e4)
    assert stats.last_flops_share == pytest.approx(flops_1 / 1.5 / 1e5)
    least = max(bytes_0 / 1e4, flops_0 / 1e5) + max(bytes_1 / 1e4, flops_1 / 1e5)
    assert stats.roofline_share == pytest.approx(least / 2)
    meter.set_peaks(bytes_per_s=None, flops_per_s=None)
    empty = meter.stats()
    assert (empty.step_s, empty.num_bytes, empty.bytes_per_s) == (0.0, 0, 0.0)
    assert empty.bandwidth_share is empty.flops_share is empty.roofline_share is None


def test_peaks_come_from_the_table_of_chips():
    meter = WorkMeter.on_chip(MODELS["llama-3-8b"].of_one_chip(8), CHIPS["v5e"], dtype="bfloat16")
    stats = meter.stats()
    assert (stats.peak_bytes_per_s, stats.peak_flops_per_s) == (819e9, 197e12)
    whole = StepWork.of(MODELS["llama-3-8b"], dtype="bfloat16")
    assert 8 * meter.work.layer_bytes == whole.layer_bytes
    assert WorkMeter.on_chip(TINY, None, dtype="float32").stats().peak_flops_per_s is None


def test_an_engine_tells_how_near_it_came():
    now = iter(range(10**6))
    meter = WorkMeter(TINY, dtype="float32", peak_bytes_per_s=1e6, peak_flops_per_s=1e9)
    engine = make_engine(clock=lambda: float(next(now)), meter=meter)
    assert engine.stats().roofline == meter.stats()
    add(engine, "a", prompt_of(6), 4)
    drain(engine)
    stats = engine.stats()
    assert stats.roofline is not None
    steps = [([(0, 6)], 1), *([([(5 + i, 1)], 1) for i in range(1, 4)])]
    expected = [by_hand(*step) for step in steps]
    assert stats.roofline.num_bytes == sum(num_bytes for num_bytes, _ in expected)
    assert stats.roofline.num_flops == sum(num_flops for _, num_flops in expected)
    assert stats.roofline.last_num_bytes == expected[-1][0]
    assert stats.roofline.step_s > 0
    figures = json.loads(json.dumps(stats.to_dict(), allow_nan=False))["roofline"]
    assert figures["num_flops"] == stats.roofline.num_flops
    assert 0 < figures["roofline_share"] < 1


def test_without_a_meter_nothing_is_told():
    engine = make_engine()
    assert engine.stats().roofline is None
    assert engine.stats().to_dict()["roofline"] is None


def test_several_engines_tell_of_the_mean_device():
    stats = make_engine().stats()
    meter = WorkMeter(TINY, dtype="float32", peak_bytes_per_s=1e4, peak_flops_per_s=1e5)
    meter.step_done(batch_of((0, 5), num_rows=0), 0, 0.5)
    one = dataclasses.replace(stats, roofline=meter.stats())
    merged = merge_stats([one, one]).roofline
    assert merged is not None
    assert merged.num_bytes == 2 * meter.stats().num_bytes
    assert merged.bandwidth_share == meter.stats().bandwidth_share
    assert merge_stats([stats, one]).roofline is None
