"""STAPO on Qwen3-14B-Base: the paper's largest run, on its 64 H20."""

from megatron_stapo.algorithms import stapo
from megatron_stapo.config import (
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RewardConfig,
    RolloutConfig,
)


def qwen3_14b_stapo() -> Config:
    return Config(
        name="qwen3_14b_stapo",
        num_steps=3000,
        model=ModelConfig(path="models/Qwen3-14B-Base"),
        cluster=ClusterConfig(accelerator="h20"),
        parallel=ParallelConfig(
            tensor_model_parallel_size=4, sequence_parallel=True, data_parallel_size=10
        ),
        data=DataConfig(source="hub:BytedTsinghua-SIA/DAPO-Math-17k"),
        rollout=RolloutConfig(num_engines=12, tensor_parallel_size=2),
        algorithm=stapo(),
    )
