import math

import pytest
import torch

from megatron_stapo.algo.s2t import (
    compute_entropy_threshold,
    compute_s2t_mask,
    select_candidates,
)


def decide(probs, entropies, advantages, response_mask=None, tau=0.002, q=0.75):
    """The whole decision over one mini-batch, as lists."""
    response_mask = [True] * len(probs) if response_mask is None else response_mask
    entropy_T = torch.tensor(entropies, dtype=torch.float32)
    response_mask_T = torch.tensor(response_mask).bool()
    candidate_mask_T = select_candidates(
        torch.tensor(probs, dtype=torch.float64).log().float(),
        torch.tensor(advantages, dtype=torch.float32),
        response_mask_T,
        tau,
    )
    threshold = compute_entropy_threshold(entropy_T[candidate_mask_T], q)
    loss_mask_T = response_mask_T & compute_s2t_mask(candidate_mask_T, entropy_T, threshold)
    return candidate_mask_T.nonzero()[:, 0].tolist(), threshold, loss_mask_T.tolist()


# Worked by hand: linear interpolation at q (n - 1), every comparison strict.
HAND_WORKED = {
    "no candidate": (
        dict(probs=[0.5, 0.3, 0.9, 0.2], entropies=[1, 0.5, 0.2, 2], advantages=[1, 1, -1, -1]),
        ([], -math.inf, [True] * 4),
    ),
    "one candidate masks nothing": (
        dict(probs=[5e-4, 0.3, 0.9], entropies=[0.4, 0.5, 0.2], advantages=[1, 1, 1]),
        ([0], 0.4, [True] * 3),
    ),
    "two candidates mask the lower": (
        dict(probs=[5e-4, 7e-4, 0.9], entropies=[0.4, 0.9, 0.2], advantages=[1, 1, 1]),
        ([0, 1], 0.775, [False, True, True]),
    ),
    "four candidates mask three": (
        dict(
            probs=[5e-4, 7e-4, 1e-4, 1.9e-3, 0.9],
            entropies=[0.4, 0.9, 0.6, 0.1, 0.2],
            advantages=[0.5] * 5,
        ),
        ([0, 1, 2, 3], 0.675, [False, True, False, False, True]),
    ),
    "ties at the threshold are kept": (
        dict(probs=[1e-3] * 5, entropies=[0.5, 0.5, 0.5, 0.5, 0.9], advantages=[1] * 5),
        ([0, 1, 2, 3, 4], 0.5, [True] * 5),
    ),
    "a probability at the threshold is not rare": (
        dict(probs=[0.002, 0.0019999, 0.001], entropies=[0.1, 0.2, 0.3], advantages=[1, 1, 1]),
        ([1, 2], 0.275, [True, False, True]),
    ),
    "negative and zero advantages are never candidates": (
        dict(probs=[1e-4] * 4, entropies=[0.1, 0.2, 0.3, 0.4], advantages=[-1, 0, 1, 1]),
        ([2, 3], 0.375, [True, True, False, True]),
    ),
    "prompts and padding do not enter": (
        dict(
            probs=[1e-4] * 5,
            entropies=[0.01, 0.02, 0.3, 0.4, 0.5],
            advantages=[1] * 5,
            response_mask=[0, 0, 1, 1, 1],
        ),
        ([2, 3, 4], 0.45, [False, False, False, False, True]),
    ),
    "q = 0 masks nothing": (
        dict(probs=[1e-4, 2e-4, 3e-4], entropies=[0.1, 0.2, 0.3], advantages=[1, 1, 1], q=0.0),
        ([0, 1, 2], 0.1, [True] * 3),
    ),
    "q = 1 keeps the highest alone": (
        dict(probs=[1e-4, 2e-4, 3e-4], entropies=[0.1, 0.2, 0.3], advantages=[1, 1, 1], q=1.0),
        ([0, 1, 2], 0.3, [False, False, True]),
    ),
    "tau_p = 0 selects nothing": (
        dict(probs=[1e-30, 2e-4], entropies=[0.1, 0.2], advantages=[1, 1], tau=0.0),
        ([], -math.inf, [True] * 2),
    ),
}


@pytest.mark.parametrize(("inputs", "expected"), HAND_WORKED.values(), ids=HAND_WORKED)
def test_decision_worked_by_hand(inputs, expected):
    candidates, threshold, loss_mask = decide(**inputs)
    assert candidates == expected[0]
    assert threshold == pytest.approx(expected[1], abs=1e-7)
    assert loss_mask == expected[2]


@pytest.mark.parametrize("num_candidates", [1, 2, 3, 5, 8, 9, 280])
def test_share_silenced_of_distinct_candidates(num_candidates):
    # Strictly below the order statistic at 0.75 (n - 1): ceil of that position many.
    generator = torch.Generator().manual_seed(num_candidates)
    entropies = torch.rand(num_candidates, generator=generator).tolist()
    _, _, loss_mask = decide([1e-4] * num_candidates, entropies, [1.0] * num_candidates)
    assert loss_mask.count(False) == math.ceil(0.75 * (num_candidates - 1))


def test_threshold_does_not_depend_on_the_order():
    entropies = torch.rand(1001, generator=torch.Generator().manual_seed(0))
    shuffled = entropies[torch.randperm(1001, generator=torch.Generator().manual_seed(1))]
    assert compute_entropy_threshold(entropies, 0.75) == compute_entropy_threshold(shuffled, 0.75)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_broken_entropy_is_refused(value):
    with pytest.raises(ValueError, match="not finite"):
        compute_entropy_threshold(torch.tensor([0.1, value]), 0.75)


def test_streams_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\)"):
        select_candidates(torch.zeros(3), torch.zeros(2), torch.ones(3).bool(), 0.002)
