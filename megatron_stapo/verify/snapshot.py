"""Reads what an update computed, whole, from ranks that each hold a part."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_stapo.parallel.groups import Groups
from megatron_stapo.trainer.trainer import Trainer
from megatron_stapo.types import Microbatch, Minibatch


@dataclass(kw_only=True)
class TokenSnapshot:
    """A rank's response tokens of one mini-batch, N of them."""

    keys_N2: torch.Tensor
    """[N, 2] int64. Sequence in the mini-batch; position in the sequence that predicts the
    token."""
    logprobs_N: torch.Tensor
    """[N] fp32, nats."""
    entropy_N: torch.Tensor
    """[N] fp32, nats."""
    loss_mask_N: torch.Tensor
    """[N] bool."""


def snapshot_tokens(minibatch: Minibatch, groups: Groups) -> TokenSnapshot | None:
    """Read this rank's tokens after `Trainer.assign_loss_masks`; None before the last stage."""
    return snapshot_microbatches(minibatch.microbatches) if groups.is_last_stage else None


def snapshot_microbatches(microbatches: Sequence[Microbatch]) -> TokenSnapshot:
    """Read the response tokens of masked microbatches."""

    def collect(name: str) -> torch.Tensor:
        return torch.cat([getattr(m, name)[m.response_mask_T] for m in microbatches]).cpu()

    return TokenSnapshot(
        keys_N2=torch.stack([collect("sequence_ids_T"), collect("position_ids_T")], dim=1),
        logprobs_N=collect("logprobs_T"),
        entropy_N=collect("entropy_T"),
        loss_mask_N=collect("loss_mask_T"),
    )


def gather_gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Gather the gradients of the last update, after clipping, by Hugging Face name.

    Returns:
        On rank 0 fp32 gradients on the CPU; elsewhere nothing.

    Communicates: an all-gather of every gradient bucket over the ranks that reduced it, and as
        `HfWeights.stream`.

    Mutates: the gradient buffers; each rank's own shard stays as it is.
    """
    for ddp in trainer.ddp:
        for buffer in [*ddp.buffers, *ddp.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                # The distributed optimizer reduces to each rank its own shard alone.
                shards = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(shards, shards[group.rank()].clone(), group=group)
    stream = trainer.weights.stream(read=lambda p: p.main_grad.to(p.dtype))
    return {name: gradient.float().to("cpu", copy=True) for name, gradient in stream}
