"""Lopti: low-probability tokens first, the others after.

    update 1: tokens with p_old < eta;   update 2: the others, under the policy that update 1 left

Low-probability tokens have the largest gradients and drown the others in a shared update. After
their own update, many of the others' gradients already point the right way.

Differs from STAPO: silences nothing, two optimizer steps per mini-batch, a lower upper clip, a KL
term.

Source: Do Not Let Low-Probability Tokens Over-Dominate, arXiv:2505.12929; its scripts
(github.com/zhyang2226/AR-Lopti) for eta = 0.4 when used alone (0.5 together with reweighting:
`lopti(lopti_prob_threshold=0.5, advantage_reweighting=0.3)`), clip 0.2 and 0.24, dual clip 10, a
mean over tokens and the KL weight of 0.001, which costs a copy of the weights.
"""

from typing import Any

from megatron_stapo.config import AlgorithmConfig


def lopti(**changes: Any) -> AlgorithmConfig:
    """The settings of Lopti.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    defaults: dict[str, Any] = dict(
        token_mask="none",
        lopti_prob_threshold=0.4,
        clip_low=0.2,
        clip_high=0.24,
        aggregation="token_mean",
        kl_coef=0.001,
    )
    return AlgorithmConfig(**defaults | changes)
