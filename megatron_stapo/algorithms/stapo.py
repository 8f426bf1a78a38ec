"""STAPO: DAPO's loss without the spurious tokens.

    A_i  = (r_i - mean_j r_j) / std_j r_j                              over a prompt's G responses
    I_it = 0  if  A_i > 0  and  p_it < tau_p  and  h_it < tau_h^(q);   1 otherwise
    J    = 1 / (sum I_it)  sum I_it min(ratio_it A_i, clip(ratio_it, 1 - 0.2, 1 + 0.28) A_i)

tau_h^(q) is the q-quantile of the entropies of the tokens that pass the first two tests in the
mini-batch. p, h and the threshold are the current policy's, read before each update.

Source: STAPO, arXiv:2602.15620 v5, section 4, Algorithm 1 and Table 3: tau_p = 0.002, q = 0.75,
clip 0.2 and 0.28, 64 prompts of 8 responses per update, no KL, no dynamic sampling.

Where the paper is silent or has two readings: the dual clip of 10 is that of JustRL's launch script
(github.com/thunlp/JustRL, run_scaling_ssh_distill.sh). The denominator is printed per prompt, as
DAPO's, and runs over the mini-batch in the code they build on: aggregation="token_mean" is the
mini-batch, "prompt_mean" the printed form, "verl_microbatch_mean" the verl release of that time.
"""

from typing import Any

from megatron_stapo.config import AlgorithmConfig


def stapo(**changes: Any) -> AlgorithmConfig:
    """The settings of STAPO, which are the defaults of AlgorithmConfig.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    return AlgorithmConfig(**changes)
