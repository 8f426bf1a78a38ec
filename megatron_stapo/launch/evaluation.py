"""Runs `stapo eval`: an engine and the process that evaluates, then the table."""

from collections.abc import Sequence
from pathlib import Path

from megatron_stapo.config import Config
from megatron_stapo.evaluation.evaluate import LoadedBenchmark
from megatron_stapo.evaluation.identity import check_identity, compute_identity
from megatron_stapo.evaluation.report import RESULTS_FILE, format_results, read_results
from megatron_stapo.launch.supervisor import Ending, launch
from megatron_stapo.launch.tasks import build_evaluation_tasks


def launch_evaluation(config: Config, benchmarks: Sequence[LoadedBenchmark], method: str) -> int:
    """Evaluate config.model.path, going on with what the folder holds, and print the table.

    Args:
        config: its run_dir lies in the evaluation's folder.
        benchmarks: of `load_benchmarks`.
        method: of the paper, whose numbers stand beside ours.

    Returns:
        Exit code, as `launch`.

    Raises:
        ValueError: the folder holds samples of another model or another setting.
    """
    folder = Path(config.run_dir).parent
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out={folder}: is not a folder.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_identity(folder, compute_identity(config, benchmarks))
    except OSError as error:
        raise ValueError(
            f"--out={folder}: cannot be written ({error.strerror}); give another folder."
        ) from error

    def report(ending: Ending) -> str:
        if ending.status != "finished":
            return (
                f"{ending.status}; {folder} holds the finished samples, and the same command goes "
                "on with them"
            )
        table = format_results(read_results(folder / RESULTS_FILE), method)
        return f"{table}\nsamples and results are in {folder}"

    notes = [f"{b.name}: {note}" for b in benchmarks for note in b.notes]
    return launch(config, build_evaluation_tasks(config), report, notes)
