"""The policy objectives and the KL penalty, per token and unreduced; the gradient is of logprobs_T.

T: tokens of a microbatch. Ratios are current policy / the trainer's own before the step's first
update. A positive advantage pulls the loss down as the log-probability rises.
"""

import torch

_MAX_LOG_RATIO = 20.0
"""Nats."""


def compute_policy_loss(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None,
) -> torch.Tensor:
    """Loss of each token: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A).

    Args:
        logprobs_T: [T] fp32, nats, with gradient. Current policy.
        old_logprobs_T: [T] fp32, nats. The trainer's own before the step's first update.
        advantages_T: [T] fp32.
        clip_low: in (0, 1].
        clip_high: > 0.
        dual_clip: where the advantage is negative the loss is at most dual_clip |A|, so that one
            token with an exploded ratio cannot own the step; None leaves it unbounded.

    Returns:
        [T] fp32. The ratio is cut at e^20.

    Source: STAPO, arXiv:2602.15620, section 3.1; dual clip: arXiv:1912.09729, equation 7.
    """
    # Beyond e^20 every bound has long taken the gradient, and an overflow would make 0 x inf of it.
    ratio_T = (logprobs_T - old_logprobs_T).clamp(max=_MAX_LOG_RATIO).exp()
    loss_T = _compute_clipped_loss(ratio_T, advantages_T, clip_low, clip_high)
    if dual_clip is None:
        return loss_T
    bounded_T = torch.minimum(loss_T, -dual_clip * advantages_T)
    return torch.where(advantages_T < 0, bounded_T, loss_T)


def compute_gspo_loss(
    logprobs_T: torch.Tensor,
    sequence_logratio_T: torch.Tensor,
    advantages_T: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """Loss of each token, clipped by the ratio s of its sequence: -min(s A, clip(s) A).

    s = (product of the sequence's token ratios)^(1 / its tokens). Every token has the value of s,
    and the gradient s grad logprob, so the mean over a sequence has the gradient of the sequence's
    own objective, s x mean of grad logprob, without a collective in backward where a sequence is
    spread over context-parallel ranks.

    Args:
        logprobs_T: [T] fp32, nats, with gradient. Current policy.
        sequence_logratio_T: [T] fp32, nats, without gradient: logprob - old logprob, the mean over
            the response tokens of the token's sequence.
        advantages_T: [T] fp32. Constant within a response.
        clip_low: in (0, 1].
        clip_high: > 0.

    Returns:
        [T] fp32.

    Source: GSPO, arXiv:2507.18071, equations 5, 7 and 14 (GSPO-token).
    """
    one_T = (logprobs_T - logprobs_T.detach()).exp()
    ratio_T = sequence_logratio_T.detach().exp() * one_T
    return _compute_clipped_loss(ratio_T, advantages_T, clip_low, clip_high)


def compute_cispo_loss(
    logprobs_T: torch.Tensor,
    old_logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    clip_low: float,
    clip_high: float,
) -> torch.Tensor:
    """Loss of each token: -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) A logprob.

    Clipping bounds a token's weight and never takes its gradient away. The value is no estimate of
    anything; its gradient is.

    Args:
        logprobs_T: [T] fp32, nats, with gradient. Current policy.
        old_logprobs_T: [T] fp32, nats. The trainer's own before the step's first update.
        advantages_T: [T] fp32.
        clip_low: in (0, 1]; 1 sets no lower bound.
        clip_high: > 0.

    Returns:
        [T] fp32.

    Source: CISPO of MiniMax-M1, arXiv:2506.13585, equations 4 and 5.
    """
    ratio_T = (logprobs_T.detach() - old_logprobs_T).exp()
    return -ratio_T.clamp(1 - clip_low, 1 + clip_high) * advantages_T * logprobs_T


def compute_kl_penalty(logprobs_T: torch.Tensor, ref_logprobs_T: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy || reference) at each sampled token: r - log r - 1, r = p_ref / p.

    Args:
        logprobs_T: [T] fp32, nats, with gradient. Current policy.
        ref_logprobs_T: [T] fp32, nats. Reference policy.

    Returns:
        [T] fp32, nats, >= 0. Unbiased where the tokens were sampled from the current policy.

    Source: GRPO, arXiv:2402.03300, equation 4 (the k3 estimator).
    """
    log_ratio_T = ref_logprobs_T - logprobs_T
    # expm1: the two terms cancel where the policies are close.
    return log_ratio_T.expm1() - log_ratio_T


def compute_covariance(
    advantages_T: torch.Tensor,
    logprobs_T: torch.Tensor,
    mean_advantage: float,
    mean_logprob: float,
) -> torch.Tensor:
    """Each token's part of the covariance between advantage and log-probability.

    Args:
        advantages_T: [T] fp32.
        logprobs_T: [T] fp32, nats. Current policy.
        mean_advantage: over the mini-batch's trained tokens, all ranks.
        mean_logprob: nats, likewise.

    Returns:
        [T] fp32, nats, without gradient.

    Source: Clip-Cov, arXiv:2505.22617.
    """
    return (advantages_T - mean_advantage) * (logprobs_T.detach() - mean_logprob)


def select_clip_cov_candidates(
    covariance_T: torch.Tensor,
    mask_T: torch.Tensor,
    ratio_T: torch.Tensor,
    advantages_T: torch.Tensor,
    clip_low: float,
    clip_high: float,
    cov_min: float,
    cov_max: float,
) -> torch.Tensor:
    """Mark the tokens from which Clip-Cov draws those that lose their gradient.

    Of N trained tokens in the mini-batch, k = max(int(frac N), 1) lose it: the candidates with the
    k smallest `token_mask.compute_uniforms`, all where there are fewer. The bound is the order
    statistic k - 1 of the candidates' uniforms, from `ops.quantile.compute_order_statistic`. Their
    loss is multiplied by 0; the denominator still counts them.

    Args:
        covariance_T: [T] fp32, nats, from `compute_covariance`.
        mask_T: [T] bool. Trained tokens.
        ratio_T: [T] fp32. Current / old policy.
        advantages_T: [T] fp32.
        clip_low: in (0, 1].
        clip_high: > 0.
        cov_min: nats, exclusive.
        cov_max: nats, exclusive.

    Returns:
        [T] bool. False where the clip has already taken the gradient.

    Source: Clip-Cov, arXiv:2505.22617; verl core_algos.py, compute_policy_loss_clip_cov.
    """
    clipped_T = select_clipped(ratio_T, advantages_T, clip_low, clip_high)
    return mask_T & ~clipped_T & (covariance_T > cov_min) & (covariance_T < cov_max)


def select_clipped(
    ratio_T: torch.Tensor, advantages_T: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """Mark the tokens whose gradient the clip takes.

    Args:
        ratio_T: [T] fp32. Current / old policy.
        advantages_T: [T] fp32.
        clip_low: in (0, 1].
        clip_high: > 0.

    Returns:
        [T] bool.
    """
    too_high_T = (advantages_T > 0) & (ratio_T > 1 + clip_high)
    too_low_T = (advantages_T < 0) & (ratio_T < 1 - clip_low)
    return too_high_T | too_low_T


def _compute_clipped_loss(
    ratio_T: torch.Tensor, advantages_T: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
