"""Runs `stapo verify-resume`: four steps at once, and two, a SIGKILL and two more; then the table.

Both runs are those of `stapo train`, on the user's own recipe, model and layout.
"""

import dataclasses
import json
import os
import shutil
import threading
from pathlib import Path

import psutil

from megatron_stapo.checkpoint.folder import name_checkpoint
from megatron_stapo.checkpoint.rollouts import ROLLOUTS_FOLDER
from megatron_stapo.config import CheckpointConfig, Config, EvaluationConfig
from megatron_stapo.launch.training import launch_training
from megatron_stapo.observability.resumption import REPORT_FILE, Row, format_rows

NUM_STEPS = 4
_NUM_STEPS_BEFORE = 2
_POLL_S = 0.05

# What a change of layout may change, by the first word of a row; anything else must be equal. Sums
# in another order differ by rounding, which Adam carries on as a share of the learning rate. An
# update lost or made twice moves weights by most of it, and moments by a tenth of their size.
_BOUNDS = {"first": 0.05, "second": 0.05, "engine's": 1e-3, "metrics": 1e-2}
_WEIGHTS_BOUND = 0.05  # learning rates


def launch_resume_check(config: Config, resumed: Config) -> int:
    """Train twice and compare.

    Args:
        config: of the run that is not disturbed, and of the first half of the other.
        resumed: of the second half; another layout or number of ranks may be its.

    Returns:
        Exit code: 0 where everything agrees, 1 where something does not or a run failed; else as
        `launch`.
    """
    folder = Path(f"{config.run_dir.rstrip('/')}_resume")
    straight, disturbed = (_shorten(config, folder / name) for name in ("straight", "resumed"))
    second_half = _shorten(resumed, folder / "resumed")
    _announce(f"1 of 3: {NUM_STEPS} steps")
    if exit_code := launch_training(straight, [], fresh=True):
        return exit_code
    _announce(
        f"2 of 3: SIGKILL of rank 0 once step {_NUM_STEPS_BEFORE} is saved; a failure follows"
    )
    killer = _Killer(name_checkpoint(folder / "resumed", _NUM_STEPS_BEFORE))
    killer.start()
    exit_code = launch_training(disturbed, [], fresh=True)
    killer.stop()
    if exit_code != 1 or not killer.has_killed:
        print("the run ended otherwise; nothing was compared")
        return exit_code or 1
    # Otherwise the resumed run would take up what was sampled before the kill.
    shutil.rmtree(folder / "resumed" / ROLLOUTS_FOLDER, ignore_errors=True)
    _announce("3 of 3: the same command")
    if exit_code := launch_training(second_half, [], changed=config != resumed):
        return exit_code
    from megatron_stapo.checkpoint.compare import compare_runs  # torch takes seconds

    is_same_layout = _shorten(resumed, folder) == _shorten(config, folder)
    bounds = {"main": _WEIGHTS_BOUND * config.optimizer.lr, **_BOUNDS}
    rows = [
        Row(
            **dataclasses.asdict(comparison),
            bound=0.0 if is_same_layout else bounds.get(comparison.what.split()[0], 0.0),
            may_differ=not is_same_layout and comparison.what.startswith("random"),
        )
        for comparison in compare_runs(
            folder / "straight", folder / "resumed", NUM_STEPS, _NUM_STEPS_BEFORE + 1
        )
    ]
    (folder / REPORT_FILE).write_text(
        json.dumps([dataclasses.asdict(row) for row in rows], indent=2) + "\n"
    )
    print(format_rows(rows, NUM_STEPS, _NUM_STEPS_BEFORE))
    print(f"the runs and {REPORT_FILE} are in {folder}")
    return 0 if all(row.passed for row in rows) else 1


def _shorten(config: Config, run_dir: Path) -> Config:
    """Four steps of the recipe as it is, with a checkpoint in the middle; nothing is evaluated."""
    return dataclasses.replace(
        config,
        num_steps=NUM_STEPS,
        run_dir=str(run_dir),
        evaluation=EvaluationConfig(),
        checkpoint=CheckpointConfig(interval_steps=_NUM_STEPS_BEFORE, keep_last=2, keep_best=0),
    )


def _announce(what: str) -> None:
    print(f"-- {what}", flush=True)


class _Killer(threading.Thread):
    """Kills the trainer's rank 0 as soon as a checkpoint is there."""

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(daemon=True)
        self._checkpoint = checkpoint
        self._is_over = threading.Event()
        self.has_killed = False

    def run(self) -> None:
        """Wait for the checkpoint, then kill."""
        while not self._is_over.wait(_POLL_S):
            # An earlier check's checkpoint is there until the run folder is cleared.
            if self._checkpoint.exists() and (rank_0 := _find_rank_0()):
                rank_0.kill()
                self.has_killed = True
                return

    def stop(self) -> None:
        """Wait no longer."""
        self._is_over.set()
        self.join()


def _find_rank_0() -> psutil.Process | None:
    for process in psutil.Process(os.getpid()).children(recursive=True):
        try:
            if "megatron_stapo.train" in process.cmdline() and process.environ()["RANK"] == "0":
                return process
        except (psutil.Error, KeyError):
            continue  # it ended, or is no rank
    return None
