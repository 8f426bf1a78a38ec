"""DAPO: GRPO for long reasoning, in four changes.

    J = 1 / (sum_i |y_i|)  sum_i sum_t min(ratio_it A_i, clip(ratio_it, 1 - 0.2, 1 + 0.28) A_i)
    subject to  0 < number of correct responses < G

A higher upper clip, groups whose rewards differ only, a loss per token, and a penalty of up to 1 on
the reward over the last 4096 tokens before the length limit.

Differs from STAPO: no mask; dynamic sampling; the penalty.

Source: DAPO, arXiv:2503.14476, equations 8 to 13 and section 4.1. Its limit is 20480 tokens, of
which the buffer is a fifth: a run with a shorter limit sets overlong_buffer_tokens. Its update
takes 512 responses, as the default of 64 prompts makes with 8 responses each. The dual clip of 10
and the 10 rounds are those of its script, verl-recipe dapo/run_dapo_qwen2.5_32b.sh. The paper's
overlong filtering, an alternative to the penalty, is filter_truncated=True.
"""

from typing import Any

from megatron_stapo.config import AlgorithmConfig


def dapo(**changes: Any) -> AlgorithmConfig:
    """The settings of DAPO.

    Args:
        changes: fields of AlgorithmConfig that shall have other values.
    """
    defaults: dict[str, Any] = dict(
        token_mask="none",
        clip_low=0.2,
        clip_high=0.28,
        aggregation="token_mean",
        dynamic_sampling=True,
        overlong_buffer_tokens=4096,
    )
    return AlgorithmConfig(**defaults | changes)
