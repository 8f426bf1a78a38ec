"""The two layers of Megatron's local spec that refuse what the trainer needs on a CPU.

Megatron's torch RMSNorm refuses sequence parallelism, and its local attention refuses packed
sequences and context parallelism. On GPUs Transformer Engine's layers stand in both places of the
same spec.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

from megatron_stapo.parallel.context_parallel import compute_local_positions


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm whose weight's gradient Megatron sums over tensor-parallel ranks."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension in float32, then scale in the dtype of x, as Qwen3 does."""
        x_fp32 = x.float()
        normed = x_fp32 * torch.rsqrt(x_fp32.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a pack, whole or cut over context-parallel ranks.

    Keys and values are gathered over the context-parallel ranks, and their gradients summed back.
    The pack is spread to [B, heads, S, head_dim], S the longest sequence, with zeros after each
    sequence's end. A causal query never looks past its own position, so it never sees them, and no
    query sees another sequence.
    """

    def __init__(
        self, config: TransformerConfig, *, pg_collection: ProcessGroupCollection, **_: Any
    ) -> None:
        super().__init__(config=config)
        self.scale = config.kv_channels**-0.5
        self.cp_group = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSeqParams,
        **_: Any,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: [T / cp, heads / tp, head_dim], of the positions of `compute_local_positions`.
            key: [T / cp, KV heads / tp, head_dim].
            value: like key.
            packed_seq_params: cu_seqlens_q [B + 1] int32 and max_seqlen_q, of the whole pack.

        Returns:
            [T / cp, heads / tp * head_dim].

        Communicates: under context parallelism an all-gather of keys and one of values over
            cp_group, and a reduce-scatter of each of their gradients.
        """
        cu_seqlens = packed_seq_params.cu_seqlens_q.long()
        cp_size, cp_rank = self.cp_group.size(), self.cp_group.rank()
        sequence_T = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff())
        position_T = torch.arange(len(sequence_T)) - cu_seqlens[sequence_T]
        # Rows of the local queries and of all keys in the grid of sequences and positions.
        local = compute_local_positions(cu_seqlens, cp_rank, cp_size)
        gathered = torch.cat(
            [compute_local_positions(cu_seqlens, rank, cp_size) for rank in range(cp_size)]
        )
        if cp_size > 1:
            key, value = (
                gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)
                for x in (key, value)
            )

        def spread(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
            padded = x.new_zeros(len(cu_seqlens) - 1, packed_seq_params.max_seqlen_q, *x.shape[1:])
            index = (sequence_T[rows], position_T[rows])
            return padded.index_put(index, x).transpose(1, 2)

        # The grid has a row for every query of the pack; those of other ranks stay zero and are not
        # read. It costs time, which a CPU's run pays for being the same mathematics.
        out = F.scaled_dot_product_attention(
            spread(query, local),
            spread(key, gathered),
            spread(value, gathered),
            is_causal=True,
            scale=self.scale,
            enable_gqa=True,
        )
        out = out.transpose(1, 2)[sequence_T[local], position_T[local]]
        return out.reshape(len(query), -1)
