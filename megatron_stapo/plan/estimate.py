"""Memory and time of one layout of trainer and engines, and whether it fits."""

from dataclasses import dataclass

from megatron_stapo.config import Config, ParallelConfig, RolloutConfig
from megatron_stapo.plan.accelerators import ENGINE_ALLOWANCE_BYTES, GIB, Accelerator
from megatron_stapo.plan.memory import (
    EngineMemory,
    TrainerMemory,
    compute_engine_memory,
    compute_trainer_memory,
)
from megatron_stapo.plan.shape import ModelShape
from megatron_stapo.plan.timing import (
    RolloutTime,
    TrainingTime,
    compute_rollout_time,
    compute_sync_time,
    compute_training_time,
    count_microbatches,
)
from megatron_stapo.plan.workload import Workload


@dataclass(frozen=True, kw_only=True)
class TrainerEstimate:
    """A layout of the trainer."""

    parallel: ParallelConfig
    max_microbatch_tokens: int
    memory: TrainerMemory
    time: TrainingTime


@dataclass(frozen=True, kw_only=True)
class EngineEstimate:
    """A layout of the engines."""

    rollout: RolloutConfig
    num_engines: int
    memory: EngineMemory
    time: RolloutTime


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A step: engines and trainer take turns or, with rollout.max_lag_steps, work at the same time;
    then the weights move."""

    trainer: TrainerEstimate
    engines: EngineEstimate
    sync: float
    """Seconds."""

    @property
    def phases(self) -> dict[str, float]:
        """Seconds by phase; rewards are judged while others are sampled."""
        time = self.trainer.time
        return {
            "rollout": self.engines.time.total,
            "score": time.score,
            "reference": time.reference,
            "threshold": time.threshold,
            "update": time.update,
            "sync": self.sync,
        }

    @property
    def is_overlapped(self) -> bool:
        """Whether the next step's sampling runs while the trainer scores and trains."""
        return self.engines.rollout.max_lag_steps > 0

    @property
    def bare_phases(self) -> dict[str, float]:
        """Those that no longer one hides: engines or trainer, whose part is longer, and sync."""
        phases = self.phases
        if self.is_overlapped:
            hidden = {"rollout"}
            if phases["rollout"] > self.trainer.time.total:
                hidden = phases.keys() - {"rollout", "sync"}
            phases = {name: seconds for name, seconds in phases.items() if name not in hidden}
        return phases

    @property
    def total(self) -> float:
        """Seconds."""
        return sum(self.bare_phases.values())


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What the layouts of a plan have in common."""

    config: Config
    shape: ModelShape
    workload: Workload
    accelerator: Accelerator

    def estimate_trainer(
        self, parallel: ParallelConfig, max_microbatch_tokens: int
    ) -> TrainerEstimate:
        """Memory and time of a trainer layout that divides the model."""
        config = self.config
        num_microbatches = count_microbatches(parallel, self.workload, max_microbatch_tokens)
        return TrainerEstimate(
            parallel=parallel,
            max_microbatch_tokens=max_microbatch_tokens,
            memory=compute_trainer_memory(
                self.shape,
                parallel,
                max_microbatch_tokens,
                num_microbatches,
                config.model.dtype,
                has_reference=config.algorithm.kl_coef > 0,
                fp8_layer_frac=self.fp8_layer_frac,
                engine_bytes=ENGINE_ALLOWANCE_BYTES if self.is_colocated else 0.0,
            ),
            time=compute_training_time(
                self.shape,
                parallel,
                self.workload,
                max_microbatch_tokens,
                self.accelerator,
                config.cluster.num_gpus_per_node,
                config.model.dtype,
                self.fp8_layer_frac,
            ),
        )

    def estimate_engines(
        self, rollout: RolloutConfig, trainer: TrainerEstimate | None = None
    ) -> EngineEstimate:
        """Memory and time of an engine layout that divides the model.

        Args:
            trainer: whose ranks hold the engines; None where they have GPUs of their own.
        """
        memory = compute_engine_memory(
            self.shape,
            rollout,
            self.accelerator,
            self.config.model.dtype,
            trainer.memory.resident if trainer else 0.0,
        )
        num_engines = rollout.num_engines
        if trainer:
            num_engines = trainer.parallel.world_size // rollout.num_engine_ranks
        time = self.estimate_sampling(rollout, num_engines, memory, self.workload)
        return EngineEstimate(rollout=rollout, num_engines=num_engines, memory=memory, time=time)

    def estimate_sampling(
        self, rollout: RolloutConfig, num_engines: int, memory: EngineMemory, workload: Workload
    ) -> RolloutTime:
        """Time that the engines take for a step's responses or an evaluation's."""
        return compute_rollout_time(
            self.shape,
            workload,
            self.accelerator,
            num_engines=num_engines,
            tensor_parallel_size=rollout.tensor_parallel_size,
            pipeline_parallel_size=rollout.pipeline_parallel_size,
            max_num_seqs=rollout.max_num_seqs,
            kv_tokens=memory.kv_tokens,
            layer_weight_bytes=1 if rollout.quantization == "fp8" else 2,
        )

    def combine(self, trainer: TrainerEstimate, engines: EngineEstimate) -> Estimate:
        """The step of both."""
        rollout = engines.rollout
        return Estimate(
            trainer=trainer,
            engines=engines,
            sync=compute_sync_time(
                self.num_weight_bytes,
                trainer.parallel.world_size,
                engines.num_engines,
                rollout.num_engine_ranks,
                self.accelerator,
            ),
        )

    @property
    def is_colocated(self) -> bool:
        """Whether engines and trainer take turns on the same GPUs."""
        return self.config.rollout.placement == "colocated"

    @property
    def fp8_layer_frac(self) -> float:
        """Layers whose products the trainer computes in FP8, of all."""
        precision = self.config.precision
        if precision.fp8 == "none":
            return 0.0
        kept = precision.num_first_layers_bf16 + precision.num_last_layers_bf16
        return 1 - kept / self.shape.num_layers

    @property
    def num_weight_bytes(self) -> int:
        """Of one copy of the model on its way to an engine."""
        shape = self.shape
        if self.config.rollout.quantization == "none":
            return shape.num_params * (4 if self.config.model.dtype == "float32" else 2)
        quantized = shape.num_layers * (shape.cut_layer_params + shape.expert_layer_params)
        scale_bytes = 4 * quantized // 128**2  # a float32 for each block
        return 2 * (shape.num_params - quantized) + quantized + scale_bytes

    def describe_misfit(self, trainer: TrainerMemory, engine: EngineMemory) -> str | None:
        """What does not fit, and its parts; None where all fits."""
        name, capacity = self.accelerator.name, self.accelerator.memory_bytes
        if trainer.total > capacity:
            parts = sorted(trainer.parts.items(), key=lambda part: -part[1])
            listed = ", ".join(f"{part} {size / GIB:.0f}" for part, size in parts if size >= GIB)
            return (
                f"parallel: a trainer GPU needs {trainer.total / GIB:.0f} GiB of {name}'s "
                f"{capacity / GIB:.0f}: {listed}"
            )
        wanted = self.config.rollout.kv_cache_bytes
        if self.is_colocated and wanted is not None and engine.parts["KV cache"] < wanted:
            others = {part: size for part, size in engine.parts.items() if part != "KV cache"}
            listed = ", ".join(f"{part} {size / GIB:.0f}" for part, size in others.items())
            return (
                f"rollout.kv_cache_bytes={wanted}: a GPU of {name}'s {capacity / GIB:.0f} GiB has "
                f"{max(engine.parts['KV cache'], 0) / GIB:.1f} for it beside {listed}"
            )
        longest = self.config.max_engine_tokens
        if engine.kv_tokens < longest:
            others = {part: size for part, size in engine.parts.items() if part != "KV cache"}
            listed = ", ".join(f"{part} {size / GIB:.0f}" for part, size in others.items())
            return (
                f"rollout: an engine GPU of {name}'s {capacity / GIB:.0f} GiB keeps "
                f"{max(engine.parts['KV cache'], 0) / GIB:.1f} for the KV cache beside {listed}; "
                f"the engine's cache holds {max(engine.kv_tokens, 0):.0f} tokens, and the longest "
                f"sequence has {longest}"
            )
        return None
