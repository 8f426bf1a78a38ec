"""20-Entropy: only the fifth of the tokens with the highest entropy trains.

    J = 1 / (sum_it 1[h_it >= tau])  sum_it 1[h_it >= tau] min(ratio_it A_i, clip(ratio_it) A_i)

tau is the 0.8-quantile of the entropies of all response tokens in the mini-batch.

Differs from STAPO: silences common and rare tokens of every advantage, four in five; DAPO's dynamic
sampling and penalty on length. STAPO runs it as a baseline without dynamic sampling:
`entropy20(dynamic_sampling=False)`.

Source: Beyond the 80/20 Rule, arXiv:2506.01939: rho = 20 %, the rest as DAPO. Its
public code takes the quantile in each microbatch; here it is over the mini-batch, as printed.
"""

from typing import Any

from megatron_stapo.algorithms.dapo import dapo
from megatron_stapo.config import AlgorithmConfig


def entropy20(**changes: Any) -> AlgorithmConfig:
    """The settings of 20-Entropy.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    return dapo(**dict(token_mask="top_entropy", entropy_quantile=0.8) | changes)
