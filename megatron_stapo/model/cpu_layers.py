"""The two layers of Megatron's local spec that refuse what the trainer needs on a CPU.

Megatron's torch RMSNorm refuses sequence parallelism, and its local attention refuses packed
sequences. On GPUs Transformer Engine's layers stand in both places of the same spec.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule


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
    """Causal attention within each sequence of a pack.

    The pack is spread to [B, heads, S, head_dim], S the longest sequence, with zeros after each
    sequence's end. A causal query never looks past its own position, so it never sees them, and no
    query sees another sequence.
    """

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        self.scale = config.kv_channels**-0.5

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
            query: [T, heads / tp, head_dim].
            key: [T, KV heads / tp, head_dim].
            value: like key.
            packed_seq_params: cu_seqlens_q [B + 1] int32 and max_seqlen_q.

        Returns:
            [T, heads / tp * head_dim].
        """
        cu_seqlens = packed_seq_params.cu_seqlens_q.long()
        num_tokens = query.shape[0]
        sequence_T = torch.repeat_interleave(
            torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff(), output_size=num_tokens
        )
        position_T = torch.arange(num_tokens) - cu_seqlens[sequence_T]

        def spread(x: torch.Tensor) -> torch.Tensor:
            padded = x.new_zeros(len(cu_seqlens) - 1, packed_seq_params.max_seqlen_q, *x.shape[1:])
            return padded.index_put((sequence_T, position_T), x).transpose(1, 2)

        out = F.scaled_dot_product_attention(
            spread(query),
            spread(key),
            spread(value),
            is_causal=True,
            scale=self.scale,
            enable_gqa=True,
        )
        return out.transpose(1, 2)[sequence_T, position_T].reshape(num_tokens, -1)
