"""Runs a host's tasks as one NeMo-Run experiment, in a process of its own.

`experiment` starts this module as a child of the launcher. In a process of its own, NeMo-Run
reads its home from an environment that is ours to set and prints into a log file; and a launcher
that is killed is noticed, because it is this process's parent. NeMo-Run waits for the other tasks
when one failed, and exits 0, so the tasks' states are watched here.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from megatron_stapo.launch.experiment import SUCCEEDED, Outcome, name_outcome, suffix
from megatron_stapo.launch.tasks import LOGS_FOLDER, Task, build_script
from megatron_stapo.rollout.processes import adopt_orphans, kill_descendants

_POLL_S = 0.25


def main() -> None:
    """Run the tasks given as JSON on stdin until one ends the run, then stop the others.

    Arguments: the run folder, the host's number, and the launcher's process id. SIGTERM stops all
    tasks. What has ended is told at once, in the file of `name_outcome`.
    """
    run_dir, host, launcher_pid = Path(sys.argv[1]).absolute(), int(sys.argv[2]), int(sys.argv[3])
    # Whoever sends it to every process of the run means the launcher, which ends the run in order.
    # No handler of a child's: exec puts the default back, which ignoring would not.
    signal.signal(signal.SIGINT, lambda signum, frame: None)
    adopt_orphans()
    tasks = [Task(**values) for values in json.load(sys.stdin)]
    try:
        outcome = _run_tasks(tasks, run_dir, host, launcher_pid)
    finally:
        kill_descendants()
    _tell(outcome, run_dir, host)


def _tell(outcome: Outcome, run_dir: Path, host: int) -> None:
    # Renamed into place, so that the launcher never reads half of it.
    path = name_outcome(run_dir, host)
    path.with_suffix(".tmp").write_text(json.dumps(outcome))
    path.with_suffix(".tmp").rename(path)


def _run_tasks(tasks: list[Task], run_dir: Path, host: int, launcher_pid: int) -> Outcome:
    # NeMo-Run wants torch only to print dtypes, and does without; it would cost three seconds.
    sys.modules["torch"] = None  # type: ignore[assignment]
    import nemo_run
    from nemo_run.core.execution.launcher import Torchrun
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
        base_dir=str(name_outcome(run_dir, host).parent),
        log_level="WARNING",
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
    ) as experiment:
        for task in tasks:
            if task.num_hosts > 1:
                # From where NeMo-Run's torchrun takes them.
                os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = task.master.rpartition(
                    ":"
                )
                os.environ["NODE_RANK"] = str(task.host_rank)
            # The default, c10d, numbers the hosts in an order of its own.
            torchrun = Torchrun(rdzv_backend="static" if task.num_hosts > 1 else "c10d")
            experiment.add(
                nemo_run.Script(inline=build_script(run_dir, task)),
                executor=nemo_run.LocalExecutor(
                    nodes=task.num_hosts,
                    ntasks_per_node=max(task.num_ranks, 1),
                    launcher=torchrun if task.num_ranks else None,
                    env_vars=env,
                ),
                name=task.name,
            )
        if must_stop():
            return {}
        experiment.run()
        processes = {task.name: _find_process(task) for task in tasks}
        _link_torchrun_log(run_dir, host)
        ended: Outcome = {}
        while not must_stop():
            time.sleep(_POLL_S)
            num_ended = len(ended)
            for name, status in experiment.status(return_dict=True).items():
                if is_terminal(status["status"]) and name not in ended:
                    exit_code = _read_exit_code(Path(status["local_dir"]))
                    ended[name] = {"state": status["status"].name, "exit_code": exit_code}
                elif name not in ended and not _is_alive(processes[name]):
                    # torchx, which has reaped it, could not write so on a full disk, and NeMo-Run
                    # swallows that.
                    ended[name] = {"state": "FAILED", "exit_code": 1}
            if len(ended) == len(tasks) or any(_ends_run(task, ended) for task in tasks):
                break
            if len(ended) > num_ended:
                _tell(ended, run_dir, host)
        # The trainer goes first: an engine that vanishes would make it report an error of its own.
        # cancel sends SIGTERM to the task's process group, and SIGKILL after ten seconds.
        for task in reversed(tasks):
            if task.name not in ended:
                experiment.cancel(task.name)
    return ended


def _ends_run(task: Task, ended: Outcome) -> bool:
    if task.name not in ended or task.ends_run == "never":
        return False
    return task.ends_run == "always" or ended[task.name]["state"] != SUCCEEDED


def _find_process(task: Task) -> psutil.Process | None:
    """The child of this process that runs the task's script."""
    for process in psutil.Process().children():
        with suppress(psutil.Error):
            if any(word.endswith(f"/{task.name}.sh") for word in process.cmdline()):
                return process
    return None  # it has ended already, or has not begun its script


def _is_alive(process: psutil.Process | None) -> bool:
    return process is None or process.is_running()


def _link_torchrun_log(run_dir: Path, host: int) -> None:
    """torchrun writes where NeMo-Run tells it to; link that beside the other logs."""
    home = name_outcome(run_dir, host).parent
    for log in home.glob("experiments/stapo/*/trainer/nemo_run/*/trainer/0/stderr.log"):
        link = run_dir / LOGS_FOLDER / f"torchrun{suffix(host)}.log"
        link.symlink_to(os.path.relpath(log, link.parent))


def _read_exit_code(job_dir: Path) -> int:
    """The exit code of an ended task, from the only place where torchx 0.7 states it."""
    (file,) = job_dir.glob("nemo_run/*/SUCCESS")
    (replica,) = next(iter(json.loads(file.read_text())["roles"].values()))
    return int(replica["exitcode"])


if __name__ == "__main__":
    main()
