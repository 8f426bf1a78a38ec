import re

import pytest

from megatron_stapo.config import Config, DataConfig, ModelConfig, ParallelConfig
from megatron_stapo.recipe import apply_overrides, list_recipes, load_recipe

RECIPE = """
from megatron_stapo.config import Config, DataConfig, ModelConfig, ParallelConfig

def {name}():
    return {value}
"""


@pytest.fixture
def config():
    return Config(
        name="base",
        num_steps=2,
        model=ModelConfig(path="model"),
        parallel=ParallelConfig(device="cpu"),
        data=DataConfig(source="train.jsonl"),
    )


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("num_steps=3", 3),
        ("optimizer.lr=2e-4", 2e-4),
        ("optimizer.eps=1", 1.0),
        ("parallel.sequence_parallel=False", False),
        ("model.dtype=float32", "float32"),
        ("model.path=a=b", "a=b"),
        ("data.prompt_suffix=", ""),
        ("rollout.kv_cache_bytes=1024", 1024),
        ("rollout.kv_cache_bytes=none", None),
        ("algorithm.dual_clip=None", None),
        ("algorithm.dual_clip=3", 3.0),
        ("evaluation.benchmarks=aime24,own=a.jsonl?answer=b", ("aime24", "own=a.jsonl?answer=b")),
        ("evaluation.benchmarks=", ()),
        ("reward.verifier_url=http://a:1", "http://a:1"),
    ],
)
def test_an_override_has_the_type_of_its_field(config, override, value):
    result = apply_overrides(config, [override])
    for name in override.partition("=")[0].split("."):
        result = getattr(result, name)
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_steps=1.5", "num_steps=1.5: must be an integer."),
        ("optimizer.lr=fast", "optimizer.lr=fast: must be a number."),
        ("optimizer.lr=inf", "optimizer.lr=inf: must be finite."),
        ("rollout.kv_cache_bytes=all", "rollout.kv_cache_bytes=all: must be an integer, or none."),
        (
            "parallel.sequence_parallel=1",
            "parallel.sequence_parallel=1: must be true or false.",
        ),
        ("model.dtype=half", "model.dtype=half: must be one of float32, bfloat16."),
        ("seed=none", "seed=none: must be an integer."),
        ("seed", "seed: an override is group.field=value."),
        ("model=x", "no field model. Did you mean model.path or model.dtype?"),
        ("lr=1", "no field lr. Did you mean optimizer.lr?"),
        ("rollout.lr=1", "no field rollout.lr. Did you mean optimizer.lr?"),
        ("optimiser.lr=1", "no field optimiser.lr. Did you mean optimizer.lr?"),
        ("num_step=1", "no field num_step. Did you mean num_steps?"),
        (
            "a.b=1",
            "no field a.b. Fields and groups: algorithm, checkpoint, cluster, data, evaluation,",
        ),
        # Refused by the config itself, with the other fields in view.
        ("rollout.group_size=1", "rollout.group_size=1: the advantage divides"),
        ("rollout.num_prompts_per_step=100", "must divide rollout.num_prompts_per_step=100"),
    ],
)
def test_a_bad_override_is_refused_by_field_value_and_rule(config, override, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        apply_overrides(config, [override])


def test_a_field_given_twice_is_refused(config):
    with pytest.raises(ValueError, match=re.escape("seed=2: seed is given twice")):
        apply_overrides(config, ["seed=1", "seed=2"])


def test_overrides_are_checked_together_whatever_their_order(config):
    overrides = ["rollout.num_prompts_per_step=6", "algorithm.num_prompts_per_minibatch=3"]
    assert apply_overrides(config, overrides) == apply_overrides(config, overrides[::-1])


def test_a_new_name_moves_a_derived_run_folder_and_no_other(config):
    assert apply_overrides(config, ["name=other"]).run_dir == "runs/other"
    chosen = apply_overrides(config, ["run_dir=here"])
    assert apply_overrides(chosen, ["name=other"]).run_dir == "here"


def test_every_listed_recipe_returns_a_config():
    assert "tiny_stapo" in list_recipes()
    for name in list_recipes():
        assert isinstance(load_recipe(name), Config)


def test_an_unknown_recipe_lists_the_closest_and_all_names():
    with pytest.raises(ValueError, match=r"unknown\. Did you mean tiny_stapo") as error:
        load_recipe("tiny_staop")
    assert all(name in str(error.value) for name in list_recipes())


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("other", "None", "has no function mine"),
        ("mine", "3", r"mine\(\) returned int, not a Config"),
    ],
)
def test_a_recipe_file_without_its_function_is_refused(tmp_path, name, value, message):
    path = tmp_path / "mine.py"
    path.write_text(RECIPE.format(name=name, value=value))
    with pytest.raises(ValueError, match=message):
        load_recipe(str(path))


def test_a_recipe_file_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.py: no such file"):
        load_recipe(str(tmp_path / "nowhere.py"))


def test_an_algorithm_is_taken_by_name_and_then_changed():
    config = load_recipe("tiny_stapo")
    changed = apply_overrides(config, ["algorithm.clip_high=0.3", "algorithm=gspo"])
    assert changed.algorithm.policy_loss == "gspo"
    assert changed.algorithm.clip_high == 0.3
    assert changed.algorithm.clip_low == 3e-4
    size = config.algorithm.num_prompts_per_minibatch
    assert changed.algorithm.num_prompts_per_minibatch == size
    with pytest.raises(ValueError, match=r"algorithm=gsop: unknown. Did you mean gspo"):
        apply_overrides(config, ["algorithm=gsop"])
    with pytest.raises(ValueError, match="given twice"):
        apply_overrides(config, ["algorithm=gspo", "algorithm=grpo"])
    with pytest.raises(ValueError, match=r"overlong_buffer_tokens=4096: exceeds"):
        apply_overrides(config, ["algorithm=dapo"])
