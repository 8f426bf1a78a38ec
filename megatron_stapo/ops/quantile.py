"""Exact order statistics and quantiles of a population that is spread over ranks.

Invariants that others rely on: nothing is gathered, the ranks exchange counts alone, so the cost
does not grow with the population; every rank makes the same collectives whatever it holds; the
result has the same bits on every rank and does not depend on how the values are spread or ordered.

The method is a radix select. float32 values map to unsigned 32-bit keys of the same order, and four
histograms of 256 bins, most significant byte first, close in on the key at the wanted rank.

N: values of this rank; over all ranks where the text says population.
"""

import math
import struct

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

_MAX_KEY = (1 << 32) - 1


def compute_order_statistic(values_N: torch.Tensor, rank: int, group: ProcessGroup | None) -> float:
    """Find the value at a rank of the population in ascending order.

    Args:
        values_N: [N] fp32, finite; N >= 0. This rank's part of the population.
        rank: 0-based, below the population's size; the same on every rank of group.
        group: ranks that share the population; None for this process alone.

    Returns:
        The value, one of the population's. Zero has no sign.

    Communicates: four all-reduces (SUM) over group, 256 int64 each.

    Raises:
        ValueError: the population has no such rank. Raised on every rank alike.
    """
    key, _ = _select_key(_compute_keys(values_N), rank, group)
    return _decode_key(key)


def compute_quantile(values_N: torch.Tensor, q: float, group: ProcessGroup | None) -> float:
    """Interpolate the population's q-quantile.

    Args:
        values_N: [N] fp32; N >= 0. This rank's part of the population, in any order.
        q: in [0, 1]; the same on every rank of group.
        group: ranks that share the population; None for this process alone.

    Returns:
        float64: linear interpolation between the order statistics around q (population size - 1),
        as numpy's and torch's "linear". -inf where the population is empty.

    Communicates: over group, one all-reduce (SUM) of 2 int64; where the population is not empty,
        four (SUM) of 256 int64; where the position falls between two unequal values, one (MIN) of
        1 int64. Which of them take place depends on reduced numbers alone.

    Raises:
        ValueError: a value of the population is not finite. Raised on every rank alike.
    """
    finite_N = values_N.isfinite()
    num_broken_here = len(values_N) - int(finite_N.sum())
    counts = torch.tensor([len(values_N), num_broken_here], device=values_N.device)
    _reduce(counts, dist.ReduceOp.SUM, group)
    num_values, num_broken = (int(count) for count in counts)
    if num_broken:
        first = (~finite_N).nonzero()[:5, 0].tolist()
        raise ValueError(
            f"{num_broken} of the population's {num_values} values are not finite, "
            f"{num_broken_here} of them on this rank (the first at indices {first}): the model's "
            "logits have overflowed; lower optimizer.lr."
        )
    if num_values == 0:
        return -math.inf
    position = q * (num_values - 1)
    rank = math.floor(position)
    keys_N = _compute_keys(values_N)
    low_key, num_equal_after = _select_key(keys_N, rank, group)
    low = _decode_key(low_key)
    if position == rank or num_equal_after > 0:
        return low
    next_key = keys_N.new_full((1,), _MAX_KEY)
    if (greater := keys_N[keys_N > low_key]).numel():
        next_key[0] = greater.min()
    _reduce(next_key, dist.ReduceOp.MIN, group)
    high = _decode_key(int(next_key.item()))
    return low + (position - rank) * (high - low)


def _select_key(keys: torch.Tensor, rank: int, group: ProcessGroup | None) -> tuple[int, int]:
    """The key at a rank, and how many of the population's equal keys come after it."""
    key = num_equal_after = 0
    for shift in (24, 16, 8, 0):
        bytes_ = (keys >> shift) & 255
        histogram = torch.bincount(bytes_, minlength=256)
        _reduce(histogram, dist.ReduceOp.SUM, group)
        ends = histogram.cumsum(0).tolist()  # the round's one synchronisation
        if not 0 <= rank < ends[-1]:
            raise ValueError(f"rank={rank}: the population has the ranks 0 to {ends[-1] - 1}.")
        byte = next(i for i, end in enumerate(ends) if rank < end)
        num_equal_after = ends[byte] - 1 - rank
        rank -= ends[byte - 1] if byte else 0
        key = key << 8 | byte
        keys = keys[bytes_ == byte]
    return key, num_equal_after


def _compute_keys(values: torch.Tensor) -> torch.Tensor:
    """Keys in [0, 2^32), int64, of the values' order: positive floats compare like their bits,
    negative ones in reverse. Adding 0 turns -0 into +0."""
    bits = (values.float() + 0.0).view(torch.int32).long()
    return torch.where(bits < 0, ~bits & (_MAX_KEY >> 1), bits + (1 << 31))


def _decode_key(key: int) -> float:
    bits = key - (1 << 31) if key >> 31 else _MAX_KEY - key
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def _reduce(counts: torch.Tensor, op: dist.ReduceOp.RedOpType, group: ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(counts, op=op, group=group)
