"""The end of a run in numbers: summary.json and the closing lines, derived from metrics.jsonl.

Serves a run that finished, failed or was interrupted alike, down to one without a single step.
"""

import json
from pathlib import Path
from typing import Any, Literal

from megatron_stapo.observability.curves import CURVES_FILE, draw_curves
from megatron_stapo.observability.progress import PHASES, MetricsFollower
from megatron_stapo.observability.run_log import METRICS_FILE, TENSORBOARD_FOLDER
from megatron_stapo.observability.timeline import TIMELINE_FILE, compute_overlap, draw_timeline

SUMMARY_FILE = "summary.json"


def write_summary(
    run_dir: str | Path,
    *,
    status: Literal["finished", "failed", "interrupted"],
    reason: str,
    num_steps: int,
    total_s: float,
) -> dict[str, Any]:
    """Write summary.json, curves.png and timeline.png into the run folder.

    Args:
        run_dir: folder of the run.
        status: how it ended.
        reason: why it did not finish; empty where it did.
        num_steps: steps the run was asked for.
        total_s: seconds from the first process to the last.

    Returns:
        What summary.json holds.
    """
    run_dir = Path(run_dir)
    records = MetricsFollower(run_dir).read_new()
    steps = [record for record in records if "step" in record]
    num_response_tokens = _sum(steps, "num_response_tokens")
    num_masked = _sum(steps, "num_masked")
    evaluations = [
        {name: record[name] for name in ("after_steps", "value", "standard_error", "benchmarks")}
        for record in records
        if record.get("event") == "accuracy"
    ]
    gaps = [gap for step in steps if (gap := step["metrics"].get("logprob_gap_max")) is not None]
    summary = {
        "status": status,
        "reason": reason,
        "num_steps": num_steps,
        "num_steps_completed": len(steps),
        "accuracy_before": _find_accuracy(evaluations, 0),
        "accuracy_after": _find_accuracy(evaluations, num_steps),
        "evaluations": evaluations,
        "logprob_gap_max": max(gaps, default=None),
        "num_response_tokens": num_response_tokens,
        "num_candidates": _sum(steps, "num_candidates"),
        "num_masked": num_masked,
        # Over the run's response tokens, not the mean of the steps' shares.
        "masked_frac": num_masked / num_response_tokens if num_response_tokens else None,
        "seconds": {
            phase: round(sum(step["seconds"].get(phase) or 0.0 for step in steps), 3)
            for phase in PHASES
        },
        # Of the engines' sampling time the share in which the trainer scored or trained.
        "overlap_frac": compute_overlap(records),
        "num_engine_restarts": sum(r.get("event") == "engine_restarted" for r in records),
        "total_s": round(total_s, 3),
        "paths": {
            "metrics": str(run_dir / METRICS_FILE),
            "tensorboard": str(run_dir / TENSORBOARD_FOLDER),
            "curves": str(run_dir / CURVES_FILE),
            "timeline": str(run_dir / TIMELINE_FILE),
            "config": str(run_dir / "config.json"),
            "logs": str(run_dir / "logs"),
        },
    }
    draw_curves(records, run_dir / CURVES_FILE)
    draw_timeline(records, run_dir / TIMELINE_FILE)
    (run_dir / SUMMARY_FILE).write_text(json.dumps(summary, indent=2) + "\n")
    return summary


def format_summary(summary: dict[str, Any]) -> str:
    """The closing lines of the console."""
    paths = summary["paths"]
    run_dir = Path(paths["curves"]).parent
    accuracies = ", ".join(map(_format_accuracy, summary["evaluations"]))
    seconds = ", ".join(f"{phase} {value:.1f}" for phase, value in summary["seconds"].items())
    return "\n".join(
        [
            f"{summary['status']} after {summary['num_steps_completed']} of "
            f"{summary['num_steps']} steps in {summary['total_s']:.0f} s",
            f"  accuracy by steps     {accuracies or '-'}",
            f"  tokens masked by S2T  {summary['num_masked']:,.0f} of "
            f"{summary['num_response_tokens']:,.0f} ({_format(summary['masked_frac'], '.4%')}), "
            f"from {summary['num_candidates']:,.0f} candidates",
            f"  largest log-prob gap  {_format(summary['logprob_gap_max'], '.2e')} nats, "
            "trainer against rollout",
            f"  seconds by phase      {seconds}",
            *(
                [f"  engines restarted     {summary['num_engine_restarts']} times"]
                if summary["num_engine_restarts"]
                else []
            ),
            f"  curves and summary    {paths['curves']}, {paths['timeline']}, "
            f"{run_dir / SUMMARY_FILE}",
            f"  record and logs       {paths['metrics']}, {paths['tensorboard']}/, "
            f"{paths['logs']}/",
        ]
    )


def _sum(steps: list[dict[str, Any]], name: str) -> float:
    return sum(step["metrics"].get(name) or 0 for step in steps)


def _find_accuracy(evaluations: list[dict[str, Any]], after_steps: int) -> float | None:
    return next((e["value"] for e in evaluations if e["after_steps"] == after_steps), None)


def _format_accuracy(evaluation: dict[str, Any]) -> str:
    error = evaluation["standard_error"]
    spread = "" if error is None else f" +- {error:.4f}"
    return f"{evaluation['value']:.4f}{spread} after {evaluation['after_steps']}"


def _format(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
