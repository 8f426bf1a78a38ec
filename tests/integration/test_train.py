"""Whole runs of the `stapo` command: the real trainer, engine and launcher on a model of 0.1 M."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from megatron_stapo.checkpoint.folder import list_checkpoints, parse_step
from megatron_stapo.rollout.engine_host import START_MARK
from tests.tiny_model import build_coin_base

DIED = "engine_died"

RECIPE = """
from megatron_stapo.config import *

def coin():
    return Config(
        name="coin",
        run_dir=r"{run_dir}",
        num_steps=6,
        model=ModelConfig(path=r"{base}", dtype="float32"),
        parallel=ParallelConfig(device="cpu", tensor_model_parallel_size=2),
        data=DataConfig(
            source=r"{base}/train.jsonl",
            prompt_suffix="", max_prompt_tokens=48, max_microbatch_tokens=512,
        ),
        rollout=RolloutConfig(
            num_prompts_per_step=16, max_response_tokens=16, kv_cache_bytes=32 << 20,
            request_timeout_s=60,
        ),
        algorithm=AlgorithmConfig(num_prompts_per_minibatch=8),
        optimizer=OptimizerConfig(lr=2e-3, num_warmup_steps=0),
        evaluation=EvaluationConfig(benchmarks=(r"heldout={base}/heldout.jsonl",), num_samples=8),
    )
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build_coin_base(tmp_path_factory.mktemp("coin"))


@pytest.fixture(scope="module")
def mixture_base(tmp_path_factory):
    return build_coin_base(tmp_path_factory.mktemp("mixture"), num_experts=8)


def start(base, folder, *overrides, **environment):
    """Start a run in folder/run; its output goes to files in folder."""
    recipe = folder / "coin.py"
    recipe.write_text(RECIPE.format(base=base, run_dir=folder / "run"))
    with open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_stapo.cli", "train", str(recipe), *overrides],
            stdout=out,
            stderr=err,
            env=os.environ | environment,
        )


def read_steps(folder):
    file = folder / "run" / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    records = []
    for line in lines:
        with contextlib.suppress(json.JSONDecodeError):  # the last may be half written
            records.append(json.loads(line))
    return [record for record in records if "step" in record]


def wait_for_step(folder, launcher, step, timeout_s=180):
    deadline = time.monotonic() + timeout_s
    while len(read_steps(folder)) < step:
        assert launcher.poll() is None, (folder / "stderr").read_text()
        assert time.monotonic() < deadline, f"no step {step} after {timeout_s} s"
        time.sleep(0.2)


def end(folder, launcher, processes, timeout_s=60):
    """Wait for the end; nothing may be left. Returns exit code, stderr and summary."""
    exit_code = launcher.wait(timeout=timeout_s)
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    summary = json.loads((folder / "run" / "summary.json").read_text())
    return exit_code, (folder / "stderr").read_text(), summary


def run_verify(base, folder, *overrides, **environment):
    recipe = folder / "coin.py"
    recipe.write_text(RECIPE.format(base=base, run_dir=folder / "run"))
    return subprocess.run(
        [sys.executable, "-m", "megatron_stapo.cli", "verify", str(recipe), *overrides],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, **environment},
    )


def test_verify_passes_a_layout_and_fails_a_broken_one(base, tmp_path):
    """Broken from outside, in the ranks alone: each takes the quantile of its own tokens."""
    (tmp_path / "sitecustomize.py").write_text(
        """
import sys
if "megatron_stapo.verify.ranks" in sys.orig_argv:
    from megatron_stapo.ops import quantile
    whole = quantile.compute_quantile
    quantile.compute_quantile = lambda values, q, group: whole(values, q, None)
"""
    )
    layout = ["parallel.tensor_model_parallel_size=1", "parallel.context_parallel_size=2"]
    passed = run_verify(base, tmp_path, *layout)
    assert passed.returncode == 0, passed.stderr
    assert passed.stderr == ""
    assert "the layout computes the dense update" in passed.stdout
    broken = run_verify(base, tmp_path, *layout, PYTHONPATH=str(tmp_path))
    assert broken.returncode == 1
    [line] = [line for line in broken.stdout.splitlines() if line.startswith("loss mask")]
    assert "FAILED" in line and "rank" in line
    assert "does NOT compute" in broken.stdout
    refused = run_verify(base, tmp_path, "algorithm.aggregation=verl_microbatch_mean")
    assert refused.returncode == 2 and "nothing to verify" in refused.stderr


@pytest.mark.vllm
def test_a_run_learns_and_leaves_everything_a_reader_needs(base, tmp_path):
    launcher = start(base, tmp_path)
    wait_for_step(tmp_path, launcher, 1)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    exit_code, stderr, summary = end(tmp_path, launcher, processes, timeout_s=180)
    assert exit_code == 0, stderr
    assert summary["status"] == "finished"
    assert summary["num_steps"] == 6
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2
    steps = read_steps(tmp_path)
    assert [record["step"] for record in steps] == [1, 2, 3, 4, 5, 6]
    for record in steps:
        # The engine samples from the trainer's weights of this very step.
        assert record["metrics"]["logprob_gap_max"] < 1e-4
    run_dir = tmp_path / "run"
    assert json.loads((run_dir / "config.json").read_text())["name"] == "coin"
    assert (run_dir / "curves.png").stat().st_size > 10_000
    assert list((run_dir / "tensorboard").iterdir())

    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    AutoModelForCausalLM.from_pretrained(run_dir / "model")
    AutoTokenizer.from_pretrained(run_dir / "model")
    before, after = (load_file(p / "model.safetensors") for p in (base, run_dir / "model"))
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)


@pytest.mark.vllm
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            [
                "parallel.tensor_model_parallel_size=1",
                "parallel.data_parallel_size=2",
                "rollout.placement=colocated",
                # 48 columns of an expert on a rank, which vLLM pads to 64.
                "rollout.tensor_parallel_size=2",
            ],
            id="colocated",
        ),
        pytest.param(["parallel.sequence_parallel=True"], id="server", marks=pytest.mark.slow),
    ],
)
def test_a_mixture_of_experts_is_sampled_with_the_weights_that_train(
    mixture_base, tmp_path, overrides
):
    """vLLM repacks experts on a CPU, after the bytes of which the hash is taken: the gap alone
    shows what is multiplied."""
    launcher = start(
        mixture_base,
        tmp_path,
        "num_steps=3",
        "evaluation.benchmarks=",
        "parallel.expert_model_parallel_size=2",
        "algorithm.router_aux_loss_coef=0.001",
        *overrides,
    )
    assert launcher.wait(timeout=240) == 0, (tmp_path / "stderr").read_text()
    steps = [record["metrics"] for record in read_steps(tmp_path)]
    assert len(steps) == 3
    # The first step samples from the folder, the others from weights that were sent.
    for metrics in steps:
        assert metrics["logprob_gap_max"] < 1e-4
        assert metrics["grad_norm"] > 0

    from safetensors.torch import load_file

    before, after = (
        load_file(p / "model.safetensors") for p in (mixture_base, tmp_path / "run/model")
    )
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before)


def find_process(launcher, *words):
    (process,) = (
        p
        for p in psutil.Process(launcher.pid).children(recursive=True)
        if all(word in " ".join([p.name(), *p.cmdline()]) for word in words)
        and "torchrun" not in " ".join(p.cmdline())
    )
    return process


@pytest.mark.vllm
def test_an_engine_that_is_given_up_ends_the_run_by_name_and_saved(base, tmp_path):
    launcher = start(base, tmp_path, "num_steps=1000", "rollout.max_engine_restarts=0")
    wait_for_step(tmp_path, launcher, 1)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    find_process(launcher, "EngineCore").kill()
    killed_s = time.monotonic()
    exit_code, stderr, summary = end(tmp_path, launcher, processes)
    # Nobody waits out rollout.start_timeout_s or checkpoint.stop_timeout_s.
    assert time.monotonic() - killed_s < 45
    assert (exit_code, summary["status"]) == (1, "failed")
    assert stderr.splitlines()[0] == f"stapo: error: {summary['reason']}"
    assert summary["reason"].startswith("the rollout engine ended with exit code 1")
    assert summary["reason"].endswith(
        "rollout.max_engine_restarts=0: engine 0 is not started again; find the cause in its log, "
        "or allow more restarts."
    )
    # The default interval has not come yet.
    [checkpoint] = list_checkpoints(tmp_path / "run")
    assert parse_step(checkpoint) == len(read_steps(tmp_path)) < 10
    assert f"the same command goes on from {checkpoint}" in (tmp_path / "stdout").read_text()


@pytest.mark.slow
@pytest.mark.vllm
def test_engines_that_are_killed_in_rollouts_change_nothing(base, tmp_path):
    """Of two engines the first dies in step 2 and the other, the last one left, in step 3; the
    metrics are those of a run with one engine that lives. The two are sent only what changed, but
    after a death."""
    from tests.integration.crash import SITECUSTOMIZE  # which imports this module

    results = {}
    two = ["rollout.num_engines=2", "reshard.delta=true", "reshard.probe_interval_steps=1"]
    for name, overrides in (("one", []), ("two", two)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        path = f"{folder}{os.pathsep}{Path(__file__).parents[2]}"
        environment = {"PYTHONPATH": path, "STAPO_TEST_PHASES": str(folder)}
        launcher = start(base, folder, "num_steps=4", *overrides, **environment)
        for index in range(2 if overrides else 0):
            wait_for_step(folder, launcher, 1 + index)
            while (folder / "phase").read_text() != "rollout":
                assert launcher.poll() is None, (folder / "stderr").read_text()
                time.sleep(0.001)
            (host, *_) = (
                p
                for p in psutil.Process(launcher.pid).children(recursive=True)
                if f"engine_host --run-dir {folder}/run --index {index}" in " ".join(p.cmdline())
            )
            (core,) = (p for p in host.children(recursive=True) if "EngineCore" in p.name())
            core.kill()
        assert launcher.wait(timeout=300) == 0, (folder / "stderr").read_text()
        results[name] = {r["step"]: r["metrics"] for r in read_steps(folder)}
    for metrics in (m for steps in results.values() for m in steps.values()):
        del metrics["tokens_per_s"]
    assert results["two"] == results["one"]
    records = [json.loads(x) for x in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    died = [(r["index"], r["num_requests_resent"]) for r in records if r.get("event") == DIED]
    assert [index for index, _ in died] == [0, 1]
    assert any(num_resent for _, num_resent in died), died
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert summary["num_engine_restarts"] >= 1
    assert (folder / "run" / "logs" / "engine_1.log").read_text().count(START_MARK) == 2


def find_last_rank(processes):
    ranks = [p for p in processes if "megatron_stapo.train" in p.cmdline()]
    return max(ranks, key=lambda p: int(p.environ()["RANK"]))


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_by_name(base, tmp_path):
    launcher = start(base, tmp_path, "num_steps=1000", "rollout.engine=transformers")
    wait_for_step(tmp_path, launcher, 1)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    find_last_rank(processes).kill()
    exit_code, stderr, summary = end(tmp_path, launcher, processes)
    assert exit_code == 1
    assert summary["status"] == "failed"
    assert "trainer rank 1 was killed by SIGKILL" in stderr.splitlines()[0]


@pytest.mark.slow  # torchrun waits 30 s before it kills a rank that is stopped
def test_a_stopped_rank_ends_the_run_by_name(base, tmp_path):
    """A minute: rank 0 waits for rank 1, and torchrun 30 s before it kills what ignores SIGTERM."""
    # Longer than rank 0 takes on a busy machine to build the engine, while rank 1 waits for it.
    overrides = ["num_steps=1000", "rollout.engine=transformers", "parallel.timeout_s=15"]
    launcher = start(base, tmp_path, *overrides)
    wait_for_step(tmp_path, launcher, 1)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    find_last_rank(processes).suspend()
    exit_code, stderr, summary = end(tmp_path, launcher, processes, timeout_s=120)
    assert exit_code == 1
    assert summary["status"] == "failed"
    waiting, hung = stderr.splitlines()[0].split("; ")
    assert "rank 0 (tp 0, pp 0, cp 0, dp 0) waited 15 s (parallel.timeout_s) in " in waiting
    assert " of ranks [0, 1] (" in waiting
    assert hung.startswith("rank 1 (tp 1, pp 0, cp 0, dp 0) has not reported for ")
    assert "SIGKILL" not in stderr.splitlines()[0]


def run_verify_resume(base, folder, *overrides, engine="transformers", **environment):
    recipe = folder / "coin.py"
    recipe.write_text(RECIPE.format(base=base, run_dir=folder / "run"))
    return subprocess.run(
        [
            *(sys.executable, "-m", "megatron_stapo.cli", "verify-resume", str(recipe)),
            *(f"rollout.engine={engine}", *overrides),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize("max_lag_steps", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_verify_resume_passes_a_run_that_is_exact(base, tmp_path, max_lag_steps):
    passed = run_verify_resume(base, tmp_path, f"rollout.max_lag_steps={max_lag_steps}")
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "2 steps, a kill and 2 more are the same as 4 steps" in passed.stdout
    rows = json.loads((tmp_path / "run_resume" / "verify_resume.json").read_text())
    what = {row["what"] for row in rows}
    assert {"main weights", "first moments", "second moments", "stream position"} <= what
    assert {"random states of every rank", "responses of step 3", "metrics of step 4"} <= what
    straight = tmp_path / "run_resume" / "straight"
    lines = (straight / "metrics.jsonl").read_text().splitlines()
    steps = [record for record in map(json.loads, lines) if "step" in record]
    lags = [step["metrics"].get("lag_mean") for step in steps]
    assert lags == ([0, 1, 1, 1] if max_lag_steps else [None] * 4)
    # With a lag the correction is on, and has something to correct.
    truncated = [step["metrics"].get("tis_truncated_frac") for step in steps]
    assert max(truncated) > 0 if max_lag_steps else truncated == [None] * 4
    for step, following in pairwise(steps):
        [update_ends] = [max(e for p, _, e in step["spans"]["trainer"] if p == "update")]
        [sampling_begins] = [b for p, b, _ in following["spans"]["engines"] if p == "rollout"]
        assert (sampling_begins < update_ends) == bool(max_lag_steps)
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["overlap_frac"] > 0.1 if max_lag_steps else summary["overlap_frac"] == 0
    assert (straight / "timeline.png").stat().st_size > 10_000


@pytest.mark.slow
def test_verify_resume_fails_a_run_that_forgets_its_moments(base, tmp_path):
    """Broken from outside: a resumed optimizer starts with moments of zero."""
    (tmp_path / "sitecustomize.py").write_text(
        """
import sys
if "megatron_stapo.train" in sys.orig_argv:
    from megatron_stapo.checkpoint import resume, state
    load = resume.load_checkpoint
    def forget(checkpoint, trainer):
        loaded = load(checkpoint, trainer)
        for key, piece in state.build_optimizer_state(trainer).items():
            if key.startswith("exp_avg."):
                piece.data.zero_()
        return loaded
    resume.load_checkpoint = forget
"""
    )
    broken = run_verify_resume(base, tmp_path, PYTHONPATH=str(tmp_path))
    assert broken.returncode == 1
    [line] = [line for line in broken.stdout.splitlines() if line.startswith("first moments")]
    assert line.endswith("FAILED")
    assert "are NOT the same" in broken.stdout


@pytest.mark.slow
def test_ctrl_c_leaves_a_readable_run_folder(base, tmp_path):
    launcher = start(base, tmp_path, "num_steps=1000", "rollout.engine=transformers")
    wait_for_step(tmp_path, launcher, 2)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    os.kill(launcher.pid, signal.SIGINT)
    exit_code, stderr, summary = end(tmp_path, launcher, processes)
    assert exit_code == 130, stderr
    assert summary["status"] == "interrupted"
    assert summary["num_steps_completed"] == len(read_steps(tmp_path)) >= 2
    assert (tmp_path / "run" / "curves.png").exists()


@pytest.mark.slow
@pytest.mark.vllm
def test_the_first_step_is_the_same_in_every_layout(base, tmp_path):
    """TP1 x PP1, TP2 x PP1, TP1 x PP2, TP2 x PP2, each with a vLLM engine of its own."""
    compared = ("loss", "grad_norm", "entropy_mean", "num_candidates", "num_masked")
    results = []
    for tp_size, pp_size in ((1, 1), (2, 1), (1, 2), (2, 2)):
        folder = tmp_path / f"tp{tp_size}_pp{pp_size}"
        folder.mkdir()
        launcher = start(
            base,
            folder,
            "num_steps=1",
            f"parallel.tensor_model_parallel_size={tp_size}",
            f"parallel.pipeline_model_parallel_size={pp_size}",
            # Half of the tokens rare, so that there is a mask to compare.
            "algorithm.prob_threshold=0.2",
        )
        exit_code = launcher.wait(timeout=300)
        assert exit_code == 0, (folder / "stderr").read_text()
        [record] = read_steps(folder)
        results.append({name: record["metrics"][name] for name in compared})
        print(f"TP{tp_size} x PP{pp_size}: {results[-1]}")
    assert results[0]["num_masked"] > 0
    for result in results[1:]:
        assert result == pytest.approx(results[0], rel=1e-5)
        assert result["num_masked"] == results[0]["num_masked"]
