"""CISPO: the clip bounds a token's weight and never takes its gradient.

    J = 1 / (sum_i |y_i|)  sum_i sum_t sg(clip(ratio_it, 1 - eps_low, 1 + eps_high)) A_i log p_it

Rare tokens that open a new line of thought move far in one update; PPO's clip would drop them from
the next.

Differs from STAPO: the loss; no mask. It keeps the rare tokens that STAPO silences.

Source: MiniMax-M1, arXiv:2506.13585, equations 4 and 5. It sets no lower bound, here clip_low = 1,
and does not print the upper one; 0.28 is the default of Trinity-RFT 0.3 (cispo_policy_loss.py).
MiniMax-M1 adds DAPO's dynamic sampling and penalty on length to it: `cispo(dynamic_sampling=True,
overlong_buffer_tokens=...)`. No KL term.
"""

from typing import Any

from megatron_stapo.config import AlgorithmConfig


def cispo(**changes: Any) -> AlgorithmConfig:
    """The settings of CISPO.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    defaults: dict[str, Any] = dict(
        token_mask="none",
        policy_loss="cispo",
        clip_low=1.0,
        clip_high=0.28,
        dual_clip=None,
        aggregation="token_mean",
    )
    return AlgorithmConfig(**defaults | changes)
