"""Builds the process groups once and names this rank's place in them.

Everything else receives a `Groups`; no other function asks a global which rank it is on.
"""

import os
import random
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
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
    cp_group: ProcessGroup
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    dp_cp_group: ProcessGroup
    """Ranks that hold the tokens of one mini-batch between them, each token once."""
    stage_group: ProcessGroup
    """All ranks of this pipeline stage: tp x cp x dp."""
    ep_rank: int
    ep_size: int
    cells: list[tuple[int, int]]
    """(dp_rank, cp_rank) of every rank of the world: which tokens it works on."""

    @property
    def is_first_stage(self) -> bool:
        """Holds the embedding."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Holds the head: the only stage with log-probabilities and entropies."""
        return self.pp_rank == self.pp_size - 1

    @property
    def reports(self) -> bool:
        """Whether this rank adds its tokens to the step's numbers: one rank for each token."""
        return self.is_last_stage and self.tp_rank == 0

    def __str__(self) -> str:
        return (
            f"rank {self.rank} (tp {self.tp_rank}, pp {self.pp_rank}, cp {self.cp_rank}, "
            f"dp {self.dp_rank})"
        )


def init_distributed(config: ParallelConfig, seed: int) -> Groups:
    """Join the world that torchrun describes and build Megatron's groups.

    Args:
        config: sizes and device; their product must be torchrun's world size.
        seed: of the random states of torch, Python, numpy and Megatron. Training draws from none.

    Communicates: makes the default group and Megatron's groups; an all-gather over all ranks.

    Raises:
        ValueError: the world has another size than the config.
    """
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != config.world_size:
        raise ValueError(
            f"torchrun started {world_size} ranks, but parallel.tensor_model_parallel_size x "
            "pipeline_model_parallel_size x context_parallel_size x data_parallel_size = "
            f"{config.world_size}; start {config.world_size}."
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
    virtual_size = config.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor_model_parallel_size,
        pipeline_model_parallel_size=config.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_size if virtual_size > 1 else None,
        context_parallel_size=config.context_parallel_size,
        expert_model_parallel_size=config.expert_model_parallel_size,
        # An expert is small: it is worth more to spread the experts than to cut one.
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=config.timeout_s / 60,
    )
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    tp_group = parallel_state.get_tensor_model_parallel_group()
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    cp_group = parallel_state.get_context_parallel_group()
    dp_group = parallel_state.get_data_parallel_group()
    ep_group = parallel_state.get_expert_model_parallel_group()
    cells: list[Any] = [None] * world_size
    dist.all_gather_object(cells, (dp_group.rank(), cp_group.rank()))
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
        cp_group=cp_group,
        cp_rank=cp_group.rank(),
        cp_size=cp_group.size(),
        dp_rank=dp_group.rank(),
        dp_size=dp_group.size(),
        dp_cp_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        stage_group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True),
        ep_rank=ep_group.rank(),
        ep_size=ep_group.size(),
        cells=cells,
    )


def agree(error: str | None, groups: Groups) -> str | None:
    """Tell every rank what went wrong on any.

    Args:
        error: what went wrong on this rank, or None.

    Returns:
        The first rank's error, with the rank's coordinates; None where no rank has one.

    Communicates: an all-reduce of one integer over all ranks; on failure an all-gather.
    """
    failed = torch.tensor(int(error is not None), device=groups.device)
    dist.all_reduce(failed)
    if not failed.item():
        return None
    errors: list[str | None] = [None] * groups.world_size
    dist.all_gather_object(errors, error and f"{groups}: {error}")
    return next(e for e in errors if e)


def fail_together(error: str | None, groups: Groups) -> None:
    """Raise on every rank if any rank has an error.

    Args and communication: as `agree`.

    Raises:
        RuntimeError: the first rank's error, with the rank's coordinates.
    """
    if agreed := agree(error, groups):
        raise RuntimeError(agreed)


def destroy_distributed() -> None:
    """Leave the groups, so that the process ends without a warning.

    A group's threads and sockets end with the last reference to it; whoever goes on in the same
    process drops its own, those of `Groups` and of a `Trainer`.
    """
    parallel_state.destroy_model_parallel()
    # What Megatron 0.19 forgets: the embeddings of the cache's keys hold their cp_group.
    RotaryEmbedding.forward.cache_clear()
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None
    dist.destroy_process_group()
