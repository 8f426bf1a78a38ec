"""One picture of a run: what it learned, what it masked, is it sound, where did the time go."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_stapo.observability.progress import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES_FILE = "curves.png"


def draw_curves(records: list[dict[str, Any]], path: Path) -> None:
    """Draw the curves of a metrics.jsonl; without a step, the axes stay empty and say so.

    Args:
        records: its lines.
        path: PNG file to write.
    """
    # Imported here because matplotlib takes a second. A Figure of its own, not pyplot, needs no
    # display and leaves no global state.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps = [record for record in records if "step" in record]
    x = [step["step"] for step in steps]
    figure = Figure(figsize=(15, 8), layout="constrained")
    axes = figure.subplots(2, 3)
    learning, entropy, masking, gap, gradient, time = axes.flat

    learning.set_title("reward and accuracy")
    _plot(learning, x, steps, "reward_mean", "mean reward")
    _plot(learning, x, steps, "accuracy", "accuracy of the rollouts")
    evaluations = [record for record in records if record.get("event") == "accuracy"]
    if evaluations:
        learning.errorbar(
            [e["after_steps"] for e in evaluations],
            [_number(e["value"]) for e in evaluations],
            yerr=[e["standard_error"] or 0.0 for e in evaluations],
            fmt="*",
            markersize=11,
            capsize=4,
            label="accuracy of the evaluations",
        )

    entropy.set_title("entropy, nats")
    _plot(entropy, x, steps, "entropy_mean", "mean over response tokens")
    _plot(entropy, x, steps, "entropy_threshold", "S2T threshold")

    masking.set_title("S2T")
    _plot(masking, x, steps, "num_candidates", "candidates")
    _plot(masking, x, steps, "num_masked", "masked")
    masking.set_ylabel("tokens")
    share = masking.twinx()
    values = [_number(step["metrics"].get("masked_frac")) * 100 for step in steps]
    share.plot(x, values, ":", color="gray")
    share.set_ylabel("masked share of response tokens, % (dotted)")
    masking.set_ylim(bottom=0)
    share.set_ylim(bottom=0)

    gap.set_title("log-prob gap, trainer to rollout, nats")
    _plot(gap, x, steps, "logprob_gap_mean", "mean")
    _plot(gap, x, steps, "logprob_gap_max", "max")
    # A gap of exactly 0, as between equal kernels, has no place on a logarithmic axis.
    gap.set_yscale("symlog", linthresh=1e-7)

    gradient.set_title("gradient norm before clipping")
    _plot(gradient, x, steps, "grad_norm", "gradient norm")

    time.set_title("seconds per step")
    bottom = [0.0] * len(steps)
    for phase in PHASES:
        heights = [step["seconds"].get(phase) or 0.0 for step in steps]
        time.bar(x, heights, bottom=bottom, width=1.0, label=phase)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]

    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        if not steps:
            axis.text(0.5, 0.5, "no step finished", ha="center", transform=axis.transAxes)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize="small")
    figure.savefig(path, dpi=100)


def _plot(axis: "Axes", x: list[int], steps: list[dict[str, Any]], name: str, label: str) -> None:
    values = [_number(step["metrics"].get(name)) for step in steps]
    axis.plot(x, values, ".-", linewidth=1, markersize=4, label=label)


def _number(value: float | None) -> float:
    """A missing value leaves a gap in the line."""
    return float("nan") if value is None else value
