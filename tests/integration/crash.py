"""Kills a random process of a run at a random moment of a chosen phase, again and again.

The run is the real command. `sitecustomize` lets every process write the phase that it is in to a
file of its own; nothing else of it is touched.
"""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from megatron_stapo.checkpoint.compare import compare_runs
from megatron_stapo.checkpoint.folder import list_checkpoints, parse_step, read_state
from tests.integration.test_train import RECIPE

NUM_STEPS = 8

PHASES = ("start", "rollout", "reward", "score", "threshold", "update", "sync", "save", "publish")

# Writes the phase on the way into it. `start` lasts until the first other one.
SITECUSTOMIZE = """
import functools, os, sys, threading
if "megatron_stapo.train" in sys.orig_argv and os.environ.get("RANK") == "0":
    folder = os.environ["STAPO_TEST_PHASES"]
    def note(phase):
        new = os.path.join(folder, f"phase.{threading.get_ident()}")
        with open(new, "w") as file:
            file.write(phase)
        os.rename(new, os.path.join(folder, "phase"))
    note("start")
    import contextlib
    from megatron_stapo import driver
    from megatron_stapo.checkpoint import save
    timed = driver.Timer.__call__
    @contextlib.contextmanager
    def noted(self, phase):
        note(phase)
        with timed(self, phase):
            yield
    driver.Timer.__call__ = noted
    def wrap(owner, name, phase):
        inner = getattr(owner, name)
        @functools.wraps(inner)
        def outer(*args, **kwargs):
            note(phase)
            return inner(*args, **kwargs)
        setattr(owner, name, outer)
    wrap(save, "_write", "save")
    wrap(save, "publish", "publish")
    fault = os.environ.get("STAPO_TEST_FAULT")
    if fault == "engine":
        from megatron_stapo.rollout import transformers_engine
        generate, calls = transformers_engine.TransformersEngine.generate, []
        def fail_in_the_second_call(self, *args, **kwargs):
            calls.append(1)
            if len(calls) == 2:
                raise RuntimeError("the engine sent a malformed answer")
            return generate(self, *args, **kwargs)
        transformers_engine.TransformersEngine.generate = fail_in_the_second_call
    if fault == "loss":
        from megatron_stapo.trainer import trainer
        compute_loss = trainer.compute_loss
        def compute_nan(*args):
            loss_sum, num_tokens, report = compute_loss(*args)
            return loss_sum * float("nan"), num_tokens, report
        trainer.compute_loss = compute_nan
"""

VICTIMS = {
    "launcher": "",
    "NeMo-Run": "megatron_stapo.launch.local",
    "torchrun": "torchrun",
    "rank 0": "megatron_stapo.train",
    "rank 1": "megatron_stapo.train",
    "reward worker": "megatron_stapo.rewards.worker",
    "engine server": "vllm.entrypoints",
    "engine core": "VLLM::EngineCore",
}


@dataclass
class Tally:
    """What was killed, and in which phase."""

    kills: list[tuple[str, str]] = field(default_factory=list)
    num_runs: int = 0

    def describe(self) -> str:
        by_phase, by_victim = (Counter(kill[i] for kill in self.kills) for i in (0, 1))
        return (
            f"{len(self.kills)} kills over {self.num_runs} runs of {NUM_STEPS} steps; "
            f"by phase {dict(by_phase)}; by victim {dict(by_victim)}"
        )


class CrashTest:
    """Runs of one recipe."""

    def __init__(self, base: Path, folder: Path, *overrides: str) -> None:
        self._base = base
        self._folder = folder
        self._overrides = overrides
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "sitecustomize.py").write_text(SITECUSTOMIZE)
        self._straight = self.name_run("straight")
        launcher = self.start("straight")
        assert launcher.wait(timeout=300) == 0, self.read_errors("straight")

    def run(self, rng: random.Random, num_kills: int, tally: Tally) -> None:
        """Crash runs and go on with them until so many kills were made; each must come to the
        numbers of the undisturbed one."""
        while len(tally.kills) < num_kills:
            name = f"crashed_{tally.num_runs}"
            tally.num_runs += 1
            # At most so many kills in a run, so that every one comes to its end.
            remaining = rng.randint(1, 8)
            committed = 0
            while True:
                start_s = time.time()
                launcher = self.start(name)
                processes = []
                if remaining and len(tally.kills) < num_kills:
                    remaining -= 1
                    phase = rng.choice(PHASES)
                    killed = self.kill_in(launcher, phase, rng)
                    if killed:
                        tally.kills.append((killed[1], killed[0]))
                        processes = killed[2]
                launcher.wait(timeout=300)
                psutil.wait_procs(processes, timeout=60)
                committed = self._check_commits(name, committed, start_s)
                if launcher.returncode == 0:
                    break
            self.check_result(name)

    def kill_in(
        self, launcher: subprocess.Popen, phase: str, rng: random.Random
    ) -> tuple[str, str, list[psutil.Process]] | None:
        """Kill a random process once the phase was seen for the nth time. Returns the victim, the
        phase in which it was, and all processes; None where the run came to its end first."""
        wanted, seen, last = rng.randint(1, 4), 0, ""
        phase_file = self._folder / "phase"
        phase_file.unlink(missing_ok=True)
        while launcher.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                current = phase_file.read_text()
                if current == phase and current != last:
                    seen += 1
                last = current
            if seen >= (1 if phase == "start" else wanted):
                break
            time.sleep(0.001)
        else:
            return None
        time.sleep(rng.uniform(0, 6.0 if phase == "start" else 0.15))
        children = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(launcher.pid).children(recursive=True)
        found = _find_victims(launcher.pid, children)
        if not found:
            return None
        victim = rng.choice(sorted(found))
        with contextlib.suppress(ProcessLookupError):
            os.kill(found[victim], signal.SIGKILL)
        return victim, phase_file.read_text(), children

    def _check_commits(self, name: str, committed: int, start_s: float) -> int:
        """No published checkpoint is lost, none has a step's updates twice or in part.

        Args:
            committed: newest checkpoint before the attempt.
            start_s: of the attempt.
        """
        run_dir = self.name_run(name)
        steps = [0]
        for checkpoint in list_checkpoints(run_dir):
            state = read_state(checkpoint)
            assert state.num_updates == 2 * state.num_steps_done
            steps.append(parse_step(checkpoint))
        assert max(steps) >= committed
        with contextlib.suppress(FileNotFoundError):
            lines = (run_dir / "metrics.jsonl").read_text().splitlines()
            records = [json.loads(line) for line in lines if line.endswith("}")]
            own = [r for r in records if r.get("event") == "going_on" and r["time"] > start_s]
            for record in own:
                assert parse_step(Path(record["value"])) == committed
        return max(steps)

    def check_result(self, name: str) -> None:
        for row in compare_runs(self._straight, self.name_run(name), NUM_STEPS, NUM_STEPS):
            assert row.is_equal, row
        assert not list(self.name_run(name).rglob("*.partial"))

    def name_run(self, name: str) -> Path:
        return self._folder / name

    def read_errors(self, name: str) -> str:
        return (self._folder / f"{name}.err").read_text()

    def start(self, name: str, *overrides: str, fault: str = "") -> subprocess.Popen:
        """Start the run, or go on with it. fault: engine fails in the second call, or the loss is
        NaN."""
        recipe = self._folder / "coin.py"
        recipe.write_text(RECIPE.format(base=self._base, run_dir=self.name_run(name)))
        command = [sys.executable, "-m", "megatron_stapo.cli", "train", str(recipe)]
        command += [f"num_steps={NUM_STEPS}", *self._overrides, *overrides]
        path = f"{self._folder}{os.pathsep}{Path(__file__).parents[2]}"
        environment = os.environ | {"PYTHONPATH": path, "STAPO_TEST_PHASES": str(self._folder)}
        environment["STAPO_TEST_FAULT"] = fault
        with (
            open(self._folder / f"{name}.out", "a") as out,
            open(self._folder / f"{name}.err", "a") as err,
        ):
            return subprocess.Popen(command, stdout=out, stderr=err, env=environment)


def _find_victims(launcher_pid: int, children: list[psutil.Process]) -> dict[str, int]:
    found = {"launcher": launcher_pid}
    for process in children:
        with contextlib.suppress(psutil.Error, KeyError):
            line = " ".join([process.name(), *process.cmdline()])
            for victim, word in VICTIMS.items():
                if victim.startswith("rank"):
                    is_victim = word in process.cmdline() and process.environ()[
                        "RANK"
                    ] == victim.removeprefix("rank ")
                else:
                    is_victim = bool(word) and word in line and "multiprocessing" not in line
                if is_victim:
                    found[victim] = process.pid
                    break
    return found
