"""Runs a job's hosts on this machine: a NeMo-Run task for each, behind a command of the user's.

`ip netns exec NAME` makes a host of a network namespace, `ssh NAME` of a machine that shares the
folders. Every host runs the command that it would run as a node of a cluster.
"""

import contextlib
import ipaddress
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from megatron_stapo.launch.console import outlive_console
from megatron_stapo.launch.experiment import read_outcome, start_experiment
from megatron_stapo.launch.run_folder import claim_run_folder
from megatron_stapo.launch.supervisor import record_signals
from megatron_stapo.launch.tasks import LOGS_FOLDER, Task
from megatron_stapo.rollout.processes import adopt_orphans, kill_descendants

_POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class LocalHost:
    """A host, and how a command gets there."""

    address: str
    prefix: tuple[str, ...] = ()


def launch_on_hosts(
    hosts: Sequence[LocalHost],
    folder: Path,
    build_command: Callable[[int], list[str]],
) -> int:
    """Run a command on every host until the first host's ends, and show what that one prints.

    A signal is passed on to the first host, which ends the run in order.

    Args:
        folder: for NeMo-Run's files and a log per host; that of an earlier launch is set aside.
        build_command: of a host's number.

    Returns:
        The first host's exit code; 1 where a signal killed it.

    Raises:
        ValueError: the folder is in use, or holds other files.
    """
    tasks = [
        Task(
            name=f"host{index}",
            argv=[*host.prefix, *build_command(index)],
            env={},
            # The first host sees what happens to the others, and tells.
            ends_run="always" if index == 0 else "never",
        )
        for index, host in enumerate(hosts)
    ]
    with outlive_console(), claim_run_folder(folder) as lock, record_signals() as received:
        (folder / LOGS_FOLDER).mkdir()
        adopt_orphans()
        experiment = start_experiment(tasks, folder, pass_fds=[lock])
        num_passed_on = 0
        try:
            with (folder / LOGS_FOLDER / "host0.log").open("a+") as log:
                log.seek(0)
                while experiment.poll() is None:
                    print(log.read(), end="", flush=True)
                    for signum in received[num_passed_on:]:
                        _signal_first_host(tasks[0], signum)
                        num_passed_on += 1
                    time.sleep(_POLL_S)
                print(log.read(), end="", flush=True)
        finally:
            kill_descendants()
    outcome = read_outcome(folder)
    if not outcome or "host0" not in outcome:
        print(f"stapo: error: NeMo-Run failed; see {folder / LOGS_FOLDER}/", file=sys.stderr)
        return 1
    exit_code = int(outcome["host0"]["exit_code"])
    return exit_code if exit_code >= 0 else 1


def _signal_first_host(task: Task, signum: int) -> None:
    """Signal the process that runs the task's command, behind the prefix; others do not see it."""
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            command = process.cmdline()
            if command and command == task.argv[-len(command) :]:
                process.send_signal(signal.Signals(signum))


def parse_host(text: str) -> LocalHost:
    """Read ADDRESS or ADDRESS=COMMAND PREFIX.

    Raises:
        ValueError: no IPv4 address.
    """
    address, _, prefix = text.partition("=")
    try:
        ipaddress.IPv4Address(address)
    except ValueError:
        raise ValueError(
            f"--host={text}: must be ADDRESS or ADDRESS=COMMAND, for example "
            "'10.0.0.1=ip netns exec host1'."
        ) from None
    return LocalHost(address=address, prefix=tuple(shlex.split(prefix)))
