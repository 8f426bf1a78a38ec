import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stapo.algo.aggregation import compute_loss_weights, compute_unit_ids, count_units
from megatron_stapo.config import AlgorithmConfig

CASE = json.loads((Path(__file__).parents[1] / "cases" / "aggregation.json").read_text())
SEQUENCES = [(s["loss"], s["mask"]) for s in CASE["sequences"]]
GROUP_SIZE = 4
MAX_RESPONSE_TOKENS = 12
SPLITS = {
    "one microbatch": [list(range(8))],
    "one sequence each": [[i] for i in range(8)],
    "the case's": CASE["wrong"]["split"],
    "out of order": [[7, 0], [5], [], [3, 6, 1], [2, 4]],
}


def aggregate(aggregation, sequences, split, group_size=GROUP_SIZE):
    """The loss of a mini-batch whose microbatches hold the sequences that split lists."""
    num_units = count_units(aggregation, len(sequences), group_size, len(split))
    counts_U = torch.zeros(num_units, dtype=torch.int64)
    microbatches = []
    for microbatch_id, members in enumerate(split):
        # A microbatch ends in two tokens of padding.
        losses = [x for i in members for x in sequences[i][0]] + [9.0, 9.0]
        mask = [x for i in members for x in sequences[i][1]] + [0, 0]
        ids = [i for i in members for _ in sequences[i][0]] + [-1, -1]
        mask_T = torch.tensor(mask).bool()
        ids_T = torch.tensor(ids)
        unit_ids_T = compute_unit_ids(aggregation, ids_T, group_size, microbatch_id)
        counts_U += unit_ids_T[mask_T].bincount(minlength=num_units)
        microbatches.append((torch.tensor(losses).double(), mask_T, unit_ids_T))
    total = 0.0
    for losses_T, mask_T, unit_ids_T in microbatches:
        weights_T = compute_loss_weights(
            aggregation, unit_ids_T, counts_U, len(sequences), MAX_RESPONSE_TOKENS
        )
        assert weights_T.dtype == torch.float32 and weights_T.isfinite().all()
        total += (weights_T * losses_T * mask_T).sum().item()
    return total / max(int(counts_U.sum()), 1)


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", CASE["expect"]["token_mean"]),
        ("prompt_mean", CASE["expect"]["per_group_mean"]),
        ("sequence_mean", CASE["expect"]["sequence_mean_over_nonempty"]),
        ("fixed_length", CASE["expect"]["loss_sum"] / (8 * MAX_RESPONSE_TOKENS)),
    ],
)
def test_means_of_the_shared_case_do_not_depend_on_the_split(aggregation, expected, split):
    assert aggregate(aggregation, SEQUENCES, split) == pytest.approx(expected, rel=1e-6)


def test_verls_mean_is_the_named_wrong_one_and_depends_on_the_split():
    wrong = CASE["wrong"]["mean_of_microbatch_means"]
    named = aggregate("verl_microbatch_mean", SEQUENCES, CASE["wrong"]["split"])
    assert named == pytest.approx(wrong, rel=1e-6)
    whole = aggregate("verl_microbatch_mean", SEQUENCES, SPLITS["one microbatch"])
    assert whole == pytest.approx(CASE["expect"]["token_mean"], rel=1e-6)
    single = aggregate("verl_microbatch_mean", SEQUENCES, SPLITS["one sequence each"])
    expected = CASE["expect"]["sequence_mean_over_nonempty"]
    assert single == pytest.approx(expected, rel=1e-6)


token = st.tuples(st.integers(-8, 8).map(float), st.integers(0, 1))
minibatches = st.lists(st.lists(token, max_size=6), min_size=4, max_size=4) | st.lists(
    st.lists(token, max_size=6), min_size=6, max_size=6
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(minibatches, st.integers(1, 5), st.randoms(use_true_random=False))
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "sequence_mean"])
def test_every_split_and_order_gives_the_mean_as_defined(aggregation, listed, num_parts, rng):
    sequences = [([x for x, _ in tokens], [m for _, m in tokens]) for tokens in listed]
    unit_of = {"token_mean": lambda i: 0, "prompt_mean": lambda i: i // 2}.get(
        aggregation, lambda i: i
    )
    units = {}
    for i, tokens in enumerate(listed):
        units.setdefault(unit_of(i), []).extend(x for x, m in tokens if m)
    means = [sum(unit) / len(unit) for unit in units.values() if unit]
    expected = sum(means) / max(len(means), 1)
    order = rng.sample(range(len(listed)), len(listed))
    split = [[] for _ in range(num_parts)]
    for i in order:
        split[rng.randrange(num_parts)].append(i)
    found = aggregate(aggregation, sequences, split, group_size=2)
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_a_token_mean_weighs_every_token_exactly_one():
    unit_ids_T = compute_unit_ids("token_mean", torch.tensor([0, 1, -1]), 2, 5)
    weights_T = compute_loss_weights("token_mean", unit_ids_T, torch.tensor([7]), 2, 12)
    assert weights_T.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("split", [SPLITS["one microbatch"], SPLITS["one sequence each"]])
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean", "sequence_mean"])
def test_without_a_trained_token_the_loss_is_zero(aggregation, split):
    masked = [(losses, [0] * len(losses)) for losses, _ in SEQUENCES]
    assert aggregate(aggregation, masked, split) == 0


def test_every_aggregation_of_the_config_is_known():
    with pytest.raises(ValueError, match="must be one of") as error:
        AlgorithmConfig(aggregation="other")
    for name in str(error.value).split("must be one of ")[1].rstrip(".").split(", "):
        assert count_units(name, num_sequences=8, group_size=4, num_microbatches=3) >= 1
