"""Corrections for the gap between the policy that the engine sampled from and the trainer's own.

Same weights, but other kernels and precisions: the two assign a token different probabilities.
"""

import math

import torch

_MAX_LOG_RATIO = 20.0
"""Nats. A larger ratio is a fault of one side and would overflow."""


def compute_tis_weights(
    old_logprobs_T: torch.Tensor, rollout_logprobs_T: torch.Tensor, max_weight: float
) -> torch.Tensor:
    """Truncated importance weights: min(p_trainer / p_engine, max_weight).

    Args:
        old_logprobs_T: [T] fp32, nats. The trainer's own before the step's first update.
        rollout_logprobs_T: [T] fp32, nats. The engine's, of softmax(logits / temperature).
        max_weight: > 0.

    Returns:
        [T] fp32, without gradient. Multiplies the token's loss, not its count.

    Source: truncated importance sampling, https://fengyao.notion.site/off-policy-rl.
    """
    log_ratio_T = (old_logprobs_T - rollout_logprobs_T).detach()
    return log_ratio_T.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp().clamp(max=max_weight)


def compute_sequence_mask(
    sequence_logratio_T: torch.Tensor, min_ratio: float | None, max_ratio: float | None
) -> torch.Tensor:
    """Mark the tokens of sequences on which the engine and the trainer agree well enough.

    Args:
        sequence_logratio_T: [T] fp32, nats: trainer's - engine's log-probability, the mean over the
            response tokens of the token's sequence; its exponential is the geometric mean ratio.
        min_ratio: > 0, inclusive; None sets no bound.
        max_ratio: likewise.

    Returns:
        [T] bool.

    Source: geometric sequence masking, verl docs/algo/rollout_corr.md.
    """
    keep_T = torch.ones_like(sequence_logratio_T, dtype=torch.bool)
    if min_ratio is not None:
        keep_T &= sequence_logratio_T >= math.log(min_ratio)
    if max_ratio is not None:
        keep_T &= sequence_logratio_T <= math.log(max_ratio)
    return keep_T
