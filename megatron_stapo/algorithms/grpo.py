"""GRPO: the group's mean reward in place of a value network.

    A_i = (r_i - mean_j r_j) / std_j r_j
    J   = 1/G sum_i 1/|y_i| sum_t [ min(ratio_it A_i, clip(ratio_it, 1 - eps, 1 + eps) A_i)
                                    - beta KL_it(policy || reference) ]
    KL  = r - log r - 1,   r = p_ref / p

Differs from STAPO: no mask, the clip is symmetric, every response weighs the same whatever its
length, and a KL term holds the policy near the model it started from, which costs a copy of the
weights: `grpo(kl_coef=0.0)` drops both. STAPO does not say whether its GRPO baseline keeps it.

Source: DeepSeekMath, arXiv:2402.03300, equations 3 and 4, and section 4.2 for beta = 0.04. It does
not state eps; 0.2 is PPO's and the customary one. The paper makes one update per step of rollouts:
set num_prompts_per_minibatch to rollout.num_prompts_per_step for that.
"""

from typing import Any

from megatron_stapo.config import AlgorithmConfig


def grpo(**changes: Any) -> AlgorithmConfig:
    """The settings of GRPO.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    defaults: dict[str, Any] = dict(
        token_mask="none",
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        aggregation="sequence_mean",
        kl_coef=0.04,
    )
    return AlgorithmConfig(**defaults | changes)
