"""Engines in the trainer's ranks: who samples what, stopping, failing; with scripted engines."""

import re

import pytest

from megatron_stapo.config import Config
from tests.rollout.colocated_ranks import run_calls
from tests.workers import build_config


def build(num_ranks=2, **changes) -> Config:
    return build_config(
        "M",
        rollout__placement="colocated",
        rollout__kv_cache_bytes=1 << 20,
        rollout__max_num_seqs=4,
        parallel__data_parallel_size=num_ranks,
        **changes,
    )


def run(rank_pool, config, calls, failures=None, stop_after=None):
    return rank_pool.run(
        run_calls, config.parallel.world_size, config, calls, failures or {}, stop_after
    )


@pytest.mark.distributed
def test_every_prompt_is_sampled_once_and_comes_back_in_order(rank_pool):
    lengths = [40, 1, 20, 3, 60, 5, 1]
    first, second = run(rank_pool, build(), [(lengths, 4), ([2], 2)])
    assert [prompt_id for prompt_id, _ in first["outcomes"][0]] == list(range(100, 107))
    assert all(len(samples) == 4 for _, samples in first["outcomes"][0])
    assert first["outcomes"][1] == [(100, [0, 0])]
    done = [prompt_id for prompt_id in first["log"] + second["log"] if isinstance(prompt_id, int)]
    assert sorted(done) == [100, *range(100, 107)]
    # Shorter ones are judged while others are still sampled.
    assert next(index for index, call in first["seen"] if call == 0) == 1
    assert first["failed"] == second["failed"] == [None, None]
    assert second["outcomes"] == []


@pytest.mark.distributed
def test_an_engine_that_is_done_first_gets_more(rank_pool):
    """Each takes eight samples at a time; the first prompt keeps engine 0 for six rounds."""
    first, second = run(rank_pool, build(), [([96, 1, 1, 1, 1, 1], 8)])
    assert first["log"] == [100, ("abort", 0)]
    assert second["log"] == [101, 102, 103, 104, 105, ("abort", 0)]


@pytest.mark.distributed
def test_the_ranks_of_an_engine_sample_the_same(rank_pool):
    config = build(num_ranks=4, rollout__tensor_parallel_size=2)
    ranks = run(rank_pool, config, [([10, 20, 30, 40], 4)])
    assert [samples[0] for _, samples in ranks[0]["outcomes"][0]] == [0, 1, 0, 1]
    assert ranks[0]["log"] == ranks[1]["log"] == [100, 102, ("abort", 0)]
    assert ranks[2]["log"] == ranks[3]["log"] == [101, 103, ("abort", 0)]


@pytest.mark.distributed
def test_a_stop_abandons_what_is_half_sampled_and_the_engines_go_on(rank_pool):
    first, second = run(rank_pool, build(), [([1, 10**7, 10**7], 4), ([1, 1], 4)], stop_after=1)
    assert first["outcomes"][0] == "InterruptedError('stop')"
    assert first["outcomes"][1] == [(100, [0] * 4), (101, [1] * 4)]
    assert next(entry for entry in first["log"] if isinstance(entry, tuple)) == ("abort", 1)
    assert first["failed"] == second["failed"] == [None, None]


@pytest.mark.distributed
def test_a_failure_reaches_every_rank_with_its_cause(rank_pool):
    """Rank 2 fails first; rank 0 may only have missed it."""
    config = build(num_ranks=4, rollout__tensor_parallel_size=2)
    ranks = run(rank_pool, config, [([10**6] * 4, 4)], failures={0: (2, 0.5), 2: (2, 0.0)})
    for rank in ranks:
        [failure] = rank["failed"]
        assert re.fullmatch(
            r"rank 2 \(tp 0, .*\): the engine failed: RuntimeError\('a broken kernel'\)", failure
        )
    assert "a broken kernel" in ranks[0]["outcomes"][0]


@pytest.mark.distributed
def test_the_memory_reported_is_the_least_freed_and_the_most_held(rank_pool):
    for rank in run(rank_pool, build(), []):
        assert rank["memory"] == (10, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout__engine": "transformers"}, r"rollout.placement=colocated: is vLLM's"),
        ({"rollout__num_engines": 2}, r"rollout.num_engines=2: has no effect"),
        ({"rollout__max_lag_steps": 1}, r"rollout.max_lag_steps=1: .*set it to 0"),
        ({"rollout__kv_cache_bytes": None}, r"rollout.kv_cache_bytes=None: must be set"),
        (
            {"rollout__tensor_parallel_size": 4, "parallel__tensor_model_parallel_size": 3},
            r"rollout.tensor_parallel_size=4: .* of 4 ranks do not fill the trainer's 6; "
            r"the product must be one of \[1, 2, 3, 6\]",
        ),
        ({"rollout__placement": "beside"}, r"must be one of disaggregated, colocated"),
    ],
)
def test_what_cannot_be_colocated_is_refused(changes, message):
    changes = {
        "rollout__placement": "colocated",
        "rollout__kv_cache_bytes": 1 << 20,
        "parallel__data_parallel_size": 2,
    } | changes
    with pytest.raises(ValueError, match=message):
        build_config("M", **changes)


def test_engines_fill_the_trainers_ranks():
    assert build(num_ranks=4).num_engines == 4
    assert build(num_ranks=4, rollout__tensor_parallel_size=2).num_engines == 2
    assert build_config("M", rollout__num_engines=3).num_engines == 3
