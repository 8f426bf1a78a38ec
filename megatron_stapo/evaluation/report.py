"""The outcome of an evaluation: results.json, and the table that is derived from it."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_stapo.evaluation.paper import SIX_BENCHMARKS, find_paper_cell
from megatron_stapo.evaluation.statistics import BenchmarkResult, compute_average

RESULTS_FILE = "results.json"


def write_results(
    path: Path,
    results: Sequence[BenchmarkResult],
    *,
    settings: dict[str, Any],
    notes: dict[str, list[str]],
    scale: str | None,
) -> None:
    """Write results.json; renamed into place.

    Args:
        settings: temperature, top_p and whatever else the numbers depend on.
        notes: of each benchmark, what a reader of its numbers must know.
        scale: the paper's model of this width, whose numbers stand beside ours.
    """
    report = {
        "settings": settings,
        "scale": scale,
        "benchmarks": [
            {**dataclasses.asdict(r), "notes": notes.get(r.benchmark, [])} for r in results
        ],
        "average": compute_average(results),
    }
    part = path.with_suffix(".part")
    part.write_text(json.dumps(report, indent=2) + "\n")
    part.rename(path)


def read_results(path: Path) -> dict[str, Any]:
    """Read results.json."""
    report: dict[str, Any] = json.loads(path.read_text())
    return report


def format_results(report: dict[str, Any], method: str) -> str:
    """The table, from results.json: shares in %, of the paper's method beside ours.

    pass@n is given for the largest k; results.json has all.
    """
    settings, scale = report["settings"], report["scale"]
    rows: list[tuple[str, ...]] = [
        (
            "benchmark",
            "problems",
            "n",
            "avg@n",
            "+-samples",
            "+-problems",
            "pass@n",
            "truncated",
            "tokens",
            "paper",
            "paper v1",
        )
    ]

    def find_paper(benchmark: str) -> tuple[str, str]:
        cell = find_paper_cell(scale, method, benchmark, settings["temperature"], settings["top_p"])
        return _format(cell.late), _format(cell.first)

    for row in report["benchmarks"]:
        rows.append(
            (
                row["benchmark"],
                str(row["num_problems"]),
                str(row["num_samples"]),
                _format(100 * row["accuracy"]),
                _format_share(row["standard_error_sampling"]),
                _format_share(row["standard_error_problems"]),
                _format_share(row["pass_at_k"][str(row["num_samples"])]),
                _format_share(row["truncated_frac"]),
                f"{row['response_tokens_mean']:.1f}",
                *find_paper(row["benchmark"]),
            )
        )
    names = [row["benchmark"] for row in report["benchmarks"]]
    if len(names) > 1:
        is_whole = set(names) == set(SIX_BENCHMARKS)
        rows.append(
            (
                "average",
                "",
                "",
                _format(100 * report["average"]),
                *[""] * 5,
                *(find_paper("average") if is_whole else ("", "")),
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    notes = [f"{r['benchmark']}: {note}" for r in report["benchmarks"] for note in r["notes"]]
    notes += [text for r in report["benchmarks"] if (text := _format_judging(r))]
    heading = (
        f"{settings['model']}, temperature {settings['temperature']}, top-p {settings['top_p']}, "
        f"at most {settings['max_response_tokens']} tokens; in %"
    )
    if scale:
        heading += f"; paper: {method} on Qwen3-{scale}-Base"
    return "\n".join([heading, *lines, *notes])


def _format_judging(row: dict[str, Any]) -> str:
    """What became of the responses that were not simply compared; empty where there are none."""
    odd = {
        name: count
        for name, count in row["outcomes"].items()
        if name not in ("judged", "no_answer", "truncated")
    }
    verdicts = row["model_verdicts"]
    parts = [f"{count} {name}" for name, count in odd.items()]
    if verdicts:
        told = ", ".join(f"{count} {name}" for name, count in verdicts.items())
        parts.append(
            f"the model verifier about {sum(verdicts.values())} that the rule calls wrong: {told}"
        )
    return f"{row['benchmark']}: {'; '.join(parts)}" if parts else ""


def _format(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _format_share(value: float | None) -> str:
    return _format(None if value is None else 100 * value)
