"""Rewards: from a response and the ground truth to a verdict, one file per verifier.

A rule is a pure function `(response, answer) -> Verdict`. The trainer never calls one in its own
process: `pool.VerifierPool` runs it in worker processes that may be killed, so that no answer can
stop or slow a run. `docs/rewards.md` lists what each rule accepts and where it is known to err.
"""

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["judged", "no_answer", "refused", "timeout", "crash", "truncated"]

MAX_EXTRACTED_CHARS = 200
"""Of `Verdict.extracted`; the rest of a longer answer is cut off."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a rule said of one response."""

    correct: bool
    """Never True unless the outcome is "judged"."""
    outcome: Outcome
    """judged: compared. no_answer: the response has no complete last box or `Answer:` line.
    refused: a guard turned the answer or the truth down as too large to compare. timeout, crash:
    the worker was killed at the limit, or died. truncated: not compared, since the recipe calls a
    response wrong that was cut at its length limit."""
    extracted: str | None
    """What the rule compared, at most MAX_EXTRACTED_CHARS characters."""
