"""STAPO on a tiny Qwen3 and arithmetic word problems: the demo, on two CPU cores.

`make base` builds the model and its problems in runs/tiny_base.
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

BASE = "runs/tiny_base"


def tiny_stapo() -> Config:
    """About six minutes on two cores."""
    return Config(
        name="tiny_stapo",
        run_dir="runs/demo",
        num_steps=50,
        model=ModelConfig(path=BASE, dtype="float32"),
        # The two cores share the vocabulary, so that the demo runs what large models need.
        parallel=ParallelConfig(device="cpu", tensor_model_parallel_size=2),
        data=DataConfig(
            source=f"{BASE}/train.jsonl",
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
        # Two updates per rollout, where the paper has four: the second is off-policy. A mini-batch
        # has four thousand tokens, where the paper's has two million, so candidates are few here
        # even at ten times the paper's threshold.
        algorithm=AlgorithmConfig(num_prompts_per_minibatch=16, prob_threshold=0.02),
        # A model of 2 M parameters takes steps that would ruin one of 2 B.
        optimizer=OptimizerConfig(lr=3e-4, num_warmup_steps=4),
        evaluation=EvaluationConfig(
            benchmarks=(f"heldout={BASE}/heldout.jsonl",),
            interval_steps=25,
            num_problems=256,
            num_samples=4,
        ),
    )
