"""Part of a tensor in the place of the whole one, for loaders that cut their part out themselves.

vLLM's weight loaders take a full tensor and narrow it to their rank's part. A `ShardTensor` has the
full shape and holds that part alone. So the loaders run as they are, and one that asks for anything
else is refused: what they take is what the plan sends.
"""

from typing import Any

import torch

from megatron_stapo.rollout.weight_transfer import Part


class ShardTensor(torch.Tensor):
    """Gives its part when it is narrowed to it, and nothing else. As an expert's weight it may be
    stacked and unstacked before."""

    _part: Part
    _held: torch.Tensor
    _taken: set[str]

    @staticmethod
    def __new__(
        cls, part: Part, held: torch.Tensor, taken: set[str], *, is_stacked: bool = False
    ) -> "ShardTensor":
        """Args: held: the elements of the part. taken gets its name when a loader narrows it.
        is_stacked: it is the only one of a stack [1, rows, columns]."""
        shape = (1, *part.shape) if is_stacked else part.shape
        tensor: ShardTensor = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=held.dtype, device=held.device
        )
        tensor._part, tensor._held, tensor._taken = part, held, taken
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer a slice along one dimension, by either of the names that torch has for `narrow`,
        and what vLLM does to an expert's weight before."""
        shard = next(a for a in args if isinstance(a, cls))
        part, aten = shard._part, torch.ops.aten
        if shard.ndim > len(part.shape):
            if func is aten.unbind.int and len(args) == 1:
                return [cls(part, shard._held, shard._taken)]
        elif func is aten.unsqueeze.default and args[1] == 0:
            return cls(part, shard._held, shard._taken, is_stacked=True)
        elif func in (aten.slice.Tensor, aten.narrow.default) and len(args) == 4 and not kwargs:
            _, dim, start, end = args
            wanted = [(0, size) for size in part.shape]
            wanted[dim] = (start, end if func is aten.slice.Tensor else start + end)
            region = part.region
            mine = [(region.first_row, region.end_row), (region.first_column, region.end_column)]
            if wanted == mine[: len(wanted)]:
                shard._taken.add(part.name)
                # A new tensor each time: torch marks it as a view of this one, which it does to
                # none twice, and a layer-wise reload narrows twice.
                return shard._held.detach()
        raise RuntimeError(
            f"weight {part.name}: the engine's loader wants {func} of {list(args[1:])}, but of "
            f"{list(part.shape)} it was sent {part.region}."
        )
