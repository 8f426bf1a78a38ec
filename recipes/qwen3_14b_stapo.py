"""STAPO on Qwen3-14B-Base: the paper's largest run, on as many GPUs, 64 H20.

The settings are those of STAPO, arXiv:2602.15620, Table 3; most of them are the config's defaults.
"""

from megatron_stapo.algorithms import stapo
from megatron_stapo.config import (
    ClusterConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
)
from megatron_stapo.evaluation.paper import SIX_BENCHMARKS


def qwen3_14b_stapo() -> Config:
    """About 1020 s per step in the plan, at responses of 7,680 tokens in the mean."""
    return Config(
        name="qwen3_14b_stapo",
        # The paper names no end; it shows curves to 3000 steps, four of which share a rollout.
        num_steps=750,
        model=ModelConfig(path="models/Qwen3-14B-Base"),
        cluster=ClusterConfig(accelerator="h20"),
        # Training is the larger half on an H20: 40 of the 64 GPUs. TP4 with sequence parallelism
        # holds a sequence of 16k at 72 of 95 GiB without recompute, which costs a third of an
        # update where TP4 costs a twentieth.
        parallel=ParallelConfig(
            tensor_model_parallel_size=4,
            sequence_parallel=True,
            data_parallel_size=10,
            timeout_s=4 * 3600,  # an evaluation
        ),
        data=DataConfig(
            source="hub:BytedTsinghua-SIA/DAPO-Math-17k",
            # One longest sequence, where JustRL's launch script has two: a GPU is busy with one,
            # and two need recompute.
            max_microbatch_tokens=16384,
        ),
        # 1024 + 15,360 tokens, 256 prompts of 8 responses, temperature 1 and top-p 1: defaults.
        # An engine of four GPUs holds 122 sequences of 16k; twelve of two take 16 % longer, since
        # each reads all the weights for half the sequences.
        rollout=RolloutConfig(num_engines=6, tensor_parallel_size=4, request_timeout_s=4 * 3600),
        algorithm=stapo(),
        # AdamW at 1e-6 after 10 steps, gradients clipped to 1: defaults.
        # Sampled as in training, the first of the paper's two settings.
        evaluation=EvaluationConfig(
            benchmarks=SIX_BENCHMARKS, interval_steps=20, max_response_tokens=20480
        ),
    )
