"""Which positions of a packed microbatch a context-parallel rank holds.

Each sequence is cut into 2 x cp_size parts of equal length, and rank r holds parts r and
2 cp_size - 1 - r, so that every rank has as much of the causal triangle to compute. Megatron's
rotary embedding and Transformer Engine's packed attention cut in the same way.
"""

import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from megatron_stapo.types import Microbatch


def compute_local_positions(cu_seqlens: torch.Tensor, cp_rank: int, cp_size: int) -> torch.Tensor:
    """List the positions of the pack that a rank holds, in the order in which it holds them.

    Args:
        cu_seqlens: [B + 1] integer; with cp_size > 1 every sequence is a multiple of 2 cp_size
            long.

    Returns:
        [T / cp_size] int64, each in [0, T).
    """
    if cp_size == 1:
        return torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    starts, lengths = cu_seqlens[:-1].long(), cu_seqlens.diff().long()
    part_lengths = lengths // (2 * cp_size)
    # Early part, late part, sequence by sequence.
    first = torch.stack(
        [starts + cp_rank * part_lengths, starts + (2 * cp_size - 1 - cp_rank) * part_lengths],
        dim=1,
    ).flatten()
    sizes = part_lengths.repeat_interleave(2)
    within = torch.arange(int(sizes.sum()), device=sizes.device)
    within -= (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return first.repeat_interleave(sizes) + within


def slice_microbatch(microbatch: "Microbatch", cp_rank: int, cp_size: int) -> "Microbatch":
    """Cut a rank's part out of the streams that packing made.

    Returns:
        A microbatch whose `[T]` streams have T / cp_size entries. cu_seqlens stays that of the
        whole pack.
    """
    if cp_size == 1:
        return microbatch
    positions = compute_local_positions(microbatch.cu_seqlens, cp_rank, cp_size)
    streams = {
        field.name: getattr(microbatch, field.name)[positions]
        for field in dataclasses.fields(microbatch)
        if field.init and field.name.endswith("_T")
    }
    return dataclasses.replace(microbatch, **streams)
