"""The tokens of a step: how many sequences, how long, how often each is computed."""

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

from megatron_stapo.config import Config
from megatron_stapo.data.benchmarks import BENCHMARKS
from megatron_stapo.plan.accelerators import LENGTH_VARIATION, MEAN_PROMPT_TOKENS


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step."""

    num_prompts: int
    num_sequences: int
    num_minibatches: int
    response_tokens: tuple[int, ...]
    """Typical lengths, ascending: equally likely quantiles."""
    prompt_tokens: int
    num_reference_passes: float = 0
    """Forward passes over all sequences, of the reference model."""
    num_statistics_passes: float = 0
    """Of the policy, beside the one that scores."""
    num_update_passes: float = 1
    """Forward and backward."""

    @property
    def num_tokens(self) -> float:
        """Prompts and responses, each prompt with every response."""
        return self.num_sequences * (self.prompt_tokens + self.mean_response_tokens)

    @property
    def mean_response_tokens(self) -> float:
        """Tokens."""
        return sum(self.response_tokens) / len(self.response_tokens)

    @property
    def mean_square_tokens(self) -> float:
        """Of the sequences' lengths; attention's work grows with it."""
        squares = ((self.prompt_tokens + n) ** 2 for n in self.response_tokens)
        return sum(squares) / len(self.response_tokens)


@cache
def sample_response_lengths(mean: float, longest: int, count: int = 256) -> tuple[int, ...]:
    """Equally likely quantiles of log-normal lengths that are cut at the longest.

    Args:
        mean: after the cut, tokens.

    Raises:
        ValueError: no such distribution: the mean is not below the longest, nor equal to it.
    """
    if not 1 <= mean <= longest:
        raise ValueError(
            f"mean_response_tokens={mean:g}: must be in [1, {longest}], the longest response."
        )
    if mean == longest:
        return (longest,) * count
    sigma = math.sqrt(math.log(1 + LENGTH_VARIATION**2))
    normal = NormalDist()
    factors = [math.exp(sigma * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]

    def cut(median: float) -> list[float]:
        return [min(max(median * factor, 1), longest) for factor in factors]

    low, high = 0.0, longest / factors[0]
    for _ in range(60):
        middle = (low + high) / 2
        if sum(cut(middle)) / count < mean:
            low = middle
        else:
            high = middle
    return tuple(round(n) for n in cut(high))


def build_workload(config: Config, mean_response_tokens: float) -> Workload:
    """The step of a config, at a mean response length in tokens."""
    algorithm, rollout = config.algorithm, config.rollout
    num_minibatches = rollout.num_prompts_per_step // algorithm.num_prompts_per_minibatch
    num_phases = 1 if algorithm.lopti_prob_threshold is None else 2
    # As Trainer: statistics are computed again before every update but the step's first.
    needs_statistics = (
        algorithm.masks_tokens
        or algorithm.policy_loss in ("gspo", "clip_cov")
        or algorithm.router_aux_loss_coef > 0
        or config.log_quadrants
    )
    num_updates = num_minibatches * num_phases
    return Workload(
        num_prompts=rollout.num_prompts_per_step,
        num_sequences=rollout.num_prompts_per_step * rollout.group_size,
        num_minibatches=num_minibatches,
        response_tokens=sample_response_lengths(mean_response_tokens, rollout.max_response_tokens),
        prompt_tokens=min(MEAN_PROMPT_TOKENS, config.data.max_prompt_tokens),
        num_reference_passes=1 if algorithm.kl_coef > 0 else 0,
        num_statistics_passes=(num_updates - 1) / num_minibatches if needs_statistics else 0,
        num_update_passes=num_phases,
    )


def build_evaluation_workload(config: Config, mean_response_tokens: float) -> Workload | None:
    """What the engines sample for an evaluation; None where a benchmark's size is not known here.

    Args:
        mean_response_tokens: of a training step, taken for the benchmarks' too.
    """
    evaluation = config.evaluation
    if not evaluation.benchmarks or not set(evaluation.benchmarks) <= set(BENCHMARKS):
        return None
    benchmarks = [BENCHMARKS[name] for name in evaluation.benchmarks]
    sizes = [min(b.num_problems, evaluation.num_problems or b.num_problems) for b in benchmarks]
    samples = [evaluation.num_samples or b.paper_num_samples for b in benchmarks]
    longest = config.max_evaluation_response_tokens
    return Workload(
        num_prompts=sum(sizes),
        num_sequences=sum(n * k for n, k in zip(sizes, samples, strict=True)),
        num_minibatches=1,
        response_tokens=sample_response_lengths(min(mean_response_tokens, longest), longest),
        prompt_tokens=min(MEAN_PROMPT_TOKENS, config.data.max_prompt_tokens),
    )
