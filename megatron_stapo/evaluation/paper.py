"""What STAPO, arXiv:2602.15620, reports, for the column beside ours. Accuracies in %.

The first versions (v1, v2) print a whole table. Of the late ones (v4, v5) some cells are known, of
temperature 1.0 with top-p 1.0. At the same setting the two differ by up to four points of the same
method: take a difference of that size for the spread of a repeated run.
"""

from dataclasses import dataclass

SIX_BENCHMARKS = ("aime24", "aime25", "amc23", "math500", "minerva", "olympiadbench")

# Hidden size of the paper's models, Qwen3 Base.
_SCALES = {2048: "1.7B", 4096: "8B", 5120: "14B"}

METHODS = ("GRPO", "20-Entropy", "JustRL", "STAPO")

# Table 2 of v1: of each benchmark and the average at temperature 1.0 with top-p 1.0, then at 0.7
# with 0.9. The average of 14B STAPO is printed as 64.38; its cells' mean is 64.91.
_FIRST = {
    "1.7B": {
        "GRPO": (
            (6.88, 4.06, 40.47, 68.60, 32.44, 30.64, 30.52),
            (10.83, 4.06, 41.17, 67.15, 32.53, 30.64, 31.06),
        ),
        "20-Entropy": (
            (13.33, 8.44, 46.56, 69.85, 28.03, 35.65, 33.64),
            (13.85, 7.60, 44.53, 69.10, 29.04, 34.35, 33.08),
        ),
        "JustRL": (
            (8.85, 6.25, 45.39, 62.70, 22.61, 29.15, 29.16),
            (14.58, 10.93, 51.09, 69.75, 28.89, 34.16, 34.90),
        ),
        "STAPO": (
            (17.40, 15.42, 55.94, 73.55, 28.22, 38.54, 38.18),
            (16.04, 14.27, 52.42, 70.30, 29.42, 37.87, 36.72),
        ),
    },
    "8B": {
        "GRPO": (
            (31.25, 24.69, 75.23, 88.90, 55.88, 61.50, 56.24),
            (32.40, 24.17, 74.14, 88.85, 53.58, 58.34, 55.25),
        ),
        "20-Entropy": (
            (31.25, 27.50, 79.92, 89.85, 54.78, 62.50, 57.63),
            (35.10, 27.39, 80.00, 89.85, 54.23, 60.39, 57.83),
        ),
        "JustRL": (
            (25.21, 21.98, 73.52, 84.90, 47.33, 51.26, 50.70),
            (34.06, 26.04, 81.48, 87.55, 51.03, 56.57, 56.12),
        ),
        "STAPO": (
            (33.44, 28.65, 79.92, 90.40, 57.17, 62.98, 58.76),
            (39.48, 29.37, 80.23, 91.40, 55.70, 63.32, 59.92),
        ),
    },
    "14B": {
        "GRPO": (
            (42.19, 30.31, 81.95, 90.05, 55.15, 64.76, 60.74),
            (40.52, 32.40, 78.12, 92.00, 57.54, 64.28, 60.81),
        ),
        "20-Entropy": (
            (42.08, 34.06, 84.45, 91.65, 51.10, 61.30, 60.77),
            (51.25, 39.48, 87.73, 92.30, 54.78, 63.95, 64.92),
        ),
        "JustRL": (
            (37.40, 26.56, 81.95, 87.65, 43.84, 57.01, 55.74),
            (52.08, 38.96, 89.61, 94.25, 58.92, 68.81, 67.11),
        ),
        "STAPO": (
            (46.98, 35.21, 87.11, 92.45, 59.47, 68.21, 64.38),
            (54.27, 41.67, 90.62, 93.85, 59.93, 71.62, 68.66),
        ),
    },
}

# The known cells of v4: aime24, amc23 and the average at temperature 1.0 with top-p 1.0.
_LATE: dict[str, dict[str, dict[str, float]]] = {
    "1.7B": {
        "GRPO": {"aime24": 7.60, "amc23": 37.81, "average": 29.92},
        "20-Entropy": {"aime24": 11.98, "amc23": 42.66, "average": 29.60},
        "JustRL": {"aime24": 9.17, "amc23": 43.20, "average": 31.10},
        "STAPO": {"aime24": 18.44, "amc23": 54.22, "average": 36.85},
    },
    "8B": {
        "GRPO": {"aime24": 31.25, "average": 56.24},
        "20-Entropy": {"aime24": 31.25, "average": 57.63},
        "JustRL": {"aime24": 25.21, "average": 50.70},
        "STAPO": {"aime24": 38.33, "average": 60.96},
    },
    "14B": {
        "GRPO": {"aime24": 41.04, "average": 61.49},
        "20-Entropy": {"aime24": 42.08, "average": 60.77},
        "JustRL": {"aime24": 34.48, "average": 55.74},
        "STAPO": {"aime24": 51.04, "average": 67.76},
    },
}


@dataclass(frozen=True, kw_only=True)
class PaperSetting:
    """One of the two ways in which the paper samples."""

    temperature: float
    top_p: float
    max_response_tokens: int = 20480


PRESETS = {
    "training": PaperSetting(temperature=1.0, top_p=1.0),
    "justrl": PaperSetting(temperature=0.7, top_p=0.9),
}
"""training: as the rollouts of the training. justrl: JustRL's, which the paper means where it does
not say."""


@dataclass(frozen=True, kw_only=True)
class PaperCell:
    """An accuracy of the paper in %, None where it is not known."""

    late: float | None
    first: float | None


def find_scale(hidden_size: int) -> str | None:
    """The paper's model of this width; None where it has none."""
    return _SCALES.get(hidden_size)


def find_paper_cell(
    scale: str | None, method: str, benchmark: str, temperature: float, top_p: float
) -> PaperCell:
    """Look up a number of the paper.

    Args:
        scale: 1.7B, 8B or 14B; None has no numbers.
        method: of METHODS.
        benchmark: of SIX_BENCHMARKS, or average, their unweighted mean.
        temperature: of the sampling.
        top_p: of the sampling.
    """
    setting = next(
        (
            i
            for i, name in enumerate(("training", "justrl"))
            if (PRESETS[name].temperature, PRESETS[name].top_p) == (temperature, top_p)
        ),
        None,
    )
    columns = (*SIX_BENCHMARKS, "average")
    if scale is None or setting is None or benchmark not in columns:
        return PaperCell(late=None, first=None)
    late = _LATE[scale][method].get(benchmark) if setting == 0 else None
    return PaperCell(late=late, first=_FIRST[scale][method][setting][columns.index(benchmark)])
