import math

import pytest
import torch

from megatron_stapo.algo.off_policy import compute_sequence_mask, compute_tis_weights


def test_weights_are_truncated_above_and_carry_no_gradient():
    old = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    rollout = -1.0 - torch.tensor([0.5, 1.0, 3.0]).log()
    weights = compute_tis_weights(old, rollout, 2.0)
    assert weights.tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert not weights.requires_grad


def test_an_extreme_ratio_stays_finite():
    weights = compute_tis_weights(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]), 1e30)
    assert weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)])


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ((None, None), [True] * 4),
        ((0.5, None), [False, True, True, True]),
        ((None, 2.0), [True, True, True, False]),
        ((0.5, 2.0), [False, True, True, False]),
    ],
)
def test_sequences_within_the_bounds_are_kept(bounds, kept):
    # Bounds are inclusive.
    logratio = torch.tensor([0.49, 0.5, 2.0, 2.01], dtype=torch.float64).log().float()
    assert compute_sequence_mask(logratio, *bounds).tolist() == kept
