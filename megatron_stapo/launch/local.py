"""Runs a run's tasks on this machine as one NeMo-Run experiment, in a process of its own.

`supervisor` starts this module as a child. In a process of its own, NeMo-Run reads its home from
an environment that is ours to set and prints into a log file; and a launcher that is killed is
noticed, because it is this process's parent. NeMo-Run waits for the other tasks when one failed,
and exits 0, so the tasks' states are watched here.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from megatron_stapo.launch.tasks import LOGS_FOLDER, OUTCOME_FILE, Task, build_script
from megatron_stapo.rollout.processes import adopt_orphans, kill_descendants

_POLL_S = 0.25


def main() -> None:
    """Run the tasks given as JSON on stdin until the first one ends, then stop the others.

    Arguments: the run folder, and the launcher's process id. SIGTERM stops all tasks.
    """
    run_dir, launcher_pid = Path(sys.argv[1]).absolute(), int(sys.argv[2])
    # Whoever sends it to every process of the run means the launcher, which ends the run in order.
    # No handler of a child's: exec puts the default back, which ignoring would not.
    signal.signal(signal.SIGINT, lambda signum, frame: None)
    adopt_orphans()
    tasks = [Task(**values) for values in json.load(sys.stdin)]
    try:
        outcome = _run_tasks(tasks, run_dir, launcher_pid)
    finally:
        kill_descendants()
    # Renamed into place, so that the supervisor never reads half of it.
    path = run_dir / OUTCOME_FILE
    path.with_suffix(".tmp").write_text(json.dumps(outcome))
    path.with_suffix(".tmp").rename(path)


def _run_tasks(tasks: list[Task], run_dir: Path, launcher_pid: int) -> dict[str, dict[str, Any]]:
    """Returns the tasks that ended by themselves: {name: {"state": ..., "exit_code": ...}}."""
    # NeMo-Run wants torch only to print dtypes, and does without; it would cost three seconds.
    sys.modules["torch"] = None  # type: ignore[assignment]
    import nemo_run
    from torchx.specs.api import is_terminal

    stop_signals: list[int] = []
    # Not before the imports: until a task runs, a SIGTERM may end this process at once.
    signal.signal(signal.SIGTERM, lambda signum, frame: stop_signals.append(signum))

    def must_stop() -> bool:
        return bool(stop_signals) or os.getppid() != launcher_pid

    # torchrun is looked up on the PATH, which lacks the environment's folder if that is not active.
    env = {"PATH": os.path.dirname(sys.executable)}
    with nemo_run.Experiment(
        "stapo",
        base_dir=str(run_dir / "nemo_run"),
        log_level="WARNING",
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
    ) as experiment:
        for task in tasks:
            experiment.add(
                nemo_run.Script(inline=build_script(run_dir, task)),
                executor=nemo_run.LocalExecutor(
                    ntasks_per_node=max(task.num_ranks, 1),
                    launcher="torchrun" if task.num_ranks else None,
                    env_vars=env,
                ),
                name=task.name,
            )
        if must_stop():
            return {}
        experiment.run()
        _link_torchrun_log(run_dir)
        ended: dict[str, dict[str, Any]] = {}
        while not ended and not must_stop():
            time.sleep(_POLL_S)
            for name, status in experiment.status(return_dict=True).items():
                if is_terminal(status["status"]):
                    exit_code = _read_exit_code(Path(status["local_dir"]))
                    ended[name] = {"state": status["status"].name, "exit_code": exit_code}
        # The trainer goes first: an engine that vanishes would make it report an error of its own.
        # cancel sends SIGTERM to the task's process group, and SIGKILL after ten seconds.
        for task in reversed(tasks):
            if task.name not in ended:
                experiment.cancel(task.name)
    return ended


def _link_torchrun_log(run_dir: Path) -> None:
    """torchrun writes where NeMo-Run tells it to; link that beside the other logs."""
    for log in run_dir.glob("nemo_run/experiments/stapo/*/trainer/nemo_run/*/trainer/0/stderr.log"):
        link = run_dir / LOGS_FOLDER / "torchrun.log"
        link.symlink_to(os.path.relpath(log, link.parent))


def _read_exit_code(job_dir: Path) -> int:
    """The exit code of an ended task, from the only place where torchx 0.7 states it."""
    (file,) = job_dir.glob("nemo_run/*/SUCCESS")
    (replica,) = next(iter(json.loads(file.read_text())["roles"].values()))
    return int(replica["exitcode"])


if __name__ == "__main__":
    main()
