"""However a run ends, it ends whole: the right exit code, one message, a summary, no process left.

The runs are real: NeMo-Run, torchrun and its ranks, with stand-ins for the engine and the trainer.
They all start together, because a start is seconds of imports; each test then ends one of them.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

STAND_IN_RUN = Path(__file__).with_name("stand_in_run.py")
ENVIRONMENT = os.environ | {"PYTHONPATH": str(STAND_IN_RUN.parents[2])}

# Runs end in one to three seconds; the bounds leave room for a machine with other work.
START_TIMEOUT_S = 300
END_TIMEOUT_S = 60


def is_running(process: psutil.Process) -> bool:
    # Whoever adopts the last zombies may be slow to reap them.
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def take_signals() -> None:
    """Undo what a test under nohup or in the background of a script inherits."""
    for signum in (signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)


@dataclass
class Run:
    run_dir: Path
    launcher: subprocess.Popen

    def get_pid(self, name: str) -> int:
        return int((self.run_dir / f"ready_{name}").read_text())

    def wait_until_ready(self) -> None:
        files = [self.run_dir / f"ready_{name}" for name in ("engine", "0", "1")]
        wait_until(
            lambda: all(file.exists() and file.read_text() for file in files),
            START_TIMEOUT_S,
            f"{self.run_dir} is up",
        )

    def find_processes(self) -> list[psutil.Process]:
        return psutil.Process(self.launcher.pid).children(recursive=True)

    def wait_until_ended(self, processes: list[psutil.Process]) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of the launcher, once every process is gone."""
        stdout, stderr = self.launcher.communicate(timeout=END_TIMEOUT_S)
        wait_until(lambda: not any(map(is_running, processes)), END_TIMEOUT_S, "no process is left")
        return self.launcher.returncode, stdout, stderr

    def read_summary(self) -> dict:
        assert (self.run_dir / "curves.png").stat().st_size > 10_000
        return json.loads((self.run_dir / "summary.json").read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Run]]:
    folder = tmp_path_factory.mktemp("runs")
    trainers = {
        "success": "succeed",
        "rank_raises": "raise",
        "rank_killed": "wait",
        "torchrun_killed": "wait",
        "engine_killed": "wait",
        "engine_lost": "save",
        "interrupted": "wait",
        "hung_up": "wait",
        "launcher_killed": "wait",
        "experiment_killed": "wait",
    }
    runs = {}
    for name, trainer in trainers.items():
        run_dir = folder / name
        launcher = subprocess.Popen(
            [sys.executable, str(STAND_IN_RUN), str(run_dir), trainer],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
            start_new_session=True,
            preexec_fn=take_signals,
        )
        runs[name] = Run(run_dir, launcher)
    yield runs
    for run in runs.values():
        run.launcher.kill()
        run.launcher.wait()
        for pipe in (run.launcher.stdout, run.launcher.stderr):
            assert pipe is not None
            pipe.close()


def test_success_stops_the_engine_and_exits_0(runs: dict[str, Run]) -> None:
    run = runs["success"]
    run.wait_until_ready()
    engine = psutil.Process(run.get_pid("engine"))
    exit_code, stdout, stderr = run.wait_until_ended([engine])
    assert (exit_code, stderr) == (0, "")
    assert "accuracy: 0.25" in stdout and "finished after 1 of 2 steps" in stdout
    summary = run.read_summary()
    assert (summary["status"], summary["reason"]) == ("finished", "")
    assert summary["masked_frac"] == 0.02
    assert json.loads((run.run_dir / "config.json").read_text())["name"] == "stand_in"
    assert (run.run_dir / "logs" / "engine.log").read_text() == "engine is up\n"


def test_a_rank_that_raises_is_named_with_its_exception(runs: dict[str, Run]) -> None:
    run = runs["rank_raises"]
    run.wait_until_ready()
    exit_code, _, stderr = run.wait_until_ended(run.find_processes())
    assert exit_code == 1
    assert stderr.startswith(
        "stapo: error: trainer rank 1 ended with exit code 1: ArithmeticError: the stand-in fails\n"
    )
    assert stderr.count("stapo: error:") == 1
    assert f"last lines of {run.run_dir}/logs/trainer_rank1.log" in stderr
    assert run.read_summary()["status"] == "failed"


def test_a_killed_rank_is_named_with_its_signal(runs: dict[str, Run]) -> None:
    run = runs["rank_killed"]
    run.wait_until_ready()
    processes = run.find_processes()
    os.kill(run.get_pid("1"), signal.SIGKILL)
    exit_code, _, stderr = run.wait_until_ended(processes)
    assert exit_code == 1
    assert stderr.startswith("stapo: error: trainer rank 1 was killed by SIGKILL.\n")


def test_a_killed_torchrun_takes_its_ranks_along(runs: dict[str, Run]) -> None:
    run = runs["torchrun_killed"]
    run.wait_until_ready()
    processes = run.find_processes()
    psutil.Process(run.get_pid("0")).parent().kill()
    exit_code, _, stderr = run.wait_until_ended(processes)
    assert exit_code == 1
    assert stderr.startswith(
        "stapo: error: torchrun, the parent of the trainer's ranks, was killed by SIGKILL.\n"
    )


def test_a_killed_engine_is_named_and_takes_its_child_along(runs: dict[str, Run]) -> None:
    run = runs["engine_killed"]
    run.wait_until_ready()
    processes = run.find_processes()
    os.kill(run.get_pid("engine"), signal.SIGKILL)
    exit_code, _, stderr = run.wait_until_ended(processes)
    assert exit_code == 1
    assert stderr.startswith("stapo: error: the rollout engine was killed by SIGKILL.\n")
    assert stderr.endswith(f"{run.run_dir}/logs/engine.log:\n  engine is up\n")


def test_a_trainer_that_has_taken_steps_saves_when_an_engine_is_lost(runs: dict[str, Run]) -> None:
    run = runs["engine_lost"]
    run.wait_until_ready()
    processes = run.find_processes()
    os.kill(run.get_pid("engine"), signal.SIGKILL)
    exit_code, stdout, stderr = run.wait_until_ended(processes)
    assert (run.run_dir / "saved_0").exists() and (run.run_dir / "saved_1").exists()
    assert "engine has ended: saving, for at most 60 s; a signal stops at once" in stdout
    reason = "the rollout engine was killed by SIGKILL."
    assert exit_code == 1 and stderr.startswith(f"stapo: error: {reason}\n")
    summary = run.read_summary()
    assert (summary["status"], summary["reason"]) == ("failed", reason)


def test_ctrl_c_ends_the_run_with_130_and_a_summary(runs: dict[str, Run]) -> None:
    run = runs["interrupted"]
    run.wait_until_ready()
    processes = run.find_processes()
    os.killpg(run.launcher.pid, signal.SIGINT)  # a terminal signals the whole foreground group
    exit_code, stdout, stderr = run.wait_until_ended(processes)
    assert (exit_code, stderr) == (130, "stapo: stopped by SIGINT.\n")
    assert "interrupted after 1 of 2 steps" in stdout
    assert run.read_summary()["reason"] == "stopped by SIGINT."


def test_a_closed_terminal_ends_the_run_with_129_and_a_summary(runs: dict[str, Run]) -> None:
    run = runs["hung_up"]
    run.wait_until_ready()
    processes = run.find_processes()
    (experiment,) = psutil.Process(run.launcher.pid).children()
    experiment.send_signal(signal.SIGINT)  # means the launcher, if it means anything
    assert run.launcher.stdout is not None and run.launcher.stderr is not None
    run.launcher.stdout.close()
    run.launcher.stderr.close()
    run.launcher.send_signal(signal.SIGHUP)
    assert run.launcher.wait(timeout=END_TIMEOUT_S) == 129
    wait_until(lambda: not any(map(is_running, processes)), END_TIMEOUT_S, "no process is left")
    assert run.read_summary()["reason"] == "stopped by SIGHUP."


def test_a_killed_launcher_leaves_no_process(runs: dict[str, Run]) -> None:
    run = runs["launcher_killed"]
    run.wait_until_ready()
    processes = run.find_processes()
    run.launcher.kill()
    run.wait_until_ended(processes)


def test_a_killed_experiment_process_leaves_no_process(runs: dict[str, Run]) -> None:
    run = runs["experiment_killed"]
    run.wait_until_ready()
    processes = run.find_processes()
    (experiment,) = psutil.Process(run.launcher.pid).children()
    experiment.kill()
    exit_code, _, stderr = run.wait_until_ended(processes)
    assert exit_code == 1
    assert stderr.startswith("stapo: error: NeMo-Run was killed by SIGKILL.\n")
    assert run.read_summary()["status"] == "failed"


def test_a_disk_that_fills_up_ends_the_run_by_name(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no right to mount a small disk")
    launcher = subprocess.Popen(
        [sys.executable, str(STAND_IN_RUN), str(disk / "run"), "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        run = Run(disk / "run", launcher)
        run.wait_until_ready()
        with suppress(OSError), open(disk / "fill", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        os.kill(run.get_pid("0"), signal.SIGKILL)
        exit_code, stdout, stderr = run.wait_until_ended(run.find_processes())
        assert exit_code == 1
        assert "cannot be written any more (No space left on device)" in stderr
        assert "no summary: " in stdout and "Traceback" not in stderr
    finally:
        launcher.kill()
        launcher.communicate()
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_sigterm_before_the_tasks_start_ends_the_run_with_143(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [sys.executable, str(STAND_IN_RUN), str(tmp_path), "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    run = Run(tmp_path, launcher)
    assert launcher.stdout is not None
    assert launcher.stdout.readline().startswith("starting engine and trainer (ranks: 2)")
    wait_until(lambda: bool(run.find_processes()), START_TIMEOUT_S, "the experiment's process runs")
    processes = run.find_processes()
    launcher.terminate()
    exit_code, stdout, stderr = run.wait_until_ended(processes)
    assert (exit_code, stderr) == (143, "stapo: stopped by SIGTERM.\n")
    assert "interrupted after 0 of 2 steps" in stdout
    assert not (tmp_path / "ready_engine").exists()
    summary = run.read_summary()
    assert summary["masked_frac"] is None and summary["num_steps_completed"] == 0
