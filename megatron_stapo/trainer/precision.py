"""Watches how far the trainer's log-probabilities are from the engine's, and gives up FP8 for good
where that is too far.

Invariant: the gap is a sum over all ranks, so every rank decides alike without a word between them.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from megatron.core.transformer import TransformerConfig

from megatron_stapo.config import PrecisionConfig

type Verdict = Literal["keep", "leave_fp8", "warn"]


def judge_gap(gap: float, limit: float, *, in_fp8: bool, has_warned: bool) -> Verdict:
    """Decide what a step's gap asks for.

    Args:
        gap: mean over the step's response tokens of |log p of the trainer - log p of the engine|,
            nats; NaN where the step had none, which asks for nothing.
        limit: precision.max_logprob_gap, nats; a gap equal to it is within.
        in_fp8: whether the trainer's layers are in FP8.
        has_warned: whether the run has warned before. Once is enough: the gap stands in every step.
    """
    if not gap > limit:
        return "keep"
    if in_fp8:
        return "leave_fp8"
    return "keep" if has_warned else "warn"


class PrecisionGuard:
    """The FP8 of one trainer, for as long as it is trusted."""

    def __init__(self, config: PrecisionConfig, chunks: Sequence[torch.nn.Module]) -> None:
        """Args: chunks of the live model on this rank."""
        self._limit = config.max_logprob_gap
        # Some modules, such as single experts, keep a copy of the model's config.
        found = (getattr(m, "config", None) for chunk in chunks for m in chunk.modules())
        self._configs = {id(c): c for c in found if isinstance(c, TransformerConfig)}.values()
        self._has_warned = False
        self.fp8_left_after: int | None = None
        """Steps after which training went on in bfloat16; None where it did not change."""

    @property
    def in_fp8(self) -> bool:
        """Whether the layers that are not kept in bfloat16 are in FP8."""
        return any(config.fp8 for config in self._configs)

    def check(self, num_steps_done: int, gap: float) -> str | None:
        """Judge a step, and act on it.

        Args:
            gap: as in `judge_gap`, the same on every rank.

        Mutates: as `leave_fp8`.

        Returns:
            What the user has to know, or None.
        """
        verdict = judge_gap(gap, self._limit, in_fp8=self.in_fp8, has_warned=self._has_warned)
        if verdict == "keep":
            return None
        found = (
            f"precision.max_logprob_gap={self._limit}: log-probabilities of trainer and engine "
            f"differ by {gap:.4g} nats on average in step {num_steps_done}; "
        )
        if verdict == "leave_fp8":
            self.leave_fp8(num_steps_done)
            return (
                found + f"from step {num_steps_done + 1} on this run trains in bfloat16, not FP8."
            )
        self._has_warned = True
        return found + (
            "the trainer is not in FP8, so training goes on as it is. A few hundredths are the "
            "engine's FP8 (rollout.quantization); more points to weights or settings that differ. "
            "algorithm.tis_max_weight corrects the loss for it."
        )

    def leave_fp8(self, num_steps_done: int) -> None:
        """Train in bfloat16 from here on.

        Megatron asks its config before every layer whether to open Transformer Engine's FP8
        context. The weights are in bfloat16 all along, so nothing is converted.

        Mutates: the configs of the model's modules, fp8_left_after.

        Source: megatron.core 0.19.2, transformer_block.py, TransformerBlock.forward, and
            fp8_utils.py, get_fp8_context.
        """
        for config in self._configs:
            config.fp8 = None
        self.fp8_left_after = num_steps_done
