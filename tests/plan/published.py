"""Published figures whose conditions suffice for the plan's formulas, and what these give.

The systems are colocated: all GPUs sample, then all train. What a source leaves out is named in
docs/plan.md.
"""

from dataclasses import dataclass, replace

from megatron_stapo.config import ParallelConfig, RolloutConfig, find_model_json
from megatron_stapo.plan.accelerators import ACCELERATORS, GIB
from megatron_stapo.plan.memory import compute_engine_memory, compute_trainer_memory
from megatron_stapo.plan.shape import ModelShape, build_shape
from megatron_stapo.plan.timing import (
    compute_rollout_time,
    compute_sync_time,
    compute_training_time,
)
from megatron_stapo.plan.workload import Workload, sample_response_lengths

LLAMA_8B = ModelShape(
    num_layers=32,
    hidden_size=4096,
    query_size=4096,
    kv_size=1024,
    head_dim=128,
    ffn_size=14336,
    vocab_size=128256,
    is_tied=False,
)
PROMPT_TOKENS = 100
DEEPSEEK_V3_BYTES = 2 * 671e9


@dataclass(frozen=True)
class Figure:
    """One published number, and the plan's."""

    source: str
    what: str
    published: float
    predicted: float
    unit: str
    bound: float | None = None
    """Largest error that the tests take; None only reports."""

    @property
    def error(self):
        return self.predicted / self.published - 1

    @property
    def row(self):
        return (
            f"| {self.source} | {self.what} | {_format(self.published)} {self.unit} | "
            f"{_format(self.predicted)} | {self.error:+.0%} |"
        )


def _format(value):
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def qwen3(name):
    return build_shape(find_model_json(name))


def build_parallel(tp=1, pp=1, ends=None, **sizes):
    return ParallelConfig(
        tensor_model_parallel_size=tp,
        sequence_parallel=tp > 1,
        pipeline_model_parallel_size=pp,
        num_layers_in_first_pipeline_stage=ends,
        num_layers_in_last_pipeline_stage=ends,
        **sizes,
    )


def compute_nemo_rl_step(shape, parallel, engine_tp, num_sequences, mean, longest):
    """GRPO with a reference policy, mini-batches of 512, on H100."""
    h100 = ACCELERATORS["h100"]
    num_gpus = parallel.world_size
    workload = Workload(
        num_prompts=num_sequences // 32,
        num_sequences=num_sequences,
        num_minibatches=num_sequences // 512,
        response_tokens=sample_response_lengths(mean - PROMPT_TOKENS, longest - PROMPT_TOKENS),
        prompt_tokens=PROMPT_TOKENS,
        num_reference_passes=1,
    )
    rollout = RolloutConfig(
        num_engines=num_gpus // engine_tp, tensor_parallel_size=engine_tp, max_num_seqs=1024
    )
    training = compute_training_time(shape, parallel, workload, longest, h100, 8)
    sampling = compute_rollout_time(
        shape,
        workload,
        h100,
        num_engines=rollout.num_engines,
        tensor_parallel_size=engine_tp,
        pipeline_parallel_size=1,
        max_num_seqs=1024,
        kv_tokens=compute_engine_memory(shape, rollout, h100).kv_tokens,
    )
    return sampling.total + training.total


def compute_packed_update(shape, parallel, num_packs, tokens, accelerator, fp8_layer_frac=0.0):
    """Seconds of an update on packs of equal length, each taken for one sequence."""
    workload = Workload(
        num_prompts=num_packs,
        num_sequences=num_packs,
        num_minibatches=1,
        response_tokens=(tokens,),
        prompt_tokens=0,
    )
    return compute_training_time(
        shape, parallel, workload, tokens, accelerator, 8, fp8_layer_frac=fp8_layer_frac
    ).update


def compute_packed_rate(shape, parallel, num_packs, tokens, accelerator, fp8_layer_frac=0.0):
    """Tokens per second and GPU of such an update."""
    seconds = compute_packed_update(shape, parallel, num_packs, tokens, accelerator, fp8_layer_frac)
    return num_packs * tokens / parallel.world_size / seconds


def compute_ms_swift_memory(shape, parallel, fp8_layer_frac=0.0):
    """GiB. Moments of 2 bytes instead of 4, and a fused activation that keeps two widths less."""
    memory = compute_trainer_memory(shape, parallel, 8192, 8, fp8_layer_frac=fp8_layer_frac)
    fused = 2 * 2 * shape.ffn_size * 8192 * (shape.num_layers + 1) / 4
    return (memory.total - memory.parts["optimizer"] / 3 - fused) / GIB


def compute_figures():
    """Every figure, in the order of the table in docs/plan.md."""
    h20, h100, h200, b200 = (ACCELERATORS[name] for name in ("h20", "h100", "h200", "b200"))
    mixture, large = qwen3("Qwen3-30B-A3B"), qwen3("Qwen3-235B-A22B")
    swift = build_parallel(tp=4, data_parallel_size=2, recompute="selective")
    return [
        Figure(
            "ms-swift",
            "Qwen3-14B SFT, 8 H20, 16 x 8192 tokens: update",
            13,
            compute_packed_update(qwen3("Qwen3-14B"), swift, 16, 8192, h20),
            "s",
            0.2,
        ),
        Figure(
            "ms-swift",
            "the same: memory",
            52,
            compute_ms_swift_memory(qwen3("Qwen3-14B"), swift),
            "GiB",
            0.1,
        ),
        Figure(
            "ms-swift",
            "the same in FP8: update",
            8,
            compute_packed_update(qwen3("Qwen3-14B"), swift, 16, 8192, h20, fp8_layer_frac=1.0),
            "s",
            0.25,
        ),
        Figure(
            "ms-swift",
            "the same in FP8: memory",
            58,
            compute_ms_swift_memory(qwen3("Qwen3-14B"), swift, fp8_layer_frac=1.0),
            "GiB",
            0.1,
        ),
        Figure(
            "awsome-distributed-ai 1138",
            "Qwen3-8B pre-training, 16 H200",
            10_100,
            compute_packed_rate(
                qwen3("Qwen3-8B"), build_parallel(data_parallel_size=16), 512, 4096, h200
            ),
            "token/s/GPU",
            0.2,
        ),
        *(
            Figure(
                "Megatron-Bridge 25.11",
                f"{name} pre-training, {parallel.world_size} B200, MXFP8",
                published,
                compute_packed_rate(shape, parallel, num_packs, tokens, b200, 1.0),
                "token/s/GPU",
                bound,
            )
            for name, shape, parallel, num_packs, tokens, published, bound in (
                (
                    "Llama-3-8B",
                    LLAMA_8B,
                    build_parallel(data_parallel_size=8),
                    128,
                    8192,
                    29_521,
                    0.2,
                ),
                (
                    "Qwen3-235B-A22B",
                    large,
                    build_parallel(
                        pp=8, ends=11, data_parallel_size=8, expert_model_parallel_size=8
                    ),
                    1024,
                    4096,
                    3_269,
                    0.3,
                ),
                (
                    "Qwen3-30B-A3B",
                    mixture,
                    build_parallel(data_parallel_size=8, expert_model_parallel_size=8),
                    512,
                    4096,
                    9_299,
                    None,
                ),
            )
        ),
        Figure(
            "NeMo-RL 0.5",
            "Llama-3.1-8B GRPO, 16 H100: step",
            92.8,
            compute_nemo_rl_step(
                LLAMA_8B,
                build_parallel(pp=2, data_parallel_size=8, recompute="full"),
                engine_tp=1,
                num_sequences=2048,
                mean=1146,
                longest=4096,
            ),
            "s",
            0.3,
        ),
        Figure(
            "NeMo-RL 0.5",
            "Qwen3-32B GRPO, 32 H100: step",
            376,
            compute_nemo_rl_step(
                qwen3("Qwen3-32B"),
                build_parallel(tp=4, pp=4, data_parallel_size=2),
                engine_tp=4,
                num_sequences=2048,
                mean=3354,
                longest=4096,
            ),
            "s",
            0.3,
        ),
        Figure(
            "NeMo-RL 0.6",
            "Qwen3-30B-A3B GRPO, 32 H100: step",
            192,
            compute_nemo_rl_step(
                mixture,
                build_parallel(data_parallel_size=32, expert_model_parallel_size=8),
                engine_tp=2,
                num_sequences=2048,
                mean=3203,
                longest=4096,
            ),
            "s",
            0.3,
        ),
        Figure(
            "NeMo-RL 0.6",
            "Qwen3-235B-A22B GRPO, 128 H100: step",
            395,
            compute_nemo_rl_step(
                large,
                build_parallel(
                    tp=2,
                    pp=8,
                    ends=11,
                    context_parallel_size=2,
                    data_parallel_size=4,
                    expert_model_parallel_size=16,
                    recompute="full",
                ),
                engine_tp=16,
                num_sequences=512,
                mean=5698,
                longest=8192,
            ),
            "s",
        ),
        Figure(
            "NeMo-RL reshard",
            "Qwen3-4B, 8 H100 to 1 x TP8: resync",
            0.28,
            compute_sync_time(2 * qwen3("Qwen3-4B").num_params, 8, 1, 8, h100),
            "s",
            0.3,
        ),
        Figure(
            "NeMo-RL reshard",
            "Qwen3-30B-A3B, 16 H100 to 2 x TP8: resync",
            0.87,
            compute_sync_time(2 * mixture.num_params, 16, 2, 8, h100),
            "s",
            0.3,
        ),
        Figure(
            "NeMo-RL reshard",
            "DeepSeek-V3, 256 H100 to 8 x TP32: resync",
            2.6,
            compute_sync_time(DEEPSEEK_V3_BYTES, 256, 8, 32, h100),
            "s",
            0.3,
        ),
        Figure(
            "checkpoint-engine",
            "Qwen3-235B-A22B, 8 H800 to 1 x TP8: resync",
            6.2,
            compute_sync_time(2 * large.num_params, 8, 1, 8, h100),
            "s",
        ),
        Figure(
            "verl checkpoint-engine",
            "Qwen3-30B-A3B, 16 H20 to 16: resync",
            4.38,
            compute_sync_time(2 * mixture.num_params, 16, 4, 4, h20),
            "s",
        ),
        Figure(
            "verl checkpoint-engine",
            "Qwen3-235B-A22B, 64 H20 to 64: resync",
            23.7,
            compute_sync_time(2 * large.num_params, 64, 8, 8, h20),
            "s",
        ),
    ]


def compute_verl_235b_memory(num_gpus):
    """verl's layout of Qwen3-235B-A22B on H20: TP4, PP8, EP4, the rest data-parallel; 8192 tokens.

    Returns:
        The share of an H20's memory.
    """
    parallel = build_parallel(
        tp=4,
        pp=8,
        ends=11,
        data_parallel_size=num_gpus // 32,
        expert_model_parallel_size=4,
        recompute="full",
    )
    memory = compute_trainer_memory(qwen3("Qwen3-235B-A22B"), replace(parallel), 8192, 64)
    return memory.total / ACCELERATORS["h20"].memory_bytes
