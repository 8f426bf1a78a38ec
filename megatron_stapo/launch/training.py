"""Runs `stapo train`: the engine and the trainer's ranks, then the summary."""

from collections.abc import Sequence

from megatron_stapo.config import Config
from megatron_stapo.launch.supervisor import Ending, launch
from megatron_stapo.launch.tasks import build_tasks
from megatron_stapo.observability.summary import format_summary, write_summary


def launch_training(config: Config, notes: Sequence[str]) -> int:
    """Start the run, write summary.json and curves.png, print the closing lines.

    Args:
        notes: printed first, a line each.

    Returns:
        Exit code, as `launch`.
    """

    def report(ending: Ending) -> str:
        summary = write_summary(
            config.run_dir,
            status=ending.status,
            reason=ending.reason,
            num_steps=config.num_steps,
            total_s=ending.total_s,
        )
        return format_summary(summary)

    return launch(config, build_tasks(config), report, notes)
