"""S2T, silencing spurious tokens: which tokens keep their gradient.

A token is spurious when its response is better than its group's mean, its probability is below
tau_p and its entropy is below the q-quantile of the tokens that pass the first two tests in the
same mini-batch. The three functions are the three steps; between the first and the second the
trainer gathers the candidates' entropies over all ranks.

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
        prob_threshold: tau_p, a probability. Strict: a token at the threshold is not rare. 0
            selects nothing.

    Returns:
        [T] bool.

    Raises:
        ValueError: the streams have different shapes.
    """
    _check_shapes(logprobs_T, advantages_T, response_mask_T)
    # torch rounds the scalar to float32, like the log-probability that equals it.
    log_threshold = math.log(prob_threshold) if prob_threshold > 0 else -math.inf
    return response_mask_T & (advantages_T > 0) & (logprobs_T < log_threshold)


def compute_entropy_threshold(candidate_entropy_N: torch.Tensor, entropy_quantile: float) -> float:
    """Take the q-quantile of the candidates' entropies, exactly.

    Args:
        candidate_entropy_N: [N] fp32, nats. Of every candidate of the mini-batch, in any order.
        entropy_quantile: q in [0, 1].

    Returns:
        Nats, float64; linear interpolation between the order statistics at q (N - 1), as numpy's
        and torch's "linear". -inf without candidates, so that nothing is masked.

    Raises:
        ValueError: an entropy is not finite.
    """
    if not len(candidate_entropy_N):
        return -math.inf
    if not candidate_entropy_N.isfinite().all():
        raise ValueError("a candidate's entropy is not finite; the policy's logits are broken.")
    ordered = candidate_entropy_N.double().sort().values
    position = entropy_quantile * (len(ordered) - 1)
    low = math.floor(position)
    high = math.ceil(position)
    return (ordered[low] + (position - low) * (ordered[high] - ordered[low])).item()


def compute_s2t_mask(
    candidate_mask_T: torch.Tensor, entropy_T: torch.Tensor, entropy_threshold: float
) -> torch.Tensor:
    """Mark the tokens that S2T keeps.

    Args:
        candidate_mask_T: [T] bool, from `select_candidates`.
        entropy_T: [T] fp32, nats. Over the full vocabulary at each position.
        entropy_threshold: nats, from `compute_entropy_threshold`. Strict: a candidate at the
            threshold is kept.

    Returns:
        [T] bool. False on the spurious tokens alone; padding and prompts are True here.

    Raises:
        ValueError: the streams have different shapes.
    """
    _check_shapes(candidate_mask_T, entropy_T)
    return ~(candidate_mask_T & (entropy_T.double() < entropy_threshold))


def _check_shapes(first: torch.Tensor, *others: torch.Tensor) -> None:
    for other in others:
        if first.shape != other.shape:
            raise ValueError(
                f"streams of one microbatch have shapes {tuple(first.shape)} and "
                f"{tuple(other.shape)}; they must be equal."
            )
