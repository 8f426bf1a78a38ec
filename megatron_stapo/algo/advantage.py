"""Group-relative advantages.

Source: STAPO, arXiv:2602.15620, section 3.1; GRPO, arXiv:2402.03300.
"""

import torch

EPS = 1e-6
"""Added to the standard deviation, in reward units."""


def compute_group_advantages(rewards_G: torch.Tensor, divide_by_std: bool = True) -> torch.Tensor:
    """Compare the rewards of one prompt's responses with their mean.

    Args:
        rewards_G: [G] float, reward units; G >= 2.
        divide_by_std: False leaves the difference in reward units: Dr.GRPO, arXiv:2503.20783.

    Returns:
        [G] fp32: (r - mean) / (std + 1e-6), std with the denominator G - 1; or r - mean. Exactly 0
        where all rewards are equal, so that rounding in the mean never becomes an advantage.

    Raises:
        ValueError: fewer than two rewards, or one that is not finite.
    """
    if rewards_G.ndim != 1 or len(rewards_G) < 2:
        raise ValueError(f"rewards_G has shape {tuple(rewards_G.shape)}; needs [G] with G >= 2.")
    if not rewards_G.isfinite().all():
        raise ValueError(f"rewards_G={rewards_G.tolist()} must be finite.")
    if (rewards_G == rewards_G[0]).all():
        return torch.zeros(len(rewards_G), dtype=torch.float32)
    rewards_G = rewards_G.double()
    centred_G = rewards_G - rewards_G.mean()
    return (centred_G / (rewards_G.std() + EPS) if divide_by_std else centred_G).float()


def reweight_advantages(
    advantages_T: torch.Tensor, old_logprobs_T: torch.Tensor, alpha: float
) -> torch.Tensor:
    """Shrink the advantages of improbable tokens: A (1 - alpha (1 - p)), for both signs of A.

    Args:
        advantages_T: [T] fp32.
        old_logprobs_T: [T] fp32, nats. Of the policy that sampled.
        alpha: in [0, 1]; 0 changes nothing.

    Returns:
        [T] fp32.

    Source: Advantage Reweighting, arXiv:2505.12929.
    """
    return advantages_T * (1 - alpha * (1 - old_logprobs_T.exp()))
