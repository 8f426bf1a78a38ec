"""Which process runs on which GPU of which host: pure arithmetic on a config.

The trainer's ranks fill the first hosts; the engines follow, beside the last ranks where there is
room. Host 0 therefore holds rank 0, which drives the run. No tensor-parallel group leaves its host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_stapo.config import Config


@dataclass(frozen=True, kw_only=True)
class Process:
    """One process and its GPU. On a CPU the GPU is a slot without hardware."""

    engine: int | None
    """Number of the rollout engine; None for a trainer rank."""
    colocated_engine: int | None
    """Number of the engine that a trainer rank holds a part of; None where it holds none."""
    rank: int
    """Over all trainer ranks, or within the engine."""
    host: int
    gpu: int
    """Of the host, from 0."""
    tp: int
    """Tensor-parallel rank; cp, ep, dp and pp likewise. An engine has tp and pp alone."""
    cp: int = 0
    ep: int = 0
    dp: int = 0
    pp: int = 0

    @property
    def role(self) -> str:
        """trainer, engine N, or trainer+engine N."""
        if self.engine is not None:
            return f"engine {self.engine}"
        return "trainer" if (n := self.colocated_engine) is None else f"trainer+engine {n}"


def build_process_table(config: Config) -> list[Process]:
    """Place every process of a run.

    Trainer ranks count in Megatron's default order "tp-cp-ep-dp-pp", tensor parallelism fastest.
    The experts of a stage are spread over its ranks in the same order, with expert tensor
    parallelism 1 (`parallel.groups`). An engine's ranks count as vLLM's, tp before pp; a colocated
    one's are consecutive trainer ranks.

    Returns:
        Trainer ranks in order, then engine by engine.

    Raises:
        ValueError: a tensor-parallel group of the trainer, or an engine, would span hosts.
    """
    num_slots = config.cluster.num_gpus_per_node
    parallel, rollout = config.parallel, config.rollout
    tp_size, cp_size = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if parallel.world_size > num_slots and num_slots % tp_size:
        fitting = [n for n in range(1, num_slots + 1) if num_slots % n == 0]
        raise ValueError(
            f"parallel.tensor_model_parallel_size={tp_size}: a tensor-parallel group would span "
            f"hosts of cluster.num_gpus_per_node={num_slots}; use one of {fitting}."
        )
    is_colocated = rollout.placement == "colocated"
    if is_colocated and parallel.world_size > num_slots and num_slots % rollout.num_engine_ranks:
        raise ValueError(_describe_span(config))
    stage_size = parallel.world_size // parallel.pipeline_model_parallel_size
    processes = [
        Process(
            engine=None,
            colocated_engine=rank // rollout.num_engine_ranks if is_colocated else None,
            rank=rank,
            host=rank // num_slots,
            gpu=rank % num_slots,
            tp=rank % tp_size,
            cp=rank // tp_size % cp_size,
            ep=rank % stage_size % parallel.expert_model_parallel_size,
            dp=rank % stage_size // (tp_size * cp_size),
            pp=rank // stage_size,
        )
        for rank in range(parallel.world_size)
    ]
    if not rollout.has_servers:
        return processes
    if rollout.num_engine_ranks > num_slots:
        raise ValueError(_describe_span(config))
    slot = parallel.world_size
    for engine in range(rollout.num_engines):
        if slot % num_slots + rollout.num_engine_ranks > num_slots:
            slot += -slot % num_slots  # it does not fit beside what the host holds
        processes += [
            Process(
                engine=engine,
                colocated_engine=None,
                rank=rank,
                host=(slot + rank) // num_slots,
                gpu=(slot + rank) % num_slots,
                tp=rank % rollout.tensor_parallel_size,
                pp=rank // rollout.tensor_parallel_size,
            )
            for rank in range(rollout.num_engine_ranks)
        ]
        slot += rollout.num_engine_ranks
    return processes


def _describe_span(config: Config) -> str:
    rollout = config.rollout
    remedy = "use smaller engines and more of them (rollout.num_engines)"
    if rollout.placement == "colocated":
        remedy = "use engines whose ranks divide it"
    return (
        f"rollout.tensor_parallel_size={rollout.tensor_parallel_size} x "
        f"pipeline_parallel_size={rollout.pipeline_parallel_size}: an engine of "
        f"{rollout.num_engine_ranks} ranks would span hosts of cluster.num_gpus_per_node="
        f"{config.cluster.num_gpus_per_node}; {remedy}."
    )


def count_hosts(processes: Sequence[Process]) -> int:
    """Hosts that the processes need."""
    return 1 + max(process.host for process in processes)


def format_process_table(processes: Sequence[Process]) -> str:
    """A line per process."""
    width = max(len(p.role) for p in processes)
    lines = [f"{'host':>4} {'gpu':>3} {'role':<{width}} {'rank':>5}  tp cp ep dp pp"]
    for p in processes:
        lines.append(
            f"{p.host:>4} {p.gpu:>3} {p.role:<{width}} {p.rank:>5}  "
            f"{p.tp:>2} {p.cp:>2} {p.ep:>2} {p.dp:>2} {p.pp:>2}"
        )
    return "\n".join(lines) + "\n"
