"""Advantage Reweighting: improbable tokens pull less, in proportion.

    A'_it = (alpha p_old(y_it) + 1 - alpha) A_i
    J     = 1 / (sum_i |y_i|)  sum_i sum_t min(ratio_it A'_it, clip(ratio_it) A'_it)

Differs from STAPO: damps every improbable token, of both signs of the advantage, by at most alpha
and silences none; a lower upper clip; a KL term.

Source: Do Not Let Low-Probability Tokens Over-Dominate, arXiv:2505.12929; its scripts
(github.com/zhyang2226/AR-Lopti) for alpha = 0.2 when used alone, clip 0.2 and 0.24, dual clip 10, a
mean over tokens and the KL weight of 0.001, which costs a copy of the weights.
"""

from typing import Any

from megatron_stapo.config import AlgorithmConfig


def advantage_reweighting(**changes: Any) -> AlgorithmConfig:
    """The settings of Advantage Reweighting.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    defaults: dict[str, Any] = dict(
        token_mask="none",
        advantage_reweighting=0.2,
        clip_low=0.2,
        clip_high=0.24,
        aggregation="token_mean",
        kl_coef=0.001,
    )
    return AlgorithmConfig(**defaults | changes)
