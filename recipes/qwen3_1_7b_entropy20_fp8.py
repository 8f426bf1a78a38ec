"""20-Entropy on Qwen3-1.7B: layers and rollouts in FP8."""

import dataclasses

from megatron_stapo.config import Config, PrecisionConfig
from recipes.qwen3_1_7b_entropy20 import qwen3_1_7b_entropy20


def qwen3_1_7b_entropy20_fp8() -> Config:
    """The run of `qwen3_1_7b_entropy20`, whose layers' products take an H20 half the time."""
    base = qwen3_1_7b_entropy20()
    return dataclasses.replace(
        base,
        name="qwen3_1_7b_entropy20_fp8",
        run_dir="",
        # Blocks of 128 x 128 weights have a scale each, in the trainer and in vLLM.
        precision=PrecisionConfig(fp8="blockwise"),
        rollout=dataclasses.replace(base.rollout, quantization="fp8"),
    )
