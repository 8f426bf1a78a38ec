"""Packs a step's rollouts into microbatches of whole sequences, balanced over data-parallel ranks.

No token is padding except the last few of a microbatch, and those train nothing. Which sequences
share a mini-batch is the prompts' order alone; where a sequence lands inside it never changes the
loss.
"""

from collections.abc import Sequence

import torch

from megatron_stapo.types import Microbatch, Minibatch, Prompt, Rollout, RolloutGroup


def pack(
    groups: Sequence[RolloutGroup],
    num_prompts_per_minibatch: int,
    max_microbatch_tokens: int,
    dp_size: int,
    token_multiple: int,
) -> list[list[Minibatch]]:
    """Cut a step's groups into mini-batches, and each into every data-parallel rank's microbatches.

    Args:
        groups: all groups of the step; rewards and advantages assigned.
        num_prompts_per_minibatch: consecutive groups that share an optimizer step.
        max_microbatch_tokens: budget; at least the longest sequence.
        dp_size: number of data-parallel ranks.
        token_multiple: T of every microbatch is a multiple of it, for sequence parallelism.

    Returns:
        For each data-parallel rank its mini-batches, in order. Every rank has every mini-batch, and
        at least one microbatch in each.

    Raises:
        ValueError: a sequence exceeds the budget.
    """
    ranks: list[list[Minibatch]] = [[] for _ in range(dp_size)]
    for start in range(0, len(groups), num_prompts_per_minibatch):
        sequences = [
            (group.prompt, rollout)
            for group in groups[start : start + num_prompts_per_minibatch]
            for rollout in group.rollouts
        ]
        lengths = [len(prompt.token_ids) + len(rollout.token_ids) for prompt, rollout in sequences]
        if max(lengths) > max_microbatch_tokens:
            raise ValueError(
                f"data.max_microbatch_tokens={max_microbatch_tokens}: a sequence has "
                f"{max(lengths)} tokens; raise the budget."
            )
        for rank, indices in enumerate(_balance(lengths, dp_size)):
            bins = _fill_bins(indices, lengths, max_microbatch_tokens)
            ranks[rank].append(
                Minibatch(
                    microbatches=[
                        _build_microbatch([sequences[i] for i in bin], token_multiple)
                        for bin in bins or [[]]
                    ]
                )
            )
    return ranks


def _balance(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Give the longest remaining sequence to the rank with the fewest tokens."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = loads.index(min(loads))
        ranks[rank].append(index)
        loads[rank] += lengths[index]
    return ranks


def _fill_bins(indices: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First fit: indices come longest first, so neighbours in a bin have like lengths."""
    bins: list[list[int]] = []
    free: list[int] = []
    for index in indices:
        fitting = (i for i, room in enumerate(free) if lengths[index] <= room)
        i = next(fitting, len(bins))
        if i == len(bins):
            bins.append([])
            free.append(capacity)
        bins[i].append(index)
        free[i] -= lengths[index]
    return bins


def _build_microbatch(
    sequences: Sequence[tuple[Prompt, Rollout]], token_multiple: int
) -> Microbatch:
    token_ids: list[int] = []
    labels: list[int] = []
    position_ids: list[int] = []
    cu_seqlens = [0]
    response_mask: list[bool] = []
    advantages: list[float] = []
    rollout_logprobs: list[float] = []

    def append(
        tokens: list[int], num_responses: int, advantage: float, logprobs: list[float]
    ) -> None:
        # Entry t of a stream describes the token after t, so the stream of a response starts at the
        # prompt's last token, and the sequence's last entry describes nothing.
        num_before = len(tokens) - num_responses - 1
        token_ids.extend(tokens)
        labels.extend([*tokens[1:], 0])
        position_ids.extend(range(len(tokens)))
        cu_seqlens.append(len(token_ids))
        response_mask.extend([False] * num_before + [True] * num_responses + [False])
        advantages.extend([0.0] * num_before + [advantage] * num_responses + [0.0])
        rollout_logprobs.extend([0.0] * num_before + logprobs + [0.0])

    for prompt, rollout in sequences:
        append(
            prompt.token_ids + rollout.token_ids,
            len(rollout.token_ids),
            rollout.advantage,
            rollout.rollout_logprobs,
        )
    missing = -len(token_ids) % token_multiple if token_ids else token_multiple
    if missing:
        append([0] * missing, 0, 0.0, [])
    return Microbatch(
        token_ids_T=torch.tensor(token_ids),
        labels_T=torch.tensor(labels),
        position_ids_T=torch.tensor(position_ids),
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
        response_mask_T=torch.tensor(response_mask),
        advantages_T=torch.tensor(advantages, dtype=torch.float32),
        rollout_logprobs_T=torch.tensor(rollout_logprobs, dtype=torch.float32),
    )
