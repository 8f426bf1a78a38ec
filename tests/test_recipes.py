"""Every recipe of a published model: it is checked, it fits, and it is what its comments say."""

import dataclasses
import re
from functools import cache
from pathlib import Path

import pytest

from megatron_stapo.algorithms import ALGORITHMS
from megatron_stapo.config import check_model_layout, find_model_json
from megatron_stapo.evaluation.paper import SIX_BENCHMARKS
from megatron_stapo.plan import build_plan
from megatron_stapo.plan.accelerators import GIB
from megatron_stapo.recipe import list_recipes, load_recipe

ALL = [name for name in list_recipes() if load_recipe(name).parallel.device == "cuda"]
LARGE = [name for name in ALL if not name.endswith("_fp8")]
PAPER = [name for name in LARGE if re.match(r"qwen3_(1_7b|8b|14b)_", name)]
plan_recipe = cache(lambda name: build_plan(load_recipe(name)))
DOCS = Path(__file__).parents[1] / "docs/plan.md"


def format_row(name):
    """A recipe's row of the table in docs/plan.md."""
    plan = plan_recipe(name)
    parallel, rollout = plan.problem.config.parallel, plan.problem.config.rollout
    sizes = {
        "TP": parallel.tensor_model_parallel_size,
        "PP": parallel.pipeline_model_parallel_size,
        "CP": parallel.context_parallel_size,
        "DP": parallel.data_parallel_size,
        "EP": parallel.expert_model_parallel_size,
    }
    layout = " ".join(f"{key}{size}" for key, size in sizes.items() if size > 1)
    stages = f" PP{rollout.pipeline_parallel_size}" if rollout.pipeline_parallel_size > 1 else ""
    phases = plan.estimate.phases
    train = plan.estimate.total - phases["rollout"] - phases["sync"]
    return (
        f"| {name} | {plan.num_trainer_gpus}: {layout} | {plan.num_engine_gpus}: "
        f"{rollout.num_engines} x TP{rollout.tensor_parallel_size}{stages} | "
        f"{plan.estimate.trainer.memory.total / GIB:.0f} | {phases['rollout']:.0f} + {train:.0f} + "
        f"{phases['sync']:.1f} | {plan.run_days:.1f} |"
    )


def test_all_sizes_and_algorithms_are_there():
    sizes = ("1_7b", "8b", "14b")
    names = {f"qwen3_{s}_{a}" for s in sizes for a in ("stapo", "justrl", "grpo", "entropy20")}
    assert set(PAPER) == names
    assert set(ALL) == {*LARGE, *(f"{name}_fp8" for name in LARGE)}
    assert set(LARGE) == names | {f"qwen3_{s}_stapo" for s in ("32b", "30b_a3b", "235b_a22b")}


@pytest.mark.parametrize("name", LARGE)
def test_a_recipe_fits_and_is_within_a_twentieth_of_the_fastest_layout(name):
    config = load_recipe(name)
    assert config.name == name
    assert config.run_dir == f"runs/{name}"
    check_model_layout(config, find_model_json(config.model.path))
    plan = plan_recipe(name)
    assert plan.warnings == []
    assert plan.estimate.total <= 1.05 * plan.layouts[0].total
    nodes = config.cluster.num_gpus_per_node
    assert plan.num_trainer_gpus % nodes == plan.num_engine_gpus % nodes == 0


@pytest.mark.parametrize("name", [name for name in LARGE if name.endswith("_stapo")])
def test_a_recipe_says_how_long_a_step_takes(name):
    module = __import__(f"recipes.{name}", fromlist=[name])
    (seconds,) = re.findall(r"About (\d+) s per step in the plan", getattr(module, name).__doc__)
    assert int(seconds) == pytest.approx(plan_recipe(name).estimate.total, rel=0.01)


@pytest.mark.parametrize("name", PAPER)
def test_a_papers_run_has_the_settings_of_its_table_3(name):
    config = load_recipe(name)
    size = {"1_7b": "1.7B", "8b": "8B", "14b": "14B"}[re.findall(r"qwen3_(\w+?b)_", name)[0]]
    assert config.model.path.endswith(f"Qwen3-{size}-Base")
    assert config.data.source == "hub:BytedTsinghua-SIA/DAPO-Math-17k"
    assert config.data.prompt_suffix.endswith(
        "Please reason step by step, and put your final answer within \\boxed{}."
    )
    rollout, algorithm, optimizer = config.rollout, config.algorithm, config.optimizer
    assert (rollout.num_prompts_per_step, rollout.group_size) == (256, 8)
    assert (config.data.max_prompt_tokens, rollout.max_response_tokens) == (1024, 15 * 1024)
    assert algorithm.num_prompts_per_minibatch == 64
    assert rollout.temperature == 1.0
    assert not algorithm.dynamic_sampling
    assert (optimizer.lr, optimizer.num_warmup_steps) == (1e-6, 10)
    assert optimizer.max_grad_norm == 1.0
    evaluation = config.evaluation
    assert evaluation.benchmarks == SIX_BENCHMARKS
    assert evaluation.num_samples is None  # the paper's 32 and 4
    assert (evaluation.interval_steps, evaluation.max_response_tokens) == (20, 20_480)
    assert config.cluster.accelerator == "h20"
    num_engine_gpus = rollout.num_engines * rollout.num_engine_ranks
    assert config.parallel.world_size + num_engine_gpus == 64
    if name.endswith("_stapo"):
        assert (algorithm.token_mask, algorithm.prob_threshold) == ("s2t", 0.002)
        assert algorithm.entropy_quantile == 0.75
        assert (algorithm.clip_low, algorithm.clip_high) == (0.2, 0.28)
        assert algorithm.kl_coef == 0.0


@pytest.mark.parametrize("name", [name for name in PAPER if not name.endswith("_stapo")])
def test_a_baseline_differs_in_the_algorithm_alone(name):
    config = load_recipe(name)
    base, _, algorithm = name.rpartition("_")
    stapo = load_recipe(f"{base}_stapo")
    assert dataclasses.replace(
        config, name=stapo.name, run_dir="", algorithm=stapo.algorithm
    ) == dataclasses.replace(stapo, run_dir="")
    published = ALGORITHMS[algorithm]()
    assert config.algorithm == dataclasses.replace(published, dynamic_sampling=False)


@pytest.mark.parametrize("name", LARGE)
def test_a_variant_in_fp8_is_the_same_run_and_faster(name):
    config, other = load_recipe(f"{name}_fp8"), load_recipe(name)
    assert (config.name, config.run_dir) == (f"{name}_fp8", f"runs/{name}_fp8")
    assert (config.precision.fp8, config.rollout.quantization) == ("blockwise", "fp8")
    assert other == dataclasses.replace(
        config,
        name=name,
        run_dir=other.run_dir,
        precision=other.precision,
        rollout=dataclasses.replace(config.rollout, quantization="none"),
    )
    assert build_plan(config).estimate.total < plan_recipe(name).estimate.total


@pytest.mark.parametrize("name", LARGE)
def test_the_documented_plan_is_the_recipes(name):
    assert format_row(name) in DOCS.read_text()
