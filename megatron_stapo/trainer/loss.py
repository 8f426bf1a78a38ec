"""The loss of a microbatch, as the sum and the count that Megatron asks for."""

import torch

from megatron_stapo.algo.off_policy import compute_tis_weights
from megatron_stapo.algo.policy_loss import (
    compute_cispo_loss,
    compute_gspo_loss,
    compute_kl_penalty,
    compute_policy_loss,
    select_clipped,
)
from megatron_stapo.config import AlgorithmConfig
from megatron_stapo.trainer.metrics import StepSums
from megatron_stapo.types import Microbatch


def compute_loss(
    logprobs_T: torch.Tensor, m: Microbatch, algorithm: AlgorithmConfig, sums: StepSums
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Add up the losses of the tokens that train.

    Args:
        logprobs_T: [T] fp32, nats, with gradient.
        m: masks and weights assigned.
        sums: takes the counts of clipped tokens.

    Returns:
        Sum of weight x loss over loss_mask_T; their number, int32; both again as [2] float64,
        without gradient. Sums, never means: Megatron adds the numbers of all data- and
        context-parallel ranks and divides every gradient once.
    """
    mask_T = m.loss_mask_T
    # where, not a product, before the loss and after it: what a masked token holds must reach
    # neither the sum nor the gradient.
    safe_T = torch.where(mask_T, logprobs_T, m.old_logprobs_T.to(logprobs_T.dtype))
    loss_T = compute_token_loss(safe_T, m, algorithm) * m.loss_weights_T
    loss_sum = torch.where(mask_T, loss_T, 0.0).sum()
    num_tokens = mask_T.sum(dtype=torch.int32)
    _add_clipping(logprobs_T.detach(), m, algorithm, sums)
    return loss_sum, num_tokens, torch.stack([loss_sum.detach().double(), num_tokens.double()])


def compute_token_loss(
    logprobs_T: torch.Tensor, m: Microbatch, algorithm: AlgorithmConfig
) -> torch.Tensor:
    """Loss of each token, unreduced.

    Returns:
        [T] fp32. Policy loss, times the off-policy weight, plus the KL term.
    """
    clip = (algorithm.clip_low, algorithm.clip_high)
    if algorithm.policy_loss == "gspo":
        loss_T = compute_gspo_loss(logprobs_T, m.sequence_logratio_T, m.advantages_T, *clip)
    elif algorithm.policy_loss == "cispo":
        loss_T = compute_cispo_loss(logprobs_T, m.old_logprobs_T, m.advantages_T, *clip)
    else:
        loss_T = compute_policy_loss(
            logprobs_T, m.old_logprobs_T, m.advantages_T, *clip, algorithm.dual_clip
        )
    if algorithm.tis_max_weight is not None:
        loss_T = loss_T * compute_tis_weights(
            m.old_logprobs_T, m.rollout_logprobs_T, algorithm.tis_max_weight
        )
    if algorithm.kl_coef > 0:
        loss_T = loss_T + algorithm.kl_coef * compute_kl_penalty(logprobs_T, m.ref_logprobs_T)
    return loss_T


def _add_clipping(
    logprobs_T: torch.Tensor, m: Microbatch, algorithm: AlgorithmConfig, sums: StepSums
) -> None:
    mask_T = m.loss_mask_T
    if not mask_T.any():
        return
    is_gspo = algorithm.policy_loss == "gspo"
    logratio_T = m.sequence_logratio_T if is_gspo else logprobs_T - m.old_logprobs_T
    ratio, advantages = logratio_T[mask_T].exp(), m.advantages_T[mask_T]
    clipped = select_clipped(ratio, advantages, algorithm.clip_low, algorithm.clip_high)
    sums.add(num_trained=len(ratio), num_clipped=clipped.sum().item())
    sums.raise_to(ratio_max=ratio.max().item())
    if algorithm.tis_max_weight is not None:
        gap = (m.old_logprobs_T - m.rollout_logprobs_T)[mask_T]
        sums.add(num_tis_truncated=(gap.exp() > algorithm.tis_max_weight).sum().item())
    if algorithm.kl_coef > 0:
        kl = compute_kl_penalty(logprobs_T, m.ref_logprobs_T)[mask_T]
        sums.add(kl=kl.sum(dtype=torch.float64).item())
