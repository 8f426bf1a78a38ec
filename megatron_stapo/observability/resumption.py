"""The table of `stapo verify-resume`."""

from collections.abc import Sequence
from dataclasses import dataclass

REPORT_FILE = "verify_resume.json"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One thing that both runs have, and how far it may differ."""

    what: str
    first: str
    """Hash or value of the run that was not disturbed."""
    second: str
    """Of the resumed run."""
    difference: float
    bound: float
    """Largest difference that passes; 0 asks for equal bits."""
    may_differ: bool
    """It belongs to ranks of which there are not as many."""

    @property
    def passed(self) -> bool:
        """Equal, or close enough."""
        is_close = self.first == self.second if self.bound == 0 else self.difference <= self.bound
        return is_close or self.may_differ


def format_rows(rows: Sequence[Row], num_steps: int, num_steps_before: int) -> str:
    """The table and the verdict."""
    heading = (f"after step {num_steps}", "in one go", "resumed", "difference", "bound", "")
    cells = [
        (
            row.what,
            row.first,
            row.second,
            "-" if row.may_differ else f"{row.difference:.2g}",
            "-" if row.may_differ else f"{row.bound:.0e}" if row.bound else "equal",
            "ok" if row.passed else "FAILED",
        )
        for row in rows
    ]
    widths = [max(len(row[i]) for row in [heading, *cells]) for i in range(len(heading))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in [heading, *cells]
    ]
    num_failed = sum(not row.passed for row in rows)
    num_after = num_steps - num_steps_before
    what = f"{num_steps_before} steps, a kill and {num_after} more"
    verdict = (
        f"{what} are the same as {num_steps} steps"
        if not num_failed
        else f"{what} are NOT the same as {num_steps} steps: {num_failed} rows differ"
    )
    return "\n".join([*lines, verdict])
