"""The numbers of an evaluation, each with its definition. Pure Python, of counts alone.

M problems; n samples of each, c of them right; p = c / n.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_stapo.evaluation.samples import Sample


@dataclass(frozen=True, kw_only=True)
class BenchmarkResult:
    """One benchmark's row of the table."""

    benchmark: str
    num_problems: int
    num_samples: int
    """Per problem."""
    accuracy: float
    """avg@n: mean of p over the problems."""
    standard_error_sampling: float | None
    """Of the accuracy, were the same problems sampled again; None with one sample."""
    standard_error_problems: float | None
    """Of the accuracy, were other problems of the same kind drawn, too; None with one problem."""
    pass_at_k: dict[int, float]
    truncated_frac: float
    """Of all samples."""
    response_tokens_mean: float
    """Over all samples, stop tokens included."""
    outcomes: dict[str, int]
    """Of the rule, by name of `rewards.Verdict.outcome`."""
    model_verdicts: dict[str, int]
    """Of the model verifier, over the samples it was asked about."""


def compute_result(benchmark: str, samples: Sequence[Sample]) -> BenchmarkResult:
    """Summarize one benchmark.

    Args:
        benchmark: its name.
        samples: the same number of every problem.

    Raises:
        ValueError: no samples, or problems with different numbers of them.
    """
    if not samples:
        raise ValueError(f"benchmark {benchmark}: no samples.")
    num_correct: defaultdict[int, int] = defaultdict(int)
    num_samples = Counter(sample.row for sample in samples)
    for sample in samples:
        num_correct[sample.row] += sample.is_correct
    sizes = set(num_samples.values())
    if len(sizes) > 1:
        raise ValueError(
            f"benchmark {benchmark}: its problems have {sorted(sizes)} samples; the mean over "
            "problems needs the same number of each."
        )
    (n,) = sizes
    counts = list(num_correct.values())
    return BenchmarkResult(
        benchmark=benchmark,
        num_problems=len(counts),
        num_samples=n,
        accuracy=sum(counts) / (n * len(counts)),
        standard_error_sampling=compute_sampling_error(counts, n),
        standard_error_problems=compute_problem_error(counts, n),
        pass_at_k={k: compute_pass_at_k(counts, n, k) for k in _list_k(n)},
        truncated_frac=sum(s.is_truncated for s in samples) / len(samples),
        response_tokens_mean=sum(s.num_tokens for s in samples) / len(samples),
        outcomes=dict(sorted(Counter(s.rule_outcome for s in samples).items())),
        model_verdicts=dict(
            sorted(Counter(s.model_verdict for s in samples if s.model_verdict).items())
        ),
    )


def compute_average(results: Sequence[BenchmarkResult]) -> float:
    """Mean of the benchmarks' accuracies, each with the same weight, as the paper averages."""
    return sum(result.accuracy for result in results) / len(results)


def compute_average_error(results: Sequence[BenchmarkResult]) -> float | None:
    """Standard error of `compute_average` over repeated sampling of the same problems; None where a
    benchmark's is."""
    errors = [result.standard_error_sampling for result in results]
    if None in errors:
        return None
    return math.sqrt(sum(error**2 for error in errors if error is not None)) / len(errors)


def compute_sampling_error(num_correct: Sequence[int], num_samples: int) -> float | None:
    """Standard error of avg@n over repeated sampling of the same problems.

    sqrt(sum_m p (1 - p) / (n - 1)) / M: p (1 - p) / (n - 1) is the unbiased estimate of the
    variance of one problem's mean. None with one sample, which says nothing about its spread.
    """
    if num_samples == 1:
        return None
    variance = sum(c / num_samples * (1 - c / num_samples) / (num_samples - 1) for c in num_correct)
    return math.sqrt(variance) / len(num_correct)


def compute_problem_error(num_correct: Sequence[int], num_samples: int) -> float | None:
    """Standard error of avg@n over problems drawn anew, sampling included.

    std(p) / sqrt(M), with the unbiased standard deviation over problems. None with one problem.

    Source: Miller, Adding Error Bars to Evals, arXiv:2411.00640, section 2.1.
    """
    size = len(num_correct)
    if size == 1:
        return None
    p = [c / num_samples for c in num_correct]
    mean = sum(p) / size
    return math.sqrt(sum((x - mean) ** 2 for x in p) / (size - 1) / size)


def compute_pass_at_k(num_correct: Sequence[int], num_samples: int, k: int) -> float:
    """Mean over problems of the chance that one of k samples, drawn of the n, is right.

    1 - C(n - c, k) / C(n, k), unbiased for the chance that one of k fresh samples is right.

    Source: Chen et al., arXiv:2107.03374, equation 1.

    Raises:
        ValueError: k is not in 1..n.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k}: pass@k needs 1 <= k <= n = {num_samples}.")
    total = math.comb(num_samples, k)
    # Integers of any size: the quotient is rounded once.
    missed = sum(math.comb(num_samples - c, k) for c in num_correct)
    return 1 - missed / (total * len(num_correct))


def _list_k(num_samples: int) -> list[int]:
    """1, 2, 4, ... and n."""
    powers = [2**i for i in range(num_samples.bit_length()) if 2**i < num_samples]
    return [*powers, num_samples]
