"""The named algorithms: one file each, with the formula, the source and the published settings.

A file holds one function of its own name. It builds an `AlgorithmConfig`; keyword arguments change
single fields, for example `grpo(kl_coef=0.0)`.
"""

from collections.abc import Callable

from megatron_stapo.algorithms.advantage_reweighting import advantage_reweighting
from megatron_stapo.algorithms.cispo import cispo
from megatron_stapo.algorithms.clip_cov import clip_cov
from megatron_stapo.algorithms.dapo import dapo
from megatron_stapo.algorithms.dr_grpo import dr_grpo
from megatron_stapo.algorithms.entropy20 import entropy20
from megatron_stapo.algorithms.grpo import grpo
from megatron_stapo.algorithms.gspo import gspo
from megatron_stapo.algorithms.justrl import justrl
from megatron_stapo.algorithms.justrl_fullmask import justrl_fullmask
from megatron_stapo.algorithms.lopti import lopti
from megatron_stapo.algorithms.mask_high_entropy import mask_high_entropy
from megatron_stapo.algorithms.mask_random import mask_random
from megatron_stapo.algorithms.stapo import stapo
from megatron_stapo.algorithms.stapo_v1 import stapo_v1
from megatron_stapo.config import AlgorithmConfig

ALGORITHMS: dict[str, Callable[..., AlgorithmConfig]] = {
    algorithm.__name__: algorithm
    for algorithm in (
        stapo,
        stapo_v1,
        grpo,
        dapo,
        justrl,
        justrl_fullmask,
        entropy20,
        dr_grpo,
        gspo,
        cispo,
        lopti,
        advantage_reweighting,
        clip_cov,
        mask_high_entropy,
        mask_random,
    )
}
