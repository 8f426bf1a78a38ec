"""The wish to stop a run, as a file in its folder: the launcher or a person makes it, rank 0 looks.

A file reaches every node that shares the folder, and no process has to know another's id.
"""

import time
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


class StopCheck:
    """`check_stop` that lets what is under way come to its end, for so long."""

    def __init__(self, run_dir: Path, grace_s: float = 0.0) -> None:
        """Args: grace_s: time from the moment that the wish is seen to the exception."""
        self._run_dir = run_dir
        self._grace_s = grace_s
        self._seen_s: float | None = None

    def __call__(self, can_end: bool = True) -> None:
        """Raises StopRequested once the wish is so old, or at once where what is under way cannot
        come to its end."""
        try:
            check_stop(self._run_dir)
        except StopRequested:
            if self._seen_s is None:
                self._seen_s = time.monotonic()
            if not can_end or time.monotonic() - self._seen_s >= self._grace_s:
                raise
