import dataclasses

from jaxserve.replicas.merged_stats import merge_stats
from jaxserve.stats import BucketStats
from tests.fakes import drain, make_engine
from tests.replicas.replicated import make_replicated
from tests.replicas.test_engine import prompt_of, request


def test_counts_are_added_and_settings_of_a_step_are_not():
    engine = make_replicated(2)
    for i in range(5):
        engine.add(request(str(i), prompt_of(i)))
    drain(engine)  # type: ignore[arg-type]
    parts = [one.stats() for one in engine.engines]
    stats = engine.stats()
    assert stats == merge_stats(parts)
    assert stats.num_replicas == 2
    assert stats.num_output_tokens == 30 == sum(one.num_output_tokens for one in parts)
    assert stats.num_prompt_tokens == 45
    assert stats.num_pages == 2 * parts[0].num_pages
    assert stats.num_free_pages + stats.num_cached_pages + stats.num_owned_pages == 2 * 63
    assert stats.num_usable_pages == 2 * 63
    assert stats.num_slots == parts[0].num_slots == 63 * 4
    assert stats.max_num_seqs == 16
    assert stats.max_num_batched_tokens == 32
    assert stats.token_buckets == parts[0].token_buckets
    assert sum(use.num_steps for use in stats.by_bucket.values()) == stats.num_steps
    assert stats.to_dict()["engine"]["num_replicas"] == 2


def test_rungs_that_only_one_has_used_are_there():
    stats = make_engine().stats()
    a = dataclasses.replace(stats, by_bucket={4: BucketStats(1, 2, 3)}, num_steps=1)
    b = dataclasses.replace(
        stats, by_bucket={4: BucketStats(1, 1, 1), 8: BucketStats(5, 6, 7)}, num_steps=6
    )
    merged = merge_stats([a, b])
    assert merged.by_bucket == {4: BucketStats(2, 3, 4), 8: BucketStats(5, 6, 7)}
    assert merged.num_steps == 7


def test_of_one_engine_they_are_its_own():
    stats = make_engine().stats()
    assert merge_stats([stats]) == stats
