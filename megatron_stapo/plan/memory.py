"""Bytes on a trainer's and on an engine's GPU, by part."""

from dataclasses import dataclass

from megatron_stapo.config import ParallelConfig, RolloutConfig, list_stage_layers
from megatron_stapo.plan.accelerators import (
    ENGINE_ALLOWANCE_BYTES,
    ENGINE_BATCHED_TOKENS,
    ENGINE_MEMORY_FRACTION,
    FRAGMENTATION,
    HEAD_CHUNK_TOKENS,
    TRAINER_ALLOWANCE_BYTES,
    Accelerator,
)
from megatron_stapo.plan.shape import ModelShape


@dataclass(frozen=True, kw_only=True)
class StageState:
    """What a rank of one pipeline stage holds for the whole run."""

    num_params: float
    """On the rank."""
    weights: float
    """Bytes; so are the next."""
    gradients: float
    optimizer: float


@dataclass(frozen=True, kw_only=True)
class TrainerMemory:
    """Of the fullest rank."""

    stage: int
    """Pipeline stage of the rank."""
    parts: dict[str, float]
    """Bytes."""
    resident: float
    """Bytes of a rank outside its updates, of the rank that has most: what an engine on the same
    GPU finds taken."""

    @property
    def total(self) -> float:
        """Bytes."""
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class EngineMemory:
    """Of the fullest rank of an engine."""

    parts: dict[str, float]
    """Bytes; KV cache is what the others leave, negative where they leave nothing."""
    kv_tokens: float
    """Tokens that the engine's KV cache holds, over all its ranks."""


def compute_stage_state(
    shape: ModelShape, parallel: ParallelConfig, stage: int, num_layers: int, dtype: str
) -> StageState:
    """Bytes of weights, gradients and optimizer of a rank.

    bf16: weights of 2 bytes, DDP's gradients of 4, and float32 main weights and Adam's two moments,
    12 together, shared by the ranks that hold the same weights: data- and context-parallel ones,
    for experts those of the stage that hold the same experts. float32: the weights are the main
    weights.
    """
    tp, ep = parallel.tensor_model_parallel_size, parallel.expert_model_parallel_size
    sharing = parallel.context_parallel_size * parallel.data_parallel_size
    num_stages = parallel.pipeline_model_parallel_size
    dense = num_layers * (shape.cut_layer_params / tp + shape.whole_layer_params)
    if stage == 0:
        dense += shape.embedding_params / tp
    if stage == num_stages - 1:
        dense += shape.hidden_size
        if num_stages > 1 or not shape.is_tied:
            dense += shape.embedding_params / tp
    experts = num_layers * shape.expert_layer_params / ep
    weight_bytes, optimizer_bytes = (4, 8) if dtype == "float32" else (2, 12)
    return StageState(
        num_params=dense + experts,
        weights=(dense + experts) * weight_bytes,
        gradients=(dense + experts) * 4,
        optimizer=optimizer_bytes * (dense / sharing + experts * ep / (tp * sharing)),
    )


def compute_layer_activations(shape: ModelShape, parallel: ParallelConfig) -> float:
    """Bytes that a layer keeps for backward, per token of the rank's microbatch, in bf16.

    Counted from the layer of Transformer Engine that Megatron builds without fused activations: of
    each norm its input and output; the product of queries, keys and values; queries and keys after
    their norms; the attention's output; of the MLP its first product, the activation of one half,
    the other half once more (Megatron adds an offset of 0 to it) and the product of both. The parts
    that tensor parallelism does not cut are cut by sequence parallelism.
    """
    tp = parallel.tensor_model_parallel_size
    outer = tp if parallel.sequence_parallel else 1
    norms = 2 * 2 * 2 * shape.hidden_size
    attention = 2 * (2 * shape.query_size + 2 * shape.kv_size) + 2 * (
        shape.query_size + shape.kv_size
    )
    if not shape.num_experts:
        return norms / outer + (attention + 10 * shape.ffn_size) / tp
    # Logits, softmax and map of the router in float32; an expert's input and six widths.
    router = 3 * 4 * shape.num_experts
    expert = 2 * shape.hidden_size + 12 * shape.expert_ffn_size
    tokens = shape.num_experts_per_token * expert
    return (norms + router + tokens) / outer + attention / tp


def count_layers_in_flight(
    parallel: ParallelConfig, stage: int, num_layers: int, num_microbatches: int
) -> float:
    """Layers of the stage, times the microbatches whose activations wait for backward.

    1F1B keeps one microbatch per stage from here to the last; interleaved, Megatron warms up with
    2 (stages after this one) + (chunks - 1) stages chunks.
    """
    num_stages = parallel.pipeline_model_parallel_size
    chunks = parallel.virtual_pipeline_model_parallel_size
    after = num_stages - stage - 1
    in_flight = after + 1 if chunks == 1 else 2 * after + (chunks - 1) * num_stages + 1
    return min(in_flight, num_microbatches * chunks) * num_layers / chunks


def compute_trainer_memory(
    shape: ModelShape,
    parallel: ParallelConfig,
    max_microbatch_tokens: int,
    num_microbatches: int,
    dtype: str = "bfloat16",
    has_reference: bool = False,
    fp8_layer_frac: float = 0.0,
    engine_bytes: float = 0.0,
) -> TrainerMemory:
    """Bytes by part on the fullest trainer GPU.

    Args:
        max_microbatch_tokens: of a rank.
        num_microbatches: of a mini-batch, per data-parallel rank.
        has_reference: a copy of the weights for the KL term.
        fp8_layer_frac: layers in FP8, of all. Transformer Engine keeps their weights besides in
            FP8, for forward and for backward; what the activations save is not counted.
        engine_bytes: what an engine that sleeps on the GPU holds.
    """
    scale = 2 if dtype == "float32" else 1
    layer = scale * compute_layer_activations(shape, parallel)
    tp = parallel.tensor_model_parallel_size
    layer_input = (
        scale * 2 * shape.hidden_size / (tp if parallel.sequence_parallel else 1)
        if parallel.recompute == "full"
        else layer
    )
    ep = parallel.expert_model_parallel_size
    layer_params = shape.cut_layer_params / tp + shape.expert_layer_params / ep
    stages = list_stage_layers(parallel, shape.num_layers)
    fullest: tuple[int, dict[str, float]] | None = None
    resident = 0.0
    for stage, num_layers in enumerate(stages):
        state = compute_stage_state(shape, parallel, stage, num_layers, dtype)
        in_flight = count_layers_in_flight(parallel, stage, num_layers, num_microbatches)
        # One layer more for the gradients of its activations; with full recompute another, the one
        # that is computed again.
        extra = 2 if parallel.recompute == "full" else 1
        activations = max_microbatch_tokens * (in_flight * layer_input + extra * layer)
        head = 0.0
        if stage == len(stages) - 1:
            # A chunk of logits and of their gradient; the gradient of the head's weights and the
            # product that is added to it, float32; the hidden states, gathered, and those that are
            # scored, with their gradients.
            rows = shape.vocab_size / tp
            chunk = min(HEAD_CHUNK_TOKENS, max_microbatch_tokens) * rows * (4 + 2)
            hidden = 4 * 2 * scale * max_microbatch_tokens * shape.hidden_size
            head = chunk + rows * shape.hidden_size * (4 + 4) + hidden
        kept = {
            "weights": state.weights,
            "gradients": state.gradients,
            "optimizer": state.optimizer,
            "reference": state.weights if has_reference else 0.0,
            "FP8 weights": fp8_layer_frac * num_layers * layer_params * 2,
        }
        resident = max(resident, sum(kept.values()) + TRAINER_ALLOWANCE_BYTES)
        parts = kept | {
            "activations": activations,
            "head": head,
            "allowance": TRAINER_ALLOWANCE_BYTES + FRAGMENTATION * (activations + head),
            "engine asleep": engine_bytes,
        }
        if fullest is None or sum(parts.values()) > sum(fullest[1].values()):
            fullest = stage, parts
    assert fullest is not None
    return TrainerMemory(stage=fullest[0], parts=fullest[1], resident=resident)


def compute_engine_memory(
    shape: ModelShape,
    rollout: RolloutConfig,
    accelerator: Accelerator,
    dtype: str = "bfloat16",
    trainer_bytes: float = 0.0,
) -> EngineMemory:
    """Bytes by part on an engine's GPU, and what its KV cache holds.

    Args:
        trainer_bytes: `TrainerMemory.resident` of a trainer on the same GPU.
    """
    tp, pp = rollout.tensor_parallel_size, rollout.pipeline_parallel_size
    scale = 2 if dtype == "float32" else 1
    table = shape.embedding_params
    body = shape.num_params - (1 if shape.is_tied else 2) * table
    # Embedding and head lie on the first and the last stage.
    tables = table if pp > 1 or shape.is_tied else 2 * table
    layer_weight_bytes = 1 if rollout.quantization == "fp8" else 2 * scale
    weights = (layer_weight_bytes * body / pp + 2 * scale * tables) / tp
    widest = max(4 * shape.ffn_size, 4 * shape.num_experts_per_token * shape.expert_ffn_size)
    activations = ENGINE_BATCHED_TOKENS * scale * (8 * shape.hidden_size + widest / tp)
    # Logits of every sequence over the whole vocabulary, their softmax and logarithm, in float32.
    logits = 12 * rollout.max_num_seqs * shape.vocab_size
    kept = weights + activations + logits + ENGINE_ALLOWANCE_BYTES + trainer_bytes
    free = ENGINE_MEMORY_FRACTION * accelerator.memory_bytes - kept
    cache = free if rollout.kv_cache_bytes is None else min(free, rollout.kv_cache_bytes)
    return EngineMemory(
        parts={
            "weights": weights,
            "activations": activations + logits,
            "allowance": ENGINE_ALLOWANCE_BYTES,
            "trainer's state": trainer_bytes,
            "left free": (1 - ENGINE_MEMORY_FRACTION) * accelerator.memory_bytes,
            "KV cache": cache,
        },
        kv_tokens=cache * tp * pp / (scale * shape.kv_bytes_per_token),
    )
