"""20-Entropy on Qwen3-1.7B-Base: the paper's baseline."""

import dataclasses

from megatron_stapo.algorithms import entropy20
from megatron_stapo.config import Config
from recipes.qwen3_1_7b_stapo import qwen3_1_7b_stapo


def qwen3_1_7b_entropy20() -> Config:
    """The run of `qwen3_1_7b_stapo` with another algorithm."""
    return dataclasses.replace(
        qwen3_1_7b_stapo(),
        name="qwen3_1_7b_entropy20",
        run_dir="",
        # The paper runs every method without dynamic sampling.
        algorithm=entropy20(dynamic_sampling=False),
    )
