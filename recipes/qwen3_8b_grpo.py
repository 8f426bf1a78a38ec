"""GRPO on Qwen3-8B-Base: the paper's baseline, with the settings of GRPO's own paper."""

import dataclasses

from megatron_stapo.algorithms import grpo
from megatron_stapo.config import Config
from recipes.qwen3_8b_stapo import qwen3_8b_stapo


def qwen3_8b_grpo() -> Config:
    """The run of `qwen3_8b_stapo` with another algorithm."""
    return dataclasses.replace(
        qwen3_8b_stapo(),
        name="qwen3_8b_grpo",
        run_dir="",
        # Mini-batches are STAPO's, four updates per step; the KL term keeps a copy of the weights.
        algorithm=grpo(),
    )
