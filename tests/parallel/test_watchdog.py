"""Whom the ranks blame when one of them does not join a collective."""

import re

import pytest

from tests.workers import build_config, run_hang

pytestmark = pytest.mark.distributed

TIMEOUT_S = 6.0  # five reports missed in a row, 3 s, and a busy rank looks stopped


def hang(rank_pool, path, kind, **sizes):
    config = build_config(path, **sizes)
    return rank_pool.run(run_hang, config.parallel.world_size, config, kind, TIMEOUT_S)


def hang_two(rank_pool, path, kind):
    return hang(rank_pool, path, kind, parallel__tensor_model_parallel_size=2)


def name(rank, **coordinates):
    places = {"tp": 0, "pp": 0, "cp": 0, "dp": 0} | coordinates
    return f"rank {rank} ({', '.join(f'{axis} {place}' for axis, place in places.items())})"


WAITED = f"{name(0)} waited 6 s (parallel.timeout_s) in all_reduce number 4 of ranks [0, 1] (first)"


def test_a_stopped_rank_is_named_with_its_last_report(rank_pool, tmp_path):
    waited, _ = hang_two(rank_pool, tmp_path, "stopped")
    found = re.fullmatch(
        re.escape(f"{WAITED}; {name(1, tp=1)} has not reported for ")
        + r"(?P<silence>\S+) s: it was in run_hang \(tests/workers\.py:\d+\), \S+ s after its "
        r"last collective, all_reduce number 3 of ranks \[0, 1\] \(first\)\. It is stopped .*",
        waited,
    )
    assert found, waited
    assert 0 < float(found["silence"]) <= TIMEOUT_S


def test_a_rank_that_is_busy_elsewhere_is_named_with_the_line_it_is_at(rank_pool, tmp_path):
    waited, noticed_nothing = hang_two(rank_pool, tmp_path, "absent")
    assert noticed_nothing is None
    assert (
        f"{WAITED}; {name(1, tp=1)} reports, but has not joined: it is in run_hang (" in waited
    ), waited
    assert "last collective, all_reduce number 3 of ranks [0, 1] (first)." in waited


def test_ranks_in_different_collectives_are_all_named(rank_pool, tmp_path):
    for waited in hang_two(rank_pool, tmp_path, "mismatch"):
        _, _, all_ranks = waited.partition("; no rank is missing: ")
        first, second = all_ranks.split("; ", maxsplit=1)
        assert first.startswith(name(0))
        assert "waiting in all_reduce number 4 of ranks [0, 1] (first)" in first
        assert second.startswith(name(1, tp=1))
        assert "waiting in all_reduce number 1 of ranks [0, 1] (second)" in second


def test_a_rank_that_fails_by_itself_keeps_its_error_and_is_named_as_lost(rank_pool, tmp_path):
    lost, own = hang_two(rank_pool, tmp_path, "failed")
    assert own == "a bug"
    collective = "all_reduce number 4 of ranks [0, 1] (first)"
    assert lost.startswith(f"{name(0)} lost its connection to another rank in {collective}; ")
    assert f"{name(1, tp=1)} has not reported for" in lost


def test_a_stage_that_waits_for_a_waiting_stage_blames_neither(rank_pool, tmp_path):
    _, *waited = hang(rank_pool, tmp_path, "pipeline", parallel__pipeline_model_parallel_size=3)
    for stage, message in enumerate(waited, start=1):
        waiting, _, blamed = message.partition("; ")
        assert waiting.startswith(f"{name(stage, pp=stage)} waited 6 s (parallel.timeout_s) in a ")
        assert "send or receive after all_reduce number 3 of ranks [0, 1, 2] (first)" in waiting
        assert blamed.startswith(f"{name(0)} reports, but has not joined: it is in run_hang")
