"""The mean that the loss is, as a weight per token.

Every mean is written as sum over trained tokens of (weight x token loss) / N, with N the trained
tokens of the mini-batch over all ranks. One sum and one count then serve all of them, and no result
but verl_microbatch_mean's depends on how the tokens are packed.

T: tokens of a microbatch; U: units of the mini-batch. A mean of means averages over units, each
with its own token mean: a prompt's group, a sequence, or a microbatch.
"""

from typing import Literal

import torch

Aggregation = Literal[
    "token_mean", "prompt_mean", "sequence_mean", "fixed_length", "verl_microbatch_mean"
]


def compute_unit_ids(
    aggregation: Aggregation,
    sequence_ids_T: torch.Tensor,
    group_size: int,
    microbatch_id: int,
) -> torch.Tensor:
    """Name the unit of each token.

    Args:
        aggregation: token_mean and fixed_length have a single unit, 0.
        sequence_ids_T: [T] int64. Within the mini-batch over all ranks, a group's responses
            consecutive; negative on padding.
        group_size: responses per prompt.
        microbatch_id: of these tokens, within the mini-batch over all ranks.

    Returns:
        [T] int64, below `count_units`; 0 on padding, which carries no loss.
    """
    if aggregation == "prompt_mean":
        return sequence_ids_T.clamp(min=0) // group_size
    if aggregation == "sequence_mean":
        return sequence_ids_T.clamp(min=0)
    unit_id = microbatch_id if aggregation == "verl_microbatch_mean" else 0
    return torch.full_like(sequence_ids_T, unit_id).masked_fill(sequence_ids_T < 0, 0)


def count_units(
    aggregation: Aggregation, num_sequences: int, group_size: int, num_microbatches: int
) -> int:
    """U: the units of a mini-batch over all ranks, those without a trained token included.

    Args:
        aggregation: see `compute_unit_ids`.
        num_sequences: of the mini-batch over all ranks; a multiple of group_size.
        group_size: responses per prompt.
        num_microbatches: of the mini-batch over all ranks.
    """
    return {
        "token_mean": 1,
        "fixed_length": 1,
        "prompt_mean": num_sequences // group_size,
        "sequence_mean": num_sequences,
        "verl_microbatch_mean": num_microbatches,
    }[aggregation]


def compute_loss_weights(
    aggregation: Aggregation,
    unit_ids_T: torch.Tensor,
    unit_counts_U: torch.Tensor,
    num_sequences: int,
    max_response_tokens: int,
) -> torch.Tensor:
    """Weight of each token's loss, for a sum that is divided by N.

    With N the sum of unit_counts_U:
        token_mean: exactly 1.
        means of units: N / (units with a trained token x trained tokens of the token's unit).
        fixed_length: N / (num_sequences x max_response_tokens).

    Args:
        aggregation: what the loss is the mean of.
        unit_ids_T: [T] int64, from `compute_unit_ids`.
        unit_counts_U: [U] int64 or float64. Trained tokens of each unit, after the masks, over all
            ranks.
        num_sequences: of the mini-batch over all ranks, those without a trained token included.
        max_response_tokens: limit that the responses were sampled under.

    Returns:
        [T] fp32, computed in float64. 0 in a unit without a trained token; elsewhere it does not
        look at the loss mask, which the caller applies.

    Source: token_mean: DAPO, arXiv:2503.14476, equation 8, over the mini-batch; prompt_mean: STAPO,
        arXiv:2602.15620, section 4, whose denominator is a prompt's; sequence_mean: GRPO,
        arXiv:2402.03300, equation 3; fixed_length: Dr.GRPO, arXiv:2503.20783.
    """
    if aggregation == "token_mean":
        return torch.ones_like(unit_ids_T, dtype=torch.float32)
    counts_U = unit_counts_U.double()
    num_tokens = counts_U.sum()
    if aggregation == "fixed_length":
        weight = num_tokens / (num_sequences * max_response_tokens)
        return weight.float().expand_as(unit_ids_T)
    occupied_U = counts_U > 0
    weights_U = num_tokens / (occupied_U.sum() * counts_U)
    return weights_U.masked_fill(~occupied_U, 0.0)[unit_ids_T].float()
