import pytest
import torch

from megatron_stapo.algo.s2t import select_candidates, select_rare


def test_candidates_are_rare_sampled_and_better_than_their_group():
    logprobs = torch.tensor([0.001, 0.001, 0.001, 0.001, 0.5]).log()
    advantages = torch.tensor([1.0, 0.0, -1.0, 1.0, 1.0])
    response_mask = torch.tensor([True, True, True, False, True])
    candidates = select_candidates(logprobs, advantages, response_mask, 0.002)
    assert candidates.tolist() == [True, False, False, False, False]


def test_a_probability_at_the_threshold_is_not_rare():
    logprobs = torch.tensor([0.002, 0.0019999, 0.0020001], dtype=torch.float64).log().float()
    assert select_rare(logprobs, 0.002).tolist() == [False, True, False]


def test_threshold_zero_selects_nothing_and_one_all_but_certain_tokens():
    logprobs = torch.tensor([-200.0, -1.0, 0.0])
    assert select_rare(logprobs, 0.0).tolist() == [False, False, False]
    assert select_rare(logprobs, 1.0).tolist() == [True, True, False]


def test_streams_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\)"):
        select_candidates(torch.zeros(3), torch.zeros(2), torch.ones(3).bool(), 0.002)
