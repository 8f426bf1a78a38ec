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
    parse_step,
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

    The ranks share the files, so that the time goes by bytes per rank. Where one with a fault is
    passed over, it is renamed. Where none is whole, all stay, so that the run is refused until
    somebody restores one.

    Returns:
        The checkpoint, None where the run has none; the faults of newer ones.

    Communicates: a broadcast, and an all-reduce for every checkpoint that is tried.

    Raises:
        RuntimeError: there are checkpoints, and none is whole; on every rank.
    """
    found: list[Any] = [list_checkpoints(run_dir) if groups.rank == 0 else None]
    dist.broadcast_object_list(found, src=0)
    faults: dict[Path, str] = {}
    for checkpoint in reversed(found[0]):
        fault = agree(_find_own_fault(checkpoint, groups), groups)
        if fault is None:
            return checkpoint, [_set_aside(*item, groups) for item in faults.items()]
        faults[checkpoint] = fault
    if faults:
        raise RuntimeError(
            f"run_dir={run_dir}: no checkpoint can be used. {' '.join(faults.values())} Restore "
            "one from a copy, or begin again with --fresh."
        )
    return None, []


def _set_aside(checkpoint: Path, fault: str, groups: Groups) -> str:
    """Rename a checkpoint, on rank 0; returns the fault and the new name."""
    if groups.rank != 0:
        return fault
    try:
        return f"{fault} It is now {set_broken_aside(checkpoint).name}."
    except OSError as error:
        return f"{fault} It cannot be renamed ({error.strerror})."


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
    if state.fp8_left_after is not None:
        trainer.precision_guard.leave_fp8(state.fp8_left_after)
    return state


def _load(state: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = dist_checkpointing.load(
        state, str(checkpoint), validate_access_integrity=False
    )
    return loaded


def _find_own_fault(checkpoint: Path, groups: Groups) -> str | None:
    try:
        names = sorted(list_files(checkpoint))
        if fault := find_fault(checkpoint, names[groups.rank :: groups.world_size]):
            return fault
        num_steps_done = read_state(checkpoint).num_steps_done
    except ValueError as error:
        return str(error)
    if parse_step(checkpoint) != num_steps_done:
        return f"checkpoint {checkpoint}: holds the state after {num_steps_done} steps."
    return None
