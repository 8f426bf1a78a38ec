"""STAPO's theory as numbers per token: how hard a token pulls, and where it moves the entropy.

a = logits of one position, p = softmax(a), y = the sampled token, H = entropy of p, and J = the
token's objective, whose gradient is w grad log p(y). All are values without gradient; results have
the dtype of logprobs_T.

Source: STAPO, arXiv:2602.15620 v5, section 3.
"""

import math

import torch

from megatron_stapo.algo.policy_loss import select_clipped
from megatron_stapo.algo.s2t import select_rare


def compute_gradient_weights(
    ratio_T: torch.Tensor, advantages_T: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """w: ratio A, or 0 where the clip takes the gradient.

    Args:
        ratio_T: [T] fp32. Current / old policy.
        advantages_T: [T] fp32.
        clip_low: in (0, 1].
        clip_high: > 0.

    Returns:
        [T] fp32.

    Source: the lemma on gradient norms, after arXiv:2505.12929.
    """
    clipped_T = select_clipped(ratio_T, advantages_T, clip_low, clip_high)
    return (ratio_T * advantages_T).masked_fill(clipped_T, 0.0)


def compute_squared_gradient_norm(
    logprobs_T: torch.Tensor, collision_T: torch.Tensor, weights_T: torch.Tensor
) -> torch.Tensor:
    """Squared norm of dJ/da: w^2 (1 - 2 p(y) + sum p^2).

    Args:
        logprobs_T: [T] fp32, nats. Of the sampled token, current policy.
        collision_T: [T] fp32. Collision probability, sum of p^2 over the vocabulary.
        weights_T: [T] fp32, from `compute_gradient_weights`.

    Returns:
        [T], >= 0.

    Source: the lemma on gradient norms, after arXiv:2505.12929.
    """
    # Not below 0: at p(y) near 1 the terms cancel to rounding.
    return weights_T**2 * (1 - 2 * logprobs_T.exp() + collision_T).clamp(min=0)


def compute_gradient_norm_bounds(
    logprobs_T: torch.Tensor,
    entropy_T: torch.Tensor,
    weights_T: torch.Tensor,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Bounds of the squared norm from probability and entropy alone.

    Args:
        logprobs_T: [T] fp32, nats. Of the sampled token, current policy.
        entropy_T: [T] fp32, nats.
        weights_T: [T] fp32, from `compute_gradient_weights`.
        vocab_size: |V|, of the softmax; >= 2.

    Returns:
        Lower bound [T], w^2 (1 - 2 p(y) + exp(-H)), and upper bound [T],
        w^2 (2 - 2 p(y) - C_V H^2). The lower one may be negative, where it says nothing.

    Source: Theorem 3.3.
    """
    remainder_T = 1 - 2 * logprobs_T.exp()
    lower_T = remainder_T + (-entropy_T).exp()
    upper_T = remainder_T + 1 - compute_collision_constant(vocab_size) * entropy_T**2
    return weights_T**2 * lower_T, weights_T**2 * upper_T


def compute_collision_constant(vocab_size: int) -> float:
    """C_V = (|V| - 1) / (|V| ln^2 |V|), the largest with sum p^2 <= 1 - C_V H^2 at every softmax.

    Args:
        vocab_size: |V| >= 2.

    Source: Theorem 3.3; equality at the uniform distribution.
    """
    return (vocab_size - 1) / (vocab_size * math.log(vocab_size) ** 2)


def compute_entropy_change(
    logprobs_T: torch.Tensor, entropy_T: torch.Tensor, weights_T: torch.Tensor
) -> torch.Tensor:
    """First-order change of H per unit of learning rate: -p(y) (log p(y) + H) w.

    The lemma's covariance, with the mean advantage over the vocabulary, of which one sample says
    nothing, set to 0. It is exact for a step w on the logit of y alone. A rare token with w > 0
    raises the entropy.

    Args:
        logprobs_T: [T] fp32, nats. Of the sampled token, current policy.
        entropy_T: [T] fp32, nats.
        weights_T: [T] fp32, from `compute_gradient_weights`; in place of the lemma's advantage, so
            that clipped tokens change nothing.

    Returns:
        [T], nats per unit of learning rate.

    Source: Lemma 3.2; the clipped tokens: BAPO, arXiv:2510.18927.
    """
    return -logprobs_T.exp() * (logprobs_T + entropy_T) * weights_T


def compute_quadrants(
    logprobs_T: torch.Tensor,
    entropy_T: torch.Tensor,
    prob_threshold: float,
    entropy_threshold: float,
) -> torch.Tensor:
    """Sort tokens by probability and entropy, with the mask's own comparisons.

    Args:
        logprobs_T: [T] fp32, nats. Of the sampled token, current policy.
        entropy_T: [T] fp32, nats.
        prob_threshold: tau_p. Low is strictly below.
        entropy_threshold: nats. Low is strictly below.

    Returns:
        [T] int64, probability first: 0 low low, 1 low high, 2 high low, 3 high high. S2T silences
        quadrant 0 of positive advantages.

    Source: Table 1.
    """
    is_probable_T = ~select_rare(logprobs_T, prob_threshold)
    is_uncertain_T = entropy_T.double() >= entropy_threshold
    return 2 * is_probable_T.long() + is_uncertain_T.long()
