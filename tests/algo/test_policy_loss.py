import math

import pytest
import torch

from megatron_stapo.algo.policy_loss import (
    compute_cispo_loss,
    compute_covariance,
    compute_gspo_loss,
    compute_kl_penalty,
    compute_policy_loss,
    select_clip_cov_candidates,
)


def loss_and_gradient(ratio, advantage, dual_clip=10.0):
    logprobs = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    loss = compute_policy_loss(
        logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), 0.2, 0.28, dual_clip
    )
    loss.sum().backward()
    return loss.item(), logprobs.grad.item()


# (ratio, advantage): loss and d loss / d log p, worked by hand.
@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.0, 2.0, -2.0, -2.0),
        (1.2, 1.0, -1.2, -1.2),
        (1.5, 1.0, -1.28, 0.0),  # clipped above
        (0.5, 1.0, -0.5, -0.5),  # a better token that lost probability is pulled back
        (0.5, -1.0, 0.8, 0.0),  # clipped below
        (1.5, -1.0, 1.5, 1.5),
        (12.0, -1.0, 10.0, 0.0),  # dual clip
        (1.5, 0.0, 0.0, 0.0),
    ],
)
def test_loss_and_gradient_worked_by_hand(ratio, advantage, loss, gradient):
    assert loss_and_gradient(ratio, advantage) == pytest.approx((loss, gradient), abs=1e-5)


def test_without_dual_clip_a_negative_advantage_is_unbounded():
    assert loss_and_gradient(12.0, -1.0, dual_clip=None) == pytest.approx((12.0, 12.0), rel=1e-5)


def test_a_lower_clip_of_one_bounds_nothing_below():
    logprobs = torch.tensor([-9.0], requires_grad=True)
    loss = compute_policy_loss(
        logprobs, torch.tensor([-1.0]), torch.tensor([-1.0]), 1.0, 0.28, None
    )
    loss.sum().backward()
    assert logprobs.grad.item() == pytest.approx(math.exp(-8), rel=1e-5)


SEQUENCE_LENGTHS = [3, 1, 5]


def build_sequences(seed, gap):
    """Log-probabilities whose sequence ratios lie about gap away from 1, and an advantage each."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(sum(SEQUENCE_LENGTHS), generator=generator, dtype=torch.float64) - 0.1
    noise = torch.randn(len(old), generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(SEQUENCE_LENGTHS), generator=generator, dtype=torch.float64)
    return (old + gap * noise).requires_grad_(), old, advantages


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("gap", [0.0, 3e-4, 0.1])
def test_gspo_has_the_gradient_of_the_objective_on_sequences(gap, seed):
    clip_low, clip_high = 3e-4, 4e-4
    logprobs, old, advantages = build_sequences(seed, gap)
    # The definition: one ratio per sequence, clipped, and the mean over sequences.
    log_ratios = (logprobs - old).split(SEQUENCE_LENGTHS)
    ratios = torch.stack([log_ratio.mean() for log_ratio in log_ratios]).exp()
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high)
    expected = -torch.minimum(ratios * advantages, clipped * advantages).mean()
    (expected_gradient,) = torch.autograd.grad(expected, logprobs)

    lengths = torch.tensor(SEQUENCE_LENGTHS)
    loss_T = compute_gspo_loss(
        logprobs,
        ratios.detach().log().repeat_interleave(lengths),
        advantages.repeat_interleave(lengths),
        clip_low,
        clip_high,
    )
    loss = torch.stack([part.mean() for part in loss_T.split(SEQUENCE_LENGTHS)]).mean()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-10, atol=0)


# (ratio, advantage): d loss / d log p = -clip(ratio, 1 - 1, 1 + 0.28) A.
@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [(1.0, 2.0, -2.0), (1.5, 1.0, -1.28), (0.01, 1.0, -0.01), (1.5, -1.0, 1.28), (0.5, -2.0, 1.0)],
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio, advantage, gradient):
    logprobs = torch.tensor([-1.0 + math.log(ratio)], requires_grad=True)
    loss = compute_cispo_loss(logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), 1.0, 0.28)
    loss.sum().backward()
    assert logprobs.grad.item() == pytest.approx(gradient, rel=1e-5)
    assert loss.item() == pytest.approx(gradient * logprobs.item(), rel=1e-5)


def test_kl_penalty_worked_by_hand():
    logprobs = torch.tensor([0.5, 0.25, 0.5], dtype=torch.float64).log().requires_grad_()
    ref = torch.tensor([0.5, 0.5, 0.25], dtype=torch.float64).log()
    penalty = compute_kl_penalty(logprobs, ref)
    # r = 1, 2, 1/2: r - log r - 1, with the gradient 1 - r
    assert penalty.tolist() == pytest.approx([0.0, 1 - math.log(2), -0.5 + math.log(2)])
    penalty.sum().backward()
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.0, 0.5])


def test_kl_penalty_averages_to_the_divergence():
    generator = torch.Generator().manual_seed(0)
    policy, ref = torch.randn(2, 50, generator=generator, dtype=torch.float64).log_softmax(-1)
    expected = (policy.exp() * (policy - ref)).sum()
    assert (policy.exp() * compute_kl_penalty(policy, ref)).sum().item() == pytest.approx(
        expected.item()
    )


# Columns: advantage, ratio, covariance, trained; whether Clip-Cov may draw the token.
CLIP_COV = [
    ((1.0, 1.0, 2.0, True), True),
    ((1.0, 1.0, 2.0, False), False),
    ((1.0, 1.0, 1.0, True), False),  # bounds are exclusive
    ((1.0, 1.0, 5.0, True), False),
    ((1.0, 1.3, 2.0, True), False),  # clipped already
    ((-1.0, 1.3, 2.0, True), True),
    ((-1.0, 0.7, 2.0, True), False),
    ((1.0, 0.7, 2.0, True), True),
]


def test_clip_cov_draws_from_trained_unclipped_tokens_between_the_bounds():
    (advantages, ratios, covariances, mask), expected = (
        [torch.tensor(column) for column in zip(*(row for row, _ in CLIP_COV), strict=True)],
        [drawn for _, drawn in CLIP_COV],
    )
    selected = select_clip_cov_candidates(
        covariances, mask, ratios, advantages, 0.2, 0.28, cov_min=1.0, cov_max=5.0
    )
    assert selected.tolist() == expected


def test_covariance_sums_to_that_of_the_population():
    generator = torch.Generator().manual_seed(0)
    advantages, logprobs = torch.randn(2, 100, generator=generator, dtype=torch.float64)
    logprobs.requires_grad_()
    covariance = compute_covariance(
        advantages, logprobs, advantages.mean().item(), logprobs.mean().item()
    )
    expected = torch.cov(torch.stack([advantages, logprobs.detach()]), correction=0)[0, 1]
    assert covariance.mean().item() == pytest.approx(expected.item())
    assert not covariance.requires_grad


@pytest.mark.parametrize("dual_clip", [10.0, None])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
def test_an_exploded_ratio_leaves_a_finite_gradient(advantage, dual_clip):
    logprobs = torch.tensor([-0.1], requires_grad=True)
    loss = compute_policy_loss(
        logprobs, torch.tensor([-95.1]), torch.tensor([advantage]), 0.2, 0.28, dual_clip
    )
    loss.sum().backward()
    assert loss.isfinite().all() and logprobs.grad.isfinite().all()
