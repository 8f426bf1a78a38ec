import math

import pytest
import torch

from megatron_stapo.algo.policy_loss import compute_policy_loss
from megatron_stapo.algo.theory import (
    compute_collision_constant,
    compute_entropy_change,
    compute_gradient_norm_bounds,
    compute_gradient_weights,
    compute_quadrants,
    compute_squared_gradient_norm,
)

CLIP = (0.2, 0.28)


def build_softmaxes(num_tokens, vocab_size, seed=0):
    """Random softmaxes from nearly uniform to nearly certain, a sampled token each, in float64.

    Returns:
        logits [T, V] that carry a gradient, log p of the sampled token [T], H [T], sum p^2 [T].
    """
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(-2, 1.5, num_tokens, dtype=torch.float64)[:, None]
    logits = torch.randn(num_tokens, vocab_size, generator=generator, dtype=torch.float64) * spread
    logits.requires_grad_()
    labels = torch.randint(vocab_size, (num_tokens, 1), generator=generator)
    logprobs_TV = logits.log_softmax(-1)
    entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    collision_T = logprobs_TV.exp().square().sum(-1)
    return logits, logprobs_TV.gather(-1, labels)[:, 0], entropy_T, collision_T, labels


def test_the_norm_is_that_of_the_policy_loss_under_autograd():
    logits, logprobs_T, _, collision_T, _ = build_softmaxes(300, 11)
    generator = torch.Generator().manual_seed(1)
    # Ratios on both sides of both bounds.
    old_T = logprobs_T.detach() + 0.3 * torch.randn(300, generator=generator, dtype=torch.float64)
    advantages_T = torch.randn(300, generator=generator, dtype=torch.float64)
    compute_policy_loss(logprobs_T, old_T, advantages_T, *CLIP, None).sum().backward()
    weights_T = compute_gradient_weights((logprobs_T - old_T).exp(), advantages_T, *CLIP)
    assert 0 < (weights_T == 0).sum() < 300
    norm_T = compute_squared_gradient_norm(logprobs_T, collision_T, weights_T)
    assert torch.allclose(norm_T, logits.grad.square().sum(-1), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("vocab_size", [2, 17, 1000])
def test_the_bounds_hold_on_random_softmaxes(vocab_size):
    _, logprobs_T, entropy_T, collision_T, _ = build_softmaxes(3000, vocab_size)
    weights_T = torch.linspace(-3, 3, 3000, dtype=torch.float64)
    norm_T = compute_squared_gradient_norm(logprobs_T, collision_T, weights_T)
    lower_T, upper_T = compute_gradient_norm_bounds(logprobs_T, entropy_T, weights_T, vocab_size)
    assert (lower_T <= norm_T + 1e-12).all()
    assert (norm_T <= upper_T + 1e-12).all()


def test_both_bounds_are_met_at_the_uniform_distribution():
    vocab_size = 50
    logprobs_T = torch.full((1,), -math.log(vocab_size), dtype=torch.float64)
    lower_T, upper_T = compute_gradient_norm_bounds(
        logprobs_T, -logprobs_T, torch.ones(1), vocab_size
    )
    collision_T = torch.full((1,), 1 / vocab_size, dtype=torch.float64)
    norm_T = compute_squared_gradient_norm(logprobs_T, collision_T, torch.ones(1))
    assert lower_T.item() == pytest.approx(norm_T.item(), rel=1e-12)
    assert upper_T.item() == pytest.approx(norm_T.item(), rel=1e-12)


def test_the_constant_of_qwen3s_vocabulary():
    assert compute_collision_constant(151936) == pytest.approx(0.0070247, abs=5e-8)


def test_the_entropy_change_is_the_derivative_along_the_sampled_logit():
    logits, logprobs_T, entropy_T, _, labels = build_softmaxes(300, 11)
    (gradient,) = torch.autograd.grad(entropy_T.sum(), logits, retain_graph=True)
    weights_T = torch.linspace(-3, 3, 300, dtype=torch.float64)
    change_T = compute_entropy_change(logprobs_T, entropy_T, weights_T)
    expected_T = weights_T * gradient.gather(-1, labels)[:, 0]
    assert torch.allclose(change_T, expected_T, rtol=1e-9, atol=1e-12)


def test_a_rare_token_of_a_better_response_raises_the_entropy_and_a_common_one_lowers_it():
    logprobs_T, entropy_T = torch.tensor([-7.0, -0.1]), torch.tensor([0.5, 0.5])
    change_T = compute_entropy_change(logprobs_T, entropy_T, torch.ones(2))
    assert change_T[0] > 0 > change_T[1]


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [
        (1.5, 1.0, 0.0),
        (1.28, 1.0, 1.28),
        (0.5, 1.0, 0.5),
        (0.5, -1.0, 0.0),
        (1.5, -1.0, -1.5),
        (1.5, 0.0, 0.0),
    ],
)
def test_gradient_weights_worked_by_hand(ratio, advantage, weight):
    found = compute_gradient_weights(torch.tensor([ratio]), torch.tensor([advantage]), *CLIP)
    assert found.item() == pytest.approx(weight)


def test_quadrants_take_the_masks_own_comparisons():
    logprobs_T = torch.tensor([0.001, 0.001, 0.002, 0.5], dtype=torch.float64).log().float()
    entropy_T = torch.tensor([0.4, 0.5, 0.4, 0.6])
    assert compute_quadrants(logprobs_T, entropy_T, 0.002, 0.5).tolist() == [0, 1, 2, 3]


def test_a_certain_token_has_no_gradient_and_no_rounding_below_zero():
    logprobs_T = torch.tensor([-1e-8, -3e-8, 0.0])
    collision_T = (2 * logprobs_T).exp() - 6e-8
    assert (compute_squared_gradient_norm(logprobs_T, collision_T, torch.ones(3)) >= 0).all()
