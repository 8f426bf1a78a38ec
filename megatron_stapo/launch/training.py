"""Runs `stapo train`: the engine and the trainer's ranks, then the summary."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_stapo.checkpoint.folder import list_checkpoints
from megatron_stapo.config import Config, from_dict, list_changes
from megatron_stapo.launch.supervisor import Ending, launch
from megatron_stapo.launch.tasks import build_tasks
from megatron_stapo.observability.summary import SUMMARY_FILE, format_summary, write_summary


def launch_training(
    config: Config, notes: Sequence[str], *, fresh: bool = False, changed: bool = False
) -> int:
    """Start the run or go on with it, write summary.json and curves.png, print the closing lines.

    Args:
        notes: printed first, a line each.
        fresh: begin at step 0, and set an unfinished run aside.
        changed: go on with settings that differ from those the run began with.

    Returns:
        Exit code, as `launch`.

    Raises:
        ValueError: as `launch`; or the folder holds an unfinished run of another experiment.
    """

    def report(ending: Ending) -> str:
        summary = write_summary(
            config.run_dir,
            status=ending.status,
            reason=ending.reason,
            num_steps=config.num_steps,
            total_s=ending.total_s,
        )
        lines = format_summary(summary)
        if ending.status != "finished" and list_checkpoints(Path(config.run_dir)):
            newest = list_checkpoints(Path(config.run_dir))[-1]
            lines += f"\n  the same command goes on from {newest}"
        return lines

    def goes_on(run_dir: Path) -> bool:
        return not fresh and continues(run_dir, config, changed)

    return launch(
        config,
        build_tasks(config),
        report,
        notes,
        goes_on=goes_on,
        stop_timeout_s=config.checkpoint.stop_timeout_s,
    )


def continues(run_dir: Path, config: Config, changed: bool) -> bool:
    """Whether a run with this config is the continuation of the one that the folder holds.

    It is where that one is the same experiment and has not taken as many steps. A finished run that
    is repeated begins anew.

    Args:
        changed: the settings may differ.

    Raises:
        ValueError: the folder holds an unfinished run of another experiment, with checkpoints.
    """
    try:
        old = from_dict(json.loads((run_dir / "config.json").read_text()))
    except FileNotFoundError:
        return False
    except (ValueError, TypeError) as error:
        if not list_checkpoints(run_dir):
            return False
        raise ValueError(
            f"run_dir={run_dir}: its config.json cannot be read ({error}), and it has checkpoints; "
            "give another folder, or --fresh to set that run aside."
        ) from error
    num_steps_done = _read_num_steps_if_finished(run_dir)
    differences = list_changes(old, config)
    if num_steps_done is not None and (differences or config.num_steps <= num_steps_done):
        return False
    if differences and not changed:
        if not list_checkpoints(run_dir):
            return False
        raise ValueError(
            f"run_dir={run_dir}: holds an unfinished run with other settings "
            f"({'; '.join(differences)}). Give the old ones to go on with it, --changed to take "
            "the new ones into it, --fresh to set it aside and begin anew, or another run_dir=."
        )
    return True


def _read_num_steps_if_finished(run_dir: Path) -> int | None:
    try:
        summary = json.loads((run_dir / SUMMARY_FILE).read_text())
    except (OSError, ValueError):
        return None
    return int(summary["num_steps"]) if summary["status"] == "finished" else None
