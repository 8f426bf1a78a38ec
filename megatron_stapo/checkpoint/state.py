"""Which tensors a checkpoint holds, and which part of each this rank owns.

Keys are `weights.NAME`, `exp_avg.NAME` and `exp_avg_sq.NAME`, with the names that `model.weights`
gives over the whole model, so that no layout shows in them. All are float32: in bfloat16 training
the weights are the optimizer's main ones, of which the model's are a cast.

The distributed optimizer gives each rank a range of every parameter's elements, which need not
begin or end at a row. Such a range is at most three rectangles per block of rows, so each rank
writes what it owns and nothing is gathered.
"""

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from megatron_stapo.checkpoint.tensors import MOMENTS, WEIGHTS
from megatron_stapo.model.weights import Block, HfWeights, locate
from megatron_stapo.parallel.groups import Groups
from megatron_stapo.trainer.trainer import Trainer

_RANDOM_STATES_KEY = "random_states"


@dataclass(frozen=True)
class Rectangle:
    """A contiguous run of a local parameter's elements that is a rectangle of the whole one."""

    start: int
    """First element, in the flattened local parameter."""
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Of its first element in the whole parameter."""

    @property
    def stop(self) -> int:
        """Element after the last."""
        return self.start + math.prod(self.shape)


def cut_rectangles(
    block: Block, row_shape: tuple[int, ...], start: int, stop: int
) -> list[Rectangle]:
    """Cut the elements [start, stop) of a local parameter that lie in a block into rectangles.

    Args:
        row_shape: of a row of the local parameter: (columns,), or () of a vector.
    """
    num_columns = row_shape[0] if row_shape else 1
    begin = block.first_row * num_columns
    start, stop = max(start, begin), min(stop, begin + block.num_rows * num_columns)
    rectangles = []
    while start < stop:
        row, column = divmod(start - begin, num_columns)
        if column or stop - start < num_columns:
            num_rows, width = 1, min(num_columns - column, stop - start)
        else:
            num_rows, width = (stop - start) // num_columns, num_columns
        shape, place = (num_rows, width), (row, column)
        offset = tuple(a + b for a, b in zip(block.offset, place, strict=False))
        rectangles.append(Rectangle(start, shape[: 1 + len(row_shape)], offset))
        start += num_rows * width
    return rectangles


def build_optimizer_state(trainer: Trainer) -> dict[str, ShardedTensor]:
    """The main weights and moments that this rank owns: views of the optimizer's own tensors.

    Mutates: an optimizer that has taken no step gets moments of zero, and a step count of zero.
    """
    start_moments(trainer)
    names = {parameter: name for name, parameter, _ in trainer.weights.named_parameters()}
    state = {}
    for optimizer in list_optimizers(trainer):
        for parameter in optimizer.model_param_gbuf_map:
            owned = optimizer._get_model_param_range_map(parameter)["param"]
            tensors = optimizer._get_main_param_and_optimizer_states(parameter)
            flat = {WEIGHTS: tensors["param"], **{name: tensors[name] for name in MOMENTS}}
            name = names[parameter]
            for kind, tensor in flat.items():
                state |= _build_pieces(
                    kind, name, tensor, owned.start, owned.end, trainer.weights, trainer.groups
                )
    return state


def build_model_state(trainer: Trainer) -> dict[str, ShardedTensor]:
    """Every weight of this rank's chunks, whole, as the place that a checkpoint is read into."""
    state = {}
    for name, parameter, _ in trainer.weights.named_parameters():
        flat = parameter.data.view(-1)
        state |= _build_pieces(WEIGHTS, name, flat, 0, len(flat), trainer.weights, trainer.groups)
    return state


def list_optimizers(trainer: Trainer) -> list[Any]:
    """Megatron's distributed optimizers on this rank: one, and another for experts."""
    chained = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    return [o for o in chained if not getattr(o, "is_stub_optimizer", False)]


def start_moments(trainer: Trainer) -> None:
    """Give an optimizer that has taken no step the moments of zero that it would start from.

    torch's Adam makes them in its first step; a checkpoint before that has them, too, so that it
    has one form.
    """
    for optimizer in list_optimizers(trainer):
        inner = optimizer.optimizer
        for group in inner.param_groups:
            for main in group["params"]:
                if main.numel() and not inner.state[main]:
                    inner.state[main] = {name: torch.zeros_like(main) for name in MOMENTS}
                    if isinstance(inner, torch.optim.Adam):
                        inner.state[main]["step"] = torch.tensor(0.0)


def read_optimizer_step(trainer: Trainer) -> int:
    """Adam's count of steps. torch keeps it with every parameter, apex and Transformer Engine with
    every group."""
    counts = set()
    for optimizer in list_optimizers(trainer):
        inner = optimizer.optimizer
        counts |= {int(s["step"]) for s in inner.state.values() if "step" in s}
        counts |= {int(g["step"]) for g in inner.param_groups if g["params"] and "step" in g}
    assert len(counts) <= 1, counts
    return counts.pop() if counts else 0


def write_optimizer_step(trainer: Trainer, step: int) -> None:
    """Set Adam's count of steps everywhere."""
    for optimizer in list_optimizers(trainer):
        inner = optimizer.optimizer
        if isinstance(inner, torch.optim.Adam):
            for state in inner.state.values():
                state["step"].fill_(step)
        else:
            for group in inner.param_groups:
                group["step"] = step


def build_random_states(groups: Groups, *, with_data: bool) -> dict[str, ShardedObject]:
    """The states of this rank's random generators, under its rank.

    Training draws from none of them; they are kept for what a user's own reward or mask draws.
    """
    data = None
    if with_data:
        kind, keys, *rest = np.random.get_state()
        data = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": [kind, keys.tolist(), *rest],  # type: ignore[union-attr]
            "megatron": tensor_parallel.get_cuda_rng_tracker().get_states(),
        }
        if groups.device.type == "cuda":
            data["cuda"] = torch.cuda.get_rng_state()
    return {
        _RANDOM_STATES_KEY: ShardedObject(
            _RANDOM_STATES_KEY, data, (groups.world_size,), (groups.rank,)
        )
    }


def restore_random_states(loaded: dict[str, Any], groups: Groups) -> None:
    """Put the generators into the states of `build_random_states`, as loaded."""
    data = loaded[_RANDOM_STATES_KEY]
    torch.set_rng_state(data["torch"])
    random.setstate(data["python"])
    kind, keys, *rest = data["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    tensor_parallel.get_cuda_rng_tracker().set_states(data["megatron"])
    if groups.device.type == "cuda":
        torch.cuda.set_rng_state(data["cuda"])


def _build_pieces(
    kind: str,
    name: str,
    flat: torch.Tensor,
    start: int,
    stop: int,
    weights: HfWeights,
    groups: Groups,
) -> dict[str, ShardedTensor]:
    """Args: flat holds the elements [start, stop) of the local parameter."""
    pair = weights.find_pair(name)
    shape, blocks = locate(pair, groups.tp_rank, groups.tp_size)
    row_shape = weights.local_shape(name)[1:]
    pieces: dict[str, ShardedTensor] = {}
    for rectangle in (r for b in blocks for r in cut_rectangles(b, row_shape, start, stop)):
        data = flat[rectangle.start - start : rectangle.stop - start].view(rectangle.shape)
        key = f"{kind}.{pair.name}"
        pieces[f"{key}/{name}/{rectangle.start}"] = ShardedTensor(
            key=key,
            data=data,
            dtype=data.dtype,
            local_shape=rectangle.shape,
            global_shape=shape,
            global_offset=rectangle.offset,
            axis_fragmentations=None,  # ranges of unlike lengths make no regular grid
            replica_id=_rate_replica(name, pair.name, pair.layout, groups),
        )
    return pieces


def _rate_replica(name: str, stored_name: str, layout: str, groups: Groups) -> int:
    """0 where this rank's copy of the parameter is the one that is written."""
    if name != stored_name:
        return 1  # the last stage's copy of a tied head
    # Experts are spread over the tensor-parallel ranks as well, so none of these has a copy.
    is_copied = layout == "replicated" and ".experts." not in name
    return groups.tp_rank if is_copied else 0
