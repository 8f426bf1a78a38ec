"""Watches how far the trainer's log-probabilities are from the engine's, and gives up FP8 for good
where that is too far.

Invariant: the gap is a sum over all ranks, so every rank decides alike without a word between them.
"""

from typing import Literal

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

    def __init__(self, config: PrecisionConfig, model_config: TransformerConfig) -> None:
        """Args: model_config is the one that the live model's layers read."""
        self._limit = config.max_logprob_gap
        self._model_config = model_config
        self._has_warned = False
        self.fp8_left_after: int | None = None
        """Steps after which training went on in bfloat16; None where it did not change."""

    def check(self, num_steps_done: int, gap: float) -> str | None:
        """Judge a step, and act on it.

        Args:
            gap: as in `judge_gap`, the same on every rank.

        Mutates: as `leave_fp8`.

        Returns:
            What the user has to know, or None.
        """
        in_fp8 = self._model_config.fp8 is not None
        verdict = judge_gap(gap, self._limit, in_fp8=in_fp8, has_warned=self._has_warned)
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

        Mutates: Megatron's config, fp8_left_after.

        Source: megatron.core 0.19.2, transformer_block.py, TransformerBlock.forward, and
            fp8_utils.py, get_fp8_context.
        """
        self._model_config.fp8 = None
        self.fp8_left_after = num_steps_done
