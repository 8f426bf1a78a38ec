"""20-Entropy on Qwen3-14B-Base: the paper's baseline."""

import dataclasses

from megatron_stapo.algorithms import entropy20
from megatron_stapo.config import Config
from recipes.qwen3_14b_stapo import qwen3_14b_stapo


def qwen3_14b_entropy20() -> Config:
    """The run of `qwen3_14b_stapo` with another algorithm."""
    return dataclasses.replace(
        qwen3_14b_stapo(),
        name="qwen3_14b_entropy20",
        run_dir="",
        # The paper runs every method without dynamic sampling.
        algorithm=entropy20(dynamic_sampling=False),
    )
