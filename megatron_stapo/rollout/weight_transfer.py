"""New weights from the trainer's rank 0 to the workers of an engine: the part that both ends share.

A bucket is one flat tensor of one dtype, sent as one broadcast, and a description that travels
beside it as JSON. `iter_buckets` and `unpack` are inverse to each other bit for bit.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist

BUCKET_BYTES = 256 << 20
"""Size at which a bucket is sent. An 8B model in bf16 takes about 60, at one HTTP call each. Rank 0
holds a bucket twice, as tensors and packed; a worker holds it once beside an unfinished layer."""

TIMEOUT_S = 60.0
"""Longest wait of one end for the other in a broadcast, or while they connect."""

type TransferGroup = dist.ProcessGroupGloo | dist.ProcessGroupNCCL


@dataclass(frozen=True, kw_only=True)
class ConnectInfo:
    """Where the trainer waits for the workers."""

    host: str
    port: int
    """Of the trainer's store."""
    world_size: int
    """All workers, and the trainer."""


@dataclass(frozen=True, kw_only=True)
class BucketInfo:
    """What a bucket holds, in the order of its elements."""

    names: list[str]
    """Hugging Face names."""
    shapes: list[list[int]]
    dtype: str
    """Name of a torch dtype, e.g. bfloat16."""

    @property
    def num_elements(self) -> int:
        """Elements of the flat tensor."""
        return sum(prod(shape) for shape in self.shapes)


def iter_buckets(
    named_tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int = BUCKET_BYTES
) -> Iterator[tuple[BucketInfo, torch.Tensor]]:
    """Pack tensors in their order; a bucket ends at bucket_bytes, or where the dtype changes.

    Yields:
        The description and the flat tensor, a copy. A tensor over bucket_bytes fills a bucket of
        its own.
    """
    names: list[str] = []
    tensors: list[torch.Tensor] = []

    def flush() -> tuple[BucketInfo, torch.Tensor]:
        info = BucketInfo(
            names=list(names),
            shapes=[list(tensor.shape) for tensor in tensors],
            dtype=str(tensors[0].dtype).removeprefix("torch."),
        )
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
        names.clear()
        tensors.clear()
        return info, flat

    for name, tensor in named_tensors:
        num_bytes = sum(held.nbytes for held in tensors) + tensor.nbytes
        if tensors and (num_bytes > bucket_bytes or tensor.dtype != tensors[0].dtype):
            yield flush()
        names.append(name)
        tensors.append(tensor)
    if tensors:
        yield flush()


def unpack(info: BucketInfo, flat: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Cut a bucket into its tensors, which are views of flat."""
    pieces = flat.split([prod(shape) for shape in info.shapes])
    return [
        (name, piece.view(shape))
        for name, piece, shape in zip(info.names, pieces, info.shapes, strict=True)
    ]


class Checklist:
    """The tensors that an update still owes. A gap would leave old or empty weights in silence."""

    def __init__(self, shapes: Mapping[str, Sequence[int]]) -> None:
        """Args: shapes: of every tensor of the model, by Hugging Face name."""
        self._due = {name: tuple(shape) for name, shape in shapes.items()}

    def take(self, name: str, shape: Sequence[int]) -> None:
        """Tick off one tensor.

        Raises:
            RuntimeError: the name is unknown or came before, or the shape is another.
        """
        if name not in self._due:
            raise RuntimeError(f"weight {name}: the engine's model has no such tensor, or got it.")
        expected = self._due.pop(name)
        if tuple(shape) != expected:
            raise RuntimeError(
                f"weight {name}: got shape {tuple(shape)}, the engine's model has {expected}."
            )

    def check_complete(self) -> None:
        """Raises: RuntimeError: the update left tensors out."""
        if self._due:
            raise RuntimeError(f"the weight update left out {sorted(self._due)}.")


def connect(store: dist.Store, rank: int, world_size: int, device: torch.device) -> TransferGroup:
    """Make a group of its own, apart from the default group of either end: NCCL or gloo.

    Args:
        store: where the ranks find each other; the trainer's.
        rank: 0 is the trainer, 1 and above are the engine's workers.
        world_size: the workers and the trainer.
        device: of this end's buckets.

    Communicates: connects all ranks and broadcasts one element; waits at most TIMEOUT_S.
    """
    group_type = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
    group = group_type(store, rank, world_size, timedelta(seconds=TIMEOUT_S))
    # NCCL connects in its first operation: here, while the other end is known to wait for it.
    broadcast(group, torch.zeros(1, device=device)).wait()
    return group


def broadcast(group: TransferGroup, tensor: torch.Tensor) -> dist.Work:
    """Start sending the trainer's tensor into every worker's."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return group.broadcast([tensor], options)
