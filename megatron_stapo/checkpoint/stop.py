"""The wish to stop a run, as a file in its folder: the launcher or a person makes it, rank 0 looks.

A file reaches every node that shares the folder, and no process has to know another's id.
"""

from pathlib import Path

STOP_FILE = "stop"


class StopRequested(Exception):
    """The run is asked to save and end."""


def request_stop(run_dir: Path, reason: str) -> None:
    """Ask the run to save and end."""
    (run_dir / STOP_FILE).write_text(f"{reason}\n")


def withdraw_stop(run_dir: Path) -> None:
    """Forget an earlier wish."""
    (run_dir / STOP_FILE).unlink(missing_ok=True)


def check_stop(run_dir: Path) -> None:
    """Raises StopRequested where somebody has asked for it."""
    if (run_dir / STOP_FILE).exists():
        raise StopRequested(str(run_dir / STOP_FILE))
