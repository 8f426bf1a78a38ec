"""The run folder: one run at a time, and no run lost to the next.

A folder is a run's when it holds the lock file. A live run holds an flock on it, which the kernel
drops with the last process that carries it, so that no stale lock needs a human.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = "stapo.lock"
"""Carries the process id of the launcher, for people; the flock is what counts."""


ATTEMPTS_FOLDER = "attempts"
"""What earlier attempts of a run wrote that went on."""

_OF_AN_ATTEMPT = (
    "logs",
    "nemo_run",
    "metrics.jsonl",
    "summary.json",
    "curves.png",
    "timeline.png",
    "stop",
)


@contextmanager
def claim_run_folder(
    run_dir: Path, goes_on: Callable[[Path], bool] = lambda run_dir: False
) -> Iterator[int]:
    """Create the folder or take it over, and hold it until the block ends.

    What an earlier run left is moved to `<run_dir>.1`, or the next free number: a run that is
    repeated by habit, as the demo is, neither fails nor destroys the one before. Where this run
    goes on from the earlier one, only what the earlier attempt's processes wrote is moved, to
    `attempts/1` and so on.

    Args:
        goes_on: asked once the folder is held, whether this run is the earlier one's continuation.

    Yields:
        File descriptor of the lock; a process that inherits it holds the folder, too.

    Raises:
        ValueError: another run holds the folder, or its files are not a run's.
    """
    lock_path = run_dir / LOCK_FILE
    if run_dir.exists() and not run_dir.is_dir():
        raise ValueError(f"run_dir={run_dir}: is not a folder.")
    if run_dir.is_dir() and any(run_dir.iterdir()) and not lock_path.exists():
        raise ValueError(
            f"run_dir={run_dir}: holds files that are not a run's; give a new or an empty folder."
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = open(lock_path, "a+")  # noqa: SIM115
    except OSError as error:
        raise ValueError(
            f"run_dir={run_dir}: cannot be written ({error.strerror}); give another folder."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise ValueError(
                f"run_dir={run_dir}: in use by the live run of process {lock.read().strip()}; stop "
                "that run, or give this one another folder with run_dir=."
            ) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()}\n")
        lock.flush()
        set_aside = _set_earlier_attempt_aside if goes_on(run_dir) else _set_earlier_run_aside
        try:
            set_aside(run_dir)
        except OSError as error:
            raise ValueError(
                f"run_dir={run_dir}: what an earlier run left cannot be moved ({error}); repair "
                "its permissions, or give another folder."
            ) from error
        yield lock.fileno()


def _set_earlier_attempt_aside(run_dir: Path) -> None:
    number = 1
    while (aside := run_dir / ATTEMPTS_FOLDER / str(number)).exists():
        number += 1
    aside.mkdir(parents=True)
    for name in _OF_AN_ATTEMPT:
        if (run_dir / name).exists():
            (run_dir / name).rename(aside / name)


def _set_earlier_run_aside(run_dir: Path) -> None:
    # Entry by entry, because the lock file must stay where the next launcher looks for it.
    entries = [entry for entry in run_dir.iterdir() if entry.name != LOCK_FILE]
    if not entries:
        return
    number = 1
    while (aside := run_dir.with_name(f"{run_dir.name}.{number}")).exists():
        number += 1
    aside.mkdir()
    (aside / LOCK_FILE).touch()  # it stays a run, which a command with its name goes on with
    for entry in entries:
        entry.rename(aside / entry.name)
    print(f"the earlier run of {run_dir} is now in {aside}")
