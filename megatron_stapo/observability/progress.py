"""A run as it happens: follows metrics.jsonl and prints one line per event and per step."""

import json
import time
from pathlib import Path
from typing import Any

from megatron_stapo.observability.run_log import METRICS_FILE

PHASES = ("rollout", "reward", "score", "threshold", "update", "sync")
"""The parts of a step, in their order. With rollout.max_lag_steps `rollout` is the time that the
trainer waits for what is sampled ahead, and `reward` is not measured."""

# Metric, heading and format of each column. A width fits its heading and every value in reach.
_COLUMNS = (
    ("reward_mean", "reward", "7.3f"),
    ("accuracy", "accuracy", "8.3f"),
    ("entropy_mean", "entropy", "7.3f"),
    ("num_candidates", "candidates", "10.0f"),
    ("num_masked", "masked", "6.0f"),
    ("masked_frac", "share", "9.4%"),
    ("logprob_gap_mean", "gap mean", "8.1e"),
    ("logprob_gap_max", "gap max", "8.1e"),
    ("tokens_per_s", "tok/s", "7.0f"),
)
_ROWS_PER_HEADING = 20


class MetricsFollower:
    """Reads a growing metrics.jsonl, each whole line once."""

    def __init__(self, run_dir: str | Path) -> None:
        self._path = Path(run_dir) / METRICS_FILE
        self._offset = 0

    def read_new(self) -> list[dict[str, Any]]:
        """Records added since the last call; none while the file does not exist.

        A last line without its newline is being written, or was torn when the writer was killed: it
        is left for the next call, and never read if that does not complete it.
        """
        if not self._path.exists():
            return []
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            whole = file.read().rpartition(b"\n")[0]
        if not whole:
            return []
        self._offset += len(whole) + 1
        return [json.loads(line) for line in whole.splitlines()]


class ProgressPrinter:
    """Prints what the trainer records, as it records it."""

    def __init__(self, run_dir: str | Path, num_steps: int) -> None:
        self._follower = MetricsFollower(run_dir)
        self._num_steps = num_steps
        self._start_s = time.time()
        self.num_steps_shown = 0
        """Steps that have ended since this was made."""

    def print_new(self) -> None:
        """Print the records that are new since the last call."""
        for record in self._follower.read_new():
            if record["time"] < self._start_s:
                continue  # of the attempt that this run goes on from
            if "step" in record:
                if self.num_steps_shown % _ROWS_PER_HEADING == 0:
                    print(format_heading())
                self.num_steps_shown += 1
                print(format_step(record, self._num_steps), flush=True)
            else:
                print(
                    f"{record['time'] - self._start_s:7.1f} s  {format_event(record)}", flush=True
                )


def format_heading() -> str:
    """The heading of the step lines."""
    cells = [heading.rjust(_width(spec)) for _, heading, spec in _COLUMNS]
    phases = [phase.rjust(_phase_width(phase)) for phase in PHASES]
    return " ".join(["     step", *cells, " s:", *phases, "  total"])


def format_step(record: dict[str, Any], num_steps: int) -> str:
    """One line for one step; a value that is not there, or not finite, shows as a dash."""
    cells = [
        _format_cell(record["metrics"].get(name), spec, _width(spec)) for name, _, spec in _COLUMNS
    ]
    seconds = record["seconds"]
    phases = [_format_cell(seconds.get(phase), ".1f", _phase_width(phase)) for phase in PHASES]
    total = sum(value for value in seconds.values() if value is not None)
    step = f"{record['step']}/{num_steps}".rjust(9)
    return " ".join([step, *cells, "   ", *phases, f"{total:7.1f}"])


def format_event(record: dict[str, Any]) -> str:
    """An event in words: its name, then its values."""
    values = []
    for name, value in record.items():
        if isinstance(value, dict):
            values += [f"{key} {_format_value(item)}" for key, item in value.items()]
        elif name not in ("event", "time"):
            text = _format_value(value)
            values.append(text if name == "value" else f"{name.replace('_', ' ')} {text}")
    words = record["event"].replace("_", " ")
    return f"{words}: {', '.join(values)}" if values else words


def _format_value(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _format_cell(value: float | None, spec: str, width: int) -> str:
    return ("-" if value is None else format(value, spec)).rjust(width)


def _width(spec: str) -> int:
    return int(spec.partition(".")[0])


def _phase_width(phase: str) -> int:
    return max(len(phase), 6)
