import pytest
import torch

from megatron_stapo.data.packing import pack
from megatron_stapo.types import Prompt, Rollout, RolloutGroup


def build_group(prompt_id, prompt_tokens, responses, advantage=0.5):
    return RolloutGroup(
        prompt=Prompt(prompt_id=prompt_id, problem="", answer="", token_ids=prompt_tokens),
        rollouts=[
            Rollout(
                token_ids=response,
                rollout_logprobs=[-float(t) for t in response],
                finish_reason="stop",
                policy_version=0,
                advantage=advantage,
            )
            for response in responses
        ],
    )


def test_streams_describe_the_token_after_each_position():
    [[minibatch]] = pack([build_group(0, [1, 2, 3], [[4, 5]])], 1, 100, 1, 1)
    [m] = minibatch.microbatches
    assert m.token_ids_T.tolist() == [1, 2, 3, 4, 5]
    assert m.labels_T.tolist() == [2, 3, 4, 5, 0]
    assert m.position_ids_T.tolist() == [0, 1, 2, 3, 4]
    assert m.cu_seqlens.tolist() == [0, 5]
    assert m.response_mask_T.tolist() == [False, False, True, True, False]
    assert m.advantages_T.tolist() == [0, 0, 0.5, 0.5, 0]
    assert m.rollout_logprobs_T.tolist() == [0, 0, -4, -5, 0]


def test_labels_never_cross_a_sequence():
    [[minibatch]] = pack([build_group(0, [1], [[2, 3, 9], [4]])], 1, 100, 1, 1)
    [m] = minibatch.microbatches
    assert m.token_ids_T.tolist() == [1, 2, 3, 9, 1, 4]
    assert m.labels_T.tolist() == [2, 3, 9, 0, 4, 0]
    assert m.response_mask_T.tolist() == [True, True, True, False, True, False]


def test_the_end_of_a_microbatch_is_padded_to_the_multiple_and_trains_nothing():
    [[minibatch]] = pack([build_group(0, [1, 2], [[3]])], 1, 100, 1, token_multiple=4)
    [m] = minibatch.microbatches
    assert m.token_ids_T.tolist() == [1, 2, 3, 0]
    assert m.cu_seqlens.tolist() == [0, 3, 4]
    assert m.response_mask_T.tolist() == [False, True, False, False]


def test_an_empty_response_trains_nothing():
    [[minibatch]] = pack([build_group(0, [1, 2], [[], [3]])], 1, 100, 1, 1)
    [m] = minibatch.microbatches
    assert sorted(m.cu_seqlens.diff().tolist()) == [2, 3]
    assert m.response_mask_T.sum() == 1


@pytest.mark.parametrize("dp_size", [1, 2, 3, 7])
@pytest.mark.parametrize("budget", [40, 64, 1000])
def test_every_sequence_is_packed_once_within_the_budget(dp_size, budget):
    generator = torch.Generator().manual_seed(0)
    groups = [
        build_group(
            i,
            [100 + i] * int(torch.randint(1, 10, (1,), generator=generator)),
            [[k + 1] * int(torch.randint(1, 30, (1,), generator=generator)) for k in range(4)],
        )
        for i in range(6)
    ]
    ranks = pack(groups, 3, budget, dp_size, 1)
    assert [len(minibatches) for minibatches in ranks] == [2] * dp_size
    for index in range(2):
        packed = []
        for minibatches in ranks:
            for m in minibatches[index].microbatches:
                assert len(m.token_ids_T) <= budget
                packed += [
                    tuple(s.tolist()) for s in m.token_ids_T.split(m.cu_seqlens.diff().tolist())
                ]
        expected = [
            tuple(g.prompt.token_ids + r.token_ids)
            for g in groups[3 * index : 3 * index + 3]
            for r in g.rollouts
        ]
        assert sorted(p for p in packed if len(p) > 1) == sorted(expected)


def test_a_rank_without_sequences_still_has_a_microbatch():
    ranks = pack([build_group(0, [1], [[2]])], 1, 10, dp_size=3, token_multiple=2)
    for [minibatch] in ranks[1:]:
        [m] = minibatch.microbatches
        assert len(m.token_ids_T) == 2 and not m.response_mask_T.any()


def test_ranks_are_balanced_by_tokens():
    lengths = [300, 10, 200, 40, 250, 90, 60, 150]
    groups = [build_group(0, [1], [[2] * n for n in lengths])]
    loads = [
        sum(len(m.token_ids_T) for m in minibatch.microbatches)
        for [minibatch] in pack(groups, 1, 1000, 2, 1)
    ]
    assert max(loads) / (sum(loads) / 2) < 1.02


def test_a_sequence_over_the_budget_is_refused():
    with pytest.raises(ValueError, match=r"data.max_microbatch_tokens=4: a sequence has 5 tokens"):
        pack([build_group(0, [1, 2], [[3, 4, 5]])], 1, 4, 1, 1)
