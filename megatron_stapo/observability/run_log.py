"""What a run records: `metrics.jsonl` and TensorBoard scalars, written by trainer rank 0 alone.

metrics.jsonl is the record; the summary, the curves and the console are derived from it. A line is
whole once it ends in a newline, and flushed at once, so that it survives the process and another
process may follow the file. A line holds "step" or "event", never both. Several threads write.
"""

import json
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
TENSORBOARD_FOLDER = "tensorboard"


class RunLog:
    """Appends a run's steps and events to its folder."""

    def __init__(self, run_dir: str | Path, history: bytes = b"") -> None:
        """Open the files of the run folder, which exists.

        Args:
            history: lines of metrics.jsonl up to the step that a resumed run starts from; they take
                the place of what the file holds.
        """
        # Imported here because it brings torch, which the readers of a run do without.
        from torch.utils.tensorboard import SummaryWriter

        self._path = Path(run_dir) / METRICS_FILE
        self._unwritten = b""
        purge_step = None
        if history:
            # In one move, so that a crash here leaves the one or the other.
            partial = self._path.with_name(METRICS_FILE + ".partial")
            partial.write_bytes(history)
            partial.replace(self._path)
            purge_step = max((r["step"] for r in self.read() if "step" in r), default=0) + 1
        self._lock = threading.Lock()
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self._tensorboard: Any = SummaryWriter(
            str(Path(run_dir) / TENSORBOARD_FOLDER), purge_step=purge_step
        )

    def log_step(
        self,
        step: int,
        metrics: dict[str, float | None],
        seconds: dict[str, float],
        spans: Mapping[str, Sequence[tuple[str, float, float]]] | None = None,
    ) -> None:
        """Record a finished step.

        Args:
            step: number of completed steps, from 1.
            metrics: name -> value; a value that is None or not finite is recorded as null.
            seconds: phase of the step -> seconds.
            spans: who -> phases with begin and end, in seconds of the wall clock; what the engines
                did for this step may lie before it.
        """
        record = {"step": step, "time": time.time(), "metrics": metrics, "seconds": seconds}
        self._write(record | ({"spans": spans} if spans else {}))
        if self._tensorboard is None:
            return
        try:
            for tag, values in (("step", metrics), ("seconds", seconds)):
                for name, value in values.items():
                    if value is not None and math.isfinite(value):
                        self._tensorboard.add_scalar(f"{tag}/{name}", value, step)
            self._tensorboard.flush()
        except OSError as error:
            # Its writer has ended. The record goes on in metrics.jsonl.
            self._tensorboard = None
            self.log_event("tensorboard_ended", value=error.strerror, after_steps=step)

    def log_event(self, name: str, **values: Any) -> None:
        """Record something that happens once: a phase that begins, or a result of the whole run.

        `accuracy` carries an evaluation: the mean over benchmarks as `value`, its standard_error,
        and after_steps. The console shows an event by its name and values.
        """
        self._write({"event": name, "time": time.time(), **values})

    def read_bytes(self) -> bytes:
        """What metrics.jsonl holds, and what the disk has not taken yet."""
        return self._path.read_bytes() + self._unwritten

    def read(self) -> list[dict[str, Any]]:
        """The records of metrics.jsonl."""
        return [json.loads(line) for line in self.read_bytes().splitlines()]

    def close(self) -> None:
        """Close both records."""
        os.close(self._file)
        if self._tensorboard is not None:
            with suppress(OSError):
                self._tensorboard.close()

    def _write(self, record: dict[str, Any]) -> None:
        line = json.dumps(_replace_non_finite(record), allow_nan=False) + "\n"
        with self._lock:
            self._unwritten += line.encode()
            # A full disk may take a part, and has room again later. Unbuffered: a reader sees a
            # prefix of the file, never two halves mixed.
            try:
                while self._unwritten:
                    self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
            except OSError as error:
                print(f"{self._path}: not written ({error.strerror})", flush=True)


def _replace_non_finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null takes their place."""
    if isinstance(value, dict):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
