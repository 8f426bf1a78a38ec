"""Dr.GRPO: GRPO without its two biases.

    A_i = r_i - mean_j r_j
    J   = 1 / (G L_max)  sum_i sum_t min(ratio_it A_i, clip(ratio_it, 1 - eps, 1 + eps) A_i)

No division by the standard deviation, which favours very easy and very hard prompts; a constant
denominator, so that a long wrong answer is not punished less per token than a short one.

Differs from STAPO: both of these, no mask, a symmetric clip. The constant L_max makes the gradient
smaller than a token mean's by the mean length / L_max.

Source: Understanding R1-Zero-Like Training, arXiv:2503.20783, section 3; no KL term, and PPO's
eps = 0.2.
"""

from typing import Any

from megatron_stapo.config import AlgorithmConfig


def dr_grpo(**changes: Any) -> AlgorithmConfig:
    """The settings of Dr.GRPO.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    defaults: dict[str, Any] = dict(
        token_mask="none",
        advantage="group_mean",
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        aggregation="fixed_length",
    )
    return AlgorithmConfig(**defaults | changes)
