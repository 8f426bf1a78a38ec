import math

import pytest
import torch

from megatron_stapo.algo.policy_loss import compute_policy_loss


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
