"""Runs `stapo verify`: the ranks of the recipe's layout on the small problem, then the table."""

from pathlib import Path

from megatron_stapo.config import Config
from megatron_stapo.launch.supervisor import launch
from megatron_stapo.launch.tasks import build_tasks
from megatron_stapo.observability.verification import format_report, read_report
from megatron_stapo.verify.reduce import reduce_config


def launch_verification(config: Config) -> int:
    """Start the ranks and print the table.

    Returns:
        Exit code: 0 where every number agrees, 1 where one does not or a rank failed; else as
        `launch`.
    """
    reduced, num_layers = reduce_config(config)
    run_dir = Path(reduced.run_dir)
    tasks = build_tasks(
        reduced,
        "megatron_stapo.verify.ranks",
        f"--source={config.model.path}",
        f"--num-layers={num_layers}",
    )
    exit_code = launch(
        reduced,
        tasks,
        lambda ending: (
            format_report(report) if (report := read_report(run_dir)) else "nothing was compared"
        ),
    )
    report = read_report(run_dir)
    return 1 if exit_code == 0 and not (report and report["passed"]) else exit_code
