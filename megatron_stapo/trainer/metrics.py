"""Adds up a step's numbers where they arise, and reduces them once over all ranks.

Only tensor-parallel rank 0 of the last pipeline stage contributes, so each token is counted once.
"""

import math
from collections import defaultdict

import torch
import torch.distributed as dist

from megatron_stapo.parallel.groups import Groups

QUADRANTS = ("rare_certain", "rare_open", "likely_certain", "likely_open")
"""Names of `algo.theory.compute_quadrants`: by probability, then by entropy."""

_SUMS = (
    "num_response_tokens",
    "entropy",
    "logprob_gap",
    "num_candidates",
    "num_masked",
    "num_thresholds",
    "entropy_threshold",
    "num_clipped",
    "num_trained",
    "num_sequence_masked",
    "num_covariance_dropped",
    "num_tis_truncated",
    "kl",
    *(f"{what}_{name}" for name in QUADRANTS for what in ("num", "grad_norm", "entropy_change")),
)
_MAXIMA = ("logprob_gap_max", "ratio_max")


class StepSums:
    """Local sums and maxima of one step."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._maxima: dict[str, float] = defaultdict(lambda: -math.inf)

    def add(self, **values: float) -> None:
        """Add to sums; their names are in `_SUMS`."""
        for name, value in values.items():
            self._sums[name] += value

    def raise_to(self, **values: float) -> None:
        """Raise maxima; their names are in `_MAXIMA`."""
        for name, value in values.items():
            self._maxima[name] = max(self._maxima[name], value)

    def total(self, name: str) -> float:
        """This rank's sum of one name."""
        return self._sums[name]

    def reduce(self, groups: Groups) -> dict[str, float]:
        """Means, shares and counts over all ranks, the same on every rank.

        The denominators are the step's response tokens (entropy_mean, logprob_gap_mean,
        masked_frac), the tokens that trained, over all updates (clip_frac, kl_mean,
        tis_truncated_frac), the mini-batches that had a candidate (entropy_threshold), and the
        quadrant's tokens (grad_norm_*, entropy_change_*); 0 / 0 is NaN. What the recipe leaves off
        is left out.

        Communicates: two all-reduces over all ranks, of one double per name.
        """
        sums = torch.tensor(
            [self._sums[name] * groups.reports for name in _SUMS],
            dtype=torch.float64,
            device=groups.device,
        )
        maxima = torch.tensor(
            [self._maxima[name] for name in _MAXIMA], dtype=torch.float64, device=groups.device
        )
        dist.all_reduce(sums)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        total = dict(zip(_SUMS, sums.tolist(), strict=True))

        def share(name: str, denominator: str) -> float:
            return total[name] / total[denominator] if total[denominator] else math.nan

        optional = {
            "num_sequence_masked": total["num_sequence_masked"],
            "num_covariance_dropped": total["num_covariance_dropped"],
            "tis_truncated_frac": share("num_tis_truncated", "num_trained"),
            "kl_mean": share("kl", "num_trained"),
        }
        for name in QUADRANTS:
            optional[f"num_{name}"] = total[f"num_{name}"]
            for what in ("grad_norm", "entropy_change"):
                optional[f"{what}_{name}"] = share(f"{what}_{name}", f"num_{name}")
        return {
            "entropy_mean": share("entropy", "num_response_tokens"),
            "num_response_tokens": total["num_response_tokens"],
            "num_candidates": total["num_candidates"],
            "num_masked": total["num_masked"],
            "masked_frac": share("num_masked", "num_response_tokens"),
            "entropy_threshold": share("entropy_threshold", "num_thresholds"),
            "logprob_gap_mean": share("logprob_gap", "num_response_tokens"),
            "clip_frac": share("num_clipped", "num_trained"),
            **dict(zip(_MAXIMA, maxima.tolist(), strict=True)),
            **{name: value for name, value in optional.items() if value and not math.isnan(value)},
        }
