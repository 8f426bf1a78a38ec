"""Log-probability and entropy over a vocabulary that is sharded across tensor-parallel ranks.

Invariants that others rely on: log-probability carries the gradient, entropy is a value; both are
those of softmax(logits / temperature) over the whole vocabulary, equal bit for bit on every rank of
the group; at most one chunk of logits is alive at a time, in forward and in backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

CHUNK_TOKENS = 2048
"""Rows of logits alive at a time: 0.6 GB in float32 for Qwen3's vocabulary over two ranks. Products
of this height keep a GPU busy, and a row's result does not depend on it."""

BLOCK_COLUMNS = 8192
"""Columns whose exponentials are alive at a time. Fixed, because the order of a sum is part of its
value."""


def compute_logprobs_and_entropy(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    labels_T: torch.Tensor,
    temperature: float,
    tp_group: ProcessGroup | None,
    chunk_tokens: int = CHUNK_TOKENS,
    with_collision: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Score labels under softmax(hidden @ weight.T / temperature).

    With x = logits / temperature - max, S = sum e^x and W = sum e^x x over the whole vocabulary:
    log p = x_label - log S and H = log S - W / S. This shifted form does not cancel numbers of the
    size of the logits, and S and W are summed in float64, so H is accurate to 1e-6 nats however
    small it is.

    Args:
        hidden_TD: [T, D] bf16 or fp32, the same on every rank of tp_group.
        weight_VD: [V/tp, D], this rank's rows of the head, of the dtype of hidden_TD.
        labels_T: [T] int64, ids in the whole vocabulary [0, V).
        temperature: divides the logits before both results.
        tp_group: ranks that share the vocabulary, in the order of their rows; None for one rank.
        chunk_tokens: rows of logits alive at a time.
        with_collision: also return the collision probability.

    Returns:
        logprobs_T: [T] fp32, nats, differentiable in hidden_TD and weight_VD. Its gradient in
            hidden_TD is this rank's part of a sum over tp_group.
        entropy_T: [T] fp32, nats, without gradient.
        collision_T: [T] fp32, sum of p^2, without gradient; only if asked for.

    Communicates: per chunk, forward only, two all-reduces over tp_group: MAX of T floats and SUM of
        3 T doubles, 4 T with_collision.

    Source: policy and entropy of STAPO, arXiv:2602.15620, section 3.
    """
    streams: tuple[torch.Tensor, ...] = _LogprobsAndEntropy.apply(
        hidden_TD, weight_VD, labels_T, temperature, tp_group, chunk_tokens, with_collision
    )
    return streams


class _LogprobsAndEntropy(torch.autograd.Function):
    """Forward keeps two numbers per token; backward computes each chunk's logits again."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: torch.Tensor,
        weight_VD: torch.Tensor,
        labels_T: torch.Tensor,
        temperature: float,
        tp_group: ProcessGroup | None,
        chunk_tokens: int,
        with_collision: bool,
    ) -> tuple[torch.Tensor, ...]:
        num_tokens, shard_size = len(hidden_TD), len(weight_VD)
        tp_rank = 0 if tp_group is None else tp_group.rank()
        columns_T = labels_T - tp_rank * shard_size
        max_T, log_sum_T, logprobs_T, entropy_T, *collision = hidden_TD.new_empty(
            4 + with_collision, num_tokens, dtype=torch.float32
        )
        for start in range(0, num_tokens, chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            x = _matmul_fp32(hidden_TD[rows], weight_VD.T).div_(temperature)
            peak = x.amax(dim=-1)
            if tp_group is not None:
                dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=tp_group)
            x.sub_(peak[:, None])
            sums = torch.zeros(3 + with_collision, len(x), dtype=torch.float64, device=x.device)
            for block in x.split(BLOCK_COLUMNS, dim=-1):
                exp = block.exp()
                sums[0] += exp.sum(-1, dtype=torch.float64)
                if with_collision:
                    sums[3] += exp.square().sum(-1, dtype=torch.float64)
                sums[1] += exp.mul_(block).sum(-1, dtype=torch.float64)
            owned, column = _locate(columns_T[rows], shard_size)
            sums[2] = x.gather(-1, column)[:, 0].masked_fill(~owned, 0.0)
            if tp_group is not None:
                dist.all_reduce(sums, group=tp_group)
            log_sum = sums[0].log()
            max_T[rows] = peak
            log_sum_T[rows] = log_sum
            logprobs_T[rows] = sums[2] - log_sum
            entropy_T[rows] = log_sum - sums[1] / sums[0]
            if with_collision:
                collision[0][rows] = sums[3] / sums[0].square()
        ctx.save_for_backward(hidden_TD, weight_VD, columns_T, max_T, log_sum_T)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.mark_non_differentiable(entropy_T, *collision)
        return logprobs_T, entropy_T, *collision

    @staticmethod
    def backward(
        ctx: Any, grad_logprobs_T: torch.Tensor, *_no_gradients: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """d log p / d logits = (1[label] - p) / temperature. All terms are this rank's own."""
        hidden_TD, weight_VD, columns_T, max_T, log_sum_T = ctx.saved_tensors
        grad_hidden_TD = torch.empty_like(hidden_TD)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        for start in range(0, len(hidden_TD), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            hidden = hidden_TD[rows]
            x = _matmul_fp32(hidden, weight_VD.T).div_(ctx.temperature)
            x.sub_(max_T[rows, None]).sub_(log_sum_T[rows, None])
            scale = grad_logprobs_T[rows, None] / ctx.temperature
            grad_logits = x.exp_().mul_(-scale)
            owned, column = _locate(columns_T[rows], len(weight_VD))
            grad_logits.scatter_add_(-1, column, scale * owned[:, None])
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden_TD[rows] = _matmul_fp32(grad_logits, weight_VD)
            grad_weight_VD += _matmul_fp32(grad_logits.T, hidden)
        return grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype), None, None, None, None, None


def _locate(columns: torch.Tensor, shard_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether this rank owns each label's column, and that column (0 where it does not)."""
    owned = (columns >= 0) & (columns < shard_size)
    return owned, columns.masked_fill(~owned, 0)[:, None]


def _matmul_fp32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Multiply with a float32 result: logits rounded to bf16 move p by several percent."""
    if a.dtype is torch.float32:
        return a @ b
    if a.device.type == "cuda":
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
