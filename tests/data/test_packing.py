import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stapo.config import ParallelConfig
from megatron_stapo.data.packing import pack
from megatron_stapo.parallel.context_parallel import compute_local_positions, slice_microbatch
from megatron_stapo.types import Prompt, Rollout, RolloutGroup

SINGLE = ParallelConfig(device="cpu")


def build_parallel(dp_size=1, **sizes):
    return ParallelConfig(device="cpu", data_parallel_size=dp_size, **sizes)


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
    [[minibatch]] = pack([build_group(0, [1, 2, 3], [[4, 5]])], 1, 100, SINGLE)
    [m] = minibatch.microbatches
    assert m.token_ids_T.tolist() == [1, 2, 3, 4, 5]
    assert m.labels_T.tolist() == [2, 3, 4, 5, 0]
    assert m.position_ids_T.tolist() == [0, 1, 2, 3, 4]
    assert m.cu_seqlens.tolist() == [0, 5]
    assert m.response_mask_T.tolist() == [False, False, True, True, False]
    assert m.advantages_T.tolist() == [0, 0, 0.5, 0.5, 0]
    assert m.rollout_logprobs_T.tolist() == [0, 0, -4, -5, 0]


def test_labels_never_cross_a_sequence():
    [[minibatch]] = pack([build_group(0, [1], [[2, 3, 9], [4]])], 1, 100, SINGLE)
    [m] = minibatch.microbatches
    assert m.token_ids_T.tolist() == [1, 2, 3, 9, 1, 4]
    assert m.labels_T.tolist() == [2, 3, 9, 0, 4, 0]
    assert m.response_mask_T.tolist() == [True, True, True, False, True, False]


def test_the_end_of_a_microbatch_is_padded_to_the_multiple_and_trains_nothing():
    [[minibatch]] = pack(
        [build_group(0, [1, 2], [[3]])],
        1,
        100,
        build_parallel(tensor_model_parallel_size=4, sequence_parallel=True),
    )
    [m] = minibatch.microbatches
    assert m.token_ids_T.tolist() == [1, 2, 3, 0]
    assert m.cu_seqlens.tolist() == [0, 3, 4]
    assert m.response_mask_T.tolist() == [False, True, False, False]


def test_an_empty_response_trains_nothing():
    [[minibatch]] = pack([build_group(0, [1, 2], [[], [3]])], 1, 100, SINGLE)
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
    ranks = pack(groups, 3, budget, build_parallel(dp_size))
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
        counts = {len(minibatches[index].microbatches) for minibatches in ranks}
        assert counts == {ranks[0][index].num_microbatches // dp_size}


def test_a_rank_without_sequences_still_has_a_microbatch():
    ranks = pack(
        [build_group(0, [1], [[2]])],
        1,
        10,
        build_parallel(3, tensor_model_parallel_size=2, sequence_parallel=True),
    )
    for [minibatch] in ranks[1:]:
        [m] = minibatch.microbatches
        assert len(m.token_ids_T) == 2 and not m.response_mask_T.any()


def test_ranks_are_balanced_by_tokens():
    lengths = [300, 10, 200, 40, 250, 90, 60, 150]
    groups = [build_group(0, [1], [[2] * n for n in lengths])]
    loads = [
        sum(len(m.token_ids_T) for m in minibatch.microbatches)
        for [minibatch] in pack(groups, 1, 1000, build_parallel(2))
    ]
    assert max(loads) / (sum(loads) / 2) < 1.02


def test_a_sequence_over_the_budget_is_refused():
    with pytest.raises(ValueError, match=r"allows 4 tokens in a pack: a sequence has 5"):
        pack([build_group(0, [1, 2], [[3, 4, 5]])], 1, 4, SINGLE)


def test_truncated_responses_are_left_out_if_asked():
    group = build_group(0, [1], [[2, 3], [4, 5, 6]])
    group.rollouts[1].finish_reason = "length"
    [[minibatch]] = pack([group], 1, 100, SINGLE, filter_truncated=True)
    assert minibatch.microbatches[0].token_ids_T.tolist() == [1, 2, 3]
    assert minibatch.num_sequences == 2
    group.rollouts[0].finish_reason = "length"
    [[minibatch]] = pack([group], 1, 100, SINGLE, filter_truncated=True)
    assert not minibatch.microbatches[0].response_mask_T.any()


def test_the_interleaved_schedule_gets_a_multiple_of_the_stages():
    parallel = build_parallel(
        pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=2
    )
    [[minibatch]] = pack([build_group(0, [1], [[2] * 5] * 5)], 1, 6, parallel)
    assert len(minibatch.microbatches) == 8


def test_context_parallel_ranks_hold_an_early_and_a_late_part_of_each_sequence():
    cu_seqlens = torch.tensor([0, 8, 12])
    assert compute_local_positions(cu_seqlens, 0, 2).tolist() == [0, 1, 6, 7, 8, 11]
    assert compute_local_positions(cu_seqlens, 1, 2).tolist() == [2, 3, 4, 5, 9, 10]


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    lengths=st.lists(st.lists(st.integers(0, 20), min_size=2, max_size=2), min_size=1, max_size=6),
    prompt=st.integers(1, 6),
    slack=st.integers(0, 60),
    dp_size=st.integers(1, 4),
    cp_size=st.sampled_from([1, 2, 3, 4]),
    tp_size=st.sampled_from([1, 2, 4]),
    chunks=st.sampled_from([1, 2]),
    token_multiple=st.sampled_from([1, 16, 128]),
)
def test_every_layout_holds_every_token_once(
    lengths, prompt, slack, dp_size, cp_size, tp_size, chunks, token_multiple
):
    """Over data- and context-parallel ranks, with its label, and nothing but padding besides."""
    parallel = build_parallel(
        dp_size,
        context_parallel_size=cp_size,
        tensor_model_parallel_size=tp_size,
        sequence_parallel=tp_size > 1,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=chunks,
    )
    groups = [
        build_group(i, [7] * prompt, [[100 * i + t for t in range(n)] for n in sizes])
        for i, sizes in enumerate(lengths)
    ]
    budget = max(prompt + n for sizes in lengths for n in sizes) + 2 * cp_size + slack
    ranks = pack(groups, len(groups), budget, parallel, token_multiple=token_multiple)
    seen = []
    for [minibatch] in ranks:
        assert minibatch.num_sequences == 2 * len(groups)
        assert len(minibatch.microbatches) == minibatch.num_microbatches / dp_size
        for m in minibatch.microbatches:
            assert len(m.token_ids_T) % parallel.microbatch_multiple == 0
            for cp_rank in range(cp_size):
                part = slice_microbatch(m, cp_rank, cp_size)
                assert len(part.token_ids_T) * cp_size == len(m.token_ids_T)
                assert len(part.token_ids_T) % (tp_size * token_multiple) == 0
                keys = zip(
                    part.sequence_ids_T[part.response_mask_T].tolist(),
                    part.position_ids_T[part.response_mask_T].tolist(),
                    part.labels_T[part.response_mask_T].tolist(),
                    strict=True,
                )
                seen += keys
    expected = [
        (2 * i + sample, prompt - 1 + t, 100 * i + t)
        for i, sizes in enumerate(lengths)
        for sample, n in enumerate(sizes)
        for t in range(n)
    ]
    assert sorted(seen) == sorted(expected)
    num_tokens = sum(prompt + n for sizes in lengths for n in sizes)
    total = sum(int((m.sequence_ids_T >= 0).sum()) for [b] in ranks for m in b.microbatches)
    assert total == num_tokens
