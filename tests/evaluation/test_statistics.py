import math
import random
from itertools import combinations

import pytest

from megatron_stapo.evaluation.samples import Sample
from megatron_stapo.evaluation.statistics import (
    BenchmarkResult,
    compute_average,
    compute_average_error,
    compute_pass_at_k,
    compute_problem_error,
    compute_result,
    compute_sampling_error,
)


def build_sample(row, number, is_correct, **changes):
    values = {
        "benchmark": "own",
        "row": row,
        "sample": number,
        "problem": "",
        "answer": "",
        "response": "",
        "num_tokens": 10,
        "is_truncated": False,
        "rule_correct": is_correct,
        "rule_outcome": "judged",
        "extracted": None,
    }
    return Sample(**(values | changes))


def test_a_case_by_hand():
    """Three problems, four samples each, of which 1, 4 and 2 are right."""
    samples = [
        build_sample(row, number, number < right, num_tokens=row + number, is_truncated=number == 3)
        for row, right in ((5, 1), (7, 4), (9, 2))
        for number in range(4)
    ]
    result = compute_result("own", samples)
    assert (result.num_problems, result.num_samples) == (3, 4)
    assert result.accuracy == pytest.approx(7 / 12)
    # p = 1/4, 1, 1/2: p (1 - p) / 3 = 1/16, 0, 1/12; their sum is 7/48.
    assert result.standard_error_sampling == pytest.approx(math.sqrt(7 / 48) / 3)
    # Deviations from 7/12: -4/12, 5/12, -1/12; squares 42/144 over 2, over 3 problems.
    assert result.standard_error_problems == pytest.approx(math.sqrt(42 / 144 / 2 / 3))
    # Two samples of four: both wrong in 3 of 6, 0 of 6, 1 of 6 draws.
    assert result.pass_at_k == pytest.approx({1: 7 / 12, 2: 1 - (3 + 0 + 1) / 18, 4: 1.0})
    assert result.truncated_frac == 0.25
    assert result.response_tokens_mean == 8.5
    assert result.outcomes == {"judged": 12}


def test_what_the_model_verifier_calls_right_is_right():
    samples = [
        build_sample(0, 0, True),
        build_sample(0, 1, False, model_verdict="correct"),
        build_sample(0, 2, False, model_verdict="incorrect", rule_outcome="no_answer"),
        build_sample(0, 3, False),
    ]
    result = compute_result("own", samples)
    assert result.accuracy == 0.5
    assert result.model_verdicts == {"correct": 1, "incorrect": 1}
    assert result.outcomes == {"judged": 3, "no_answer": 1}
    assert result.standard_error_problems is None


@pytest.mark.parametrize(("n", "c"), [(1, 0), (1, 1), (5, 0), (5, 2), (5, 5), (8, 3)])
def test_pass_at_k_is_the_share_of_draws_that_hold_a_right_sample(n, c):
    for k in range(1, n + 1):
        draws = list(combinations([True] * c + [False] * (n - c), k))
        share = sum(any(draw) for draw in draws) / len(draws)
        assert compute_pass_at_k([c], n, k) == pytest.approx(share)


def test_pass_at_1_is_the_accuracy_and_n_may_be_large():
    counts = [0, 17, 4096, 5000]
    assert compute_pass_at_k(counts, 5000, 1) == pytest.approx(sum(counts) / 20000, abs=1e-15)
    assert compute_pass_at_k([1], 5000, 2500) == pytest.approx(0.5)
    for k in (0, 5001):
        with pytest.raises(ValueError, match="pass@k needs 1 <= k <= n = 5000"):
            compute_pass_at_k(counts, 5000, k)


def simulate(seed, probs, n):
    rng = random.Random(seed)
    return [sum(rng.random() < p for _ in range(n)) for p in probs]


def measure_spread(means):
    mean = sum(means) / len(means)
    return math.sqrt(sum((x - mean) ** 2 for x in means) / (len(means) - 1))


def test_the_errors_are_the_spread_of_repeated_evaluations():
    """Of 2,000 evaluations; their spread is known to 2 %, the mean of the estimates to less."""
    n, size = 4, 25
    fixed = [i / (size - 1) for i in range(size)]
    sampled, fresh = [], []
    for seed in range(2000):
        sampled.append(simulate(seed, fixed, n))
        rng = random.Random(-seed - 1)
        fresh.append(simulate(seed, [rng.random() for _ in range(size)], n))
    for evaluations, compute in (
        (sampled, compute_sampling_error),
        (fresh, compute_problem_error),
    ):
        spread = measure_spread([sum(counts) / n / size for counts in evaluations])
        squares = [compute(counts, n) ** 2 for counts in evaluations]
        assert math.sqrt(sum(squares) / len(squares)) == pytest.approx(spread, rel=0.06)


def test_one_sample_says_nothing_about_its_spread():
    assert compute_sampling_error([1, 0], 1) is None
    assert compute_problem_error([1, 0], 1) == pytest.approx(0.5)


def test_unlike_numbers_of_samples_are_refused():
    samples = [build_sample(0, 0, True), build_sample(1, 0, True), build_sample(1, 1, True)]
    with pytest.raises(ValueError, match=r"benchmark own: its problems have \[1, 2\] samples"):
        compute_result("own", samples)
    with pytest.raises(ValueError, match="benchmark own: no samples"):
        compute_result("own", [])


def build_result(accuracy, error):
    return BenchmarkResult(
        benchmark="own",
        num_problems=1,
        num_samples=2,
        accuracy=accuracy,
        standard_error_sampling=error,
        standard_error_problems=None,
        pass_at_k={},
        truncated_frac=0.0,
        response_tokens_mean=0.0,
        outcomes={},
        model_verdicts={},
    )


def test_the_average_gives_every_benchmark_the_same_weight():
    results = [build_result(0.2, 0.03), build_result(0.6, 0.04)]
    assert compute_average(results) == pytest.approx(0.4)
    assert compute_average_error(results) == pytest.approx(0.025)
    assert compute_average_error([*results, build_result(1.0, None)]) is None
