"""Weights on their way to an engine that keeps them in FP8: half the bytes, and the same bits.

vLLM quantises a layer in blocks of 128 x 128 when its weights have arrived. A sender that cuts the
same blocks does so first. The receiver multiplies and rounds to bfloat16, and vLLM quantises that
to the same numbers and scales: a block's largest magnitude is a bfloat16, which 448 times its scale
rounds back to; the others move by 2^-9 at most, where half the distance to the next number of E4M3
is 2^-5 or more.

Source: vllm 0.32.0, utils/deep_gemm.py, `per_block_cast_to_fp8`.
"""

from collections.abc import Sequence

import torch

from megatron_stapo.ops.fp8 import E4M3_MAX, dequantize_blocks, quantize_blocks

BLOCK_SIZE = 128
"""Rows and columns that share a scale."""

_SMALLEST_LARGEST = 1e-4
"""vLLM scales a block of smaller weights as if its largest were this."""
_LARGEST_BELOW = 9.965896606445312e-05
"""The largest bfloat16 below it."""
_SCRATCH_BYTES = 24
"""For each element of a band of blocks, while it is quantised or multiplied."""


def count_bytes(shapes: Sequence[tuple[int, int]]) -> int:
    """Bytes of an encoded message: one per element, and four per block."""
    return sum(
        rows * columns + 4 * -(-rows // BLOCK_SIZE) * -(-columns // BLOCK_SIZE)
        for rows, columns in shapes
    )


def count_scratch_bytes(num_columns: int) -> int:
    """The most memory that `encode`, `decode` and `round_trip` take beside their results."""
    return _SCRATCH_BYTES * BLOCK_SIZE * (-(-num_columns // BLOCK_SIZE) * BLOCK_SIZE)


def encode(views: Sequence[torch.Tensor]) -> torch.Tensor:
    """Quantise weights.

    Args:
        views: each [rows, columns] bfloat16; blocks begin at its first element.

    Returns:
        [`count_bytes`] uint8: the scales of all views in float32, then their numbers in E4M3.

    Raises:
        ValueError: a weight is not finite.
    """
    num_bytes = count_bytes([(view.shape[0], view.shape[1]) for view in views])
    flat = torch.empty(num_bytes, dtype=torch.uint8, device=views[0].device)
    for view, (numbers, scales) in zip(views, _split(flat, views), strict=True):
        for band, row in _list_bands(view):
            numbers[band], scales[row : row + 1] = _quantize(view[band])
    return flat


def decode(flat: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
    """Undo `encode`, but for what quantising lost.

    Args:
        places: each [rows, columns] bfloat16, written to.
    """
    for place, (numbers, scales) in zip(places, _split(flat, places), strict=True):
        for band, row in _list_bands(place):
            place[band] = _dequantize(numbers[band], scales[row : row + 1])


def round_trip(weight: torch.Tensor) -> torch.Tensor:
    """What is left of a weight [rows, columns], in its dtype. A second trip changes nothing."""
    left = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    for band, _ in _list_bands(weight):
        left[band] = _dequantize(*_quantize(weight[band]))
    return left


def _split(
    flat: torch.Tensor, matrices: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Numbers and scales of every matrix, as views of a message."""
    grids = [tuple(-(-size // BLOCK_SIZE) for size in matrix.shape) for matrix in matrices]
    num_blocks = [rows * columns for rows, columns in grids]
    scale_bytes = 4 * sum(num_blocks)
    scales = flat[:scale_bytes].view(torch.float32).split(num_blocks)
    numbers = flat[scale_bytes:].view(torch.float8_e4m3fn)
    return [
        (n.view(matrix.shape), s.view(grid))
        for matrix, grid, n, s in zip(
            matrices,
            grids,
            numbers.split([matrix.numel() for matrix in matrices]),
            scales,
            strict=True,
        )
    ]


def _quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return quantize_blocks(weight, smallest_largest=_SMALLEST_LARGEST)


def _dequantize(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    weight = dequantize_blocks(numbers, scales, dtype=torch.bfloat16)
    if (scales > _SMALLEST_LARGEST / E4M3_MAX).all():
        return weight
    # bfloat16 has no 1e-4 and would round to above it, which vLLM would scale by.
    limits = torch.where(scales > _SMALLEST_LARGEST / E4M3_MAX, torch.inf, _LARGEST_BELOW)
    limit = limits.repeat_interleave(BLOCK_SIZE, 1)[:, : weight.shape[1]].bfloat16()
    return weight.clamp(-limit, limit)


def _list_bands(matrix: torch.Tensor) -> list[tuple[slice, int]]:
    """Rows that share scales, and the row of these: a band at a time needs little memory."""
    return [
        (slice(first, first + BLOCK_SIZE), first // BLOCK_SIZE)
        for first in range(0, matrix.shape[0], BLOCK_SIZE)
    ]
