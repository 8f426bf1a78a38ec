"""Group-relative advantages.

Source: STAPO, arXiv:2602.15620, section 3.1; GRPO, arXiv:2402.03300.
"""

import torch

EPS = 1e-6
"""Added to the standard deviation, in reward units."""


def compute_group_advantages(rewards_G: torch.Tensor) -> torch.Tensor:
    """Standardise the rewards of one prompt's responses.

    Args:
        rewards_G: [G] float, reward units; G >= 2.

    Returns:
        [G] fp32: (r - mean) / (std + 1e-6), std with the denominator G - 1. Exactly 0 where all
        rewards are equal, so that rounding in the mean never becomes an advantage.

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
    return ((rewards_G - rewards_G.mean()) / (rewards_G.std() + EPS)).float()
