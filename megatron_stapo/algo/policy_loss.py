"""The clipped policy objective, per token and unreduced."""

import torch


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
        clip_low: in (0, 1).
        clip_high: > 0.
        dual_clip: where the advantage is negative the loss is at most dual_clip |A|, so that one
            token with an exploded ratio cannot own the step; None leaves it unbounded.

    Returns:
        [T] fp32.

    Source: STAPO, arXiv:2602.15620, section 3.1; dual clip: arXiv:1912.09729, equation 7.
    """
    ratio_T = (logprobs_T - old_logprobs_T).exp()
    clipped_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = -torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T)
    if dual_clip is None:
        return loss_T
    bounded_T = torch.minimum(loss_T, -dual_clip * advantages_T)
    return torch.where(advantages_T < 0, bounded_T, loss_T)
