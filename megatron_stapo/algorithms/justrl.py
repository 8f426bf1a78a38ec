"""JustRL: a single stage with fixed settings, and nothing else.

    J = 1 / (sum_i |y_i|)  sum_i sum_t min(ratio_it A_i, clip(ratio_it, 1 - 0.2, 1 + 0.28) A_i)

Differs from STAPO in the mask alone: there is none. Differs from DAPO: no dynamic sampling, no
penalty on length.

Source: JustRL, arXiv:2512.16649; its launch script run_scaling_ssh_distill.sh
(github.com/thunlp/JustRL) sets every default that STAPO shares, and the dual clip of 10. The verl
release that it contains takes the mean per microbatch: aggregation="verl_microbatch_mean".
"""

from typing import Any

from megatron_stapo.algorithms.stapo import stapo
from megatron_stapo.config import AlgorithmConfig


def justrl(**changes: Any) -> AlgorithmConfig:
    """The settings of JustRL.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    return stapo(**dict(token_mask="none") | changes)
