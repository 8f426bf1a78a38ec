"""The ablation of STAPO that silences the candidates of high entropy.

    I_it = 0  if  A_i > 0  and  p_it < tau_p  and  h_it > the (1 - q)-quantile;   1 otherwise

Differs from STAPO in which candidates go: as many, from the other end. The paper finds it clearly
the worst of the three choices: it silences exploration and keeps the noise.

Source: STAPO, arXiv:2602.15620 v5, the ablation of masking strategies.
"""

from typing import Any

from megatron_stapo.algorithms.stapo import stapo
from megatron_stapo.config import AlgorithmConfig


def mask_high_entropy(**changes: Any) -> AlgorithmConfig:
    """The settings of the high-entropy ablation.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    return stapo(**dict(token_mask="high_entropy") | changes)
