import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_stapo.ops.quantile import compute_order_statistic, compute_quantile

SETTINGS = settings(max_examples=60, deadline=None, derandomize=True)
floats = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)
populations = st.lists(floats | st.sampled_from([0.0, -0.0, 0.5]), min_size=1, max_size=50)
quantiles = st.sampled_from([0.0, 0.5, 0.75, 0.8, 1.0]) | st.floats(0, 1)


@SETTINGS
@given(populations, quantiles)
def test_quantile_is_numpys(values, q):
    expected = np.quantile(np.array(values, dtype=np.float64), q)
    found = compute_quantile(torch.tensor(values), q, None)
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12 * max(map(abs, values)))


@SETTINGS
@given(populations)
def test_order_statistics_are_those_of_the_sorted_values(values):
    values_N = torch.tensor(values)
    ordered = values_N.sort().values.tolist()
    assert [compute_order_statistic(values_N, i, None) for i in range(len(values))] == ordered


@SETTINGS
@given(populations, quantiles, st.randoms(use_true_random=False))
def test_the_order_does_not_change_a_bit(values, q, rng):
    shuffled = rng.sample(values, len(values))
    assert compute_quantile(torch.tensor(values), q, None) == compute_quantile(
        torch.tensor(shuffled), q, None
    )


@SETTINGS
@given(populations, st.integers(2, 5))
def test_repeating_the_population_keeps_the_ends_and_the_ties(values, times):
    values_N = torch.tensor(values)
    repeated_N = values_N.repeat(times)
    for q in (0.0, 1.0):
        assert compute_quantile(values_N, q, None) == compute_quantile(repeated_N, q, None)
    ties_N = values_N[:1].repeat(times)
    for q in (0.0, 0.3, 0.75, 1.0):
        assert compute_quantile(ties_N, q, None) == values_N[0].item()


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([0.4], 0.75, np.float32(0.4)),
        ([0.5, 0.5, 0.5, 0.5, 1.0], 0.75, 0.5),
        ([1.0, 2.0], 0.75, 1.75),
        ([-2.0, -1.0, 0.0], 0.25, -1.5),
        ([3.0, 1.0, 2.0], 0.5, 2.0),
    ],
)
def test_quantile_worked_by_hand(values, q, expected):
    assert compute_quantile(torch.tensor(values), q, None) == expected


def test_the_two_zeros_are_one_value():
    found = [compute_order_statistic(torch.tensor([0.0, -0.0]), i, None) for i in (0, 1)]
    assert [math.copysign(1, zero) for zero in found] == [1.0, 1.0]


def test_an_empty_population_lies_below_everything():
    assert compute_quantile(torch.tensor([]), 0.75, None) == -math.inf


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_is_refused(value):
    with pytest.raises(ValueError, match=r"1 of the population's 2 values .* indices \[1\]"):
        compute_quantile(torch.tensor([0.1, value]), 0.75, None)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_outside_the_population_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank={rank}"):
        compute_order_statistic(torch.tensor([1.0, 2.0, 3.0]), rank, None)


def test_a_population_above_2_to_the_24_is_counted_exactly():
    # torch.quantile refuses it, and float32 could not count it.
    num_values = 2**24 + 3
    values_N = torch.ones(num_values)
    values_N[: num_values // 2 + 1] = -1.0  # the middle one is the last of the low half
    assert compute_quantile(values_N, 0.5, None) == -1.0
    assert compute_order_statistic(values_N, num_values // 2 + 1, None) == 1.0


def build_population(size):
    return torch.rand(size, generator=torch.Generator().manual_seed(size)) - 0.3


def compute_on_shards(sizes, q, broken_rank=None):
    """One rank's part: quantile, extremes and the message of what failed."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    values = build_population(sum(sizes)).split(sizes)[rank]
    if rank == broken_rank:
        values = values.clone()
        values[0] = math.nan
    try:
        group = dist.group.WORLD
        result = [compute_quantile(values, q, group)]
        result += [compute_order_statistic(values, i, group) for i in (0, sum(sizes) - 1)]
        return result
    except ValueError as error:
        return str(error)
    finally:
        dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize("sizes", [[1000, 0, 17, 1], [0, 1, 0, 1], [0, 0, 0, 3]])
@pytest.mark.parametrize("q", [0.0, 0.75, 0.8, 1.0])
def test_shards_give_the_bits_of_the_whole(rank_pool, sizes, q):
    whole = build_population(sum(sizes))
    expected = [compute_quantile(whole, q, None), whole.min().item(), whole.max().item()]
    assert rank_pool.run(compute_on_shards, 4, sizes, q) == [expected] * 4


@pytest.mark.distributed
def test_every_rank_refuses_what_one_rank_holds(rank_pool):
    messages = rank_pool.run(compute_on_shards, 4, [3, 0, 2, 1], 0.75, 2)
    for rank, message in enumerate(messages):
        assert "1 of the population's 6 values are not finite" in message
        assert f"{int(rank == 2)} of them on this rank" in message
