"""FP8 in blocks: numbers of E4M3 and one scale per block. Plain torch, on any device.

Invariant: a block's largest magnitude lands on the largest number of E4M3, or with power-of-two
scales within a factor of two below it, so that nothing overflows.

    format                   block        power_of_two_scales
    weight, blockwise        (128, 128)   Transformer Engine's recipe; vLLM takes any scale
    activation, blockwise    (1, 128)     Transformer Engine's recipe
    MXFP8                    (1, 32)      always: E8M0 holds nothing else
    tensorwise               its shape    no

`scales` multiply: value = number x scale. vLLM and DeepSeek's checkpoints call it
`weight_scale_inv`, float32, [ceil(N / 128), ceil(K / 128)].

Sources: E4M3, arXiv:2209.05433, table 1; blocks, DeepSeek-V3, arXiv:2412.19437, section 3.3.2;
MXFP8 and E8M0, OCP Microscaling Formats 1.0, but the scale is rounded up, as Transformer Engine
does, since the standard's rounding down saturates the largest numbers.
"""

import torch
import torch.nn.functional as F

E4M3_MAX = 448.0
_SMALLEST_SCALE = 2.0**-126
"""A smaller float32 is subnormal, and has too few bits to be divided by."""


def quantize_blocks(
    values: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    *,
    power_of_two_scales: bool = False,
    smallest_largest: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round to the nearest number of E4M3 times the block's scale, ties to even.

    Args:
        values: [N, K] of any floating dtype; blocks at the edges may be smaller than the others.
        block: rows and columns that share a scale.
        power_of_two_scales: round the scales up to powers of two. They then fit E8M0 exactly, and
            multiplying by them is exact.
        smallest_largest: a block whose largest magnitude is smaller is scaled as if it were that.

    Returns:
        [N, K] float8_e4m3fn, and the scales [ceil(N / rows), ceil(K / columns)] fp32. The relative
        error of a value is at most 2^-4 where it is at least 2^-6 of its scale; below, the error is
        at most 2^-10 of the scale.

    Raises:
        ValueError: values are not [N, K], the block is empty, or a value is not finite.
    """
    _check_shape("values", values, block)
    if not values.isfinite().all():
        row, column = (~values.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"values[{row}, {column}]={values[row, column].item()}: only finite numbers can be "
            "quantised."
        )
    blocks = _split(values.float(), block)
    largest = blocks.abs().amax((1, 3)).clamp(min=smallest_largest)
    scales = (largest / E4M3_MAX).clamp(min=_SMALLEST_SCALE)
    if power_of_two_scales:
        mantissa, exponent = torch.frexp(scales)  # scale = mantissa x 2^exponent, in [0.5, 1)
        exponent -= (mantissa == 0.5).int()
        scales = torch.ldexp(torch.ones_like(scales), exponent)
    # Times the reciprocal, not divided, as vLLM and Transformer Engine do: ties are common, for
    # bfloat16 has few bits. Rounding could exceed the largest number by a float32's last bits.
    scaled = (blocks * (1.0 / scales[:, None, :, None])).clamp(-E4M3_MAX, E4M3_MAX)
    return _join(scaled.to(torch.float8_e4m3fn), values.shape), scales


def dequantize_blocks(
    numbers: torch.Tensor,
    scales: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Multiply every number by its block's scale, in float32.

    Args:
        numbers: [N, K] float8_e4m3fn.
        scales: of `quantize_blocks`, fp32 or E8M0.
        block: likewise.
        dtype: of the result.

    Returns:
        [N, K].

    Raises:
        ValueError: the scales are not one per block.
    """
    _check_shape("numbers", numbers, block)
    expected = tuple(-(-size // extent) for size, extent in zip(numbers.shape, block, strict=True))
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"scales: got shape {tuple(scales.shape)}, numbers of shape {tuple(numbers.shape)} in "
            f"blocks of {block} have {expected}."
        )
    blocks = _split(numbers.float(), block) * scales.float()[:, None, :, None]
    return _join(blocks, numbers.shape).to(dtype)


def _check_shape(name: str, tensor: torch.Tensor, block: tuple[int, int]) -> None:
    if tensor.dim() != 2:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, expected [N, K].")
    if min(block) < 1:
        raise ValueError(f"block={block}: must have at least one row and one column.")


def _split(tensor: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """[N, K] to [block rows, rows, block columns, columns], zeros behind the edges."""
    rows, columns = block
    padded = F.pad(tensor, (0, -tensor.shape[1] % columns, 0, -tensor.shape[0] % rows))
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def _join(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The inverse of `_split`."""
    whole = blocks.reshape(blocks.shape[0] * blocks.shape[1], -1)
    return whole[: shape[0], : shape[1]].contiguous()
