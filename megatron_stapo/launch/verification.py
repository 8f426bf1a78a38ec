"""Runs `stapo verify`: the ranks of the recipe's layout on the small problem, then the table."""

import json
from pathlib import Path
from typing import Any

from megatron_stapo.config import Config
from megatron_stapo.launch.supervisor import launch
from megatron_stapo.launch.tasks import build_tasks


def launch_verification(config: Config) -> int:
    """Cut the model, start the ranks, print the table.

    Returns:
        Exit code: 0 where every number agrees, 1 where one does not or a rank failed; else as
        `launch`.
    """
    from megatron_stapo.verify.problem import reduce_config, write_reduced_model
    from megatron_stapo.verify.report import REPORT_FILE, format_report

    reduced, num_layers = reduce_config(config)
    report_path = Path(reduced.run_dir) / REPORT_FILE

    def prepare() -> None:
        write_reduced_model(config.model.path, Path(reduced.model.path), num_layers)

    def read(summary: dict[str, Any]) -> str:
        if not report_path.exists():
            return f"{summary['status']}: nothing was compared"
        return format_report(json.loads(report_path.read_text()))

    tasks = build_tasks(reduced, trainer_module="megatron_stapo.verify.ranks")
    exit_code = launch(reduced, tasks, prepare=prepare, format_report=read)
    if exit_code == 0 and not json.loads(report_path.read_text())["passed"]:
        return 1
    return exit_code
