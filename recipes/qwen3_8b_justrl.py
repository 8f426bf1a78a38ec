"""JustRL on Qwen3-8B-Base: the paper's baseline, STAPO without its mask."""

import dataclasses

from megatron_stapo.algorithms import justrl
from megatron_stapo.config import Config
from recipes.qwen3_8b_stapo import qwen3_8b_stapo


def qwen3_8b_justrl() -> Config:
    """The run of `qwen3_8b_stapo` with another algorithm."""
    return dataclasses.replace(
        qwen3_8b_stapo(),
        name="qwen3_8b_justrl",
        run_dir="",
        algorithm=justrl(),
    )
