import pytest
import torch

from megatron_stapo.algo.advantage import compute_group_advantages

# The values that STAPO's appendix prints for its spurious tokens: G = 8, k correct, k = 7 ... 1.
PRINTED = {7: 0.3536, 6: 0.5401, 5: 0.7246, 4: 0.9354, 3: 1.2076, 2: 1.6202, 1: 2.4749}


@pytest.mark.parametrize("num_correct", PRINTED)
def test_advantages_of_eight_responses_are_the_printed_ones(num_correct):
    rewards = torch.tensor([1.0] * num_correct + [-1.0] * (8 - num_correct))
    advantages = compute_group_advantages(rewards)
    assert advantages[0].item() == pytest.approx(PRINTED[num_correct], abs=5e-5)
    assert advantages.sum().item() == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5]),
        ([1.0, -1.0, -1.0, -1.0], [1.5, -0.5, -0.5, -0.5]),
        ([1.0, -1.0], [0.5**0.5, -(0.5**0.5)]),
    ],
)
def test_advantages_do_not_depend_on_the_two_values_of_the_reward(rewards, expected):
    assert compute_group_advantages(torch.tensor(rewards)).tolist() == pytest.approx(
        expected, abs=1e-5
    )


@pytest.mark.parametrize("reward", [-1.0, 0.0, 0.1, 1 / 3])
@pytest.mark.parametrize("size", [2, 3, 8])
def test_equal_rewards_give_exactly_zero(reward, size):
    assert compute_group_advantages(torch.full((size,), reward)).tolist() == [0.0] * size


@pytest.mark.parametrize("rewards", [[1.0], [], [1.0, float("nan")], [1.0, float("inf")]])
def test_a_group_without_standard_deviation_is_refused(rewards):
    with pytest.raises(ValueError, match="rewards_G"):
        compute_group_advantages(torch.tensor(rewards))
