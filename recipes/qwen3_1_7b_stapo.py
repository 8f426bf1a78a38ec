"""STAPO on Qwen3-1.7B-Base: the paper's smallest run, on as many GPUs, 64 H20."""

import dataclasses

from megatron_stapo.config import Config, ModelConfig
from recipes.qwen3_14b_stapo import qwen3_14b_stapo


def qwen3_1_7b_stapo() -> Config:
    """About 340 s per step in the plan."""
    base = qwen3_14b_stapo()
    return dataclasses.replace(
        base,
        name="qwen3_1_7b_stapo",
        run_dir="",
        model=ModelConfig(path="models/Qwen3-1.7B-Base"),
        # 32 GPUs train, each with the whole model: 62 of 95 GiB without recompute, and no
        # collective but the gradients'.
        parallel=dataclasses.replace(
            base.parallel,
            tensor_model_parallel_size=1,
            sequence_parallel=False,
            data_parallel_size=32,
        ),
        # 32 GPUs sample. An engine of four decodes its 256 sequences at once; with engines of one
        # a rollout takes 7 % longer.
        rollout=dataclasses.replace(base.rollout, num_engines=8),
    )
