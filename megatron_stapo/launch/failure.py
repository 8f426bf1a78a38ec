"""Why a run failed, in one message: what died, of what, its last words, and where to read more."""

import re
import signal
from pathlib import Path
from typing import Any

from megatron_stapo.launch.experiment import find_lost_engine
from megatron_stapo.launch.tasks import LOGS_FOLDER
from megatron_stapo.rollout.engine_host import END_MARK, START_MARK, is_engine

_NUM_TAIL_LINES = 12

# What torch puts before the lines of a rank's traceback, and vLLM before its processes' lines.
_PREFIX = re.compile(r"^(\[rank\d+\]: ?|\([^)]* pid=\d+\) (ERROR \S+ \S+ \[[^]]*\] ?)?)")

# How a rank's collective ends when another rank is gone: the watchdog's words, gloo's and NCCL's.
_LOST_PEER = re.compile(
    r"lost its connection to another rank|gloo/transport|Connection (closed|reset) by peer"
    r"|NCCL (Error|error)|remote process exited"
)

# How it ends when another rank hangs, which the watchdog names.
_WAITED = re.compile(r"RuntimeError: rank \d+ \(.*?\) waited \S+ s \(parallel\.timeout_s\)")

# One entry of torchrun 2.13's closing table of failed ranks.
_TORCHRUN_FAILURE = re.compile(
    r"^  rank +: (?P<rank>\d+) .*\n  exitcode +: (?P<exit_code>-?\d+) ", re.MULTILINE
)


def describe_failure(
    outcome: dict[str, dict[str, Any]] | None, experiment_exit_code: int | None, run_dir: Path
) -> tuple[str, str]:
    """Find out what ended the run.

    Args:
        outcome: the tasks that ended unasked, as `launch.local` wrote it; None where it did not.
        experiment_exit_code: of the process of `launch.local`.
        run_dir: the run folder with the logs.

    Returns:
        The reason in one line, and the last lines of the log with its path.
    """
    logs = run_dir / LOGS_FOLDER
    if not outcome:
        what, log = f"NeMo-Run {_describe_exit(experiment_exit_code)}", logs / "nemo_run.log"
    elif name := find_lost_engine(outcome):
        # Also when the trainer has ended, saved or not: it cannot end the engine, only miss it.
        exit_code = outcome[name]["exit_code"]
        what = f"the rollout {name.replace('_', ' ')} {_describe_exit(exit_code)}"
        log = logs / f"{name}.log"
    elif "evaluation" in outcome:
        exit_code = outcome["evaluation"]["exit_code"]
        what, log = f"the evaluation {_describe_exit(exit_code)}", logs / "evaluation.log"
    else:
        what, log = _describe_trainer(outcome["trainer"]["exit_code"], logs)
    lines = _read_lines(log)
    is_of_engine = is_engine(log.name)
    if is_of_engine:
        starts = [i for i, line in enumerate(lines) if line.startswith(START_MARK)]
        lines = lines[starts[-1] if starts else 0 :]
    errors = _find_errors(lines)
    # The engine's processes share a log, and the cause comes first, then who missed the process. A
    # rank has its own, and raises last what it wants read.
    words = [errors[0 if is_of_engine else -1]] if errors else []
    if is_of_engine:
        words += [line.removeprefix(END_MARK) for line in lines if line.startswith(END_MARK)]
    reason = f"{what}: {'; '.join(words)}" if words else f"{what}."
    tail = [f"  {line[:200]}" for line in lines[-_NUM_TAIL_LINES:]] or ["  (the log is empty)"]
    return reason, "\n".join([f"last lines of {log}:", *tail])


def _describe_trainer(exit_code: int, logs: Path) -> tuple[str, Path]:
    """Name the rank that failed first, or torchrun where it did not live to tell."""
    torchrun_log = logs / "torchrun.log"
    failures = [
        (int(match["rank"]), int(match["exit_code"]))
        for log in sorted(logs.glob("torchrun*.log"))  # one for each host
        for match in _TORCHRUN_FAILURE.finditer("\n".join(_read_lines(log)))
    ]
    if not failures:
        what = f"torchrun, the parent of the trainer's ranks, {_describe_exit(exit_code)}"
        return what, torchrun_log
    # Of ranks alike in guilt, the first one's log ends before the others'.
    rank, exit_code = min(
        failures,
        key=lambda failure: (
            _rate_innocence(*failure, logs),
            (logs / f"trainer_rank{failure[0]}.log").stat().st_mtime_ns,
        ),
    )
    return f"trainer rank {rank} {_describe_exit(exit_code)}", logs / f"trainer_rank{rank}.log"


def _rate_innocence(rank: int, exit_code: int, logs: Path) -> int:
    """0 for a rank that tells which one hangs, 1 for one that failed by itself, 2 for one that
    torchrun stopped in its last words, 3 for one that only lost a peer or was stopped."""
    errors = _find_errors(_read_lines(logs / f"trainer_rank{rank}.log"))
    if errors and _LOST_PEER.search(errors[-1]):
        return 3
    if errors and _WAITED.match(errors[-1]):
        return 0  # the one that hangs is killed in the end, as if that had been the cause
    if exit_code != -signal.SIGTERM:
        return 1
    return 2 if errors else 3


def _describe_exit(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by {signal.Signals(-exit_code).name}"
    return f"ended with exit code {exit_code}"


def _read_lines(log: Path) -> list[str]:
    """Lines with something on them."""
    if not log.exists():
        return []
    return [line for line in log.read_text(errors="replace").splitlines() if line.strip()]


def _find_errors(lines: list[str]) -> list[str]:
    """Of every traceback the line that names the exception, the first that is not indented."""
    errors = []
    in_traceback = False
    for line in (_PREFIX.sub("", line) for line in lines):
        if line.startswith("Traceback (most recent call last)"):
            in_traceback = True
        elif in_traceback and line and not line.startswith(" "):
            errors.append(line)
            in_traceback = False
    return errors
