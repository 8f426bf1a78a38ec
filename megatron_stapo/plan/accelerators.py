"""The table of what GPUs can do and of the shares of it that are reached.

Every number that the formulas of this room do not derive stands here, with its source: [P]
published, [M] measured, [F] fitted to published figures, see tests/plan/test_calibration.py, [A]
assumed.
"""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """One GPU and its links."""

    name: str
    memory_bytes: int
    """What the driver shows [A: 99 % of the nominal GiB, as measured on an H200: 139.8 of 141]. Of
    192 GB of a B200 boards have 180 [P: data sheets]."""
    bf16_flops: float
    """Dense peak, FLOP/s [P: data sheets]."""
    fp8_flops: float
    """Likewise."""
    hbm_bytes_per_s: float
    """[P: data sheets]."""
    nvlink_bytes_per_s: float = 450e9
    """One direction [P: 900 GB/s both ways; of a B200 1800]."""
    network_bytes_per_s: float = 50e9
    """Per GPU, one direction [A: an adapter of 400 Gb/s each]."""
    gemm_efficiency: float
    """Reached share of bf16_flops in the dense products of a layer [F; of a B200 A: an H100's]. The
    H20 has few FLOPs for its bandwidth, so that little beside the products takes time."""
    fp8_efficiency: float
    """Likewise of fp8_flops, quantising included [F]."""
    expert_efficiency: float
    """Likewise of bf16_flops in the experts' products, which are small and uneven, their
    permutations included [F]; no more in FP8 [P: verl 7232 finds it slower]."""


ACCELERATORS = {
    a.name: a
    for a in (
        Accelerator(
            name="h20",
            memory_bytes=95 * GIB,
            bf16_flops=148e12,
            fp8_flops=296e12,
            hbm_bytes_per_s=4.0e12,
            gemm_efficiency=0.80,
            fp8_efficiency=0.75,
            expert_efficiency=0.40,
        ),
        Accelerator(
            name="h20_141",
            memory_bytes=139 * GIB,
            bf16_flops=148e12,
            fp8_flops=296e12,
            hbm_bytes_per_s=4.8e12,
            gemm_efficiency=0.80,
            fp8_efficiency=0.75,
            expert_efficiency=0.40,
        ),
        Accelerator(
            name="h100",
            memory_bytes=79 * GIB,
            bf16_flops=989e12,
            fp8_flops=1979e12,
            hbm_bytes_per_s=3.35e12,
            gemm_efficiency=0.50,
            fp8_efficiency=0.37,
            expert_efficiency=0.15,
        ),
        Accelerator(
            name="h200",
            memory_bytes=139 * GIB,
            bf16_flops=989e12,
            fp8_flops=1979e12,
            hbm_bytes_per_s=4.8e12,
            gemm_efficiency=0.50,
            fp8_efficiency=0.37,
            expert_efficiency=0.15,
        ),
        Accelerator(
            name="b200",
            memory_bytes=178 * GIB,
            bf16_flops=2250e12,
            fp8_flops=4500e12,
            hbm_bytes_per_s=8.0e12,
            nvlink_bytes_per_s=900e9,
            gemm_efficiency=0.50,
            fp8_efficiency=0.37,
            expert_efficiency=0.15,
        ),
    )
}

# Memory.
TRAINER_ALLOWANCE_BYTES = 3 * GIB
"""CUDA context, libraries and the buffers of NCCL's groups [A]."""
FRAGMENTATION = 0.05
"""Of activations and head, lost to the allocator [A]."""
HEAD_CHUNK_TOKENS = 2048
"""Rows of logits alive at a time [M: `ops.logprobs.CHUNK_TOKENS`]."""
ENGINE_MEMORY_FRACTION = 0.92
"""Of the GPU that vLLM 0.32 takes by default [P: its gpu_memory_utilization]."""
ENGINE_ALLOWANCE_BYTES = 3 * GIB
"""Context, NCCL, captured CUDA graphs, and buckets of new weights [A]."""
ENGINE_BATCHED_TOKENS = 8192
"""Tokens of the largest prefill [P: vLLM 0.32's default of its server on these GPUs]."""

# Training.
LINK_EFFICIENCY = 0.8
"""Reached share of a link in collectives of many MB [A]."""
CONTEXT_PARALLEL_LOSS = 0.1
"""What attention takes longer per doubling of the context-parallel ranks: kernels on ever shorter
parts of a sequence, the ring's steps between them, and the padding [A]."""
MICROBATCH_FILL = 0.95
"""Tokens of a microbatch of its budget [M: `data.packing` on drawn lengths, see
tests/plan/test_calibration.py]."""
DP_IMBALANCE = 1.01
"""Slowest data-parallel rank over the mean [M: likewise]."""

# Rollouts.
HBM_EFFICIENCY = 0.60
"""Reached share of the bandwidth while decoding [F]."""
DECODE_OVERHEAD_S = 6e-3
"""Of a decoding step, beside the model: scheduler, sampler, log-probabilities [F]."""
TP_LATENCY_S = 15e-6
"""Of an all-reduce of a decoding step; a layer has two [A]."""
LENGTH_VARIATION = 0.8
"""Standard deviation of response lengths over their mean, log-normal before the cut [A]."""
MEAN_PROMPT_TOKENS = 150
"""Prompt with template and instruction, of DAPO-Math-17k's size [A]."""

# Weights to the engines.
SYNC_OVERHEAD_S = 0.2
"""Of a resync, beside the bytes: agreeing, pausing, resuming [F]."""
SYNC_EFFICIENCY = 0.35
"""Reached share of the network's bandwidth of the fullest GPU [F]."""
