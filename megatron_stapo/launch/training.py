"""Runs `stapo train`: the engine and the trainer's ranks, then the summary."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_stapo.checkpoint.folder import list_checkpoints, parse_step, read_config
from megatron_stapo.config import Config, list_changes
from megatron_stapo.launch.hosts import Head
from megatron_stapo.launch.supervisor import Ending, launch
from megatron_stapo.launch.tasks import build_tasks
from megatron_stapo.observability.summary import SUMMARY_FILE, format_summary, write_summary


def launch_training(
    config: Config,
    notes: Sequence[str],
    *,
    fresh: bool = False,
    changed: bool = False,
    head: Head | None = None,
) -> int:
    """Start the run or go on with it, write summary.json and curves.png, print the closing lines.

    Args:
        notes: printed first, a line each.
        fresh: begin at step 0, and set an unfinished run aside.
        changed: go on with settings that differ from those the run began with.
        head: of a run on several hosts; None runs everything on this machine.

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
        () if head else build_tasks(config),
        report,
        notes,
        goes_on=goes_on,
        stop_timeout_s=config.checkpoint.stop_timeout_s,
        head=head,
    )


def continues(run_dir: Path, config: Config, changed: bool) -> bool:
    """Whether a run with this config is the continuation of the one that the folder holds.

    It is where that one is the same experiment and has not taken as many steps. A finished run that
    is repeated begins anew.

    Args:
        changed: the settings may differ.

    Raises:
        ValueError: the folder holds a run that this one would go on with, but with other settings,
            or settings that cannot be read; it has checkpoints, which are not to be left behind
            unasked. Or it has taken more steps; or as many, and changed is given.
    """
    num_steps_done = _read_num_steps_if_finished(run_dir)
    if num_steps_done is not None and config.num_steps <= num_steps_done:
        if changed:
            raise ValueError(
                f"num_steps={config.num_steps}: the run in {run_dir} has finished "
                f"{num_steps_done}, so that --changed has nothing to go on with; ask for more."
            )
        return False
    checkpoints = list_checkpoints(run_dir)
    if checkpoints and config.num_steps < (newest := parse_step(checkpoints[-1]) or 0):
        raise ValueError(
            f"num_steps={config.num_steps}: the run in {run_dir} has a checkpoint of {newest} "
            "steps; ask for as many at least, or move the newer checkpoints away."
        )
    old = _read_settings(run_dir, checkpoints)
    if old is None:
        if not checkpoints:
            return False
        raise ValueError(
            f"run_dir={run_dir}: has checkpoints, and no config.json of it can be read. Restore "
            "one, give another folder, or --fresh to set that run aside."
        )
    differences = list_changes(old, config)
    if differences and not changed:
        if not checkpoints:
            return False
        raise ValueError(
            f"run_dir={run_dir}: holds a run with other settings ({'; '.join(differences)}). Give "
            "the old ones to go on with it, --changed to take the new ones into it, --fresh to set "
            "it aside and begin anew, or another run_dir=."
        )
    return True


def _read_settings(run_dir: Path, checkpoints: Sequence[Path]) -> Config | None:
    """Those that the newest checkpoint was trained with; without one, those of the last attempt."""
    for folder in [*reversed(checkpoints), run_dir]:
        try:
            return read_config(folder)
        except ValueError:
            continue
    return None


def _read_num_steps_if_finished(run_dir: Path) -> int | None:
    try:
        summary = json.loads((run_dir / SUMMARY_FILE).read_text())
        return int(summary["num_steps"]) if summary["status"] == "finished" else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # written at the end of a run; without one there was none
