import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stapo.algo.token_mask import (
    TOKEN_MASK_RULES,
    check_finite,
    compute_keys,
    compute_token_mask,
    compute_uniforms,
    select_tokens,
)
from megatron_stapo.config import AlgorithmConfig
from megatron_stapo.ops.quantile import compute_quantile

CASES = json.loads((Path(__file__).parents[1] / "cases" / "masks.json").read_text())["cases"]


def decide(rule_name, logprobs_T, entropy_T, advantages_T, mask_T, tau, q, uniforms_T=None):
    """The whole decision over one mini-batch: gate, threshold, tokens that keep."""
    rule = TOKEN_MASK_RULES[rule_name]
    streams = (logprobs_T, advantages_T, mask_T, tau)
    gate_T = select_tokens(rule.gate, *streams)
    uniforms_T = torch.zeros_like(entropy_T) if uniforms_T is None else uniforms_T
    keys_T = compute_keys(rule.key, entropy_T, uniforms_T)
    threshold = compute_quantile(keys_T[select_tokens(rule.population, *streams)], q, None)
    if rule_name == "rare":
        threshold = math.inf
    return gate_T, threshold, compute_token_mask(gate_T, keys_T, threshold)


def decide_s2t(case):
    mask_T = torch.tensor(case["response_mask"]).bool()
    gate_T, threshold, keep_T = decide(
        "s2t",
        torch.tensor(case["probs"], dtype=torch.float64).log().float(),
        torch.tensor(case["entropies"], dtype=torch.float32),
        torch.tensor(case["advantages"], dtype=torch.float32),
        mask_T,
        case["prob_threshold"],
        case["quantile"],
    )
    return gate_T, threshold, mask_T & keep_T


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_s2t_of_the_shared_cases(case):
    expected = case["expect"]
    gate_T, threshold, loss_mask_T = decide_s2t(case)
    assert gate_T.nonzero()[:, 0].tolist() == expected["candidates"]
    listed = expected["entropy_threshold"]
    assert threshold == pytest.approx(-math.inf if listed is None else listed, abs=1e-7)
    assert loss_mask_T.tolist() == expected["loss_mask"]
    assert loss_mask_T.sum() == expected["valid_tokens"]


def test_tau_zero_silences_nothing():
    case = dict(CASES[4], prob_threshold=0.0)
    gate_T, threshold, loss_mask_T = decide_s2t(case)
    assert not gate_T.any() and threshold == -math.inf and loss_mask_T.all()


@pytest.mark.parametrize("num_candidates", [1, 2, 3, 5, 8, 9, 280])
@pytest.mark.parametrize("rule", ["s2t", "high_entropy", "random"])
def test_share_silenced_of_distinct_candidates(rule, num_candidates):
    # Strictly below the order statistic at 0.75 (n - 1): ceil of that position many.
    generator = torch.Generator().manual_seed(num_candidates)
    entropy_T, uniforms_T = torch.rand(2, num_candidates, generator=generator)
    ones = torch.ones(num_candidates)
    _, _, keep_T = decide(rule, -9 * ones, entropy_T, ones, ones.bool(), 0.002, 0.75, uniforms_T)
    assert (~keep_T).sum() == math.ceil(0.75 * (num_candidates - 1))


# Five response tokens and one of the prompt; token 4 is common, token 3 has a negative advantage.
STREAMS = dict(
    logprobs_T=torch.tensor([-9.0, -9.0, -9.0, -9.0, -0.1, -9.0]),
    entropy_T=torch.tensor([0.1, 0.2, 0.3, 0.4, 0.0, 0.5]),
    advantages_T=torch.tensor([1.0, 1.0, 1.0, -1.0, 1.0, 1.0]),
    mask_T=torch.tensor([True, True, True, True, True, False]),
    tau=0.002,
    uniforms_T=torch.tensor([0.5, 0.9, 0.2, 0.1, 0.1, 0.1]),
)


# Silenced tokens and threshold at q = 0.5, worked by hand.
@pytest.mark.parametrize(
    ("rule", "silenced", "threshold"),
    [
        ("s2t", [0], 0.2),
        ("s2t_v1", [0], 0.2),
        ("rare", [0, 1, 2], math.inf),
        ("high_entropy", [2], -0.2),
        ("random", [2], 0.5),
        ("top_entropy", [0, 4], 0.2),
    ],
)
def test_every_rule_worked_by_hand(rule, silenced, threshold):
    _, found, keep_T = decide(rule, q=0.5, **STREAMS)
    assert (~keep_T).nonzero()[:, 0].tolist() == silenced
    assert found == pytest.approx(threshold)


def test_v1_takes_its_quantile_over_all_response_tokens():
    # At q = 0.75: of the entropies 0.1, 0.2, 0.3 it is 0.25; of 0, 0.1, 0.2, 0.3, 0.4 it is 0.3.
    assert decide("s2t", q=0.75, **STREAMS)[1] == pytest.approx(0.25)
    assert decide("s2t_v1", q=0.75, **STREAMS)[1] == pytest.approx(0.3)


def test_every_mask_of_the_config_has_a_rule():
    for name in TOKEN_MASK_RULES:
        AlgorithmConfig(token_mask=name)
    with pytest.raises(ValueError, match="must be one of") as error:
        AlgorithmConfig(token_mask="other")
    options = str(error.value).split("must be one of ")[1].rstrip(".").split(", ")
    assert set(options) == {"none", *TOKEN_MASK_RULES}


tokens = st.lists(
    st.tuples(
        st.sampled_from([1e-5, 1e-3, 0.0019, 0.002, 0.3]),
        st.floats(0, 4, width=32),
        st.sampled_from([-1.0, 0.0, 0.5]),
        st.booleans(),
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tokens, st.sampled_from([0.0, 0.5, 0.75, 1.0]), st.randoms(use_true_random=False))
def test_s2t_is_the_formula_and_does_not_depend_on_the_order(listed, q, rng):
    def run(listed):
        columns = list(zip(*listed, strict=True)) or [[]] * 4
        probs, entropies, advantages, mask = (torch.tensor(column) for column in columns)
        streams = (probs.double().log().float(), entropies.float(), advantages, mask.bool())
        return decide("s2t", *streams, 0.002, q)

    gate_T, threshold, keep_T = run(listed)
    for (prob, entropy, advantage, sampled), keep in zip(listed, keep_T.tolist(), strict=True):
        spurious = sampled and advantage > 0 and prob < 0.002 and entropy < threshold
        assert keep is not spurious
    assert (~keep_T).sum() <= math.ceil(q * max(int(gate_T.sum()) - 1, 0))
    order = rng.sample(range(len(listed)), len(listed))
    _, other_threshold, other_keep_T = run([listed[i] for i in order])
    assert other_threshold == threshold
    assert other_keep_T.tolist() == keep_T[order].tolist()


@pytest.mark.parametrize("advantages", [[0.0] * 6, [-1.0] * 6])
@pytest.mark.parametrize("rule", ["s2t", "s2t_v1", "rare", "high_entropy", "random"])
def test_groups_without_a_better_response_lose_nothing(rule, advantages):
    # All correct and all wrong make advantages of 0.
    streams = STREAMS | dict(advantages_T=torch.tensor(advantages))
    gate_T, _, keep_T = decide(rule, q=0.75, **streams)
    assert not gate_T.any() and keep_T.all()


def test_streams_of_different_length_are_refused():
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\)"):
        compute_token_mask(torch.ones(3).bool(), torch.zeros(2), 0.5)
    with pytest.raises(ValueError, match=r"\(3,\) and \(2,\)"):
        compute_keys("entropy", torch.zeros(3), torch.zeros(2))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_broken_value_is_refused_with_its_token(value):
    values = torch.tensor([0.1, value, 0.2, value])
    mask = torch.tensor([True, True, True, False])
    sequence_ids, position_ids = torch.tensor([7, 7, 8, 8]), torch.tensor([30, 31, 0, 1])
    with pytest.raises(ValueError) as error:
        check_finite("entropy", values, mask, sequence_ids, position_ids)
    assert str(error.value).startswith(
        f"entropy of 1 tokens is not finite: {value} at sequence 7, position 31. "
    )


def test_a_broken_value_outside_the_responses_is_no_error():
    ids = torch.zeros(2, dtype=torch.int64)
    check_finite("logprobs", torch.tensor([math.nan, -1.0]), torch.tensor([False, True]), ids, ids)


def splitmix64(state, steps):
    """Published constants, in Python's own integers."""
    z = (state + steps * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return z ^ (z >> 31)


def test_splitmix64_has_its_published_first_output():
    assert splitmix64(0, 1) == 0xE220A8397B1DCDAF


def test_uniforms_equal_those_of_unbounded_integers():
    coordinates = [(3, 2**40, 0), (0, 0, 5), (1, 12345, 15359)]
    for seed, sequence_id, position_id in coordinates:
        state = 0
        for coordinate in (seed, 17, sequence_id, position_id):
            state = splitmix64(state, coordinate + 1)
        found = compute_uniforms(seed, 17, torch.tensor([sequence_id]), torch.tensor([position_id]))
        assert found.item() == (state >> 40) / 2**24


def draw(seed, update, num_sequences=64, num_positions=1024):
    sequence_ids = torch.arange(num_sequences).repeat_interleave(num_positions)
    position_ids = torch.arange(num_positions).repeat(num_sequences)
    return compute_uniforms(seed, update, sequence_ids, position_ids)


@pytest.mark.parametrize("update", [0, 1, 1000])
def test_uniforms_are_uniform_and_uncorrelated(update):
    uniforms = draw(seed=0, update=update).double()
    assert uniforms.min() >= 0 and uniforms.max() < 1
    counts = uniforms.mul(64).long().bincount(minlength=64).double()
    expected = len(uniforms) / 64
    # chi-squared with 63 degrees of freedom: 120 is beyond the 1 - 1e-5 quantile
    assert ((counts - expected) ** 2 / expected).sum() < 120
    table = uniforms.view(64, 1024)
    pairs = {
        "next position": (table[:, :-1], table[:, 1:]),
        "next sequence": (table[:-1], table[1:]),
        "next update": (table, draw(0, update + 1).double().view(64, 1024)),
        "next seed": (table, draw(1, update).double().view(64, 1024)),
    }
    for name, (x, y) in pairs.items():
        correlation = torch.corrcoef(torch.stack([x.flatten(), y.flatten()]))[0, 1]
        assert abs(correlation) < 5 / len(uniforms) ** 0.5, name


def test_uniforms_depend_on_a_tokens_coordinates_alone():
    sequence_ids, position_ids = torch.arange(12) // 4, torch.arange(12) % 4
    uniforms = compute_uniforms(1, 2, sequence_ids, position_ids)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))[:7]
    assert torch.equal(
        compute_uniforms(1, 2, sequence_ids[order], position_ids[order]), uniforms[order]
    )
    assert len(set(uniforms.tolist())) == 12
