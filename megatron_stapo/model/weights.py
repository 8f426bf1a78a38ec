"""Moves weights between Hugging Face tensors and Megatron's shards, in both directions.

One table names the pairs. `shard` and `merge` are inverse to each other bit for bit; every rank
walks the table in the same order, so the collectives of `HfWeights.stream` match without
negotiation.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from megatron_stapo.model.hf_folder import (
    copy_companions,
    find_tensor_files,
    read_tensor,
    set_dtype,
    write_tensors,
)

if TYPE_CHECKING:
    # It imports Megatron, which the names, `shard` and `merge` do without.
    from megatron_stapo.parallel.groups import Groups

Layout = Literal["replicated", "rows", "columns", "qkv", "gate_up", "whole_gate_up"]

_CUT = ("rows", "columns", "qkv", "gate_up")


@dataclass(frozen=True)
class WeightPair:
    """One Megatron parameter and the Hugging Face tensors that it holds."""

    name: str
    """Megatron's in its local spec, with layer and expert numbered over the whole model."""
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    layout: Layout
    """How tensor parallelism cuts it. An expert is not cut."""


def build_weight_table(model_json: dict[str, Any]) -> list[WeightPair]:
    """List every weight of a Qwen3 model, in the order of the network.

    A tied head is absent: the embedding is its weight.
    """
    hidden = model_json["hidden_size"]
    head_dim = model_json["head_dim"]
    num_q = model_json["num_attention_heads"] * head_dim
    num_kv = model_json["num_key_value_heads"] * head_dim
    vocab = model_json["vocab_size"]
    num_experts = model_json.get("num_experts", 0)

    table = [
        WeightPair(
            "embedding.word_embeddings.weight",
            ("model.embed_tokens.weight",),
            ((vocab, hidden),),
            "rows",
        )
    ]

    def add(layer: int, name: str, layout: Layout, **hf: tuple[int, ...]) -> None:
        """Keywords: the Hugging Face names below the layer, with __ for a dot, and shapes."""
        table.append(
            WeightPair(
                f"decoder.layers.{layer}.{name}",
                tuple(f"model.layers.{layer}.{n.replace('__', '.')}.weight" for n in hf),
                tuple(hf.values()),
                layout,
            )
        )

    def add_mlp(
        layer: int, name: str, there: str, size: int, layouts: tuple[Layout, Layout]
    ) -> None:
        gate_up = {f"{there}__{half}_proj": (size, hidden) for half in ("gate", "up")}
        add(layer, f"{name}.linear_fc1.weight", layouts[0], **gate_up)
        add(
            layer,
            f"{name}.linear_fc2.weight",
            layouts[1],
            **{f"{there}__down_proj": (hidden, size)},
        )

    for layer in range(model_json["num_hidden_layers"]):
        add(layer, "input_layernorm.weight", "replicated", input_layernorm=(hidden,))
        add(
            layer,
            "self_attention.linear_qkv.weight",
            "qkv",
            self_attn__q_proj=(num_q, hidden),
            self_attn__k_proj=(num_kv, hidden),
            self_attn__v_proj=(num_kv, hidden),
        )
        add(layer, "self_attention.q_layernorm.weight", "replicated", self_attn__q_norm=(head_dim,))
        add(layer, "self_attention.k_layernorm.weight", "replicated", self_attn__k_norm=(head_dim,))
        add(
            layer, "self_attention.linear_proj.weight", "columns", self_attn__o_proj=(hidden, num_q)
        )
        add(layer, "pre_mlp_layernorm.weight", "replicated", post_attention_layernorm=(hidden,))
        if not num_experts:
            add_mlp(layer, "mlp", "mlp", model_json["intermediate_size"], ("gate_up", "columns"))
            continue
        add(layer, "mlp.router.weight", "replicated", mlp__gate=(num_experts, hidden))
        for expert in range(num_experts):
            add_mlp(
                layer,
                f"mlp.experts.{expert}",
                f"mlp__experts__{expert}",
                model_json["moe_intermediate_size"],
                ("whole_gate_up", "replicated"),
            )
    table.append(
        WeightPair(
            "decoder.final_layernorm.weight", ("model.norm.weight",), ((hidden,),), "replicated"
        )
    )
    if not model_json["tie_word_embeddings"]:
        table.append(
            WeightPair("output_layer.weight", ("lm_head.weight",), ((vocab, hidden),), "rows")
        )
    return table


def shard(
    hf_tensors: list[torch.Tensor], layout: Layout, tp_rank: int, tp_size: int, num_kv_heads: int
) -> torch.Tensor:
    """Cut one tensor-parallel rank's Megatron parameter out of full Hugging Face tensors.

    qkv holds, per KV head, its query heads, its key and its value. gate_up holds this rank's rows
    of gate, then its rows of up; whole_gate_up all rows of both.
    """
    if layout == "replicated":
        return hf_tensors[0]
    if layout == "whole_gate_up":
        return torch.cat(hf_tensors)
    if layout == "columns":
        return hf_tensors[0].chunk(tp_size, dim=1)[tp_rank]
    if layout == "qkv":
        by_head = [t.view(num_kv_heads, -1, t.shape[-1]) for t in hf_tensors]
        mine = torch.cat(by_head, dim=1).chunk(tp_size, dim=0)[tp_rank]
        return mine.reshape(-1, mine.shape[-1])
    return torch.cat([t.chunk(tp_size, dim=0)[tp_rank] for t in hf_tensors])


def merge(
    shards: list[torch.Tensor],
    layout: Layout,
    hf_shapes: tuple[tuple[int, ...], ...],
    num_kv_heads: int,
) -> list[torch.Tensor]:
    """Undo `shard`: full Hugging Face tensors from the parameters of all tensor-parallel ranks."""
    if layout == "replicated":
        return [shards[0]]
    if layout == "whole_gate_up":
        return list(shards[0].chunk(2))
    if layout == "columns":
        return [torch.cat(shards, dim=1)]
    if layout == "qkv":
        by_head = torch.cat(shards).view(num_kv_heads, -1, shards[0].shape[-1])
        rows = [shape[0] // num_kv_heads for shape in hf_shapes]
        return [
            part.reshape(shape)
            for part, shape in zip(by_head.split(rows, dim=1), hf_shapes, strict=True)
        ]
    parts = zip(*(s.chunk(len(hf_shapes)) for s in shards), strict=True)
    return [torch.cat(part) for part in parts]


@dataclass(frozen=True)
class Block:
    """Whole rows of a rank's parameter, and where they lie in the parameter of the whole model."""

    first_row: int
    num_rows: int
    offset: tuple[int, ...]


def locate(pair: WeightPair, tp_rank: int, tp_size: int) -> tuple[tuple[int, ...], list[Block]]:
    """Say where the rows that `shard` cuts out lie in what it gives for one rank alone.

    Returns:
        Shape of the whole parameter; the rank's rows, in blocks that are together there and here.
    """
    num_rows = sum(shape[0] for shape in pair.hf_shapes)
    shape = (num_rows, *pair.hf_shapes[0][1:])
    zeros = (0,) * (len(shape) - 1)
    if pair.layout not in _CUT:
        return shape, [Block(0, num_rows, (0, *zeros))]
    if pair.layout == "columns":
        return shape, [Block(0, num_rows, (0, tp_rank * shape[1] // tp_size))]
    # The halves of gate_up lie apart in the whole.
    num_parts = 2 if pair.layout == "gate_up" else 1
    part = num_rows // num_parts
    mine = part // tp_size
    return shape, [
        Block(number * mine, mine, (number * part + tp_rank * mine, *zeros))
        for number in range(num_parts)
    ]


class HfWeights:
    """The weights of a model in this rank's chunks, by their Hugging Face names."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        path: str,
        model_json: dict[str, Any],
        groups: "Groups",
    ) -> None:
        """Args: chunks and groups of this rank; path, the model's folder.

        Communicates: an all-gather of parameter names over all ranks.
        """
        self._path = path
        self._json = model_json
        self._groups = groups
        self._table = build_weight_table(model_json)
        self._pairs = {pair.name: pair for pair in self._table}
        if model_json["tie_word_embeddings"]:
            # The last stage has a copy of the embedding as its head.
            self._pairs["output_layer.weight"] = self._pairs["embedding.word_embeddings.weight"]
        self._parameters = _name_parameters(chunks, groups, model_json.get("num_experts", 0))
        holdings: list[Any] = [None] * groups.world_size
        dist.all_gather_object(holdings, (groups.tp_rank, list(self._parameters)))
        self.holdings: list[tuple[int, list[str]]] = holdings
        """Of every rank: its tensor-parallel rank, and names as of `named_parameters`."""
        # Of the ranks that hold a parameter the first sends it: it is the first of its
        # tensor-parallel group.
        self._senders = {
            name: rank for rank in reversed(range(groups.world_size)) for name in holdings[rank][1]
        }

    def load(self) -> None:
        """Fill this rank's parameters from the safetensors of the folder.

        Mutates: every parameter, cast to its dtype.

        Raises:
            ValueError: a tensor is missing or has another shape, or a parameter was not filled.
        """
        files = find_tensor_files(self._path)
        for name, parameter in self._parameters.items():
            if name not in self._pairs:
                raise ValueError(f"model.path={self._path}: no tensor for the parameter {name}.")
            pair = self._pairs[name]
            tensors = [
                read_tensor(files, self._path, hf_name, shape)
                for hf_name, shape in zip(pair.hf_names, pair.hf_shapes, strict=True)
            ]
            tp_rank, tp_size = self._groups.tp_rank, self._groups.tp_size
            num_kv_heads = self._json["num_key_value_heads"]
            with torch.no_grad():
                parameter.copy_(shard(tensors, pair.layout, tp_rank, tp_size, num_kv_heads))

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, bool]]:
        """This rank's parameters by their names over the whole model, and whether tensor
        parallelism cuts them."""
        for name, parameter in self._parameters.items():
            yield name, parameter, self.find_pair(name).layout in _CUT

    def find_pair(self, name: str) -> WeightPair:
        """The weight of a parameter of `named_parameters`; the copy of a tied head is the
        embedding."""
        return self._pairs[name]

    def find_parameter(self, name: str) -> torch.nn.Parameter:
        """This rank's parameter of a name of `named_parameters`."""
        return self._parameters[name]

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Shape of the part of a parameter that this rank holds."""
        return tuple(self._parameters[name].shape)

    def stream(
        self, read: Callable[[torch.nn.Parameter], torch.Tensor] = torch.Tensor.detach
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Stream the weights to rank 0 under their Hugging Face names.

        Every rank must exhaust the iterator; only rank 0 gets items. One parameter is gathered at a
        time, so rank 0 never holds the model twice.

        Args:
            read: takes from a parameter what is streamed, of its shape and the model's dtype.

        Communicates: per parameter an all-gather over the tp_group of its first holder, then one
            send per tensor to rank 0. Other holders take no part.
        """
        groups = self._groups
        dtype = next(iter(self._parameters.values())).dtype
        tp_head = dist.get_global_rank(groups.tp_group, 0)
        for pair in self._table:
            sender = self._senders[pair.name]
            is_cut = pair.layout in _CUT and groups.tp_size > 1
            if groups.rank == sender or (is_cut and tp_head == sender):
                mine = read(self._parameters[pair.name]).contiguous()
                shards = [mine]
                if is_cut:
                    shards = [torch.empty_like(mine) for _ in range(groups.tp_size)]
                    dist.all_gather(shards, mine, group=groups.tp_group)
                if groups.rank != sender:
                    continue
                num_kv_heads = self._json["num_key_value_heads"]
                tensors = merge(shards, pair.layout, pair.hf_shapes, num_kv_heads)
                for name, tensor in zip(pair.hf_names, tensors, strict=True):
                    if groups.rank == 0:
                        yield name, tensor
                    else:
                        dist.send(tensor.contiguous(), dst=0)
            elif groups.rank == 0:
                for name, shape in zip(pair.hf_names, pair.hf_shapes, strict=True):
                    tensor = torch.empty(shape, dtype=dtype, device=groups.device)
                    dist.recv(tensor, src=sender)
                    yield name, tensor

    def save(self, out: Path) -> None:
        """Write a Hugging Face folder, with the files beside the tensors of the one it came from.

        Called by every rank; rank 0 writes, and holds one file's tensors at a time.

        Communicates: as `stream`.
        """
        tensors = self.stream()
        if self._groups.rank != 0:
            for _ in tensors:  # nothing but the sends
                pass
            return
        copy_companions(Path(self._path), out)
        dtype = next(iter(self._parameters.values())).dtype
        set_dtype(out, str(dtype).removeprefix("torch."))
        write_tensors(out, tensors)


# Transformer Engine's names, which fuse a norm into the projection after it, for the local spec's.
_LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


def _name_parameters(
    chunks: Sequence[torch.nn.Module], groups: "Groups", num_experts: int
) -> dict[str, torch.nn.Parameter]:
    """Number layers and experts over the whole model, whatever chunk and rank hold them."""
    first_expert = groups.ep_rank * (num_experts // groups.ep_size)
    named = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if match := re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name):
                layer = chunk.decoder.layers[int(match[1])].layer_number - 1
                rest = _LOCAL_NAMES.get(match[2], match[2])
                # One module per expert, or one that groups their matrices.
                expert = re.fullmatch(
                    r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc\d\.weight)", rest
                ) or re.fullmatch(r"mlp\.experts\.(linear_fc\d\.weight)(\d+)", rest)
                if expert:
                    number, matrix = sorted(expert.groups())  # digits sort before letters
                    rest = f"mlp.experts.{first_expert + int(number)}.{matrix}"
                name = f"decoder.layers.{layer}.{rest}"
            named[name] = parameter
    return named
