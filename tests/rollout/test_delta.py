import pytest
import torch

from megatron_stapo.rollout.delta import count_bytes, decode, encode


def draw(shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def change(tensor, share, seed=1):
    generator = torch.Generator().manual_seed(seed)
    changed = torch.rand(tensor.shape, generator=generator) < share
    return torch.where(changed, draw(tensor.shape, tensor.dtype, seed), tensor)


def send(news, olds):
    """What a receiver that holds the olds has in the end, and the message's bytes."""
    counts, message = encode(news, olds)
    sizes = [new.numel() for new in news]
    assert message.dtype == torch.uint8 and message.is_contiguous()
    assert len(message) == count_bytes(counts, sizes, news[0].element_size())
    places = [old.clone() for old in olds]
    decode(counts, message, places)
    return places, counts


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9])
def test_the_receiver_has_every_bit(dtype, chunk, share, monkeypatch):
    monkeypatch.setattr("megatron_stapo.rollout.delta._CHUNK_ELEMENTS", chunk)
    olds = [draw(shape, dtype) for shape in ((20, 30), (1, 1), (17, 1))]
    news = [change(old, share) for old in olds]
    places, counts = send(news, olds)
    for place, new, old, count in zip(places, news, olds, counts, strict=True):
        assert torch.equal(place, new)
        assert count in ((new != old).sum(), -1)


def test_views_of_larger_matrices():
    old = draw((40, 50))
    new = change(old, 0.1)
    held = old.clone()
    cuts = [(slice(3, 17), slice(10, 30)), (slice(20, 40), slice(0, 50))]
    counts, message = encode([new[cut] for cut in cuts], [old[cut] for cut in cuts])
    decode(counts, message, [held[cut] for cut in cuts])
    assert all(torch.equal(held[cut], new[cut]) for cut in cuts)
    assert torch.equal(held[:3], old[:3])


def test_bits_are_compared_and_not_values():
    old = torch.tensor([[0.0, 1.0, torch.nan, 2.0, 3.0, 4.0, 5.0, 6.0]], dtype=torch.bfloat16)
    new = old.clone()
    new[0, 0] = -0.0
    counts, message = encode([new], [old])
    # One position of four bytes and its value of two; the same NaN is no change.
    assert (counts, len(message)) == ([1], 6)
    held = old.clone()
    decode(counts, message, [held])
    assert held[0, 0].signbit()


@pytest.mark.parametrize(("num_changed", "count"), [(3, 3), (4, -1), (9, -1)])
def test_a_piece_travels_whole_where_that_is_shorter(num_changed, count):
    """Nine elements take 18 bytes; three changed ones 18 as well."""
    old = draw((3, 3))
    new = old.clone()
    new.view(-1)[:num_changed] += 1
    counts, message = encode([new], [old])
    assert (counts, len(message)) == ([count], 18)
