"""Builds the process groups once and names this rank's place in them.

Everything else receives a `Groups`; no other function asks a global which rank it is on.
"""

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch.distributed import ProcessGroup

from megatron_stapo.config import ParallelConfig


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The process groups of this rank, and its coordinates."""

    device: torch.device
    rank: int
    """Over all trainer ranks."""
    world_size: int
    tp_group: ProcessGroup
    tp_rank: int
    tp_size: int
    pp_group: ProcessGroup
    pp_rank: int
    pp_size: int
    dp_group: ProcessGroup
    dp_rank: int
    dp_size: int
    dp_rank_of_rank: list[int]
    """Data-parallel rank of every rank of the world."""

    @property
    def is_first_stage(self) -> bool:
        """Holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Holds the head: the only stage with log-probabilities and entropies."""
        return self.pp_rank == self.pp_size - 1

    def __str__(self) -> str:
        return f"rank {self.rank} (tp {self.tp_rank}, pp {self.pp_rank}, dp {self.dp_rank})"


def init_distributed(config: ParallelConfig, seed: int) -> Groups:
    """Join the world that torchrun describes and build Megatron's groups.

    Args:
        config: sizes and device; their product must be torchrun's world size.
        seed: of Megatron's random states.

    Communicates: makes the default group and Megatron's groups; an all-gather over all ranks.

    Raises:
        ValueError: the world has another size than the config.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != config.world_size:
        raise ValueError(
            f"torchrun started {world_size} ranks, but parallel.tensor_model_parallel_size x "
            f"pipeline_model_parallel_size x data_parallel_size = {config.world_size}; start "
            f"{config.world_size}."
        )
    if config.device == "cpu":
        from megatron_stapo.parallel import cpu_device

        cpu_device.install()
        device, backend = torch.device("cpu"), "gloo"
    else:
        device, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "nccl"
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=config.timeout_s)
    dist.init_process_group(backend, timeout=timeout)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        distributed_timeout_minutes=config.timeout_s / 60,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    tp_group = parallel_state.get_tensor_model_parallel_group()
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    dp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    dp_ranks: list[int] = [0] * world_size
    dist.all_gather_object(dp_ranks, dp_group.rank())
    return Groups(
        device=device,
        rank=dist.get_rank(),
        world_size=world_size,
        tp_group=tp_group,
        tp_rank=tp_group.rank(),
        tp_size=tp_group.size(),
        pp_group=pp_group,
        pp_rank=pp_group.rank(),
        pp_size=pp_group.size(),
        dp_group=dp_group,
        dp_rank=dp_group.rank(),
        dp_size=dp_group.size(),
        dp_rank_of_rank=dp_ranks,
    )


def destroy_distributed() -> None:
    """Leave the groups, so that the process ends without a warning."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
