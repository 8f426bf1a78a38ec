"""STAPO on Qwen3-30B-A3B-Base, a mixture of experts, on 64 H20."""

import dataclasses

from megatron_stapo.config import Config, ModelConfig
from recipes.qwen3_14b_stapo import qwen3_14b_stapo


def qwen3_30b_a3b_stapo() -> Config:
    """About 630 s per step in the plan."""
    base = qwen3_14b_stapo()
    return dataclasses.replace(
        base,
        name="qwen3_30b_a3b_stapo",
        run_dir="",
        model=ModelConfig(path="models/Qwen3-30B-A3B-Base"),
        # 32 GPUs train. EP8, a node, keeps the experts' exchange on NVLink; TP4, as many as there
        # are KV heads, cuts the activations of eight experts per token.
        parallel=dataclasses.replace(
            base.parallel, data_parallel_size=8, expert_model_parallel_size=8
        ),
        # 32 GPUs sample; TP4 likewise for its KV heads.
        rollout=dataclasses.replace(base.rollout, num_engines=8),
    )
