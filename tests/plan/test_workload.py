import dataclasses
import re
from statistics import fmean

import pytest

from megatron_stapo.algorithms import grpo, justrl, lopti, stapo
from megatron_stapo.plan.workload import (
    build_evaluation_workload,
    build_workload,
    sample_response_lengths,
)
from megatron_stapo.recipe import load_recipe


def build(algorithm):
    config = dataclasses.replace(load_recipe("qwen3_14b_stapo"), algorithm=algorithm)
    return build_workload(config, 7300)


@pytest.mark.parametrize(("mean", "longest"), [(1, 1), (100, 15360), (7300, 15360), (15000, 15360)])
def test_lengths_have_the_mean_and_the_cut(mean, longest):
    lengths = sample_response_lengths(mean, longest)
    assert fmean(lengths) == pytest.approx(mean, rel=0.01)
    assert 1 <= min(lengths) <= max(lengths) <= longest
    assert list(lengths) == sorted(lengths)


def test_lengths_vary_by_four_fifths_where_the_cut_is_far():
    lengths = sample_response_lengths(1000, 1_000_000)
    variance = fmean((n - 1000) ** 2 for n in lengths)
    assert variance**0.5 / 1000 == pytest.approx(0.8, rel=0.05)


@pytest.mark.parametrize("mean", [0.5, 101])
def test_a_mean_beyond_the_longest_is_refused(mean):
    message = f"mean_response_tokens={mean:g}: must be in [1, 100], the longest response."
    with pytest.raises(ValueError, match=re.escape(message)):
        sample_response_lengths(mean, 100)


def test_statistics_are_computed_before_three_of_four_updates():
    assert build(stapo()).num_statistics_passes == 3 / 4
    assert build(justrl()).num_statistics_passes == 0


def test_lopti_updates_twice_per_minibatch():
    workload = build(lopti())
    assert workload.num_update_passes == 2
    masked = build(lopti(token_mask="s2t"))
    # Seven of the eight updates.
    assert masked.num_statistics_passes == 7 / 4


def test_a_kl_term_takes_a_pass_of_the_reference():
    assert build(grpo()).num_reference_passes == 1
    assert build(grpo(kl_coef=0.0)).num_reference_passes == 0


def test_an_evaluation_samples_the_papers_numbers():
    config = load_recipe("qwen3_14b_stapo")
    workload = build_evaluation_workload(config, 7300)
    assert workload.num_prompts == 30 + 30 + 40 + 500 + 272 + 674
    assert workload.num_sequences == 32 * (30 + 30 + 40) + 4 * (500 + 272 + 674)
    few = dataclasses.replace(config.evaluation, num_problems=10, num_samples=2)
    workload = build_evaluation_workload(dataclasses.replace(config, evaluation=few), 7300)
    assert (workload.num_prompts, workload.num_sequences) == (60, 120)


@pytest.mark.parametrize("benchmarks", [(), ("aime24", "own=a.jsonl")])
def test_an_evaluation_of_unknown_size_has_no_workload(benchmarks):
    config = load_recipe("qwen3_14b_stapo")
    evaluation = dataclasses.replace(config.evaluation, benchmarks=benchmarks, interval_steps=None)
    assert build_evaluation_workload(dataclasses.replace(config, evaluation=evaluation), 1) is None
