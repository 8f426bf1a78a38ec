"""Whatever ends a run, the same command goes on with it, and it comes to the same numbers."""

import json
import random
import signal
import time

import psutil
import pytest

from megatron_stapo.checkpoint.folder import list_checkpoints, parse_step
from tests.integration.crash import NUM_STEPS, PHASES, CrashTest, Tally
from tests.integration.test_train import read_steps
from tests.tiny_model import build_coin_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build_coin_base(tmp_path_factory.mktemp("coin"))


def read_newest(run_dir):
    return parse_step(list_checkpoints(run_dir)[-1])


def test_a_kill_a_stop_and_two_failures_lose_nothing(base, tmp_path):
    crash = CrashTest(base, tmp_path, "rollout.engine=transformers", "checkpoint.interval_steps=2")
    run_dir = crash.name_run("run")

    launcher = crash.start("run")
    while not list_checkpoints(run_dir):
        assert launcher.poll() is None, crash.read_errors("run")
        time.sleep(0.01)
    _, _, processes = crash.kill_in(launcher, "update", random.Random(0))
    assert launcher.wait(timeout=60) != 0
    psutil.wait_procs(processes, timeout=60)
    committed = read_newest(run_dir)

    # SIGTERM: saved whatever the interval, within the limit.
    launcher = crash.start("run")
    while not (
        (run_dir / "attempts" / "1" / "metrics.jsonl").exists()  # the first attempt's steps
        and any(record["step"] > committed for record in read_steps(tmp_path))
    ):
        assert launcher.poll() is None, crash.read_errors("run")
        time.sleep(0.01)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=60) == 143, crash.read_errors("run")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("interrupted", "stopped by SIGTERM.")
    assert read_newest(run_dir) == summary["num_steps_completed"] > committed
    committed = read_newest(run_dir)

    # An engine that fails in the next step but one: what was trained is saved first.
    launcher = crash.start("run", fault="engine")
    assert launcher.wait(timeout=60) == 1
    assert "the engine sent a malformed answer" in crash.read_errors("run")
    assert read_newest(run_dir) == committed + 1

    # A loss that is never finite: nothing is trained, nothing is saved.
    launcher = crash.start("run", "optimizer.max_skipped_in_a_row=2", fault="loss")
    assert launcher.wait(timeout=60) == 1
    [error] = [line for line in crash.read_errors("run").splitlines() if "max_skipped" in line][:1]
    assert "updates in a row is not finite" in error and "stapo replay" in error
    assert read_newest(run_dir) == committed + 1
    assert len(list((run_dir / "dumps").rglob("update.json"))) == 2

    launcher = crash.start("run")
    assert launcher.wait(timeout=60) == 0, crash.read_errors("run")
    crash.check_result("run")
    assert [record["step"] for record in read_steps(tmp_path)] == [*range(1, NUM_STEPS + 1)]
    assert len(list((run_dir / "attempts").iterdir())) == 4


@pytest.mark.slow
def test_a_hundred_kills_lose_nothing(base, tmp_path):
    """About 30 minutes on two cores."""
    tally = Tally()
    crash = CrashTest(base, tmp_path, "rollout.engine=transformers", "checkpoint.interval_steps=1")
    try:
        crash.run(random.Random(0), 100, tally)
    finally:
        print(tally.describe())
    assert {phase for phase, _ in tally.kills} == set(PHASES)


@pytest.mark.slow
@pytest.mark.vllm
def test_kills_with_a_vllm_engine_lose_nothing(base, tmp_path):
    """About ten minutes on two cores."""
    tally = Tally()
    crash = CrashTest(base, tmp_path, "checkpoint.interval_steps=1")
    try:
        crash.run(random.Random(0), 12, tally)
    finally:
        print(tally.describe())
