import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stapo.algo.advantage import compute_group_advantages, reweight_advantages

CASES = json.loads((Path(__file__).parents[1] / "cases" / "advantages.json").read_text())["cases"]
# The values that STAPO's appendix prints for its spurious tokens: G = 8, k correct, k = 7 ... 1.
PRINTED = {7: 0.3536, 6: 0.5401, 5: 0.7246, 4: 0.9354, 3: 1.2076, 2: 1.6202, 1: 2.4749}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_advantages_of_the_shared_cases(case):
    expected = case["advantages"]
    if case["name"].startswith("equal floats"):
        # The file lists what rounding in the mean makes of equal rewards; its heading, and the
        # case's own name, ask for exactly 0.
        expected = [0.0] * 3
    advantages = compute_group_advantages(torch.tensor(case["rewards"]))
    assert advantages.tolist() == pytest.approx(expected, abs=1e-5)
    if len(set(case["rewards"])) == 1:
        assert not advantages.any()


@pytest.mark.parametrize("num_correct", PRINTED)
def test_advantages_of_eight_responses_are_the_printed_ones(num_correct):
    rewards = torch.tensor([1.0] * num_correct + [-1.0] * (8 - num_correct))
    advantages = compute_group_advantages(rewards)
    assert advantages[0].item() == pytest.approx(PRINTED[num_correct], abs=5e-5)
    assert advantages.sum().item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("reward", [-1.0, 0.0, 0.1, 1 / 3])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_equal_rewards_give_exactly_zero(reward, size, divide_by_std):
    advantages = compute_group_advantages(torch.full((size,), reward), divide_by_std)
    assert advantages.tolist() == [0.0] * size


def test_without_the_standard_deviation_advantages_are_in_reward_units():
    rewards = torch.tensor([1.0, -1.0, -1.0, -1.0])
    advantages = compute_group_advantages(rewards, divide_by_std=False)
    assert advantages.tolist() == [1.5, -0.5, -0.5, -0.5]


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(-4, 4), min_size=2, max_size=9),
    st.floats(0.5, 8),
    st.floats(-8, 8),
    st.randoms(use_true_random=False),
)
def test_advantages_follow_their_rewards_and_ignore_scale_and_offset(rewards, scale, offset, rng):
    order = rng.sample(range(len(rewards)), len(rewards))
    advantages = compute_group_advantages(torch.tensor(rewards).double())
    changed = compute_group_advantages(torch.tensor(rewards).double()[order] * scale + offset)
    assert changed.tolist() == pytest.approx(advantages[order].tolist(), abs=1e-5)
    assert advantages.sum().item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("rewards", [[1.0], [], [1.0, float("nan")], [1.0, float("inf")]])
def test_a_group_without_standard_deviation_is_refused(rewards):
    with pytest.raises(ValueError, match="rewards_G"):
        compute_group_advantages(torch.tensor(rewards))


def test_reweighting_shrinks_improbable_tokens_of_both_signs():
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0])
    logprobs = torch.tensor([1.0, 0.5, 0.25, 0.0]).log()
    # 2 x (1 - 0.2 x (1 - p)), worked by hand
    assert reweight_advantages(advantages, logprobs, 0.2).tolist() == pytest.approx(
        [2.0, 1.8, -1.7, -1.6]
    )
    assert torch.equal(reweight_advantages(advantages, logprobs, 0.0), advantages)
