"""A host's experiment as its launcher sees it: a child process, and the file that it leaves."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_stapo.launch.tasks import LOGS_FOLDER, Task
from megatron_stapo.rollout.engine_host import is_engine

SUCCEEDED = "SUCCEEDED"
"""torchx's name of a task's state."""

Outcome = dict[str, dict[str, Any]]
"""Tasks that ended by themselves: {name: {"state": ..., "exit_code": ...}}."""


def start_experiment(
    tasks: Sequence[Task], run_dir: Path, host: int = 0, pass_fds: Iterable[int] = ()
) -> subprocess.Popen[bytes]:
    """Start the process that runs the tasks; `read_outcome` has the result once it has ended.

    Args:
        run_dir: with its folder of logs; the hosts share it.
        host: whose tasks they are.
        pass_fds: descriptors that the process inherits.
    """
    with open(run_dir / LOGS_FOLDER / f"nemo_run{suffix(host)}.log", "wb") as log:
        # A session of its own keeps the terminal's Ctrl-C from it: the launcher decides.
        experiment = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "megatron_stapo.launch.local",
                str(run_dir),
                str(host),
                str(os.getpid()),
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            # In a Slurm job, NeMo-Run writes an experiment on the first host alone.
            env={k: v for k, v in os.environ.items() if k != "SLURM_PROCID"}
            | {"NEMORUN_HOME": str(name_outcome(run_dir, host).parent.absolute())},
            start_new_session=True,
            pass_fds=list(pass_fds),
        )
    with experiment.stdin as stdin:  # type: ignore[union-attr]
        stdin.write(json.dumps([dataclasses.asdict(task) for task in tasks]).encode())
    return experiment


def read_outcome(run_dir: Path, host: int = 0) -> Outcome | None:
    """What has ended in the experiment so far, which is all once it has ended itself; None where
    nothing has, or it did not live to tell."""
    path = name_outcome(run_dir, host)
    return json.loads(path.read_text()) if path.exists() else None


def find_lost_engine(outcome: Outcome | None) -> str:
    """The first rollout engine that has ended by itself, and does not come back; "" for none."""
    return next(filter(is_engine, outcome or {}), "")


def name_outcome(run_dir: Path, host: int) -> Path:
    """The file with a host's outcome, in the folder that is NeMo-Run's home there."""
    return run_dir / "nemo_run" / (f"host{host}" if host else "") / "outcome.json"


def suffix(host: int) -> str:
    """Of the host's log files."""
    return f"_host{host}" if host else ""
