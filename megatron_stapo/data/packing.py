"""Packs a step's rollouts into microbatches of whole sequences, balanced over data-parallel ranks.

Padding trains nothing. Which sequences share a mini-batch is the prompts' order alone; where a
sequence lands inside it never changes the loss.
"""

import math
from collections.abc import Sequence

import torch

from megatron_stapo.config import ParallelConfig
from megatron_stapo.types import Microbatch, Minibatch, Prompt, Rollout, RolloutGroup


def pack(
    groups: Sequence[RolloutGroup],
    num_prompts_per_minibatch: int,
    max_pack_tokens: int,
    parallel: ParallelConfig,
    filter_truncated: bool = False,
    token_multiple: int = 1,
) -> list[list[Minibatch]]:
    """Cut a step's groups into mini-batches, and each into every data-parallel rank's microbatches.

    Args:
        groups: all groups of the step, of equal size; rewards and advantages assigned.
        num_prompts_per_minibatch: consecutive groups that share an optimizer step.
        max_pack_tokens: budget of a microbatch; at least the longest sequence.
        parallel: how the pack is cut, which decides on padding and number of microbatches.
        filter_truncated: leave out responses that were cut at their longest.
        token_multiple: each rank's tokens of a microbatch are padded to a multiple of it, past the
            budget where the microbatch is full.

    Returns:
        For each data-parallel rank its mini-batches, in order. In a mini-batch every rank has
        equally many microbatches: experts are shared across ranks, which must keep step, and the
        interleaved schedule asks for a multiple of the pipeline stages.

    Raises:
        ValueError: a sequence exceeds the budget.
    """
    multiple = parallel.sequence_multiple
    microbatch_multiple = math.lcm(
        parallel.microbatch_multiple, token_multiple * parallel.num_token_shards
    )
    ranks: list[list[Minibatch]] = [[] for _ in range(parallel.data_parallel_size)]
    for start in range(0, len(groups), num_prompts_per_minibatch):
        sequences = [
            (group.prompt, rollout)
            for group in groups[start : start + num_prompts_per_minibatch]
            for rollout in group.rollouts
        ]
        lengths = [len(prompt.token_ids) + len(rollout.token_ids) for prompt, rollout in sequences]
        lengths = [length + -length % multiple for length in lengths]
        if max(lengths) > max_pack_tokens:
            raise ValueError(
                f"data.max_microbatch_tokens allows {max_pack_tokens} tokens in a pack: a sequence "
                f"has {max(lengths)}; raise the budget."
            )
        kept = [
            i
            for i, (_, rollout) in enumerate(sequences)
            if not (filter_truncated and rollout.finish_reason == "length")
        ]
        bins_per_rank = [
            _fill_bins(indices, lengths, max_pack_tokens)
            for indices in _balance(kept, lengths, parallel.data_parallel_size)
        ]
        num_bins = max(1, *(len(bins) for bins in bins_per_rank))
        if parallel.virtual_pipeline_model_parallel_size > 1:
            num_bins += -num_bins % parallel.pipeline_model_parallel_size
        for rank, bins in enumerate(bins_per_rank):
            _split_bins(bins, num_bins)
            ranks[rank].append(
                Minibatch(
                    microbatches=[
                        _build_microbatch(
                            [(i, *sequences[i]) for i in bin],
                            rank * num_bins + number,
                            multiple,
                            microbatch_multiple,
                        )
                        for number, bin in enumerate(bins)
                    ],
                    num_microbatches=num_bins * len(ranks),
                    num_sequences=len(sequences),
                )
            )
    return ranks


def _balance(indices: Sequence[int], lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Give the longest remaining sequence to the rank with the fewest tokens."""
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(indices, key=lambda i: -lengths[i]):
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


def _split_bins(bins: list[list[int]], num_bins: int) -> None:
    """Halve the fullest bins until there are num_bins; empty ones where nothing is left to halve.

    Mutates: bins.
    """
    while len(bins) < num_bins:
        fullest = max(bins, key=len, default=[])
        bins.append(fullest[1::2])
        del fullest[1::2]


def _build_microbatch(
    sequences: Sequence[tuple[int, Prompt, Rollout]],
    microbatch_id: int,
    sequence_multiple: int,
    microbatch_multiple: int,
) -> Microbatch:
    """Lay (sequence id, prompt, rollout) one after the other, with padding where layouts ask."""
    token_ids: list[int] = []
    labels: list[int] = []
    position_ids: list[int] = []
    sequence_ids: list[int] = []
    cu_seqlens = [0]
    response_mask: list[bool] = []
    advantages: list[float] = []
    rollout_logprobs: list[float] = []

    def append(sequence_id: int, prompt: list[int], rollout: Rollout, padding: int) -> None:
        # Entry t of a stream describes the token after t, so the stream of a response starts at the
        # prompt's last token, and the sequence's last entry describes nothing.
        tokens, num_responses = prompt + rollout.token_ids, len(rollout.token_ids)
        before, after = len(tokens) - num_responses - 1, padding + 1
        token_ids.extend(tokens + [0] * padding)
        labels.extend(tokens[1:] + [0] * after)
        position_ids.extend(range(len(tokens) + padding))
        sequence_ids.extend([sequence_id] * len(tokens) + [-1] * padding)
        cu_seqlens.append(len(token_ids))
        response_mask.extend([False] * before + [True] * num_responses + [False] * after)
        advantages.extend([0.0] * before + [rollout.advantage] * num_responses + [0.0] * after)
        rollout_logprobs.extend([0.0] * before + rollout.rollout_logprobs + [0.0] * after)

    for sequence_id, prompt, rollout in sequences:
        length = len(prompt.token_ids) + len(rollout.token_ids)
        append(sequence_id, prompt.token_ids, rollout, -length % sequence_multiple)
    missing = -len(token_ids) % microbatch_multiple if token_ids else microbatch_multiple
    if missing:
        nothing = Rollout(
            token_ids=[], rollout_logprobs=[], finish_reason="stop", policy_version=0, advantage=0.0
        )
        append(-1, [0], nothing, missing - 1)
    return Microbatch(
        token_ids_T=torch.tensor(token_ids),
        labels_T=torch.tensor(labels),
        position_ids_T=torch.tensor(position_ids),
        sequence_ids_T=torch.tensor(sequence_ids),
        cu_seqlens=torch.tensor(cu_seqlens, dtype=torch.int32),
        microbatch_id=microbatch_id,
        response_mask_T=torch.tensor(response_mask),
        advantages_T=torch.tensor(advantages, dtype=torch.float32),
        rollout_logprobs_T=torch.tensor(rollout_logprobs, dtype=torch.float32),
    )
