from pathlib import Path

import pytest

import megatron_stapo.algorithms
from megatron_stapo.algorithms import ALGORITHMS
from megatron_stapo.config import AlgorithmConfig

# What a paper or its script publishes, written here by hand.
PUBLISHED = {
    "stapo": dict(
        token_mask="s2t",
        prob_threshold=0.002,
        entropy_quantile=0.75,
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=10.0,
        kl_coef=0.0,
        dynamic_sampling=False,
        overlong_buffer_tokens=0,
        num_prompts_per_minibatch=64,
        aggregation="token_mean",
        advantage="group_std",
    ),
    "stapo_v1": dict(token_mask="s2t_v1", entropy_quantile=0.8, prob_threshold=0.002),
    "grpo": dict(
        token_mask="none",
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        kl_coef=0.04,
        aggregation="sequence_mean",
        advantage="group_std",
    ),
    "dapo": dict(
        token_mask="none",
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=10.0,
        dynamic_sampling=True,
        max_sampling_rounds=10,
        overlong_buffer_tokens=4096,
        kl_coef=0.0,
        aggregation="token_mean",
    ),
    "justrl": dict(
        token_mask="none",
        clip_low=0.2,
        clip_high=0.28,
        dual_clip=10.0,
        dynamic_sampling=False,
        overlong_buffer_tokens=0,
        kl_coef=0.0,
        aggregation="token_mean",
    ),
    "justrl_fullmask": dict(token_mask="rare", prob_threshold=0.002, dynamic_sampling=False),
    "entropy20": dict(
        token_mask="top_entropy", entropy_quantile=0.8, clip_high=0.28, dynamic_sampling=True
    ),
    "dr_grpo": dict(
        token_mask="none",
        advantage="group_mean",
        aggregation="fixed_length",
        clip_low=0.2,
        clip_high=0.2,
        kl_coef=0.0,
    ),
    "gspo": dict(
        token_mask="none",
        policy_loss="gspo",
        clip_low=3e-4,
        clip_high=4e-4,
        aggregation="sequence_mean",
        kl_coef=0.0,
    ),
    "cispo": dict(token_mask="none", policy_loss="cispo", clip_low=1.0, kl_coef=0.0),
    "lopti": dict(
        token_mask="none",
        lopti_prob_threshold=0.4,
        clip_low=0.2,
        clip_high=0.24,
        dual_clip=10.0,
        kl_coef=0.001,
        advantage_reweighting=0.0,
    ),
    "advantage_reweighting": dict(
        token_mask="none",
        advantage_reweighting=0.2,
        lopti_prob_threshold=None,
        clip_low=0.2,
        clip_high=0.24,
        kl_coef=0.001,
    ),
    "clip_cov": dict(
        token_mask="none",
        policy_loss="clip_cov",
        clip_cov_frac=2e-4,
        clip_cov_min=1.0,
        clip_cov_max=5.0,
        clip_low=1.0,
        clip_high=1.0,
        dual_clip=10.0,
        dynamic_sampling=True,
    ),
    "mask_high_entropy": dict(token_mask="high_entropy", entropy_quantile=0.75),
    "mask_random": dict(token_mask="random", entropy_quantile=0.75),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_an_algorithm_has_its_published_settings(name):
    config = ALGORITHMS[name]()
    assert isinstance(config, AlgorithmConfig)
    for field, value in PUBLISHED[name].items():
        assert getattr(config, field) == value, field


def test_every_algorithm_has_a_file_of_its_name_and_published_settings():
    folder = Path(megatron_stapo.algorithms.__file__).parent
    files = {path.stem for path in folder.glob("*.py")} - {"__init__"}
    assert set(ALGORITHMS) == set(PUBLISHED) == files


@pytest.mark.parametrize("name", PUBLISHED)
def test_changes_win_over_the_defaults_and_are_checked(name):
    assert ALGORITHMS[name](num_prompts_per_minibatch=2).num_prompts_per_minibatch == 2
    assert ALGORITHMS[name](token_mask="s2t").token_mask == "s2t"
    with pytest.raises(ValueError, match=r"algorithm\.clip_low"):
        ALGORITHMS[name](clip_low=0.0)
    with pytest.raises(TypeError, match="clip_lower"):
        ALGORITHMS[name](clip_lower=0.1)
