"""What engines and trainer did at what time, over the last steps of a run, as a picture."""

from pathlib import Path
from typing import Any

from megatron_stapo.observability.progress import PHASES

TIMELINE_FILE = "timeline.png"
NUM_STEPS_SHOWN = 6

_LANES = ("engines", "trainer")
_WAITING = "rollout"  # of the trainer's lane: it waits for the engines, and does nothing


def compute_overlap(records: list[dict[str, Any]]) -> float | None:
    """The share of the engines' sampling time in which the trainer scored or trained.

    Args:
        records: of a metrics.jsonl; the steps with spans count.

    Returns:
        In [0, 1]; None where nothing was sampled.
    """
    steps = [record for record in records if record.get("spans")]
    sampling = [s for step in steps for s in step["spans"]["engines"] if s[0] == "rollout"]
    training = [
        s for step in steps for s in step["spans"]["trainer"] if s[0] not in (_WAITING, "sync")
    ]
    total_s = sum(end - begin for _, begin, end in sampling)
    both_s = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for _, begin, end in sampling
        for _, other_begin, other_end in training
    )
    return both_s / total_s if total_s else None


def draw_timeline(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the last steps of a metrics.jsonl; without a step, the axes stay empty and say so.

    Args:
        records: its lines.
        path: PNG file to write.
    """
    from matplotlib.figure import Figure  # see `curves`
    from matplotlib.patches import Patch

    steps = [record for record in records if record.get("spans")][-NUM_STEPS_SHOWN:]
    figure = Figure(figsize=(15, 3), layout="constrained")
    axes = figure.subplots()
    colors = {phase: f"C{number}" for number, phase in enumerate(PHASES)}
    spans = [
        (lane, step["step"], *span)
        for step in steps
        for lane in _LANES
        for span in step["spans"][lane]
        if (lane, span[0]) != ("trainer", _WAITING)
    ]
    start_s = min((begin for *_, begin, _ in spans), default=0.0)
    for lane, number, phase, begin, end in spans:
        y = _LANES.index(lane)
        axes.barh(y, end - begin, left=begin - start_s, height=0.7, color=colors[phase])
        if phase == ("rollout" if lane == "engines" else "score"):
            axes.text(begin - start_s, y + 0.36, f"step {number}", fontsize="small", va="top")
    axes.set_yticks(range(len(_LANES)), _LANES)
    axes.set_ylim(len(_LANES) - 0.4, -0.6)
    axes.set_xlabel("seconds")
    overlap = compute_overlap(steps)
    share = "-" if overlap is None else f"{overlap:.0%}"
    axes.set_title(f"the last {len(steps)} steps; {share} of sampling beside scoring and training")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(handles=[Patch(color=c, label=p) for p, c in colors.items()], fontsize="small")
    if not spans:
        axes.text(0.5, 0.5, "no step finished", ha="center", transform=axes.transAxes)
    figure.savefig(path, dpi=100)
