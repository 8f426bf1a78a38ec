import dataclasses
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from megatron_stapo.cli import main
from megatron_stapo.config import ClusterConfig, check_model_layout, find_model_json
from megatron_stapo.plan import build_plan, format_plan
from megatron_stapo.plan.plan import list_overrides
from megatron_stapo.recipe import apply_overrides, load_recipe

ROOT = Path(__file__).parents[2]


def change(*overrides):
    return apply_overrides(load_recipe("qwen3_14b_stapo"), overrides)


def test_the_command_needs_no_torch_gpu_model_or_data_and_is_quick_for_235b(tmp_path):
    command = (
        "import sys; from megatron_stapo.cli import main;"
        "code = main(['plan', 'qwen3_235b_a22b_stapo', 'parallel.data_parallel_size=6']);"
        "assert 'torch' not in sys.modules;"
        # Of the program alone: a child's maximum, by wait, counts its parent's before it began.
        "print(*(x for x in open('/proc/self/status') if x.startswith('VmHWM')));"
        "sys.exit(code)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    output = process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0
    assert "235.09 B parameters, on 288 x h20" in output
    # CPU seconds, which do not depend on what else runs.
    assert usage.ru_utime + usage.ru_stime < 5
    (peak_kib,) = re.findall(r"VmHWM:\s+(\d+) kB", output)
    assert int(peak_kib) * 1024 < 1e9
    assert not list(tmp_path.iterdir())


def test_the_command_prints_the_plan(capsys):
    assert main(["plan", "qwen3_14b_stapo", "--accelerator", "h200"]) == 0
    out = capsys.readouterr().out
    assert out == format_plan(build_plan(change("cluster.accelerator=h200"))) + "\n"


def test_the_plan_says_what_a_resync_moves_and_how_long_the_run_takes():
    plan = build_plan(change("evaluation.interval_steps=100"))
    # 14.768 B parameters of 2 bytes; six engines of four GPUs.
    text = format_plan(plan)
    assert "resync: 29.5 GB per engine, 177.2 GB in all, 7.38 GB per engine GPU" in text
    # Of them 13.212 B in linear layers, a byte each and 4 for each 128 x 128.
    text = format_plan(build_plan(change("rollout.quantization=fp8")))
    assert "resync: 16.3 GB per engine, 98.0 GB in all, 4.08 GB per engine GPU" in text
    # Before the first step, after every 100th, and after the last.
    seconds = 750 * plan.estimate.total + 9 * plan.evaluation
    assert plan.run_days == seconds / 86400
    assert plan.estimate.total == sum(plan.estimate.phases.values())
    assert plan.bottleneck.startswith("rollout, 45% of the step")


@pytest.mark.parametrize(("num_engines", "longer"), [(6, "update"), (3, "rollout")])
def test_one_step_off_hides_the_shorter_of_sampling_and_training(num_engines, longer):
    config = change(f"rollout.num_engines={num_engines}")
    turns = build_plan(config).estimate
    plan = build_plan(apply_overrides(config, ["rollout.max_lag_steps=1"]))
    assert plan.estimate.phases == turns.phases
    sampling, sync = turns.phases["rollout"], turns.phases["sync"]
    training = sum(turns.phases[name] for name in ("score", "reference", "threshold", "update"))
    assert (sampling > training) == (longer == "rollout")
    assert plan.estimate.total == pytest.approx(max(sampling, training) + sync)
    assert plan.estimate.total < turns.total
    assert plan.bottleneck.startswith(f"{longer}, ")
    assert "; rollout beside score to update\n" in format_plan(plan)


def test_longer_responses_take_longer():
    config = change()
    short, long = (build_plan(config, mean).estimate for mean in (2000, 8000))
    for phase in ("rollout", "score", "threshold", "update"):
        assert 2 * short.phases[phase] < long.phases[phase]


def test_every_phase_has_its_pass():
    plain, masked = (build_plan(change(f"algorithm={a}")).estimate for a in ("justrl", "stapo"))
    assert plain.phases["threshold"] == 0
    assert masked.phases["threshold"] == pytest.approx(3 / 4 * masked.phases["score"])
    reference = build_plan(change("algorithm=grpo")).estimate
    assert reference.phases["reference"] == reference.phases["score"]
    assert reference.trainer.memory.parts["reference"] > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.max_microbatch_tokens=32768"],
            r"parallel: a trainer GPU needs 1\d\d GiB of h20's 95: activations \d+, gradients 14, "
            r".*weights 7, .*; use .*data.max_microbatch_tokens=16384",
        ),
        (
            ["model.path=Qwen3-235B-A22B", "parallel.expert_model_parallel_size=8"],
            r"no layout of 64 GPUs fits; with 128 use parallel.pipeline_model_parallel_size=4 ",
        ),
        (
            [
                "model.path=Qwen3-32B",
                "parallel.tensor_model_parallel_size=8",
                "parallel.data_parallel_size=5",
                "rollout.num_engines=24",
                "rollout.tensor_parallel_size=1",
                "rollout.max_num_seqs=10240",
            ],
            r"rollout: an engine GPU of h20's 95 GiB keeps \d\.\d for the KV cache beside weights "
            r"61, .*longest sequence has 21504; use .*rollout.tensor_parallel_size=8",
        ),
        (["parallel.tensor_model_parallel_size=3"], "does not divide the model's 40 attention"),
        (["parallel.device=cpu"], "parallel.device=cpu: a plan is of GPUs"),
        (
            [
                "rollout.engine=transformers",
                "rollout.num_engines=1",
                "rollout.tensor_parallel_size=1",
            ],
            "rollout.engine=transformers: a plan knows vllm alone",
        ),
        (["model.path=models/Qwen3-15B"], "model.path=models/Qwen3-15B: is no folder here"),
    ],
)
def test_what_cannot_run_is_refused_with_the_part_and_a_remedy(capsys, overrides, message):
    assert main(["plan", "qwen3_14b_stapo", *overrides]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert re.search(message, err), err
    assert err.count("\n") == 1


def test_the_layout_that_a_refusal_proposes_has_a_plan(capsys):
    words = ["data.max_microbatch_tokens=32768", "parallel.data_parallel_size=10"]
    assert main(["plan", "qwen3_14b_stapo", *words]) == 2
    proposed = capsys.readouterr().err.rpartition("; use ")[2].strip().rstrip(".").split()
    names = {word.partition("=")[0] for word in proposed}
    kept = [word for word in words if word.partition("=")[0] not in names]
    assert main(["plan", "qwen3_14b_stapo", *kept, *proposed]) == 0


@pytest.mark.parametrize(
    "recipe", ["qwen3_8b_stapo", "qwen3_30b_a3b_stapo", "qwen3_235b_a22b_stapo"]
)
def test_a_proposed_layout_divides_the_model_and_takes_what_it_promises(recipe):
    config = load_recipe(recipe)
    plan = build_plan(config)
    assert plan.layouts
    num_gpus = plan.num_trainer_gpus + plan.num_engine_gpus
    for layout in plan.layouts[:3]:
        proposed = apply_overrides(config, list_overrides(config, layout))
        check_model_layout(proposed, find_model_json(config.model.path))
        again = build_plan(proposed)
        assert again.estimate.total == layout.total
        assert again.num_trainer_gpus + again.num_engine_gpus == num_gpus
        assert again.num_trainer_gpus % config.cluster.num_gpus_per_node == 0


def test_more_memory_never_makes_the_best_layout_slower():
    small, large = (build_plan(change(f"cluster.accelerator={a}")) for a in ("h20", "h20_141"))
    assert large.layouts[0].total < small.layouts[0].total


def test_time_limits_that_a_rollout_may_reach_are_named():
    assert build_plan(change()).warnings == []
    plan = build_plan(
        change(
            "rollout.request_timeout_s=600",
            "evaluation.benchmarks=",
            "evaluation.interval_steps=none",
        )
    )
    (warning,) = plan.warnings
    rollout = plan.estimate.phases["rollout"]
    assert warning == (
        f"rollout.request_timeout_s=600: a rollout takes about {rollout:.0f} s; use "
        f"{rollout / 0.7:.0f}."
    )
    assert plan.evaluation == 0
    (warning,) = build_plan(change("algorithm.dynamic_sampling=true")).warnings
    assert warning.startswith("algorithm.dynamic_sampling: one round")


def test_a_folder_beats_the_published_shape(tiny_models):
    config = change(f"model.path={tiny_models['untied']}")
    with pytest.raises(ValueError, match="exceeds the model's max_position_embeddings=256"):
        build_plan(config)


def test_training_still_needs_the_folder():
    config = load_recipe("qwen3_14b_stapo")
    with pytest.raises(ValueError, match=r"model.path=models/Qwen3-14B-Base: has no config.json"):
        check_model_layout(config)


def test_the_same_layout_on_another_accelerator_may_not_fit():
    plan = build_plan(dataclasses.replace(change(), name="x"))
    assert not isinstance(plan.others["h20"], str)
    large = build_plan(load_recipe("qwen3_235b_a22b_stapo"))
    assert list(large.others) == list(typing.get_args(ClusterConfig.__annotations__["accelerator"]))


def test_fp8_takes_memory_and_gives_time():
    bf16, fp8 = (build_plan(change(*words)).estimate for words in ([], ["precision.fp8=blockwise"]))
    # 38 of 40 layers, two bytes a parameter, over TP4.
    layer = 5120 * (2 * 5120 + 2 * 1024) + 3 * 5120 * 17_408
    assert fp8.trainer.memory.parts["FP8 weights"] == pytest.approx(38 * layer * 2 / 4)
    assert bf16.trainer.memory.parts["FP8 weights"] == 0
    for phase in ("score", "update"):
        assert 0.5 * bf16.phases[phase] < fp8.phases[phase] < 0.8 * bf16.phases[phase]


def test_an_engine_in_fp8_has_more_cache_and_reads_less():
    bf16, fp8 = (
        build_plan(change(*words)).estimate for words in ([], ["rollout.quantization=fp8"])
    )
    assert fp8.engines.memory.kv_tokens > bf16.engines.memory.kv_tokens
    assert fp8.phases["rollout"] < bf16.phases["rollout"]


COLOCATED = (
    "rollout.placement=colocated",
    "rollout.num_engines=1",
    "parallel.data_parallel_size=8",
)


def test_colocated_engines_take_no_gpus_of_their_own():
    plan = build_plan(change(*COLOCATED, f"rollout.kv_cache_bytes={20 << 30}"))
    assert (plan.num_trainer_gpus, plan.num_engine_gpus) == (32, 0)
    assert plan.estimate.engines.num_engines == 8
    engine = plan.estimate.engines.memory.parts
    assert engine["KV cache"] == 20 << 30
    assert engine["trainer's state"] == plan.estimate.trainer.memory.resident
    assert plan.warnings == []
    text = format_plan(plan)
    assert "on 32 x h20" in text
    assert "engines  the trainer's GPUs, while it waits: 8 x TP4" in text
    for layout in plan.layouts:
        proposed = apply_overrides(plan.problem.config, list_overrides(plan.problem.config, layout))
        assert build_plan(proposed).estimate.total == layout.total


def test_a_colocated_cache_without_room_is_refused_with_what_there_is():
    refused = r"rollout.kv_cache_bytes=85899345920: .* has 47.9 for it beside .*trainer's state 29"
    with pytest.raises(ValueError, match=refused):
        build_plan(change(*COLOCATED, f"rollout.kv_cache_bytes={80 << 30}"))
