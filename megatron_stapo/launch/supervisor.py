"""Watches a run from start to end, and ends it whole: one outcome, one message, no process left.

Two processes share the work. This one, the launcher, has the console and the run folder; its child
(`launch.local`) has NeMo-Run and the tasks. Both adopt orphans, and each ends the run when the
other is gone, so that SIGKILL of either, of torchrun or of a server leaves nothing behind. On
several hosts the launcher is on the first, and `hosts` joins it with a member on each other.
"""

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_stapo.checkpoint.folder import replace_durably, write_durably
from megatron_stapo.checkpoint.stop import STOP_FILE, request_stop
from megatron_stapo.config import Config, to_dict
from megatron_stapo.launch.console import outlive_console
from megatron_stapo.launch.experiment import (
    SUCCEEDED,
    find_lost_engine,
    read_outcome,
    start_experiment,
)
from megatron_stapo.launch.failure import describe_failure
from megatron_stapo.launch.hosts import Head
from megatron_stapo.launch.run_folder import claim_run_folder
from megatron_stapo.launch.tasks import LOGS_FOLDER, Task
from megatron_stapo.observability.progress import ProgressPrinter
from megatron_stapo.rollout.processes import adopt_orphans, kill_descendants

_POLL_S = 0.2
_PROBE_BYTES = 1 << 16
# NeMo-Run gives each task ten seconds between SIGTERM and SIGKILL, one after the other.
_STOP_TIMEOUT_PER_TASK_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How a run ended."""

    status: Literal["finished", "failed", "interrupted"]
    reason: str
    """Why it did not finish; empty where it did."""
    total_s: float
    """Seconds from the first process to the last."""


def launch(
    config: Config,
    tasks: Sequence[Task],
    report: Callable[[Ending], str],
    notes: Sequence[str] = (),
    *,
    goes_on: Callable[[Path], bool] = lambda run_dir: False,
    stop_timeout_s: float = 0.0,
    head: Head | None = None,
) -> int:
    """Run the tasks, show their progress, and report.

    Args:
        config: saved as config.json in its run folder, where the tasks read it.
        tasks: of `build_tasks`; the run succeeds when the last one does. With a head: none.
        report: called at the end; what it returns is printed.
        notes: printed first, a line each.
        goes_on: whether this run continues the one that the folder holds.
        stop_timeout_s: seconds that the tasks have to save and end after a first signal, or after
            an engine has ended.
        head: joins the other hosts, and knows the tasks of each.

    Returns:
        Exit code: 0 finished, 1 failed, 130 after SIGINT, 143 after SIGTERM or a stop file,
            129 after SIGHUP.

    Raises:
        ValueError: the run folder is in use, or not a run's, or goes_on refuses it. Nothing was
            started.
    """
    run_dir = Path(config.run_dir)
    with (
        outlive_console(),
        claim_run_folder(run_dir, goes_on) as lock,
        record_signals() as received,
    ):
        try:
            (run_dir / LOGS_FOLDER).mkdir()
            replace_durably(
                run_dir / "config.json", (json.dumps(to_dict(config), indent=2) + "\n").encode()
            )
        except OSError as error:
            raise ValueError(
                f"run_dir={run_dir}: cannot be written ({error.strerror}); make room, or give "
                "another folder."
            ) from error
        start_s = time.monotonic()
        progress = ProgressPrinter(run_dir, config.num_steps)
        for note in notes:
            print(note)
        if head:
            tasks = head.assemble(received)
        names = " and ".join(
            f"{task.name} (ranks: {task.num_ranks})" if task.num_ranks else task.name
            for task in tasks
        )
        outcome, experiment_exit_code, lost_engine = None, None, ""
        if tasks:
            print(f"starting {names}; logs in {run_dir / LOGS_FOLDER}/", flush=True)
            experiment_exit_code, lost_engine = _run_experiment(
                tasks, run_dir, lock, received, progress, stop_timeout_s, head
            )
            outcome = read_outcome(run_dir)
        if head:
            outcome = head.conclude(outcome)
        status: Literal["finished", "failed", "interrupted"]
        # A run that comes to its end takes the wish to stop back.
        was_stopped = (run_dir / STOP_FILE).exists()
        has_succeeded = bool(outcome) and outcome.get(tasks[-1].name, {}).get("state") == SUCCEEDED
        if has_succeeded and not was_stopped:
            status, reason, exit_code = "finished", "", 0
        elif (received or has_succeeded) and not lost_engine:
            signum = received[0] if received else signal.SIGTERM
            who = signal.Signals(signum).name if received else str(run_dir / STOP_FILE)
            status, reason, exit_code = "interrupted", f"stopped by {who}.", 128 + signum
            print(f"stapo: {reason}", file=sys.stderr)
        else:
            status, exit_code = "failed", 1
            if fault := _find_disk_fault(run_dir):
                reason = f"run_dir={run_dir}: cannot be written any more ({fault})."
                details = "with room for it, the same command goes on"
            elif head and head.failure:
                reason, details = head.failure, f"logs are in {run_dir / LOGS_FOLDER}/"
            else:
                reason, details = describe_failure(outcome, experiment_exit_code, run_dir)
            print(f"stapo: error: {reason}\n{details}", file=sys.stderr)
        ending = Ending(status=status, reason=reason, total_s=time.monotonic() - start_s)
        try:
            print(report(ending), flush=True)
        except OSError as error:
            print(f"no summary: {error}", flush=True)
    return exit_code


def _find_disk_fault(run_dir: Path) -> str | None:
    """Why nothing can be written to the folder; None where it can."""
    probe = run_dir / "probe"
    try:
        write_durably(probe, bytes(_PROBE_BYTES))
    except OSError as error:
        return error.strerror
    finally:
        with suppress(OSError):
            probe.unlink(missing_ok=True)
    return None


@contextmanager
def record_signals() -> Iterator[list[int]]:
    """Collect signals that ask for an end in a list, so that they end the run in order and not
    anywhere. What the launcher's parent has it ignore, as nohup does SIGHUP, stays ignored."""
    received: list[int] = []
    previous = {
        signum: signal.signal(signum, lambda signum, frame: received.append(signum))
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(signum) is not signal.SIG_IGN
    }
    try:
        yield received
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _run_experiment(
    tasks: Sequence[Task],
    run_dir: Path,
    lock: int,
    received: list[int],
    progress: ProgressPrinter,
    stop_timeout_s: float,
    head: Head | None,
) -> tuple[int, str]:
    """Run the experiment's process to its end, or to the end that a signal or a lost engine asks
    for.

    Returns:
        Its exit code, and the engine whose end ended the run, "" for none. No process of the run is
        left.
    """
    adopt_orphans()
    # With the lock's descriptor, the folder stays claimed until both processes are gone.
    experiment = start_experiment(tasks, run_dir, pass_fds=[lock])
    lost_engine = ""
    try:
        while experiment.poll() is None and not received and not lost_engine:
            progress.print_new()
            time.sleep(_POLL_S)
            if head and head.must_end():
                break
            lost_engine = find_lost_engine(read_outcome(run_dir))
            if head:
                lost_engine = lost_engine or head.lost_engine
        if received:
            lost_engine = ""  # it may have got the signal as well
        num_signals, which = (2, "a second signal") if received else (1, "a signal")

        def wait_for_end(timeout_s: float) -> None:
            deadline_s = time.monotonic() + timeout_s
            while (
                experiment.poll() is None
                and len(received) < num_signals
                and time.monotonic() < deadline_s
            ):
                progress.print_new()
                time.sleep(_POLL_S)

        progress.print_new()
        cause = (
            signal.Signals(received[0]).name
            if received
            else lost_engine and f"{lost_engine} has ended"
        )
        # Before a step has ended there is nothing to save.
        must_save = cause and stop_timeout_s and progress.num_steps_shown
        if experiment.poll() is None and must_save:
            print(
                f"{cause}: saving, for at most {stop_timeout_s:.0f} s; {which} stops at once",
                flush=True,
            )
            try:
                request_stop(run_dir, cause)
                wait_for_end(stop_timeout_s)
            except OSError as error:
                print(f"not saved: {error}", flush=True)
        if experiment.poll() is None:
            is_last = len(received) >= num_signals
            print("stopping" if is_last else f"stopping; {which} stops at once", flush=True)
            experiment.terminate()
            wait_for_end(_STOP_TIMEOUT_PER_TASK_S * (len(tasks) + 1))
        progress.print_new()
    finally:
        kill_descendants()
    return experiment.wait(), lost_engine
