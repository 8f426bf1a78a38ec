import dataclasses
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from megatron_stapo.config import (
    CheckpointConfig,
    Config,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
    check_engine_layout,
    check_model_layout,
    from_dict,
    list_changes,
    load_model_json,
    to_dict,
)
from tests.workers import build_config


def test_a_config_survives_json(tmp_path):
    config = build_config(tmp_path, evaluation__benchmarks=("aime24", "own=PATH"))
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_what_is_sampled_ahead_is_corrected_unless_another_bound_is_named(tmp_path):
    def find_weight(**changes):
        return build_config(tmp_path, **changes).algorithm.tis_max_weight

    assert find_weight() is None
    assert find_weight(rollout__max_lag_steps=1) == 2.0
    assert find_weight(rollout__max_lag_steps=1, algorithm__tis_max_weight=5.0) == 5.0
    config = build_config(tmp_path, rollout__max_lag_steps=1)
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    assert [change.split(":")[0] for change in list_changes(build_config(tmp_path), config)] == [
        "rollout.max_lag_steps",
        "algorithm.tis_max_weight",
    ]


@pytest.mark.parametrize(
    ("group", "field", "value", "message"),
    [
        ("rollout", "group_size", 1, r"rollout.group_size=1: .* at least 2 responses"),
        (
            "rollout",
            "engine",
            "sglang",
            r"rollout.engine=sglang: must be one of vllm, transformers",
        ),
        ("rollout", "max_lag_steps", 2, r"rollout.max_lag_steps=2: must be 0 or 1"),
        ("rollout", "max_engine_restarts", -1, r"rollout.max_engine_restarts=-1: must be >= 0"),
        ("rollout", "health_timeout_s", 0.0, r"rollout.health_timeout_s=0.0: must be > 0"),
        ("model", "dtype", "float16", r"model.dtype=float16"),
        ("evaluation", "top_p", 0.0, r"evaluation.top_p=0.0: must be in \(0, 1\]"),
        ("evaluation", "num_samples", 0, r"evaluation.num_samples=0: must be >= 1, or None"),
        ("evaluation", "interval_steps", 5, r"interval_steps=5: has no effect without eval"),
        ("parallel", "sequence_parallel", True, r"has no effect with tensor_model_parallel_size=1"),
        (
            "algorithm",
            "entropy_quantile",
            75,
            r"algorithm.entropy_quantile=75: must be in \[0, 1\]",
        ),
        ("algorithm", "prob_threshold", -0.1, r"algorithm.prob_threshold=-0.1"),
        (
            "algorithm",
            "num_prompts_per_minibatch",
            3,
            r"must divide rollout.num_prompts_per_step=4",
        ),
        ("data", "max_microbatch_tokens", 10, r"must hold a rank's part of the longest sequence"),
        ("optimizer", "lr", 0.0, r"optimizer.lr=0.0"),
        ("optimizer", "max_skipped_in_a_row", 0, r"max_skipped_in_a_row=0: must be >= 1"),
        ("checkpoint", "interval_steps", 0, r"checkpoint.interval_steps=0: must be >= 1"),
        ("checkpoint", "keep_last", 0, r"checkpoint.keep_last=0: must be >= 1"),
        ("checkpoint", "keep_best", -1, r"checkpoint.keep_best=-1: must be >= 0"),
        ("checkpoint", "stop_timeout_s", 0.0, r"checkpoint.stop_timeout_s=0.0: must be > 0"),
        ("parallel", "virtual_pipeline_model_parallel_size", 2, r"has no effect"),
        ("parallel", "recompute", "half", r"must be none, selective or full"),
        ("parallel", "expert_model_parallel_size", 2, r"must divide the 1 ranks"),
        ("algorithm", "policy_loss", "gspo", r"dual_clip=10.0: has no effect with .*gspo"),
        ("algorithm", "overlong_buffer_tokens", 41, r"exceeds .*=40; set a part"),
        ("precision", "fp8", "delayed", r"must be one of none, tensorwise, blockwise, mxfp8"),
        ("precision", "fp8", "blockwise", r"precision.fp8=blockwise: .*device=cpu nothing would"),
        ("precision", "num_last_layers_bf16", 2, r"has no effect with precision.fp8=none"),
        ("precision", "num_first_layers_bf16", -1, r"precision.num_first_layers_bf16=-1"),
        ("precision", "match_engine", False, r"match_engine=False: .*no fused kernels"),
        ("precision", "max_logprob_gap", 0.0, r"precision.max_logprob_gap=0.0: must be > 0 nats"),
        ("rollout", "quantization", "int8", r"rollout.quantization=int8: must be one of none, fp8"),
        ("rollout", "quantization", "fp8", r"needs model.dtype=bfloat16, not float32"),
    ],
)
def test_a_bad_value_is_refused_by_field_value_and_rule(tmp_path, group, field, value, message):
    with pytest.raises(ValueError, match=message):
        build_config(tmp_path, **{f"{group}__{field}": value})


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        # The tiny model has 8 heads, 4 KV heads, 96 tokens, 80 MLP columns and 4 layers.
        (
            (3, 1),
            r"tensor_model_parallel_size=3: does not divide .* 8 attention heads; .*\[1, 2, 4",
        ),
        ((8, 1), r"tensor_model_parallel_size=8: does not divide the model's 4 KV heads"),
        ((1, 3), r"pipeline_model_parallel_size=3: .* 4 layers; use one of \[1, 2, 4\]"),
    ],
)
def test_a_layout_that_does_not_divide_the_model_is_refused(tiny_models, sizes, message):
    config = build_config(
        tiny_models["tied"],
        parallel__tensor_model_parallel_size=sizes[0],
        parallel__pipeline_model_parallel_size=sizes[1],
    )
    with pytest.raises(ValueError, match=message):
        check_model_layout(config)


def test_a_vocabulary_that_does_not_divide_is_refused(tiny_models, tmp_path):
    model_json = json.loads((tiny_models["tied"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(model_json | {"vocab_size": 97}))
    config = build_config(tmp_path, parallel__tensor_model_parallel_size=2)
    with pytest.raises(ValueError, match="=2: does not divide the model's 97 vocabulary entries"):
        check_model_layout(config)


def test_a_folder_without_config_json_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model.path=.*has no config.json.*make base"):
        check_model_layout(build_config(tmp_path))


def test_another_model_family_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ValueError, match="model_type='llama'; only qwen3"):
        check_model_layout(build_config(tmp_path))


def test_responses_beyond_the_models_positions_are_refused(tiny_models):
    config = build_config(
        tiny_models["tied"], rollout__max_response_tokens=250, data__max_microbatch_tokens=1000
    )
    with pytest.raises(ValueError, match="max_position_embeddings=256; use at most 236"):
        check_model_layout(config)


@pytest.mark.parametrize("check", [check_model_layout, check_engine_layout])
def test_an_engine_of_two_stages_is_refused_on_a_cpu_alone(tiny_models, check):
    config = build_config(tiny_models["tied"], rollout__pipeline_parallel_size=2)
    with pytest.raises(ValueError, match=r"rollout.pipeline_parallel_size=2: .*use 1"):
        check(config)
    check(replace(config, parallel=replace(config.parallel, device="cuda")))


def test_defaults_are_the_papers(tmp_path):
    config = build_config(tmp_path)
    paper = Config(
        name="paper",
        num_steps=1,
        model=ModelConfig(path="m"),
        parallel=ParallelConfig(),
        data=replace(config.data, max_microbatch_tokens=32768, max_prompt_tokens=1024),
    )
    assert (paper.algorithm.prob_threshold, paper.algorithm.entropy_quantile) == (0.002, 0.75)
    assert (paper.algorithm.clip_low, paper.algorithm.clip_high) == (0.2, 0.28)
    assert (paper.rollout.num_prompts_per_step, paper.rollout.group_size) == (256, 8)
    assert (paper.optimizer.lr, paper.optimizer.num_warmup_steps) == (1e-6, 10)
    assert RolloutConfig().max_response_tokens == 15 * 1024
    assert paper.algorithm.num_prompts_per_minibatch == 64


@pytest.mark.parametrize("module", ["megatron_stapo", "megatron_stapo.config"])
def test_import_is_light(module):
    script = f"import sys, {module}; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "[]\n"


def test_bounds_that_leave_no_sequence_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"sequence_mask_max=1.0: must exceed sequence_mask_min=2"):
        build_config(tmp_path, algorithm__sequence_mask_min=2.0, algorithm__sequence_mask_max=1.0)


def test_a_seed_beyond_64_bits_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"seed=\d+: must be in \[0, 2\^63\)"):
        dataclasses.replace(build_config(tmp_path), seed=2**63)


def test_quadrants_need_the_loss_whose_gradient_they_measure(tmp_path):
    config = build_config(tmp_path, algorithm__policy_loss="gspo", algorithm__dual_clip=None)
    with pytest.raises(ValueError, match=r"log_quadrants=True: needs .* policy_loss=clip"):
        dataclasses.replace(config, log_quadrants=True)


def test_a_resumed_run_may_change_how_it_runs_and_not_what_it_learns(tmp_path):
    old = build_config(tmp_path)
    free = replace(
        old,
        num_steps=old.num_steps + 1,
        parallel=replace(old.parallel, data_parallel_size=4),
        rollout=replace(old.rollout, engine="transformers"),
        checkpoint=CheckpointConfig(interval_steps=3),
    )
    assert list_changes(old, free) == []
    other = replace(free, seed=5, optimizer=replace(old.optimizer, lr=3e-6))
    assert sorted(list_changes(old, other)) == ["optimizer.lr: 0.001 -> 3e-06", "seed: 0 -> 5"]


CUDA = {"parallel__device": "cuda", "model__dtype": "bfloat16"}


@pytest.mark.parametrize("accelerator", ["h20", "h20_141", "h100", "h200"])
def test_mxfp8_is_refused_where_the_device_has_none(tmp_path, accelerator):
    changes = {**CUDA, "precision__fp8": "mxfp8"}
    message = rf"precision.fp8=mxfp8: cluster.accelerator={accelerator} has no MXFP8.*use blockwise"
    with pytest.raises(ValueError, match=message):
        build_config(tmp_path, **changes, cluster__accelerator=accelerator)
    build_config(tmp_path, **changes, cluster__accelerator="b200")


def test_fp8_needs_bf16_weights(tmp_path):
    with pytest.raises(ValueError, match=r"fp8=tensorwise: needs model.dtype=bfloat16, not float3"):
        build_config(tmp_path, **{**CUDA, "model__dtype": "float32"}, precision__fp8="tensorwise")


def test_changes_alone_are_for_engines_in_processes_of_their_own(tmp_path):
    with pytest.raises(ValueError, match=r"reshard.delta=True: .*rollout.engine=transformers"):
        build_config(tmp_path, rollout__engine="transformers", reshard__delta=True)


def test_the_transformers_engine_has_no_fp8(tmp_path):
    with pytest.raises(ValueError, match=r"quantization=fp8: the transformers engine has none"):
        build_config(tmp_path, **CUDA, rollout__engine="transformers", rollout__quantization="fp8")


@pytest.mark.parametrize(
    ("fp8", "changes", "message"),
    [
        # 4 layers, 8 heads and 4 KV heads of 16, hidden 48, MLP 80.
        ("tensorwise", {"precision__num_first_layers_bf16": 3}, r"bf16=3: with .*=1 leaves none"),
        (
            "tensorwise",
            {"precision__num_last_layers_bf16": 2, "parallel__pipeline_model_parallel_size": 4},
            r"precision.num_last_layers_bf16=2: Megatron takes at most .*=1",
        ),
        (
            "blockwise",
            {"parallel__tensor_model_parallel_size": 2},
            r"precision.fp8=blockwise: needs a multiple of 16, and intermediate_size / .*=40 is no",
        ),
        ("mxfp8", {"cluster__accelerator": "b200"}, r"multiple of 32, and hidden_size=48 is none"),
    ],
)
def test_fp8_that_the_model_cannot_take_is_refused(tiny_models, fp8, changes, message):
    config = build_config(tiny_models["tied"], **CUDA, precision__fp8=fp8, **changes)
    with pytest.raises(ValueError, match=message):
        check_model_layout(config)


def test_an_engine_that_cannot_cut_an_expert_is_refused(tiny_models):
    config = build_config(tiny_models["experts"], rollout__tensor_parallel_size=4)
    check_model_layout(config)
    model_json = load_model_json(config.model.path) | {"moe_intermediate_size": 30}
    with pytest.raises(ValueError, match=r"rollout.tensor_parallel_size=4: .* 30 columns of an ex"):
        check_model_layout(config, model_json)


def test_an_expert_is_not_cut_by_tensor_parallelism(tiny_models):
    config = build_config(tiny_models["experts"], **CUDA, precision__fp8="blockwise")
    with pytest.raises(ValueError, match=r"moe_intermediate_size=24 is none"):
        check_model_layout(config)
