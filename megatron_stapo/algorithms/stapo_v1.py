"""STAPO as its first two versions define it.

    I_it = 0  if  A_i > 0  and  p_it < tau_p  and  h_it < tau_h^(q);   1 otherwise

Differs from STAPO in the threshold: tau_h^(q) is the q-quantile of the entropies of all response
tokens in the mini-batch, not of the candidates, and q = 0.8. Rare tokens mostly have a high
entropy, so this silences fewer of them.

Source: STAPO, arXiv:2602.15620 v1 and v2, section 5.1 (tau_p = 0.002, q = 80 %). Section 5.3 of v1
counts the share that is kept, 20 %, and calls it tau_h; both mean the same.
"""

from typing import Any

from megatron_stapo.algorithms.stapo import stapo
from megatron_stapo.config import AlgorithmConfig


def stapo_v1(**changes: Any) -> AlgorithmConfig:
    """The settings of STAPO v1.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    return stapo(**dict(token_mask="s2t_v1", entropy_quantile=0.8) | changes)
