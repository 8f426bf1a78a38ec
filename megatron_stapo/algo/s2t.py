"""S2T, silencing spurious tokens: the mask of STAPO, and the first two of its three tests.

    I_it = 0   if  A_i > 0  and  p_it < tau_p  and  h_it < tau_h^(q);   1 otherwise

A token is spurious when its response is better than its group's mean, its probability is below
tau_p, and its entropy is below tau_h, the q-quantile of the entropies of the tokens that pass the
first two tests, the candidates, in the same mini-batch. p and h are the current policy's, values
without gradient. In three steps:

    candidate_mask_T = select_candidates(...)                                       here
    threshold = compute_quantile(entropy_T[candidate_mask_T], q, group)             ops/quantile.py
    s2t_mask_T = compute_token_mask(candidate_mask_T, entropy_T, threshold)         token_mask.py

Source: STAPO, arXiv:2602.15620 v5, section 4 and Algorithm 1.
"""

import math

import torch


def select_candidates(
    logprobs_T: torch.Tensor,
    advantages_T: torch.Tensor,
    response_mask_T: torch.Tensor,
    prob_threshold: float,
) -> torch.Tensor:
    """Mark the rare tokens of responses with positive advantage.

    Args:
        logprobs_T: [T] fp32, nats. Log-probability of each token under the current policy.
        advantages_T: [T] fp32. Constant within a response.
        response_mask_T: [T] bool. True on tokens that the policy sampled.
        prob_threshold: tau_p, a probability.

    Returns:
        [T] bool.

    Raises:
        ValueError: the streams have different shapes.
    """
    check_shapes(logprobs_T, advantages_T, response_mask_T)
    return response_mask_T & (advantages_T > 0) & select_rare(logprobs_T, prob_threshold)


def select_rare(logprobs_T: torch.Tensor, prob_threshold: float) -> torch.Tensor:
    """Mark the tokens whose probability is below a threshold.

    Args:
        logprobs_T: [T] fp32, nats.
        prob_threshold: a probability. Strict: a token at the threshold is not rare. 0 selects
            nothing.

    Returns:
        [T] bool.
    """
    # torch rounds the scalar to float32, like the log-probability that equals it.
    log_threshold = math.log(prob_threshold) if prob_threshold > 0 else -math.inf
    return logprobs_T < log_threshold


def check_shapes(first: torch.Tensor, *others: torch.Tensor) -> None:
    """Refuse streams that do not describe the same tokens: broadcasting would hide it.

    Raises:
        ValueError: the streams have different shapes.
    """
    for other in others:
        if first.shape != other.shape:
            raise ValueError(
                f"streams of one microbatch have shapes {tuple(first.shape)} and "
                f"{tuple(other.shape)}; they must be equal."
            )
