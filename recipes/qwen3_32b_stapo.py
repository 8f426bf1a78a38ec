"""STAPO on Qwen3-32B, on 128 H20. There is no Base model of this size."""

import dataclasses

from megatron_stapo.config import Config, ModelConfig
from recipes.qwen3_14b_stapo import qwen3_14b_stapo


def qwen3_32b_stapo() -> Config:
    """About 1120 s per step in the plan; 64 GPUs take 2090 s."""
    base = qwen3_14b_stapo()
    return dataclasses.replace(
        base,
        name="qwen3_32b_stapo",
        run_dir="",
        model=ModelConfig(path="models/Qwen3-32B"),
        # 80 GPUs train. TP8, a node, holds a sequence of 16k without recompute and without a
        # pipeline, at 78 of 95 GiB. TP4 with recompute takes 28 % longer for an update.
        parallel=dataclasses.replace(base.parallel, tensor_model_parallel_size=8),
        # 48 GPUs sample.
        rollout=dataclasses.replace(base.rollout, tensor_parallel_size=8),
    )
