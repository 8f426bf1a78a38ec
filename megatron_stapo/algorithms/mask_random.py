"""The ablation of STAPO that silences candidates at random.

    I_it = 0  if  A_i > 0  and  p_it < tau_p  and  u_it < the q-quantile of u;   1 otherwise

u is uniform, drawn from the seed, the update and the token's place in its sequence.

Differs from STAPO in which candidates go: as many, drawn blindly. The paper places it between
STAPO and the high-entropy ablation.

Source: STAPO, arXiv:2602.15620 v5, the ablation of masking strategies.
"""

from typing import Any

from megatron_stapo.algorithms.stapo import stapo
from megatron_stapo.config import AlgorithmConfig


def mask_random(**changes: Any) -> AlgorithmConfig:
    """The settings of the random ablation.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    return stapo(**dict(token_mask="random") | changes)
