"""Computes an update's masks and loss again from its dump: in one process, without the model."""

import math
from dataclasses import dataclass
from typing import Any

import torch

from megatron_stapo.config import from_dict
from megatron_stapo.trainer.loss import compute_loss, compute_token_loss
from megatron_stapo.trainer.masks import MaskAssigner
from megatron_stapo.trainer.metrics import StepSums
from megatron_stapo.types import Microbatch, Minibatch

_LOSS_TOLERANCE = 1e-9
"""Relative. The ranks' float64 sums are added here in one order, there in another."""

_MAX_TOKENS_SHOWN = 10


@dataclass(frozen=True, kw_only=True)
class Replay:
    """An update as it was, and as its dump gives it again."""

    record: dict[str, Any]
    num_tokens: int
    """Response tokens."""
    num_trained: int
    """Of the denominator."""
    num_candidates: int
    num_masked: int
    threshold: float | None
    """Nats; None where there is none."""
    num_mask_differences: int
    """Tokens whose mask came out another way."""
    weight_difference: float
    """Largest, of loss_weights_T."""
    loss: float
    broken_tokens: list[str]
    """Those whose loss is not finite, in words."""

    @property
    def passed(self) -> bool:
        """The same masks, weights and loss."""
        recorded = self.record["loss"]
        if recorded is None:
            same_loss = not math.isfinite(self.loss)
        else:
            same_loss = abs(self.loss - recorded) <= _LOSS_TOLERANCE * max(abs(recorded), 1e-9)
        return same_loss and self.num_mask_differences == 0 and self.weight_difference == 0


def replay(record: dict[str, Any], microbatches: list[Microbatch]) -> Replay:
    """Replay an update; the arguments are those of `load_dump`.

    The streams are those of the run: log-probabilities and entropies that masks were decided on,
    and the update's own log-probabilities, which the loss is of.
    """
    config = from_dict(record["config"])
    masks = [m.loss_mask_T for m in microbatches]
    weights = [m.loss_weights_T for m in microbatches]
    sums = StepSums()
    assigner = MaskAssigner(
        Minibatch(
            microbatches=microbatches,
            num_microbatches=record["num_microbatches"],
            num_sequences=record["num_sequences"],
        ),
        config.algorithm,
        config.rollout,
        None,
        sums,
    )
    num_trained = assigner.assign(record["phase"], config.seed, record["num_updates"])
    totals = torch.zeros(2, dtype=torch.float64)
    for m in microbatches:
        totals += compute_loss(m.trained_logprobs_T, m, config.algorithm, sums)[2]
    num_thresholds = sums.total("num_thresholds")
    return Replay(
        record=record,
        num_tokens=sum(int(m.response_mask_T.sum()) for m in microbatches),
        num_trained=num_trained,
        num_candidates=int(sums.total("num_candidates")),
        num_masked=int(sums.total("num_masked")),
        threshold=sums.total("entropy_threshold") / num_thresholds if num_thresholds else None,
        num_mask_differences=sum(
            int((m.loss_mask_T != mask).sum()) for m, mask in zip(microbatches, masks, strict=True)
        ),
        weight_difference=max(
            float((m.loss_weights_T - w).abs().max())
            for m, w in zip(microbatches, weights, strict=True)
        ),
        loss=float(totals[0] / totals[1].clamp(min=1)),
        broken_tokens=[
            line for m in microbatches for line in _describe_broken(m, config.algorithm)
        ],
    )


def format_replay(result: Replay) -> str:
    """What was compared, in lines."""
    record = result.record
    threshold = "-" if result.threshold is None else f"{result.threshold:.6g} nats"
    recorded = "not finite" if record["loss"] is None else f"{record['loss']:.12g}"
    lines = [
        f"step {record['step']}, update {record['update']}: {result.num_tokens} response tokens in "
        f"{record['num_sequences']} sequences and {record['num_microbatches']} microbatches",
        f"  candidates, masked    {result.num_candidates}, {result.num_masked}; threshold "
        f"{threshold}",
        f"  tokens that train     {result.num_trained}; {result.num_mask_differences} masks differ",
        f"  loss weights          largest difference {result.weight_difference:.2g}",
        f"  loss                  {result.loss:.12g}; recorded {recorded}",
    ]
    if record["is_skipped"]:
        lines.append("  this update was left out: its loss or its gradient was not finite")
    shown = result.broken_tokens[:_MAX_TOKENS_SHOWN]
    if shown:
        lines.append(f"  tokens without a finite loss: {len(result.broken_tokens)}")
        lines += [f"    {line}" for line in shown]
    lines.append(
        "the dump gives the recorded numbers"
        if result.passed
        else "the dump does NOT give the recorded numbers"
    )
    return "\n".join(lines)


def _describe_broken(m: Microbatch, algorithm: Any) -> list[str]:
    loss_T = compute_token_loss(m.trained_logprobs_T, m, algorithm) * m.loss_weights_T
    positions = (m.loss_mask_T & ~loss_T.isfinite()).nonzero()[:, 0].tolist()
    return [
        f"sequence {int(m.sequence_ids_T[t])}, position {int(m.position_ids_T[t])}, token "
        f"{int(m.labels_T[t])}: log-prob {float(m.trained_logprobs_T[t]):.6g}, before the step "
        f"{float(m.old_logprobs_T[t]):.6g}, of the engine {float(m.rollout_logprobs_T[t]):.6g}, "
        f"advantage {float(m.advantages_T[t]):.6g}"
        for t in positions
    ]
