"""FP8 on the way against vLLM's own rule, written down here from its source."""

import pytest
import torch

from megatron_stapo.rollout.fp8_weights import count_bytes, decode, encode, round_trip


def quantize_as_vllm(weight):
    """vllm 0.32.0, utils/deep_gemm.py, `per_block_cast_to_fp8` with use_ue8m0=False."""
    rows, columns = (-(-size // 128) * 128 for size in weight.shape)
    padded = torch.zeros(rows, columns, dtype=weight.dtype)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    blocks = padded.view(-1, 128, columns // 128, 128)
    scales = blocks.abs().float().amax(dim=(1, 3), keepdim=True).clamp(1e-4) / 448
    numbers = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn)
    return numbers.view(rows, columns).view(torch.uint8), scales


def send(*weights):
    flat = encode(weights)
    assert flat.numel() == count_bytes([tuple(weight.shape) for weight in weights])
    received = [torch.full_like(weight, torch.nan) for weight in weights]
    decode(flat, received)
    return received


def draw(shape, scale=0.02, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = 10 ** (4 * torch.rand(shape, generator=generator) - 4)
    return (torch.randn(shape, generator=generator) * spread * scale).bfloat16()


@pytest.mark.parametrize("shape", [(128, 128), (300, 515), (1, 1), (129, 7), (0, 5)])
@pytest.mark.parametrize("scale", [1e-7, 1e-4, 0.02, 1e4])
def test_vllm_makes_the_same_numbers_and_scales_of_what_arrives(shape, scale):
    for seed in range(5):
        weight = draw(shape, scale, seed)
        (received,) = send(weight)
        for found, expected in zip(
            quantize_as_vllm(received), quantize_as_vllm(weight), strict=True
        ):
            assert torch.equal(found, expected)
        assert torch.equal(received, round_trip(weight))
        assert torch.equal(received, round_trip(received))


def test_blocks_whose_largest_is_near_the_smallest_scale():
    """1e-4 is no bfloat16: a careless product rounds to above it."""
    largest = torch.arange(0x3880, 0x3900, dtype=torch.int16).view(torch.bfloat16)
    assert largest[0] < 1e-4 < largest[-1]
    weight = draw((128, 128 * len(largest)), scale=1e-5)
    weight[0, ::128] = largest
    (received,) = send(weight)
    for found, expected in zip(quantize_as_vllm(received), quantize_as_vllm(weight), strict=True):
        assert torch.equal(found, expected)


def test_every_bfloat16_as_the_largest_of_its_block():
    largest = torch.arange(0x3800, 0x4600, dtype=torch.int16).view(torch.bfloat16)
    weight = draw((2, 128 * len(largest)), scale=1.0) * largest.repeat_interleave(128) / 10
    weight[1, ::128] = -largest
    (received,) = send(weight)
    for found, expected in zip(quantize_as_vllm(received), quantize_as_vllm(weight), strict=True):
        assert torch.equal(found, expected)


def test_pieces_of_one_message_and_views_of_larger_matrices():
    matrix = draw((512, 700))
    views = [matrix[128:300, :256], matrix[:, 256:], matrix[:1]]
    for received, view in zip(send(*views), views, strict=True):
        assert torch.equal(received, round_trip(view))


def test_a_message_takes_half_the_bytes():
    assert count_bytes([(256, 256), (128, 129)]) == 256 * 256 + 4 * 4 + 128 * 129 + 2 * 4


def test_weights_that_are_not_finite_are_refused():
    weight = draw((300, 300))
    weight[200, 5] = torch.inf
    with pytest.raises(ValueError, match="only finite numbers"):
        encode([weight])
