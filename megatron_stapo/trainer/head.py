"""Turns the last stage's hidden states into the [T] streams of a microbatch, through Megatron's
hook.

Only positions whose label was sampled go through the head.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.utils import get_attr_wrapped_model, get_model_config

from megatron_stapo.ops.logprobs import compute_logprobs_and_entropy
from megatron_stapo.parallel.groups import Groups
from megatron_stapo.types import Microbatch


def run_model(
    model: torch.nn.Module,
    microbatch: Microbatch,
    groups: Groups,
    temperature: float,
    with_collision: bool,
) -> torch.Tensor:
    """Run a chunk of the model on one microbatch.

    Returns:
        From the last chunk [2, T] fp32: log-probability (with gradient) and entropy (without) of
        every response token, 0 elsewhere; with_collision [3, T], the last row the collision
        probability. From other chunks the hidden states for the next one.

    Communicates: what the model's layers do; in the head, an all-gather (sequence parallel) of the
        hidden states and the reductions of `compute_logprobs_and_entropy`, over tp_group.
    """

    def score_hidden(
        *, hidden_states: torch.Tensor, output_layer: Any, output_weight: Any, **_: Any
    ) -> torch.Tensor:
        # Backward sums the ranks' parts of the gradient: the head's own backward does not
        # communicate.
        if output_layer.sequence_parallel:
            hidden_T1D = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=True, group=groups.tp_group
            )
        else:
            hidden_T1D = copy_to_tensor_model_parallel_region(hidden_states, group=groups.tp_group)
        positions = microbatch.response_mask_T.nonzero()[:, 0]
        scores = compute_logprobs_and_entropy(
            hidden_T1D[:, 0][positions],
            output_layer.weight if output_weight is None else output_weight,
            microbatch.labels_T[positions],
            temperature,
            groups.tp_group if groups.tp_size > 1 else None,
            with_collision=with_collision,
        )
        streams = hidden_T1D.new_zeros(len(scores), len(microbatch.labels_T), dtype=torch.float32)
        rows = torch.arange(len(scores), device=positions.device)[:, None]
        return streams.index_put((rows, positions), torch.stack(scores))

    # For the routers. The chunk with the embedding cuts the mask for sequence parallelism itself.
    padding_mask_T = microbatch.sequence_ids_T < 0
    if get_model_config(model).sequence_parallel and not get_attr_wrapped_model(
        model, "pre_process"
    ):
        padding_mask_T = padding_mask_T.chunk(groups.tp_size)[groups.tp_rank]
    max_seqlen = int(microbatch.cu_seqlens.diff().max())
    return model(
        input_ids=microbatch.token_ids_T[None],
        position_ids=microbatch.position_ids_T[None],
        attention_mask=None,
        padding_mask=padding_mask_T[None],
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=microbatch.cu_seqlens,
            cu_seqlens_kv=microbatch.cu_seqlens,
            max_seqlen_q=max_seqlen,
            max_seqlen_kv=max_seqlen,
        ),
        output_processor=score_hidden,
    )
