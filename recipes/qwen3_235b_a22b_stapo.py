"""STAPO on Qwen3-235B-A22B, a mixture of experts, on 256 H20. It has no Base model."""

import dataclasses

from megatron_stapo.config import Config, ModelConfig
from recipes.qwen3_14b_stapo import qwen3_14b_stapo


def qwen3_235b_a22b_stapo() -> Config:
    """About 1490 s per step in the plan; 128 GPUs take 2480 s, and 64 do not hold it."""
    base = qwen3_14b_stapo()
    return dataclasses.replace(
        base,
        name="qwen3_235b_a22b_stapo",
        run_dir="",
        model=ModelConfig(path="models/Qwen3-235B-A22B"),
        # 160 GPUs train. EP8 and PP4 cut the experts' weights and gradients to 43 GiB, TP4, as many
        # as there are KV heads, with CP2 the activations of a sequence of 16k; the rest takes
        # recompute. PP16 without it is 3 % faster in the plan and leaves 6 GiB. 94 layers are no
        # multiple of 4: the ends have 23, beside embedding and head.
        parallel=dataclasses.replace(
            base.parallel,
            pipeline_model_parallel_size=4,
            num_layers_in_first_pipeline_stage=23,
            num_layers_in_last_pipeline_stage=23,
            context_parallel_size=2,
            data_parallel_size=5,
            expert_model_parallel_size=8,
            recompute="full",
        ),
        data=dataclasses.replace(base.data, max_microbatch_tokens=8192),
        # 96 GPUs sample: a copy takes two stages of TP4, 59 GB of weights per GPU.
        rollout=dataclasses.replace(base.rollout, num_engines=12, pipeline_parallel_size=2),
    )
