"""New weights from the trainer's ranks to the engines' ranks: the part that both ends share.

What an engine's rank takes of a Hugging Face tensor is a `Part`. Its pieces come from the trainer
ranks that hold them, in messages, a bucket at a time. Both ends go through the same buckets in the
same order, so that nothing but elements travels.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, NamedTuple, Protocol, Self

import torch
import torch.distributed as dist

from megatron_stapo.rollout import delta, fp8_weights

TIMEOUT_S = 60.0
"""Longest wait of one end for the other in a message, or while they connect."""

_POLL_S = 0.001
_HASH_CHUNK = 1 << 22

type TransferGroup = dist.ProcessGroup

type Form = Literal["direct", "packed", "fp8", "delta"]
"""How a message travels. direct: its only piece, which has all columns of its part, is received
where it belongs. packed: its pieces lie one after the other. fp8: as `fp8_weights.encode` writes
them. delta: packed, and after the first time as `delta.encode` writes them."""

type Hashes = list[dict[str, int]]
"""`hash_tensor` of what every rank of an engine takes, by Hugging Face name."""


class Region(NamedTuple):
    """Rows and columns of a Hugging Face tensor, each up to but without its end. A vector is one
    column."""

    first_row: int
    end_row: int
    first_column: int
    end_column: int

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """All of a tensor."""
        return cls(0, shape[0], 0, shape[1] if len(shape) > 1 else 1)

    @property
    def num_rows(self) -> int:
        """Height."""
        return self.end_row - self.first_row

    @property
    def num_columns(self) -> int:
        """Width."""
        return self.end_column - self.first_column

    @property
    def num_elements(self) -> int:
        """Area."""
        return self.num_rows * self.num_columns

    def intersect(self, other: "Region") -> "Region":
        """What both have; of no element where they are apart."""
        first_row = max(self.first_row, other.first_row)
        first_column = max(self.first_column, other.first_column)
        return Region(
            first_row,
            max(first_row, min(self.end_row, other.end_row)),
            first_column,
            max(first_column, min(self.end_column, other.end_column)),
        )

    def cut(self, matrix: torch.Tensor, inner: "Region") -> torch.Tensor:
        """The view of a matrix of this region that shows the inner one."""
        rows = slice(inner.first_row - self.first_row, inner.end_row - self.first_row)
        columns = slice(
            inner.first_column - self.first_column, inner.end_column - self.first_column
        )
        return matrix[rows, columns]


class Part(NamedTuple):
    """What a rank of an engine takes of one tensor."""

    name: str
    """Hugging Face's."""
    shape: tuple[int, ...]
    """Of the whole tensor."""
    region: Region
    is_fp8: bool = False
    """Whether the engine quantises it, in blocks of which one begins at its first element."""

    @property
    def is_whole(self) -> bool:
        """Whether it is all of the tensor."""
        return self.region == Region.whole(self.shape)


class Message(NamedTuple):
    """Pieces of parts that one rank sends to another, one after the other."""

    sender: int
    pieces: list[tuple[str, Region]]
    """Name of the tensor and its region."""
    form: Form


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """What one rank receives together, and loads before the next."""

    parts: list[Part]
    messages: list[Message]

    def count_bytes(self, element_bytes: int, receiver: int) -> int:
        """What the receiver holds of it before it is loaded: its parts, and pieces of others on
        their way into parts."""
        return element_bytes * sum(part.region.num_elements for part in self.parts) + sum(
            count_bytes(message.form, [region for _, region in message.pieces], element_bytes)
            for message in self.messages
            if message.form != "direct" and message.sender != receiver
        )


def count_bytes(form: Form, regions: Sequence[Region], element_bytes: int) -> int:
    """Bytes of a message; of what changed, at most."""
    if form == "fp8":
        return fp8_weights.count_bytes([(r.num_rows, r.num_columns) for r in regions])
    return element_bytes * sum(region.num_elements for region in regions)


def count_scratch_bytes(form: Form, regions: Sequence[Region]) -> int:
    """Memory that packing or unpacking a message takes beside it."""
    if form == "delta":
        return delta.SCRATCH_BYTES
    if form != "fp8":
        return 0
    return max(fp8_weights.count_scratch_bytes(region.num_columns) for region in regions)


def format_buckets(buckets: Sequence[Bucket]) -> str:
    """Write a rank's buckets as JSON."""
    return json.dumps([[bucket.parts, bucket.messages] for bucket in buckets])


def parse_buckets(text: str) -> list[Bucket]:
    """Undo `format_buckets`."""
    return [
        Bucket(
            parts=[
                Part(name, tuple(shape), Region(*region), is_fp8)
                for name, shape, region, is_fp8 in parts
            ],
            messages=[
                Message(sender, [(name, Region(*region)) for name, region in pieces], form)
                for sender, pieces, form in messages
            ],
        )
        for parts, messages in json.loads(text)
    ]


@dataclass(frozen=True, kw_only=True)
class ConnectInfo:
    """Where the trainer's ranks and the engine's find each other."""

    host: str
    port: int
    """Of rank 0's store."""
    num_trainer_ranks: int
    """The engine's ranks are numbered after them."""
    num_engine_ranks: int

    def open_store(self) -> dist.TCPStore:
        """The store, for a rank other than 0."""
        timeout = timedelta(seconds=TIMEOUT_S)
        return dist.TCPStore(self.host, self.port, is_master=False, timeout=timeout)

    def connect(self, store: dist.Store, rank: int, device: torch.device) -> TransferGroup:
        """Make a group of all these ranks, apart from the default group of either end: NCCL or
        gloo.

        Args:
            store: rank 0's own, or `open_store`.
            rank: of the trainer's ranks, or num_trainer_ranks and above.
            device: of this rank's weights.

        Communicates: connects all ranks; waits at most TIMEOUT_S.
        """
        group_type = dist.ProcessGroupNCCL if device.type == "cuda" else dist.ProcessGroupGloo
        world_size = self.num_trainer_ranks + self.num_engine_ranks
        group: TransferGroup = group_type(store, rank, world_size, timedelta(seconds=TIMEOUT_S))
        return group


def name_schedule(engine_rank: int) -> str:
    """The store's key of what a rank of the engine receives, as `format_buckets` writes it."""
    return f"schedule/{engine_rank}"


def name_hashes(policy_version: int, engine_rank: int) -> str:
    """The store's key of what a rank of the engine found in a probe: JSON, by name."""
    return f"hashes/{policy_version}/{engine_rank}"


class WeightUpdate(Protocol):
    """One update of one engine, as the rank that drives the engine sees it.

    An engine in this process calls `receive` alone. One in processes of its own is told where its
    ranks find the trainer's; then `send` runs while they receive.
    """

    policy_version: int
    """Number of completed steps of the weights."""
    is_probe: bool
    """Whether the engine's ranks have to hash what they receive."""
    hashes: Hashes
    """What they found. `receive` fills it, or the engine."""
    base_version: int | None
    """Version of the weights that the engine's ranks keep, where only what changed since them is to
    be sent; None where everything is. Not for an engine whose ranks have yet to connect."""

    def receive(self) -> Iterator[tuple[Part, torch.Tensor]]:
        """What an engine in this process takes, each part once, lazily."""
        ...

    def format_schedules(self) -> list[str]:
        """`format_buckets` for each of the engine's ranks."""
        ...

    def send(self, connect_info: ConnectInfo, store: dist.Store | None) -> None:
        """Tell the other trainer ranks, and send this rank's messages.

        Args:
            store: rank 0's, where the ranks have yet to connect; None where they are connected.
        """
        ...


def exchange(
    group: TransferGroup,
    sends: Sequence[tuple[int, torch.Tensor]],
    receives: Sequence[tuple[int, torch.Tensor]],
) -> None:
    """Send contiguous tensors to ranks, and receive into others.

    Messages between two ranks keep their order.

    Communicates: point to point; waits at most TIMEOUT_S for each.

    Raises:
        RuntimeError: another rank is gone, or silent for too long.
    """
    if not sends and not receives:
        return
    device = (sends or receives)[0][1].device
    if device.type == "cuda":
        # All at once: in an order of their own, ranks that send to each other would wait for ever.
        group._start_coalescing(device)
    works = [group.recv([tensor], rank, 0) for rank, tensor in receives]
    works += [group.send([tensor], rank, 0) for rank, tensor in sends]
    if device.type != "cuda":
        for work in works:
            work.wait(timedelta(seconds=TIMEOUT_S))
        return
    work = group._end_coalescing(device)
    deadline_s = time.monotonic() + TIMEOUT_S
    # NCCL's own wait holds up the GPU and returns; a rank that is gone would never let it go on.
    while not work.is_completed():
        if time.monotonic() > deadline_s:
            group.abort()
            raise RuntimeError(f"no answer of another rank within {TIMEOUT_S:g} s")
        time.sleep(_POLL_S)
    work.wait()


def pack(form: Form, views: Sequence[torch.Tensor]) -> torch.Tensor:
    """The contiguous tensor that a message travels as.

    Args:
        views: of its pieces, each [rows, columns].
    """
    if form == "direct":
        return views[0]
    if form == "fp8":
        return fp8_weights.encode(views)
    return torch.cat([view.reshape(-1) for view in views])


class Reception:
    """The memory that one bucket is received into."""

    def __init__(
        self,
        bucket: Bucket,
        dtype: torch.dtype,
        device: torch.device,
        rank: int | None = None,
        read: Callable[[str, Region], torch.Tensor] | None = None,
        base: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Allocate it.

        Args:
            rank: of a receiver that is a sender, too. What it sends itself is copied.
            read: gives a view of what it holds itself.
            base: the parts that travelled last, where only what changed is to come: first
                `counts`, then, after `allocate`, `receives`.
        """
        self._parts: dict[str, tuple[Part, torch.Tensor]] = {}
        for part in bucket.parts:
            shape = (part.region.num_rows, part.region.num_columns)
            tensor = torch.empty(shape, dtype=dtype, device=device)
            if base is not None:
                tensor.copy_(base[part.name].view(shape))
            self._parts[part.name] = (part, tensor)
        self._flats: list[tuple[Message, torch.Tensor]] = []
        self._changes: list[tuple[Message, list[int], torch.Tensor]] = []
        self.receives: list[tuple[int, torch.Tensor]] = []
        """Sender and contiguous tensor of every message, for `exchange`."""
        self.counts: list[tuple[int, torch.Tensor]] = []
        """Likewise, of changes how many every piece has."""
        self._messages = bucket.messages
        for message in bucket.messages:
            if base is not None:
                counts = torch.empty(len(message.pieces), dtype=torch.int64, device=device)
                self.counts.append((message.sender, counts))
            elif message.sender == rank:
                assert read is not None
                for name, region in message.pieces:
                    self._find(name, region).copy_(read(name, region))
            elif message.form == "direct":
                self.receives.append((message.sender, self._find(*message.pieces[0])))
            else:
                regions = [region for _, region in message.pieces]
                num_bytes = count_bytes(message.form, regions, dtype.itemsize)
                flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
                flat = flat if message.form == "fp8" else flat.view(dtype)
                self._flats.append((message, flat))
                self.receives.append((message.sender, flat))

    def allocate(self) -> None:
        """Make room for changes, once it is known how many there are."""
        for message, (sender, tensor) in zip(self._messages, self.counts, strict=True):
            counts: list[int] = tensor.tolist()
            sizes = [region.num_elements for _, region in message.pieces]
            dtype = self._parts[message.pieces[0][0]][1].dtype
            num_bytes = delta.count_bytes(counts, sizes, dtype.itemsize)
            flat = torch.empty(num_bytes, dtype=torch.uint8, device=tensor.device)
            self._changes.append((message, counts, flat))
            if num_bytes:
                self.receives.append((sender, flat))

    def _find(self, name: str, region: Region) -> torch.Tensor:
        part, tensor = self._parts[name]
        return part.region.cut(tensor, region)

    def unpack(self) -> list[tuple[Part, torch.Tensor]]:
        """Put the pieces in their places, once they are received.

        Returns:
            Every part with its elements, in the order of the bucket; vectors as such.
        """
        while self._changes:
            message, counts, flat = self._changes.pop()
            self.receives.clear()
            delta.decode(
                counts, flat, [self._find(name, region) for name, region in message.pieces]
            )
        while self._flats:
            message, flat = self._flats.pop()
            self.receives.clear()
            places = [self._find(name, region) for name, region in message.pieces]
            if message.form == "fp8":
                fp8_weights.decode(flat, places)
                continue
            for place, piece in zip(
                places, flat.split([place.numel() for place in places]), strict=True
            ):
                place.copy_(piece.view(place.shape))
        return [
            (part, tensor if len(part.shape) > 1 else tensor[:, 0])
            for part, tensor in self._parts.values()
        ]


class Receiver:
    """An engine rank's end of the way, from one update to the next."""

    def __init__(
        self,
        group: TransferGroup,
        buckets: Sequence[Bucket],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Args: dtype: of the weights on their way, and of what is received."""
        self._group, self._buckets = group, buckets
        self._dtype, self._device = dtype, device
        self._kept: dict[str, torch.Tensor] = {}
        """What changes refer to: every part as it travelled last, in the host's memory."""

    def receive(self, base_version: int | None) -> Iterator[list[tuple[Part, torch.Tensor]]]:
        """The parts of one update, a bucket at a time. Each list is emptied before the next, which
        needs its memory.

        Args:
            base_version: see `WeightUpdate`.

        Communicates: as `exchange`.
        """
        base = None if base_version is None else self._kept
        for bucket in self._buckets:
            reception = Reception(bucket, self._dtype, self._device, base=base)
            if base is not None:
                exchange(self._group, [], reception.counts)
                reception.allocate()
            exchange(self._group, [], reception.receives)
            parts = reception.unpack()
            if any(message.form == "delta" for message in bucket.messages):
                self._kept |= {part.name: tensor.to("cpu", copy=True) for part, tensor in parts}
            del reception
            yield parts
            parts.clear()


def hash_part(part: Part, tensor: torch.Tensor) -> int:
    """`hash_tensor` of what the engine keeps of a part, however it has travelled."""
    return hash_tensor(fp8_weights.round_trip(tensor) if part.is_fp8 else tensor)


def hash_tensor(tensor: torch.Tensor) -> int:
    """A number that another order or another bit of the elements changes, made on their device.

    Args:
        tensor: of 2 or 4 bytes per element.

    Returns:
        The sum of the elements' bits, each times an odd number of its position, modulo 2^64.
    """
    bits = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
    flat = tensor.contiguous().view(-1).view(bits)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, flat.numel(), _HASH_CHUNK):
        chunk = flat[start : start + _HASH_CHUNK].long()
        weight = torch.arange(start, start + chunk.numel(), device=tensor.device)
        weight = weight * 0x1E3779B97F4A7C15
        weight = ((weight ^ (weight >> 29)) * 0x3F58476D1CE4E5B9) | 1
        total += (chunk * weight).sum()
    return int(total)


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
