"""GSPO: ratio and clip belong to the sequence, as the reward does.

    s_i = (p(y_i) / p_old(y_i))^(1 / |y_i|)
    J   = 1/G sum_i min(s_i A_i, clip(s_i, 1 - 3e-4, 1 + 4e-4) A_i)

A clipped sequence loses the gradient of all its tokens. Steady for mixtures of experts, whose
routing moves single tokens' ratios.

Differs from STAPO: the ratio; bounds three orders of magnitude closer to 1, since a geometric mean
over a sequence hardly moves; no mask; every response weighs the same; no dual clip.

Source: GSPO, arXiv:2507.18071, equations 5 and 7, section 5.1 for the bounds and for the four
updates per step of rollouts, which are the defaults of this package too. No KL term.
"""

from typing import Any

from megatron_stapo.config import AlgorithmConfig


def gspo(**changes: Any) -> AlgorithmConfig:
    """The settings of GSPO.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    defaults: dict[str, Any] = dict(
        token_mask="none",
        policy_loss="gspo",
        clip_low=3e-4,
        clip_high=4e-4,
        dual_clip=None,
        aggregation="sequence_mean",
    )
    return AlgorithmConfig(**defaults | changes)
