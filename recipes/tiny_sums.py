"""STAPO on a tiny Qwen3 and procedural sums of reasoning-gym, which never run out.

`make sums` builds the model in runs/sums_base, evaluates it, trains it and evaluates it again.
"""

from megatron_stapo.config import (
    AlgorithmConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RolloutConfig,
)

BASE = "runs/sums_base"
SUMS = "gym:chain_sum?max_terms=4&max_digits=1"


def tiny_sums() -> Config:
    """About four minutes on two cores."""
    return Config(
        name="tiny_sums",
        num_steps=40,
        model=ModelConfig(path=BASE, dtype="float32"),
        # Two replicas, where the demo cuts the model: at this size they are faster.
        parallel=ParallelConfig(device="cpu", data_parallel_size=2),
        data=DataConfig(
            source=f"{SUMS}&part=train&size=4096",
            prompt_suffix="",  # the base has learned the bare problems
            max_prompt_tokens=128,
            max_microbatch_tokens=4096,
        ),
        rollout=RolloutConfig(
            num_prompts_per_step=32,
            max_response_tokens=128,
            kv_cache_bytes=64 << 20,
            request_timeout_s=300,
        ),
        algorithm=AlgorithmConfig(num_prompts_per_minibatch=16, prob_threshold=0.02),
        optimizer=OptimizerConfig(lr=3e-4, num_warmup_steps=4),
        # No question of the held-out part is in the training part, whatever the numbers.
        evaluation=EvaluationConfig(
            benchmarks=(f"sums={SUMS}&part=heldout&size=256",), interval_steps=20, num_samples=8
        ),
    )
