"""Layouts of a given number of GPUs that fit, fastest first."""

import dataclasses
from collections.abc import Iterator

from megatron_stapo.config import ParallelConfig, list_stage_layers
from megatron_stapo.plan.estimate import EngineEstimate, Estimate, Problem, TrainerEstimate
from megatron_stapo.plan.memory import compute_stage_state

HEADROOM = 0.95
"""Of the GPU's memory that a proposed layout may need: the formulas are not exact."""

_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)


def find_layouts(problem: Problem, num_gpus: int) -> list[Estimate]:
    """For every split of the GPUs into trainer and engines the fastest layout of each that fits.

    Split by whole nodes where there are several. Tensor parallelism stays on a node and comes with
    sequence parallelism; sizes are powers of two, but for data parallelism. Colocated engines take
    all GPUs, as the trainer does: there is one split.

    Returns:
        Ascending by step time; empty where nothing fits.
    """
    node = problem.config.cluster.num_gpus_per_node
    step = node if num_gpus > node else 1
    if problem.is_colocated:
        trainer = _find_trainer(problem, num_gpus)
        engines = _find_engines(problem, num_gpus, trainer) if trainer else None
        return [problem.combine(trainer, engines)] if trainer and engines else []
    layouts = []
    for num_engine_gpus in range(step, num_gpus, step):
        engines = _find_engines(problem, num_engine_gpus)
        if engines is None:
            continue
        trainer = _find_trainer(problem, num_gpus - num_engine_gpus)
        if trainer is not None:
            layouts.append(problem.combine(trainer, engines))
    return sorted(layouts, key=lambda layout: layout.total)


def _find_engines(
    problem: Problem, num_gpus: int, trainer: TrainerEstimate | None = None
) -> EngineEstimate | None:
    """The fastest that fits and uses all GPUs, on those of the trainer where one is given."""
    best = None
    longest = problem.config.max_engine_tokens
    node = problem.config.cluster.num_gpus_per_node
    for tp in _list_tensor_parallel_sizes(problem, node, for_trainer=False):
        for pp in _SIZES[:4]:
            if num_gpus % (tp * pp) or problem.shape.num_layers < pp:
                continue
            rollout = dataclasses.replace(
                problem.config.rollout,
                num_engines=1 if trainer else num_gpus // (tp * pp),
                tensor_parallel_size=tp,
                pipeline_parallel_size=pp,
            )
            if num_gpus // (tp * pp) > problem.workload.num_prompts:
                continue
            estimate = problem.estimate_engines(rollout, trainer)
            if estimate.memory.kv_tokens * HEADROOM < longest:
                continue
            if trainer and estimate.memory.parts["KV cache"] < (rollout.kv_cache_bytes or 0):
                continue
            if best is None or estimate.time.total < best.time.total:
                best = estimate
    return best


def _find_trainer(problem: Problem, num_gpus: int) -> TrainerEstimate | None:
    """The fastest that fits and uses all GPUs."""
    best = None
    capacity = problem.accelerator.memory_bytes * HEADROOM
    for parallel in _list_parallel(problem, num_gpus):
        stages = list_stage_layers(parallel, problem.shape.num_layers)
        # What no microbatch changes; the first stage has the embedding.
        state = compute_stage_state(
            problem.shape, parallel, 0, stages[0], problem.config.model.dtype
        )
        if state.weights + state.gradients + state.optimizer > capacity:
            continue
        for budget in _list_budgets(problem, parallel):
            for recompute in ("none", "full"):
                estimate = problem.estimate_trainer(
                    dataclasses.replace(parallel, recompute=recompute), budget
                )
                if estimate.memory.total > capacity:
                    continue
                if best is None or estimate.time.total < best.time.total:
                    best = estimate
                break  # recompute frees what fits already, at a price
    return best


def _list_parallel(problem: Problem, num_gpus: int) -> Iterator[ParallelConfig]:
    shape = problem.shape
    num_sequences = problem.workload.num_sequences // problem.workload.num_minibatches
    node = problem.config.cluster.num_gpus_per_node
    for tp in _list_tensor_parallel_sizes(problem, node, for_trainer=True):
        for pp in _SIZES[:5]:
            if num_gpus % (tp * pp) or pp > shape.num_layers:
                continue
            first, last = _share_layers(shape.num_layers, pp)
            for cp in _SIZES[:4]:
                dp, rest = divmod(num_gpus, tp * pp * cp)
                if rest or not dp or dp > num_sequences or tp * cp > node:
                    continue
                for ep in _SIZES if shape.num_experts else (1,):
                    if (tp * cp * dp) % ep or (shape.num_experts and shape.num_experts % ep):
                        continue
                    for chunks in (1, 2) if pp > 1 and first is None else (1,):
                        if shape.num_layers // pp % chunks:
                            continue
                        yield dataclasses.replace(
                            problem.config.parallel,
                            tensor_model_parallel_size=tp,
                            sequence_parallel=tp > 1,
                            pipeline_model_parallel_size=pp,
                            virtual_pipeline_model_parallel_size=chunks,
                            num_layers_in_first_pipeline_stage=first,
                            num_layers_in_last_pipeline_stage=last,
                            context_parallel_size=cp,
                            data_parallel_size=dp,
                            expert_model_parallel_size=ep,
                        )


def _share_layers(num_layers: int, num_stages: int) -> tuple[int | None, int | None]:
    """Layers of the first and the last stage where they cannot be as many as the others'."""
    if num_layers % num_stages == 0:
        return None, None
    middle = -(-num_layers // num_stages)
    ends = num_layers - middle * (num_stages - 2)
    if num_stages > 2 and ends < 2:
        middle -= 1
        ends += num_stages - 2
    # The last stage has the head besides.
    return ends - ends // 2, ends // 2


def _list_budgets(problem: Problem, parallel: ParallelConfig) -> list[int]:
    """Microbatch budgets of a rank: the config's, and the least that holds the longest sequence."""
    longest = problem.config.max_sequence_tokens
    longest += -longest % parallel.sequence_multiple
    least = -(-longest // parallel.context_parallel_size)
    return sorted({least, max(least, problem.config.data.max_microbatch_tokens)}, reverse=True)


def _list_tensor_parallel_sizes(problem: Problem, node: int, for_trainer: bool) -> list[int]:
    shape = problem.shape
    extents = [shape.query_size // shape.head_dim, shape.kv_size // shape.head_dim]
    extents.append(shape.vocab_size)
    if for_trainer and not shape.num_experts:
        extents.append(shape.ffn_size)
    return [n for n in _SIZES if n <= node and all(extent % n == 0 for extent in extents)]
