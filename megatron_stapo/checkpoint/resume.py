"""Finds the newest checkpoint that is whole, and reads it into a trainer of any layout."""

from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing

from megatron_stapo.checkpoint.folder import (
    TrainerState,
    find_fault,
    list_checkpoints,
    list_files,
    read_state,
    set_broken_aside,
)
from megatron_stapo.checkpoint.state import (
    build_model_state,
    build_optimizer_state,
    build_random_states,
    restore_random_states,
    write_optimizer_step,
)
from megatron_stapo.parallel.groups import Groups, agree
from megatron_stapo.trainer.trainer import Trainer


def choose_checkpoint(run_dir: Path, groups: Groups) -> tuple[Path | None, list[str]]:
    """Find the newest checkpoint of which every file is as it was written.

    The ranks share the files, so that the time goes by bytes per rank. A checkpoint with a fault is
    renamed, and the one before it is tried.

    Returns:
        The checkpoint, None where the run has none; the faults of newer ones.

    Communicates: a broadcast and an all-reduce for every checkpoint that is tried.

    Raises:
        RuntimeError: there are checkpoints, and none is whole; on every rank.
    """
    faults: list[str] = []
    while True:
        tried: list[Any] = [None]
        if groups.rank == 0:
            tried = [next(reversed(list_checkpoints(run_dir)), None)]
        dist.broadcast_object_list(tried, src=0)
        [checkpoint] = tried
        if checkpoint is None:
            if faults:
                raise RuntimeError(
                    f"run_dir={run_dir}: no checkpoint can be used. {' '.join(faults)} Restore one "
                    "from a copy, or begin again with --fresh."
                )
            return None, faults
        fault = agree(_find_own_fault(checkpoint, groups), groups)
        if fault is None:
            return checkpoint, faults
        if groups.rank == 0:
            aside = set_broken_aside(checkpoint)
            fault = f"{fault} It is now {aside.name}."
        faults.append(fault)


def load_checkpoint(checkpoint: Path, trainer: Trainer) -> TrainerState:
    """Read weights, moments and counters; random states where as many ranks wrote them.

    Args:
        checkpoint: of any layout and number of ranks; verified by `choose_checkpoint`.

    Mutates: the trainer's model, optimizer and counters; the process's random generators.

    Raises:
        RuntimeError: a tensor is missing or has another shape; on every rank.
    """
    groups = trainer.groups
    state = read_state(checkpoint)
    error = None
    try:
        # Tensors are read into their places. The model's are cast on the way, as Megatron casts
        # the main weights.
        objects = {}
        if state.world_size == groups.world_size:
            objects = build_random_states(groups, with_data=False)
        loaded = _load({**build_optimizer_state(trainer), **objects}, checkpoint)
        _load(build_model_state(trainer), checkpoint)
        if objects:
            restore_random_states(loaded, groups)
    except Exception as refused:
        error = f"checkpoint {checkpoint} does not fit this model: {refused!r:.500}"
    if error := agree(error, groups):
        raise RuntimeError(error)
    write_optimizer_step(trainer, state.optimizer_step)
    trainer.num_updates = state.num_updates
    trainer.num_skipped_in_a_row = state.num_skipped_in_a_row
    return state


def _load(state: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = dist_checkpointing.load(
        state, str(checkpoint), validate_access_integrity=False
    )
    return loaded


def _find_own_fault(checkpoint: Path, groups: Groups) -> str | None:
    try:
        names = sorted(list_files(checkpoint))
    except ValueError as error:
        return str(error)
    return find_fault(checkpoint, names[groups.rank :: groups.world_size])
