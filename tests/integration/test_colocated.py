"""Whole runs whose engines live in the trainer's ranks."""

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from megatron_stapo.checkpoint.rollouts import load_rollouts, name_rollouts
from tests.integration.test_train import (
    end,
    find_last_rank,
    read_steps,
    run_verify_resume,
    start,
    wait_for_step,
)
from tests.tiny_model import build_coin_base

pytestmark = pytest.mark.vllm

COLOCATED = "rollout.placement=colocated"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build_coin_base(tmp_path_factory.mktemp("coin"))


def train(base, folder, *overrides, timeout_s=240, **environment):
    """Run to the end. Returns exit code, stderr and summary."""
    folder.mkdir(exist_ok=True)
    launcher = start(base, folder, *overrides, **environment)
    wait_for_step(folder, launcher, 1)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    return end(folder, launcher, processes, timeout_s)


def read_metrics(folder):
    metrics = [record["metrics"] for record in read_steps(folder)]
    for step in metrics:
        del step["tokens_per_s"]
    return metrics


def break_step(folder, rank, number, action):
    """Let the engine of a rank do something else in its so manieth call."""
    (folder / "sitecustomize.py").write_text(
        f"""
import os, sys
if "megatron_stapo.train" in sys.orig_argv and os.environ["RANK"] == "{rank}":
    import builtins, importlib.abc
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name == "megatron_stapo.rollout.colocated":
                sys.meta_path.remove(self)
                from megatron_stapo.rollout import colocated
                whole = colocated.ColocatedEngine._run_round
                calls = []
                def run_round(self, order, request):
                    calls.append(order)
                    step = self._rank_engine.step
                    def broken(max_steps):
                        if len(calls) == {number}:
                            {action}
                        return step(max_steps)
                    self._rank_engine.step = broken
                    try:
                        return whole(self, order, request)
                    finally:
                        self._rank_engine.step = step
                colocated.ColocatedEngine._run_round = run_round
            return None
    sys.meta_path.insert(0, Finder())
"""
    )
    return {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"}


def test_a_colocated_run_learns_and_says_that_a_cpu_engine_stays_awake(base, tmp_path):
    exit_code, stderr, summary = train(base, tmp_path, COLOCATED)
    assert exit_code == 0, stderr
    assert summary["status"] == "finished"
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.2
    assert max(step["logprob_gap_max"] for step in read_metrics(tmp_path)) < 1e-4
    assert "engine stays awake" in (tmp_path / "stdout").read_text()
    assert not (tmp_path / "run" / "logs" / "engine.log").exists()


@pytest.mark.slow
def test_colocated_steps_are_those_of_servers_beside_the_trainer(base, tmp_path):
    """Two engines of a rank each: bit for bit. One of two ranks: another order of summation."""
    overrides = ["num_steps=2", "algorithm.prob_threshold=0.2"]
    # Rollouts are kept from the oldest checkpoint on.
    overrides += ["checkpoint.interval_steps=1", "checkpoint.keep_last=2"]
    for name, placement in (
        ("servers", []),
        ("two", [COLOCATED]),
        ("one", [COLOCATED, "rollout.tensor_parallel_size=2"]),
    ):
        exit_code, stderr, _ = train(base, tmp_path / name, *overrides, *placement)
        assert exit_code == 0, stderr
    servers, two, one = (read_metrics(tmp_path / name) for name in ("servers", "two", "one"))
    assert sum(step["num_masked"] for step in servers) > 0
    for ours, theirs in zip(two, servers, strict=True):
        assert ours.pop("engine_freed_bytes") is ours.pop("engine_held_bytes") is None
        assert ours == theirs
    sampled = [
        [
            (rollout.token_ids, rollout.rollout_logprobs, rollout.policy_version)
            for group in load_rollouts(name_rollouts(tmp_path / name / "run", 2)).groups
            for rollout in group.rollouts
        ]
        for name in ("servers", "two")
    ]
    assert len(sampled[0]) == 16 * 8 and sampled[1] == sampled[0]
    for ours, theirs in zip(one, servers, strict=True):
        for name in ("loss", "grad_norm", "entropy_mean", "num_masked"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4)


@pytest.mark.slow
def test_a_stop_in_a_rollout_saves_and_the_run_goes_on_with_servers(base, tmp_path):
    launcher = start(base, tmp_path, COLOCATED, "num_steps=1000")
    wait_for_step(tmp_path, launcher, 2)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    os.kill(launcher.pid, signal.SIGINT)
    exit_code, stderr, summary = end(tmp_path, launcher, processes)
    assert exit_code == 130, stderr
    assert summary["status"] == "interrupted"
    num_steps = summary["num_steps_completed"]
    assert list((tmp_path / "run" / "checkpoints").glob(f"step_*{num_steps}"))
    exit_code, stderr, summary = train(base, tmp_path, f"num_steps={num_steps + 1}")
    assert exit_code == 0, stderr
    assert summary["num_steps_completed"] == num_steps + 1


@pytest.mark.slow
def test_an_engine_that_fails_on_one_rank_ends_the_run_with_the_cause(base, tmp_path):
    """Of an engine of two ranks: the other one waits for it, and may fail of that."""
    environment = break_step(tmp_path, 1, 12, "raise RuntimeError('a broken kernel')")
    overrides = [
        "rollout.tensor_parallel_size=2",
        "parallel.timeout_s=60",
        "evaluation.benchmarks=",
    ]
    exit_code, stderr, summary = train(base, tmp_path, COLOCATED, *overrides, **environment)
    assert exit_code == 1
    assert summary["status"] == "failed"
    assert re.search(r"rank 1 .*: the engine failed: .*a broken kernel", stderr), stderr
    # What was whole is saved.
    assert list((tmp_path / "run" / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_a_rank_that_is_killed_in_a_rollout_ends_the_run_by_name(base, tmp_path):
    launcher = start(base, tmp_path, COLOCATED, "num_steps=1000", "rollout.tensor_parallel_size=2")
    wait_for_step(tmp_path, launcher, 1)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    find_last_rank(processes).kill()
    exit_code, stderr, _ = end(tmp_path, launcher, processes)
    assert exit_code == 1
    assert "trainer rank 1 was killed by SIGKILL" in stderr.splitlines()[0]


@pytest.mark.slow
@pytest.mark.parametrize("tp_size", [1, 2])
def test_verify_resume_passes_a_colocated_run(base, tmp_path, tp_size):
    passed = run_verify_resume(
        base, tmp_path, COLOCATED, f"rollout.tensor_parallel_size={tp_size}", engine="vllm"
    )
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "2 steps, a kill and 2 more are the same as 4 steps" in passed.stdout
    [line] = [x for x in passed.stdout.splitlines() if x.startswith("random states of every rank")]
    assert line.endswith("ok")
