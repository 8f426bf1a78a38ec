"""Statistics, mask, loss and gradient of a step against the float64 reference, in every layout."""

import pytest
import torch

from tests.reference import ReferenceQwen3, Sequence, reference_step
from tests.tiny_model import VOCAB_SIZE
from tests.workers import build_config, build_groups, run_step

pytestmark = pytest.mark.distributed

LAYOUTS = [
    # tp, pp, dp, sequence parallel, token budget of a microbatch
    (1, 1, 1, False, 90),
    (1, 1, 1, False, 600),
    (2, 1, 1, False, 90),
    (2, 1, 1, True, 120),
    (1, 2, 1, False, 90),
    (1, 1, 2, False, 90),
    (2, 2, 1, True, 90),
    (2, 1, 2, False, 120),
    (1, 2, 2, False, 600),
    (1, 1, 4, False, 90),
    (4, 1, 1, False, 90),
]


def layout_config(path, layout, **changes):
    tp_size, pp_size, dp_size, sequence_parallel, budget = layout
    return build_config(
        path,
        **{
            "parallel__tensor_model_parallel_size": tp_size,
            "parallel__pipeline_model_parallel_size": pp_size,
            "parallel__data_parallel_size": dp_size,
            "parallel__sequence_parallel": sequence_parallel,
            "data__max_microbatch_tokens": budget,
            "rollout__temperature": 0.8,
            **changes,
        },
    )


def to_sequences(groups):
    return [
        Sequence(group.prompt.token_ids, rollout.token_ids, rollout.advantage)
        for group in groups
        for rollout in group.rollouts
    ]


@pytest.fixture(scope="module")
def reference(tiny_models):
    """First mini-batch of `build_groups`, by kind of embedding."""

    def compute(path):
        config = build_config(path)
        groups = build_groups(config, VOCAB_SIZE)
        sequences = to_sequences(groups[: config.algorithm.num_prompts_per_minibatch])
        result = reference_step(ReferenceQwen3(path), sequences, None, 0.02, 0.75, temperature=0.8)
        assert result.num_candidates > 10  # or the mask would not be tested
        return groups, sequences, result

    return {name: compute(path) for name, path in tiny_models.items()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("embedding", ["tied", "untied"])
def test_step_equals_the_float64_reference(rank_pool, tiny_models, reference, embedding, layout):
    groups, sequences, expected = reference[embedding]
    config = layout_config(tiny_models[embedding], layout)
    ranks = rank_pool.run(run_step, config.parallel.world_size, config, groups, 1)

    tokens = {}
    for rank in ranks:
        for by_sequence in rank["tokens"]:
            tokens.update(by_sequence)
    assert len(tokens) == len(sequences)
    for sequence, logprobs, entropy, mask in zip(
        sequences, expected.logprobs, expected.entropies, expected.masks, strict=True
    ):
        ours = tokens[tuple(sequence.prompt + sequence.response)]
        torch.testing.assert_close(ours[0].double(), logprobs, rtol=0, atol=2e-5)
        torch.testing.assert_close(ours[1].double(), entropy, rtol=0, atol=2e-5)
        assert torch.equal(ours[2], mask)

    metrics = ranks[0]["metrics"]
    assert metrics["num_masked"] == sum(int((~m).sum()) for m in expected.masks)
    assert metrics["num_candidates"] == expected.num_candidates
    assert metrics["entropy_threshold"] == pytest.approx(expected.threshold, rel=1e-5)
    for rank in ranks:
        assert rank["updates"] == ranks[0]["updates"]
        assert rank["metrics"] == ranks[0]["metrics"]
    update = ranks[0]["updates"][0]
    assert update["loss"] == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    assert update["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-5)
    if config.parallel.data_parallel_size == 1:
        for name, gradient in expected.gradients.items():
            torch.testing.assert_close(
                ranks[0]["gradients"][name].double(),
                gradient,
                rtol=1e-4,
                atol=1e-5 * expected.grad_norm,
                msg=name,
            )


def test_two_updates_agree_between_layouts(rank_pool, tiny_models):
    """The second mini-batch is masked under the weights that the first update made."""
    groups = build_groups(build_config(tiny_models["tied"]), VOCAB_SIZE)

    def run(layout):
        config = layout_config(tiny_models["tied"], layout)
        return rank_pool.run(run_step, config.parallel.world_size, config, groups, 2)[0]

    single = run((1, 1, 1, False, 600))
    assert single["metrics"]["ratio_max"] > 1.01  # the second update is off-policy
    for layout in [(2, 2, 1, True, 90), (1, 1, 4, False, 90), (2, 1, 2, False, 120)]:
        other = run(layout)
        for ours, theirs in zip(other["updates"], single["updates"], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)
        for name in ("num_masked", "num_candidates", "num_response_tokens"):
            assert other["metrics"][name] == single["metrics"][name]
        for name, weight in single["weights"].items():
            # Adam's first steps move a weight by lr whatever its gradient's size, so that rounding
            # shows where a gradient is all but zero.
            torch.testing.assert_close(other["weights"][name], weight, rtol=0, atol=2e-4)
            assert (other["weights"][name] - weight).abs().mean() < 1e-6


@pytest.mark.parametrize("off", [{"entropy_quantile": 0.0}, {"prob_threshold": 0.0}])
def test_s2t_off_gives_the_unmasked_loss_bit_for_bit(rank_pool, tiny_models, off):
    """q = 0 with a population, and tau_p = 0, against a threshold that masks nothing."""
    groups = build_groups(build_config(tiny_models["tied"]), VOCAB_SIZE)
    # Rare beyond fp32: a candidate set that is always empty, through the whole S2T path.
    empty = {"prob_threshold": 1e-44}

    def run(settings):
        changes = {f"algorithm__{name}": value for name, value in settings.items()}
        config = layout_config(tiny_models["tied"], (1, 1, 1, False, 90), **changes)
        return rank_pool.run(run_step, 1, config, groups, 2)[0]

    ours, unmasked = run(off), run(empty)
    assert unmasked["metrics"]["num_masked"] == ours["metrics"]["num_masked"] == 0
    assert ours["updates"] == unmasked["updates"]
    for name, weight in unmasked["weights"].items():
        assert torch.equal(ours["weights"][name], weight), name


def test_a_step_in_bf16_stays_near_fp32(rank_pool, tiny_models):
    groups = build_groups(build_config(tiny_models["tied"]), VOCAB_SIZE)

    def run(dtype):
        config = layout_config(tiny_models["tied"], (2, 1, 1, True, 90), model__dtype=dtype)
        return rank_pool.run(run_step, 2, config, groups, 1)[0]

    bf16, fp32 = run("bfloat16"), run("float32")
    assert bf16["metrics"]["entropy_mean"] == pytest.approx(
        fp32["metrics"]["entropy_mean"], rel=0.02
    )
    assert bf16["updates"][0]["grad_norm"] == pytest.approx(
        fp32["updates"][0]["grad_norm"], rel=0.1
    )
