"""The outcome of `stapo verify`: verify.json in the run folder, and the table for people."""

import json
from pathlib import Path
from typing import Any

REPORT_FILE = "verify.json"


def write_report(run_dir: Path, rows: list[dict[str, Any]], details: dict[str, Any]) -> None:
    """Write verify.json.

    Args:
        rows: quantity, difference, tolerance, where and passed of every comparison.
        details: what was compared.
    """
    report = {"passed": all(row["passed"] for row in rows), **details, "rows": rows}
    (run_dir / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n")


def read_report(run_dir: Path) -> dict[str, Any] | None:
    """Read verify.json; None where the ranks did not come to write it."""
    path = run_dir / REPORT_FILE
    return json.loads(path.read_text()) if path.exists() else None


def format_report(report: dict[str, Any]) -> str:
    """The table, from verify.json."""
    heading = ("quantity", "worst difference", "tolerance", "", "at")
    cells = [
        (
            row["quantity"],
            f"{row['difference']:.2g}",
            f"{row['tolerance']:.2g}",
            "ok" if row["passed"] else "FAILED",
            row["where"],
        )
        for row in report["rows"]
    ]
    widths = [max(len(row[i]) for row in [heading, *cells]) for i in range(len(heading))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [heading, *cells]
    ]
    what = (
        f"{report['num_ranks']} ranks against one process in float64: {report['num_layers']} "
        f"layers, {report['num_tokens']} tokens in {report['num_sequences']} sequences and "
        f"{report['num_microbatches']} microbatches, {report['num_masked']} of "
        f"{report['num_candidates']} candidates masked"
    )
    verdict = (
        "the layout computes the dense update"
        if report["passed"]
        else "the layout does NOT compute the dense update"
    )
    return "\n".join([what, *lines, verdict])
