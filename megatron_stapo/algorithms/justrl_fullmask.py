"""JustRL-FullMask: every rare token of a better response is silenced, whatever its entropy.

    I_it = 0  if  A_i > 0  and  p_it < tau_p;   1 otherwise

Differs from STAPO: no test of the entropy, so exploration goes with the noise; the paper sees the
entropy collapse. It is STAPO's limit of q = 1, except that q = 1 keeps the candidate of the highest
entropy.

Source: STAPO, arXiv:2602.15620 v5, the ablation of that name.
"""

from typing import Any

from megatron_stapo.algorithms.stapo import stapo
from megatron_stapo.config import AlgorithmConfig


def justrl_fullmask(**changes: Any) -> AlgorithmConfig:
    """The settings of JustRL-FullMask.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    return stapo(**dict(token_mask="rare") | changes)
