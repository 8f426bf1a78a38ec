"""Seconds of a step, by phase."""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, pstdev

from megatron_stapo.config import ParallelConfig, list_stage_layers
from megatron_stapo.plan.accelerators import (
    CONTEXT_PARALLEL_LOSS,
    DECODE_OVERHEAD_S,
    DP_IMBALANCE,
    HBM_EFFICIENCY,
    LINK_EFFICIENCY,
    MICROBATCH_FILL,
    SYNC_EFFICIENCY,
    SYNC_OVERHEAD_S,
    TP_LATENCY_S,
    Accelerator,
)
from megatron_stapo.plan.memory import compute_stage_state
from megatron_stapo.plan.shape import ModelShape
from megatron_stapo.plan.workload import Workload


@dataclass(frozen=True, kw_only=True)
class TrainingTime:
    """Of all trainer phases of a step."""

    score: float
    """Seconds; so are the next."""
    reference: float
    threshold: float
    update: float
    bubble: float
    """Of the above, lost to the pipeline's filling and draining."""
    communication: float
    """Of the above, in collectives that nothing hides."""
    num_microbatches: int
    """Of a mini-batch, per data-parallel rank."""

    @property
    def total(self) -> float:
        """Seconds."""
        return self.score + self.reference + self.threshold + self.update


@dataclass(frozen=True, kw_only=True)
class RolloutTime:
    """Of sampling a step."""

    total: float
    """Seconds."""
    limit: str
    """What most of it waits for."""
    num_at_a_time: int
    """Sequences that an engine decodes at a time, at most."""


def count_microbatches(
    parallel: ParallelConfig, workload: Workload, max_microbatch_tokens: int
) -> int:
    """Of a mini-batch, per data-parallel rank, as `data.packing` fills them."""
    ranks = workload.num_minibatches * parallel.data_parallel_size
    budget = max_microbatch_tokens * parallel.context_parallel_size * MICROBATCH_FILL
    # A pack of one sequence may be far from full.
    count = max(1, math.ceil(workload.num_tokens / ranks / budget))
    if parallel.virtual_pipeline_model_parallel_size > 1:
        count += -count % parallel.pipeline_model_parallel_size
    return count


def compute_training_time(
    shape: ModelShape,
    parallel: ParallelConfig,
    workload: Workload,
    max_microbatch_tokens: int,
    accelerator: Accelerator,
    num_gpus_per_node: int,
    dtype: str = "bfloat16",
    fp8_layer_frac: float = 0.0,
) -> TrainingTime:
    """Seconds of scoring, reference, threshold and update.

    Forward of a token: 2 FLOPs per parameter that it passes, 2 x query size x its sequence's
    length per layer in attention (causal), 2 x the head where it was sampled. Backward takes twice
    the products and 2.5 times the attention; full recompute one forward more, selective the
    attention, the head always its own forward.

    Args:
        fp8_layer_frac: layers whose products are in FP8, of all; attention, router, experts and
            head never are faster for it.
    """
    tp, cp = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    dp, ep = parallel.data_parallel_size, parallel.expert_model_parallel_size
    num_stages = parallel.pipeline_model_parallel_size
    stages = list_stage_layers(parallel, shape.num_layers)
    num_microbatches = count_microbatches(parallel, workload, max_microbatch_tokens)
    # All mini-batches of a data-parallel rank that has the mean's share.
    share = workload.num_sequences * DP_IMBALANCE / dp
    tokens = workload.num_tokens / workload.num_sequences * share
    responses = workload.mean_response_tokens * share
    peak = accelerator.bf16_flops * accelerator.gemm_efficiency
    expert_peak = accelerator.bf16_flops * accelerator.expert_efficiency
    # Seconds of a layer's forward, and of the head's.
    products = 2 * (shape.cut_layer_params + shape.num_experts * shape.hidden_size) * tokens
    fp8_peak = accelerator.fp8_flops * accelerator.fp8_efficiency
    products *= ((1 - fp8_layer_frac) / peak + fp8_layer_frac / fp8_peak) / (tp * cp)
    products += 2 * shape.active_expert_layer_params * tokens / (tp * cp * expert_peak)
    attention = 2 * shape.query_size * workload.mean_square_tokens * share / (tp * cp * peak)
    attention *= 1 + CONTEXT_PARALLEL_LOSS * math.log2(cp)
    head = 2 * shape.embedding_params * responses / (tp * cp * peak)

    def link(size: int) -> float:
        """Bytes per second of a group of neighbouring ranks."""
        is_inside = size <= num_gpus_per_node
        bandwidth = accelerator.nvlink_bytes_per_s if is_inside else accelerator.network_bytes_per_s
        return bandwidth * LINK_EFFICIENCY

    # A tensor-parallel collective moves a rank's tokens, all but its own part; so does one among
    # experts, for each expert that a token goes to.
    gather = tokens / cp * shape.hidden_size * 2 * (tp - 1) / tp / link(tp)
    shuffle = tokens / (cp * tp) * shape.num_experts_per_token * shape.hidden_size * 2
    shuffle *= (ep - 1) / ep / link(ep)
    ring = tokens * (cp - 1) / cp * 2 * shape.kv_size * 2 / tp / link(tp * cp)
    if shape.num_experts:
        forward_comm, backward_comm = 2 * gather + 2 * shuffle, 3 * gather + 2 * shuffle
    else:
        forward_comm, backward_comm = 4 * gather, 6 * gather
    # The ring of context parallelism hides behind the attention that it feeds.
    forward_comm += max(0.0, ring - attention)
    backward_comm += max(0.0, 2 * ring - 2.5 * attention)

    again = {"none": 0.0, "selective": attention, "full": products + attention + forward_comm}
    forward = products + attention + forward_comm
    update = 3 * products + 3.5 * attention + forward_comm + backward_comm
    update += again[parallel.recompute]
    comm = forward_comm + backward_comm
    comm += forward_comm if parallel.recompute == "full" else 0.0

    def fill(seconds: float, head_seconds: float) -> tuple[float, float]:
        """Of all stages together and of the bubble in it: the slowest stage sets the pace."""
        last = len(stages) - 1
        slowest = max(
            n * seconds + (head_seconds if i == last else 0) for i, n in enumerate(stages)
        )
        chunks = parallel.virtual_pipeline_model_parallel_size
        bubble = slowest * (num_stages - 1) / (chunks * num_microbatches)
        return slowest + bubble, bubble

    score, score_bubble = fill(forward, head)
    train, train_bubble = fill(update, 4 * head)
    # Gradients to their shards in float32, weights back.
    sizes = [
        compute_stage_state(shape, parallel, i, n, dtype).num_params for i, n in enumerate(stages)
    ]
    sharing = dp * cp
    inside = num_stages == 1 and tp * sharing <= num_gpus_per_node
    weight_bytes = 4 if dtype == "float32" else 2
    reduce = max(sizes) * (4 + weight_bytes) * (sharing - 1) / sharing
    reduce *= workload.num_minibatches * workload.num_update_passes
    reduce /= link(1 if inside else num_gpus_per_node + 1)
    passes = 1 + workload.num_reference_passes + workload.num_statistics_passes
    return TrainingTime(
        score=score,
        reference=score * workload.num_reference_passes,
        threshold=score * workload.num_statistics_passes,
        update=train * workload.num_update_passes + reduce,
        bubble=score_bubble * passes + train_bubble * workload.num_update_passes,
        communication=max(stages) * (passes * forward_comm + workload.num_update_passes * comm)
        + reduce,
        num_microbatches=num_microbatches,
    )


def compute_rollout_time(
    shape: ModelShape,
    workload: Workload,
    accelerator: Accelerator,
    *,
    num_engines: int,
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
    max_num_seqs: int,
    kv_tokens: float,
    layer_weight_bytes: int = 2,
) -> RolloutTime:
    """Seconds until the last sequence of the slowest engine ends.

    Each decoding step reads the weights that its sequences touch and their KV cache, or waits for
    the FLOPs where they take longer. An engine runs as many sequences as its KV cache holds at
    their mean length, and takes the next when one ends. Nobody knows the lengths when sequences are
    shared out: the slowest of the engines has, in the mean, the largest of as many normal draws.

    Args:
        kv_tokens: of an engine.
        layer_weight_bytes: of a parameter of a layer; 1 in FP8, whose products are not taken for
            faster: decoding waits for bandwidth.
    """
    count = math.ceil(workload.num_sequences / num_engines)
    deviation = pstdev(workload.response_tokens) / math.sqrt(count)
    draw = NormalDist().inv_cdf(num_engines / (num_engines + 1)) * deviation
    excess = 1 + max(0.0, draw) / workload.mean_response_tokens
    longest = workload.response_tokens[-1]
    lengths = [min(longest, round(n * excess)) for n in _spread(workload.response_tokens, count)]
    prompt = workload.prompt_tokens
    fitting = int(kv_tokens / (prompt + workload.mean_response_tokens))
    limit = max(1, min(max_num_seqs, fitting))
    tp, pp = tensor_parallel_size, pipeline_parallel_size
    body = shape.num_layers * (shape.cut_layer_params + shape.whole_layer_params)
    kept = layer_weight_bytes * body + 2 * shape.embedding_params
    experts = layer_weight_bytes * shape.num_layers * shape.expert_layer_params
    active = body + shape.embedding_params + shape.num_layers * shape.active_expert_layer_params
    rank_bandwidth = tp * accelerator.hbm_bytes_per_s * HBM_EFFICIENCY
    rank_flops = tp * accelerator.bf16_flops * accelerator.gemm_efficiency
    overhead = pp * DECODE_OVERHEAD_S
    if tp > 1:
        overhead += 2 * shape.num_layers * TP_LATENCY_S
    untouched = 1 - (shape.num_experts_per_token / shape.num_experts if shape.num_experts else 0)
    waits = {
        "bandwidth: weights": 0.0,
        "bandwidth: KV cache": 0.0,
        "FLOPs": 0.0,
        "scheduler and sampler": 0.0,
    }

    def decode(num_running: int, context: float, steps: int) -> float:
        """Seconds of so many steps of the engine. context: tokens of all running sequences.

        The stages of a pipeline take a part of the sequences each: what a round of all of them
        reads of weights is the whole once.
        """
        touched = 1 - math.pow(untouched, num_running / pp)
        weights = (kept + touched * experts) / rank_bandwidth
        cache = context * shape.kv_bytes_per_token / pp / rank_bandwidth
        flops = 2 * active * num_running + 4 * shape.num_layers * shape.query_size * context
        compute = flops / pp / rank_flops
        if compute > weights + cache:
            waits["FLOPs"] += compute * steps
        else:
            waits["bandwidth: weights"] += weights * steps
            waits["bandwidth: KV cache"] += cache * steps
        waits["scheduler and sampler"] += overhead * steps
        return (max(weights + cache, compute) + overhead) * steps

    seconds, now = 0.0, 0
    ends: list[tuple[int, int]] = []
    """Of the running sequences: the step at which each ends, and began."""
    began = 0
    waiting = list(reversed(lengths))
    while waiting or ends:
        while waiting and len(ends) < limit:
            heapq.heappush(ends, (now + waiting.pop(), now))
            began += now
        until = ends[0][0]
        steps = until - now
        middle = (now + until) / 2
        context = len(ends) * (prompt + middle) - began
        if steps:
            seconds += decode(len(ends), context, steps)
        now = until
        while ends and ends[0][0] == now:
            began -= heapq.heappop(ends)[1]
    # The responses to a prompt share its prefill.
    seconds += workload.num_prompts / num_engines * prompt * 2 * active / (pp * rank_flops)
    return RolloutTime(
        total=seconds,
        limit=max(waits, key=lambda name: waits[name]),
        num_at_a_time=min(limit, count),
    )


def _spread(quantiles: Sequence[int], count: int) -> list[int]:
    """So many lengths of the distribution, long and short ones in an order without trend."""
    chosen = [quantiles[int((i + 0.5) * len(quantiles) / count)] for i in range(count)]
    golden = (math.sqrt(5) - 1) / 2
    return [chosen[i] for i in sorted(range(count), key=lambda i: (i * golden) % 1)]


def compute_sync_time(
    num_weight_bytes: float,
    num_trainer_gpus: int,
    num_engines: int,
    num_engine_ranks: int,
    accelerator: Accelerator,
) -> float:
    """Seconds of bringing new weights to all engines: each of their GPUs gets its part from the
    GPUs that hold it, and the fullest link sets the time."""
    received = num_weight_bytes / num_engine_ranks
    sent = num_weight_bytes * num_engines / num_trainer_gpus
    bandwidth = accelerator.network_bytes_per_s * SYNC_EFFICIENCY
    return SYNC_OVERHEAD_S + max(received, sent) / bandwidth
