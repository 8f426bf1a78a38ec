"""The sharded log-probability and entropy against float64, whole and in shards."""

import pytest
import torch

from megatron_stapo.ops import logprobs as ops
from tests.workers import run_sharded_logprobs

QWEN3_VOCAB = 151_936


def reference(logits, labels, temperature):
    """Log-probability and entropy in float64, with autograd."""
    all_logprobs = (logits.double() / temperature).log_softmax(-1)
    entropy = -(all_logprobs.exp() * all_logprobs).nan_to_num(0.0).sum(-1)
    return all_logprobs.gather(-1, labels[:, None])[:, 0], entropy


def score_logits(logits_TV, labels_T, temperature=1.0):
    """Score exactly these logits: one-hot hidden states pick the columns of the weight."""
    return ops.compute_logprobs_and_entropy(
        torch.eye(len(logits_TV)), logits_TV.T.contiguous(), labels_T, temperature, None
    )


def peaked_logits(margins, vocab_size, seed=0):
    """One logit leads the rest by about the margin: the larger, the smaller the entropy."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(margins), vocab_size, generator=generator)
    logits[:, 7] = torch.tensor(margins)
    return logits


@pytest.mark.parametrize("vocab_size", [QWEN3_VOCAB, 1187])
@pytest.mark.parametrize("shift", [-120.0, 0.0, 60.0])
@pytest.mark.parametrize("scale", [0.2, 1.5, 5.0])
def test_entropy_is_accurate_to_1e_6_at_any_scale_and_shift(scale, shift, vocab_size):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(8, vocab_size, generator=generator) * scale + shift
    labels = torch.randint(0, vocab_size, (8,), generator=generator)
    logprobs, entropy = score_logits(logits, labels)
    expected_logprobs, expected_entropy = reference(logits, labels, 1.0)
    # Half a unit in the last place of a float32 near 12 is 5e-7.
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=1e-6)
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=0, atol=2e-6)


@pytest.mark.parametrize("vocab_size", [QWEN3_VOCAB, 1187])
def test_small_entropies_keep_their_digits(vocab_size):
    margins = [12.0 + 2 * i for i in range(14)]
    logits = peaked_logits(margins, vocab_size)
    labels = torch.full((len(margins),), 7)
    _, entropy = score_logits(logits, labels)
    _, expected = reference(logits, labels, 1.0)
    assert expected.min() < 1e-8 < expected.max()
    torch.testing.assert_close(entropy.double(), expected, rtol=1e-5, atol=1e-12)


def test_extreme_rows_are_finite():
    logits = torch.full((4, 1000), -200.0)
    logits[1, 3] = 300.0  # all mass on one token
    logits[2] = torch.linspace(-1e4, 1e4, 1000)
    logits[3, :2] = 500.0  # two tokens share it
    logprobs, entropy = score_logits(logits, torch.tensor([0, 0, 999, 1]))
    assert logprobs.tolist() == pytest.approx([-6.907755, -500.0, 0.0, -0.693147], abs=1e-5)
    assert entropy.tolist() == pytest.approx([6.907755, 0.0, 0.0, 0.693147], abs=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 8, 9])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_gradient_equals_the_reference_for_any_chunking(num_tokens, temperature):
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = torch.randn(num_tokens, 16, generator=generator, requires_grad=True)
    weight = torch.randn(61, 16, generator=generator, requires_grad=True)
    labels = torch.randint(0, 61, (num_tokens,), generator=generator)
    upstream = torch.randn(num_tokens, generator=generator)
    logprobs, entropy = ops.compute_logprobs_and_entropy(
        hidden, weight, labels, temperature, None, chunk_tokens=4
    )
    assert not entropy.requires_grad
    ours = torch.autograd.grad((logprobs * upstream).sum(), (hidden, weight))
    expected_logprobs, expected_entropy = reference(
        hidden.double() @ weight.double().T, labels, temperature
    )
    theirs = torch.autograd.grad((expected_logprobs * upstream.double()).sum(), (hidden, weight))
    torch.testing.assert_close(logprobs.double(), expected_logprobs, rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected_entropy, rtol=0, atol=1e-5)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_a_bf16_head_has_fp32_logits():
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 64, generator=generator).bfloat16() for n in (32, 999))
    labels = torch.randint(0, 999, (32,), generator=generator)
    logprobs, entropy = ops.compute_logprobs_and_entropy(hidden, weight, labels, 1.0, None)
    expected = reference(hidden.double() @ weight.double().T, labels, 1.0)
    torch.testing.assert_close(logprobs.double(), expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy.double(), expected[1], rtol=0, atol=1e-5)


@pytest.mark.distributed
@pytest.mark.parametrize("tp_size", [2, 3, 4])
def test_shards_equal_the_whole(rank_pool, tp_size):
    """Labels fall in every shard; every rank gets the same bits."""
    generator = torch.Generator().manual_seed(tp_size)
    hidden = torch.randn(50, 32, generator=generator)
    weight = 3 * torch.randn(12 * 97, 32, generator=generator)
    labels = torch.randint(0, len(weight), (50,), generator=generator)
    upstream = torch.randn(50, generator=generator)
    ranks = rank_pool.run(run_sharded_logprobs, tp_size, hidden, weight, labels, upstream, 0.7)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logprobs, entropy = reference(hidden @ weight.T, labels, 0.7)
    (logprobs * upstream).sum().backward()
    for rank in ranks:
        assert torch.equal(rank["logprobs"], ranks[0]["logprobs"])
        assert torch.equal(rank["entropy"], ranks[0]["entropy"])
        assert rank["forward_collectives"] == 2 * 4  # four chunks
        assert rank["backward_collectives"] == 0
    torch.testing.assert_close(ranks[0]["logprobs"].double(), logprobs, rtol=0, atol=3e-5)
    torch.testing.assert_close(ranks[0]["entropy"].double(), entropy, rtol=0, atol=3e-5)
    grad_hidden = sum(rank["grad_hidden"] for rank in ranks)
    grad_weight = torch.cat([rank["grad_weight"] for rank in ranks])
    torch.testing.assert_close(grad_hidden.double(), hidden.grad, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(grad_weight.double(), weight.grad, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("with_gradient", [False, True])
def test_memory_holds_one_chunk_of_logits(with_gradient):
    """Peak bytes of new storages: the slope per token is the gradient's own size and 16 statistics
    bytes, not the vocabulary's 4 V; the constant is one chunk and one block."""
    vocab_size, hidden_size, chunk_tokens = 40_000, 32, 64

    def measure(num_tokens):
        hidden = torch.randn(num_tokens, hidden_size, requires_grad=with_gradient)
        weight = torch.randn(vocab_size, hidden_size, requires_grad=with_gradient)
        labels = torch.zeros(num_tokens, dtype=torch.int64)
        with StorageMeter() as meter:
            logprobs, _ = ops.compute_logprobs_and_entropy(
                hidden, weight, labels, 1.0, None, chunk_tokens
            )
            if with_gradient:
                logprobs.sum().backward()
        return meter.peak_bytes

    small, large = measure(256), measure(512)
    slope = (large - small) / 256
    assert slope <= 4 * hidden_size * with_gradient + 64
    chunk_bytes = 4 * chunk_tokens * vocab_size
    weight_bytes = 4 * vocab_size * hidden_size
    assert small - 256 * slope <= 2.2 * chunk_bytes + 2 * weight_bytes * with_gradient


class StorageMeter(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts the bytes of storages that operators create, and their peak."""

    def __init__(self):
        super().__init__()
        self.live = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        import weakref

        known = {
            x.untyped_storage()._cdata
            for x in torch.utils._pytree.tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if not isinstance(x, torch.Tensor):
                continue
            storage = x.untyped_storage()
            if storage._cdata in known or storage._cdata in self.live:
                continue
            self.live[storage._cdata] = storage.nbytes()
            weakref.finalize(storage, self.live.pop, storage._cdata, None)
        self.peak_bytes = max(self.peak_bytes, sum(self.live.values()))
        return out
