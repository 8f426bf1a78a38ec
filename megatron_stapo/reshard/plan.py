"""Who sends what to whom, so that every engine rank gets its part of every weight and no more.

Made once from the two layouts alone; its bytes are known before it runs. Megatron's parameters are
cut into `Holding`s, rectangles of Hugging Face tensors; each is matched with the engine ranks'
parts. Of the ranks that hold the same the least busy one sends.

Source: megatron.core.resharding (0.19.2) plans likewise between two Megatron models. It knows no
tensors but Megatron's, which vLLM's ranks have not, and moves them within one world of ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron_stapo.model.weights import HfWeights, WeightPair
from megatron_stapo.rollout.fp8_weights import BLOCK_SIZE
from megatron_stapo.rollout.weight_transfer import (
    Bucket,
    Form,
    Message,
    Part,
    Region,
    count_bytes,
    count_scratch_bytes,
)

_DIRECT_BYTES = 1 << 16
"""A piece of this size is worth a message of its own, that needs no copy at either end."""


class Holding(NamedTuple):
    """A rectangle of a Hugging Face tensor, and where it lies in a rank's parameter."""

    name: str
    """Hugging Face's."""
    region: Region
    parameter: str
    """Name of `HfWeights.named_parameters`."""
    row: int
    """Of the parameter."""
    column: int

    def view(self, parameter: torch.Tensor, region: Region) -> torch.Tensor:
        """The view of the rank's parameter that shows a region inside this one: [rows, columns]."""
        matrix = parameter if parameter.dim() > 1 else parameter[:, None]
        mine = self.region
        inner = matrix[
            self.row : self.row + mine.num_rows, self.column : self.column + mine.num_columns
        ]
        return mine.cut(inner, region)


def list_holdings(
    parameter: str, pair: WeightPair, tp_rank: int, tp_size: int, num_kv_heads: int
) -> list[Holding]:
    """Say where the rows and columns of a rank's parameter lie in Hugging Face tensors.

    The counterpart of `model.weights.shard`, whose layouts these are.

    Args:
        parameter: the rank's name of it; pair's own, but for the copy of a tied head.
    """
    wholes = [Region.whole(shape) for shape in pair.hf_shapes]

    def hold(index: int, region: Region, row: int) -> Holding:
        return Holding(pair.hf_names[index], region, parameter, row, 0)

    def cut_rows(index: int, rank: int, size: int) -> Region:
        mine = wholes[index].num_rows // size
        return wholes[index]._replace(first_row=rank * mine, end_row=(rank + 1) * mine)

    if pair.layout == "columns":
        mine = wholes[0].num_columns // tp_size
        region = wholes[0]._replace(first_column=tp_rank * mine, end_column=(tp_rank + 1) * mine)
        return [hold(0, region, 0)]
    # Blocks of rows: of every tensor one after the other; of qkv so for one KV head after another.
    if pair.layout == "qkv":
        heads = num_kv_heads // tp_size
        cuts = [
            (index, cut_rows(index, head, num_kv_heads))
            for head in range(tp_rank * heads, (tp_rank + 1) * heads)
            for index in range(len(wholes))
        ]
    else:
        rank, size = (tp_rank, tp_size) if pair.layout in ("rows", "gate_up") else (0, 1)
        cuts = [(index, cut_rows(index, rank, size)) for index in range(len(wholes))]
    holdings, row = [], 0
    for index, region in cuts:
        holdings.append(hold(index, region, row))
        row += region.num_rows
    return holdings


def list_rank_holdings(weights: HfWeights, tp_size: int, num_kv_heads: int) -> list[list[Holding]]:
    """What every trainer rank holds, by rank."""
    found: dict[tuple[int, str], list[Holding]] = {}
    for tp_rank, names in weights.holdings:
        for name in names:
            if (tp_rank, name) not in found:
                pair = weights.find_pair(name)
                found[tp_rank, name] = list_holdings(name, pair, tp_rank, tp_size, num_kv_heads)
    return [
        [holding for name in names for holding in found[tp_rank, name]]
        for tp_rank, names in weights.holdings
    ]


class SendMessage(NamedTuple):
    """A message, as its sender knows it."""

    receiver: int
    pieces: list[tuple[Holding, Region]]
    form: Form

    def count_bytes(self, element_bytes: int) -> int:
        """What travels."""
        return count_bytes(self.form, [region for _, region in self.pieces], element_bytes)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The messages of one update of one engine, in buckets."""

    element_bytes: int
    sends: list[dict[int, list[SendMessage]]]
    """Of every bucket, by sender."""
    receives: list[dict[int, Bucket]]
    """Of every bucket, by receiver."""

    def list_buckets(self, receiver: int) -> list[Bucket]:
        """What a rank receives; empty buckets where it takes no part."""
        nothing = Bucket(parts=[], messages=[])
        return [bucket.get(receiver, nothing) for bucket in self.receives]

    def count_received_bytes(self, receiver: int) -> int:
        """Bytes that a rank gets from others in an update."""
        return sum(
            message.count_bytes(self.element_bytes)
            for bucket in self.sends
            for sender, messages in bucket.items()
            if sender != receiver
            for message in messages
            if message.receiver == receiver
        )

    def count_sent_bytes(self, sender: int) -> int:
        """Bytes that a rank sends to others in an update."""
        return sum(
            message.count_bytes(self.element_bytes)
            for bucket in self.sends
            for message in bucket.get(sender, ())
            if message.receiver != sender
        )

    def find_peak_bytes(self, rank: int) -> int:
        """The most memory that a rank takes beside the weights, as sender and as receiver."""
        return max(
            (
                _count_packed_bytes(sends.get(rank, ()), rank, self.element_bytes)
                + (receives[rank].count_bytes(self.element_bytes, rank) if rank in receives else 0)
                + _count_scratch_bytes(sends.get(rank, ()), receives.get(rank), rank)
                for sends, receives in zip(self.sends, self.receives, strict=True)
            ),
            default=0,
        )


def _count_packed_bytes(messages: Iterable[SendMessage], sender: int, element_bytes: int) -> int:
    """What a sender packs; direct messages are sent from where the weights lie, and changes are
    collected before they are packed."""
    return sum(
        message.count_bytes(element_bytes) * (2 if message.form == "delta" else 1)
        for message in messages
        if message.form != "direct" and message.receiver != sender
    )


def _count_scratch_bytes(sends: Iterable[SendMessage], bucket: Bucket | None, rank: int) -> int:
    """What packing or unpacking one message takes, at the most."""
    messages = [(m.form, m.pieces) for m in sends if m.receiver != rank]
    if bucket is not None:
        messages += [(m.form, m.pieces) for m in bucket.messages if m.sender != rank]
    return max(
        (count_scratch_bytes(form, [region for _, region in pieces]) for form, pieces in messages),
        default=0,
    )


def build_plan(
    holdings: Sequence[Sequence[Holding]],
    parts: Sequence[Sequence[Sequence[Part]]],
    receivers: Sequence[int],
    *,
    element_bytes: int,
    bucket_bytes: int,
    turn: int = 0,
    is_delta: bool = False,
) -> Plan:
    """Match what the trainer's ranks hold with what an engine's ranks take.

    Args:
        holdings: of every trainer rank.
        parts: of every engine rank, `list_parts`.
        receivers: number of every engine rank in the group. One that is a trainer rank as well
            sends itself what it holds.
        bucket_bytes: most that a rank holds of a bucket beside its weights. A module that is larger
            by itself is a bucket of its own.
        turn: of the engine among several: where ranks are equally busy, another one sends.
        is_delta: only what changed will travel.

    Raises:
        ValueError: a part is held by nobody, names the tensor.
    """
    holders: dict[str, dict[Region, list[tuple[int, Holding]]]] = defaultdict(dict)
    for rank, held in enumerate(holdings):
        for holding in held:
            holders[holding.name].setdefault(holding.region, []).append((rank, holding))
    num_ranks = len(holdings)
    loads = [0] * num_ranks

    def find_pieces(part: Part, receiver: int) -> list[tuple[int, Holding, Region]]:
        pieces, missing = [], part.region.num_elements
        for region, replicas in holders[part.name].items():
            common = region.intersect(part.region)
            if common.num_elements == 0:
                continue
            sender, holding = min(
                replicas,
                key=lambda replica: (
                    replica[0] != receiver,
                    loads[replica[0]],
                    (replica[0] - turn) % num_ranks,
                ),
            )
            if sender != receiver:
                loads[sender] += common.num_elements
            missing -= common.num_elements
            pieces.append((sender, holding, common))
        if missing:
            raise ValueError(
                f"weight {part.name}: the engine takes {part.region} of {list(part.shape)}, and "
                f"the trainer's ranks hold {part.region.num_elements - missing} of these "
                f"{part.region.num_elements} elements."
            )
        return pieces

    sends: list[dict[int, list[SendMessage]]] = []
    receives: list[dict[int, Bucket]] = []
    used: dict[int, int] = defaultdict(int)  # bytes of the open bucket, by rank
    for module in _interleave(parts, holders):
        found = {
            receiver: [(part, find_pieces(part, receiver)) for part in mine]
            for receiver, mine in zip(receivers, module, strict=True)
            if mine
        }
        new_sends, new_receives = _form_messages(found, element_bytes, is_delta)
        needed: dict[int, int] = defaultdict(int)
        for rank, messages in new_sends.items():
            needed[rank] += _count_packed_bytes(messages, rank, element_bytes)
        for rank, bucket in new_receives.items():
            needed[rank] += bucket.count_bytes(element_bytes, rank)
        if not sends or any(used[rank] + n > bucket_bytes for rank, n in needed.items()):
            sends.append({})
            receives.append({})
            used.clear()
        for rank, num_bytes in needed.items():
            used[rank] += num_bytes
        for sender, messages in new_sends.items():
            sends[-1].setdefault(sender, []).extend(messages)
        for receiver, bucket in new_receives.items():
            open_bucket = receives[-1].setdefault(receiver, Bucket(parts=[], messages=[]))
            open_bucket.parts.extend(bucket.parts)
            open_bucket.messages.extend(bucket.messages)
    return Plan(element_bytes=element_bytes, sends=sends, receives=receives)


def _interleave(
    parts: Sequence[Sequence[Sequence[Part]]],
    holders: dict[str, dict[Region, list[tuple[int, Holding]]]],
) -> list[list[Sequence[Part]]]:
    """Order the modules so that neighbours come from different stages of the trainer, which send at
    the same time.

    Returns:
        Of every module what each engine rank takes; nothing where the module is in another stage.
    """
    by_module: dict[str, list[Sequence[Part]]] = {}
    for rank, modules in enumerate(parts):
        for module in modules:
            mine = by_module.setdefault(module[0].name, [()] * len(parts))
            mine[rank] = module
    places: dict[int, int] = defaultdict(int)  # modules so far, by the first rank that holds them
    keys = {}
    for name in by_module:
        replicas = next(iter(holders[name].values()), [(0, None)])
        first = min(rank for rank, _ in replicas)
        keys[name] = (places[first], first)
        places[first] += 1
    return [by_module[name] for name in sorted(by_module, key=lambda name: keys[name])]


def _form_messages(
    found: dict[int, list[tuple[Part, list[tuple[int, Holding, Region]]]]],
    element_bytes: int,
    is_delta: bool,
) -> tuple[dict[int, list[SendMessage]], dict[int, Bucket]]:
    """The messages of one module, by sender and by receiver."""
    sends: dict[int, list[SendMessage]] = defaultdict(list)
    receives: dict[int, Bucket] = {}
    for receiver, parts in found.items():
        bucket = Bucket(parts=[part for part, _ in parts], messages=[])
        messages: list[tuple[int, Form, list[tuple[Holding, Region]]]] = []
        together: dict[tuple[int, Form], list[tuple[Holding, Region]]] = defaultdict(list)
        for part, pieces in parts:
            for sender, holding, region in pieces:
                form = "delta" if is_delta else _choose_form(part, holding, region, element_bytes)
                if form == "direct":
                    messages.append((sender, form, [(holding, region)]))
                else:
                    together[sender, form].append((holding, region))
        messages += [(sender, form, held) for (sender, form), held in together.items()]
        for sender, form, held in messages:
            sends[sender].append(SendMessage(receiver, held, form))
            named = [(holding.name, region) for holding, region in held]
            bucket.messages.append(Message(sender, named, form))
        receives[receiver] = bucket
    return sends, receives


def _choose_form(part: Part, holding: Holding, region: Region, element_bytes: int) -> Form:
    """How a piece travels."""
    whole = part.region
    if part.is_fp8 and all(
        (place - first) % BLOCK_SIZE == 0 or place == end
        for first, end, places in (
            (whole.first_row, whole.end_row, (region.first_row, region.end_row)),
            (whole.first_column, whole.end_column, (region.first_column, region.end_column)),
        )
        for place in places
    ):
        return "fp8"
    has_all_columns = whole.num_columns == holding.region.num_columns == region.num_columns
    if has_all_columns and region.num_elements * element_bytes >= _DIRECT_BYTES:
        return "direct"
    return "packed"
