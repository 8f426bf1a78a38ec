"""Quantisation against an emulation in float64 that knows E4M3 only by its definition."""

import numpy as np
import pytest
import torch

from megatron_stapo.ops.fp8 import dequantize_blocks, quantize_blocks

# Sign, four exponent bits with bias 7, three mantissa bits; exponent 0 is subnormal and the code
# 0x7f is NaN. arXiv:2209.05433, table 1.
POSITIVE = np.array(
    [
        (mantissa / 8 if exponent == 0 else 1 + mantissa / 8) * 2.0 ** (max(exponent, 1) - 7)
        for exponent in range(16)
        for mantissa in range(8)
        if (exponent, mantissa) != (15, 7)
    ]
)
FORMATS = {
    "weight": ((128, 128), False),
    "weight of Transformer Engine": ((128, 128), True),
    "activation": ((1, 128), True),
    "MXFP8": ((1, 32), True),
    "tensorwise": ((200, 333), False),
}


def round_to_e4m3(x):
    """Nearest number by search; of two equally near ones that with the even mantissa."""
    magnitude = abs(x)
    distance = np.abs(POSITIVE - magnitude)
    [*candidates] = np.flatnonzero(distance == distance.min())
    code = next((c for c in candidates if c % 2 == 0), candidates[0])
    return np.copysign(POSITIVE[code], x)


def emulate(values, block, power_of_two_scales):
    """Numbers and scales in float64, a block at a time."""
    (num_rows, num_columns), (rows, columns) = values.shape, block
    numbers = np.empty_like(values)
    scales = np.empty((-(-num_rows // rows), -(-num_columns // columns)))
    for i, j in np.ndindex(*scales.shape):
        at = np.s_[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
        scale = max(np.abs(values[at]).max() / 448, 2.0**-126)
        if power_of_two_scales:
            scale = 2.0 ** np.ceil(np.log2(scale))
        scales[i, j] = scale
        # The scale is stored in float32; its reciprocal and the product are float32s, too.
        reciprocal = np.float32(1) / np.float32(scale)
        quotient = (values[at] * np.float64(reciprocal)).astype(np.float32).astype(np.float64)
        numbers[at] = np.vectorize(round_to_e4m3)(quotient)
    return numbers, scales


def draw(shape, seed=0):
    """Values whose magnitudes differ within a block and from block to block."""
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** (4 * torch.rand(shape, generator=generator) - 2)
    rows = 10 ** (6 * torch.rand(shape[0], 1, generator=generator) - 3)
    return (torch.randn(shape, generator=generator) * spread * rows).bfloat16()


@pytest.mark.parametrize(("block", "power_of_two"), FORMATS.values(), ids=FORMATS)
def test_numbers_and_scales_equal_a_float64_emulation(block, power_of_two):
    values = draw((200, 333))
    numbers, scales = quantize_blocks(values, block, power_of_two_scales=power_of_two)
    expected_numbers, expected_scales = emulate(values.double().numpy(), block, power_of_two)
    assert numbers.dtype == torch.float8_e4m3fn and numbers.shape == values.shape
    assert scales.dtype == torch.float32
    np.testing.assert_allclose(scales.double().numpy(), expected_scales, rtol=2**-24)
    np.testing.assert_array_equal(numbers.double().numpy(), expected_numbers)


@pytest.mark.parametrize(("block", "power_of_two"), FORMATS.values(), ids=FORMATS)
def test_the_error_is_within_the_stated_bound(block, power_of_two):
    values = draw((200, 333), seed=1).double()
    numbers, scales = quantize_blocks(values, block, power_of_two_scales=power_of_two)
    again = dequantize_blocks(numbers, scales, block, dtype=torch.float64)
    spread = scales.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    spread = spread[:200, :333]
    error = (again - values).abs()
    normal = values.abs() >= spread * 2**-6
    assert normal.any() and (~normal).any()
    # A float32's roundings of scale, quotient and product come on top.
    assert (error[normal] / values.abs()[normal]).max() <= 2**-4 * (1 + 2**-20)
    assert (error[~normal] / spread[~normal]).max() <= 2**-10 * (1 + 2**-20)


def test_every_number_of_e4m3_survives_under_every_scale_that_is_a_power_of_two():
    numbers = torch.tensor(np.concatenate([POSITIVE, -POSITIVE]), dtype=torch.float32)
    assert len(numbers.unique()) == 253  # both zeros are one
    for exponent in (-100, -9, 0, 1, 60):
        values = numbers[None] * 2.0**exponent
        quantized, scales = quantize_blocks(values, (1, 254))
        assert scales.item() == 2.0**exponent
        assert torch.equal(dequantize_blocks(quantized, scales, (1, 254)), values)
        assert torch.equal(quantized.float().signbit(), values.signbit())


def test_a_case_worked_by_hand():
    # The largest is 448 x 2^-3, so the scale is an eighth and the quotients are 448, 8.5, 2.1875
    # and 0.03125. 8.5 lies between 8 and 9, whose mantissa is odd; 2.1875 rounds up to 2.25.
    values = torch.tensor([[56.0, 1.0625], [-0.2734375, 0.00390625]])
    numbers, scales = quantize_blocks(values)
    assert scales.tolist() == [[0.125]]
    assert numbers.float().tolist() == [[448.0, 8.0], [-2.25, 0.03125]]
    assert dequantize_blocks(numbers, scales).tolist() == [[56.0, 1.0], [-0.28125, 0.00390625]]


@pytest.mark.parametrize(
    ("largest", "scale"),
    [(448.0, 1.0), (449.0, 2.0), (447.0, 1.0), (896.0, 2.0), (3.5, 2.0**-7), (1e-38, 2.0**-126)],
)
def test_a_power_of_two_is_the_smallest_without_overflow(largest, scale):
    numbers, scales = quantize_blocks(torch.tensor([[largest]]), (1, 32), power_of_two_scales=True)
    assert scales.item() == scale
    # E8M0 is an exponent alone, so it holds the scale exactly.
    assert scales.to(torch.float8_e8m0fnu).float().item() == scale
    assert numbers.float().abs().max() <= 448


def test_blocks_of_zeros_and_of_subnormals_stay_finite():
    values = torch.zeros(4, 64)
    values[0, 32] = 2.0**-140  # a subnormal of float32
    for power_of_two in (False, True):
        numbers, scales = quantize_blocks(values, (1, 32), power_of_two_scales=power_of_two)
        assert (scales > 0).all()
        again = dequantize_blocks(numbers, scales, (1, 32))
        assert (again - values).abs().max() <= 2.0**-126 * 2**-10


@pytest.mark.parametrize("shape", [(1, 1), (127, 129), (128, 1), (300, 5)])
def test_a_ragged_edge_equals_the_same_values_in_a_padded_tensor(shape):
    values = draw(shape, seed=2)
    padded = torch.zeros(384, 384, dtype=values.dtype)
    padded[: shape[0], : shape[1]] = values
    numbers, scales = quantize_blocks(values)
    whole, whole_scales = quantize_blocks(padded)
    assert torch.equal(numbers.float(), whole[: shape[0], : shape[1]].float())
    assert torch.equal(scales, whole_scales[: scales.shape[0], : scales.shape[1]])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_refused_by_its_place(bad):
    values = torch.ones(3, 5)
    values[1, 4] = bad
    with pytest.raises(ValueError, match=rf"values\[1, 4\]={bad}: only finite"):
        quantize_blocks(values)


def test_shapes_that_do_not_match_are_refused():
    with pytest.raises(ValueError, match=r"values: got shape \(3,\), expected \[N, K\]"):
        quantize_blocks(torch.ones(3))
    with pytest.raises(ValueError, match=r"block=\(0, 128\): must have"):
        quantize_blocks(torch.ones(3, 3), (0, 128))
    numbers, scales = quantize_blocks(torch.ones(129, 3))
    with pytest.raises(ValueError, match=r"scales: got shape \(1, 1\).* have \(2, 1\)"):
        dequantize_blocks(numbers, scales[:1])
