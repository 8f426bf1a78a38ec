"""Clip-Cov: a few of the tokens that drive the entropy down lose their gradient.

    cov_it = (A_i - mean A) (log p_it - mean log p)              means over the mini-batch's tokens
    of the tokens with 1 < cov < 5, a random share of 2e-4 of all N tokens is left out

The entropy falls with the covariance of advantage and log-probability. The tokens are drawn from
those that the clip has left a gradient; they stay in the denominator.

Differs from STAPO: silences confident tokens of good responses and rare ones of bad responses, to
keep entropy up; STAPO silences rare ones of good responses. A clip of [0, 2]; dynamic sampling.

Source: The Entropy Mechanism, arXiv:2505.22617, Clip-Cov; verl's
recipe/entropy/7b_clip_cov.sh for every number here: share, bounds, clip of 1 and 1, dual clip 10, a
mean over tokens, dynamic sampling in at most 10 rounds. It updates on 32 of 256 prompts at a time.
"""

from typing import Any

from megatron_stapo.config import AlgorithmConfig


def clip_cov(**changes: Any) -> AlgorithmConfig:
    """The settings of Clip-Cov.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    defaults: dict[str, Any] = dict(
        token_mask="none",
        policy_loss="clip_cov",
        clip_low=1.0,
        clip_high=1.0,
        clip_cov_frac=2e-4,
        clip_cov_min=1.0,
        clip_cov_max=5.0,
        aggregation="token_mean",
        dynamic_sampling=True,
    )
    return AlgorithmConfig(**defaults | changes)
