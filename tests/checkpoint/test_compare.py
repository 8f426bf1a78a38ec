"""How far the records of two runs are apart; tests/integration compares whole runs."""

import math

import pytest

from megatron_stapo.checkpoint.compare import _compare_metrics


def compare(first: dict[str, float | None], second: dict[str, float | None]) -> float:
    [row] = _compare_metrics({3: first}, {3: second})
    assert row.what == "metrics of step 3"
    assert row.is_equal == (first == second)
    return row.difference


def test_the_largest_relative_difference_counts() -> None:
    assert compare({"a": 1.0, "b": 2.0}, {"a": 1.0, "b": 2.0}) == 0
    assert compare({"a": 1.0, "b": 2.0}, {"a": 1.1, "b": 2.5}) == pytest.approx(0.2)
    assert compare({"grad_norm": 1e-9}, {"grad_norm": 2e-9}) == pytest.approx(0.5)


def test_what_rounding_leaves_is_measured_against_what_was_rounded() -> None:
    assert compare({"logprob_gap_max": 1e-7}, {"logprob_gap_max": 3e-7}) == pytest.approx(2e-5)
    assert compare({"logprob_gap_max": 0.5}, {"logprob_gap_max": 1.0}) == pytest.approx(0.5)
    assert compare({"loss": -1e-8}, {"loss": 1e-8}) == pytest.approx(2e-5)


@pytest.mark.parametrize(
    "other", [{}, {"a": None}, {"a": math.inf}, {"a": math.nan}, {"a": 1.0, "b": 1.0}]
)
def test_a_metric_that_one_run_lacks_is_infinitely_far(other: dict[str, float | None]) -> None:
    assert compare({"a": 1.0}, other) == math.inf
    assert compare(other, {"a": 1.0}) == math.inf
