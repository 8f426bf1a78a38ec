"""Moves weights between Hugging Face tensors and Megatron's shards, in both directions.

One table names the pairs. `shard` and `merge` are inverse to each other bit for bit; every rank
walks the table in the same order, so the collectives of `iter_hf_weights` match without
negotiation.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from megatron_stapo.parallel.groups import Groups

_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
"""What a Hugging Face folder holds beside its tensors."""

Layout = Literal["replicated", "rows", "columns", "qkv", "gate_up"]


@dataclass(frozen=True)
class WeightPair:
    """One Megatron parameter and the Hugging Face tensors that it holds."""

    megatron_names: tuple[str, ...]
    """The local spec's name, then Transformer Engine's where it differs."""
    hf_names: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    layout: Layout
    """How tensor parallelism cuts it."""
    stage: int
    """Pipeline stage that holds it."""


def build_weight_table(model_json: dict[str, Any], pp_size: int) -> list[WeightPair]:
    """List every weight of a Qwen3 dense model, in the order of the network.

    A tied head is absent: the embedding is its weight.
    """
    hidden = model_json["hidden_size"]
    head_dim = model_json["head_dim"]
    num_q = model_json["num_attention_heads"] * head_dim
    num_kv = model_json["num_key_value_heads"] * head_dim
    mlp = model_json["intermediate_size"]
    vocab = model_json["vocab_size"]
    num_layers = model_json["num_hidden_layers"]
    layers_per_stage = num_layers // pp_size
    last = pp_size - 1

    table = [
        WeightPair(
            ("embedding.word_embeddings.weight",),
            ("model.embed_tokens.weight",),
            ((vocab, hidden),),
            "rows",
            0,
        )
    ]
    for layer in range(num_layers):
        stage, local = divmod(layer, layers_per_stage)
        here, there = f"decoder.layers.{local}.", f"model.layers.{layer}."

        def add(
            names: tuple[str, ...],
            hf: tuple[tuple[str, tuple[int, ...]], ...],
            layout: Layout,
            *,
            here: str = here,
            there: str = there,
            stage: int = stage,
        ) -> None:
            table.append(
                WeightPair(
                    tuple(here + name for name in names),
                    tuple(there + name for name, _ in hf),
                    tuple(shape for _, shape in hf),
                    layout,
                    stage,
                )
            )

        add(
            ("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight"),
            (("input_layernorm.weight", (hidden,)),),
            "replicated",
        )
        add(
            ("self_attention.linear_qkv.weight",),
            (
                ("self_attn.q_proj.weight", (num_q, hidden)),
                ("self_attn.k_proj.weight", (num_kv, hidden)),
                ("self_attn.v_proj.weight", (num_kv, hidden)),
            ),
            "qkv",
        )
        for head in ("q", "k"):
            add(
                (f"self_attention.{head}_layernorm.weight",),
                ((f"self_attn.{head}_norm.weight", (head_dim,)),),
                "replicated",
            )
        add(
            ("self_attention.linear_proj.weight",),
            (("self_attn.o_proj.weight", (hidden, num_q)),),
            "columns",
        )
        add(
            ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
            (("post_attention_layernorm.weight", (hidden,)),),
            "replicated",
        )
        add(
            ("mlp.linear_fc1.weight",),
            (("mlp.gate_proj.weight", (mlp, hidden)), ("mlp.up_proj.weight", (mlp, hidden))),
            "gate_up",
        )
        add(("mlp.linear_fc2.weight",), (("mlp.down_proj.weight", (hidden, mlp)),), "columns")
    table.append(
        WeightPair(
            ("decoder.final_layernorm.weight",),
            ("model.norm.weight",),
            ((hidden,),),
            "replicated",
            last,
        )
    )
    if not model_json["tie_word_embeddings"]:
        table.append(
            WeightPair(
                ("output_layer.weight",), ("lm_head.weight",), ((vocab, hidden),), "rows", last
            )
        )
    return table


def shard(
    hf_tensors: list[torch.Tensor], layout: Layout, tp_rank: int, tp_size: int, num_kv_heads: int
) -> torch.Tensor:
    """Cut one tensor-parallel rank's Megatron parameter out of full Hugging Face tensors.

    qkv holds, per KV head, its query heads, its key and its value. gate_up holds this rank's rows
    of gate, then its rows of up.
    """
    if layout == "replicated":
        return hf_tensors[0]
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


def load_hf_weights(
    model: torch.nn.Module, path: str, model_json: dict[str, Any], groups: Groups
) -> None:
    """Fill this rank's parameters from the safetensors of a Hugging Face folder.

    Mutates: every parameter of model, cast to its dtype.

    Raises:
        ValueError: a tensor is missing or has another shape, or a parameter was not filled.
    """
    files = _find_tensor_files(path)
    parameters = dict(model.named_parameters())
    filled = set()
    table = build_weight_table(model_json, groups.pp_size)
    if model_json["tie_word_embeddings"] and groups.is_last_stage and not groups.is_first_stage:
        # The last stage has a copy of the embedding as its head.
        table.append(
            WeightPair(
                ("output_layer.weight",),
                table[0].hf_names,
                table[0].hf_shapes,
                "rows",
                groups.pp_rank,
            )
        )
    for pair in table:
        if pair.stage != groups.pp_rank:
            continue
        name = _find_parameter(pair, parameters)
        tensors = [
            _read_tensor(files, path, hf_name, shape)
            for hf_name, shape in zip(pair.hf_names, pair.hf_shapes, strict=True)
        ]
        with torch.no_grad():
            parameters[name].copy_(
                shard(
                    tensors,
                    pair.layout,
                    groups.tp_rank,
                    groups.tp_size,
                    model_json["num_key_value_heads"],
                )
            )
        filled.add(name)
    if parameters.keys() - filled:
        raise ValueError(
            f"model.path={path}: no tensor for the parameters {sorted(parameters.keys() - filled)}."
        )


def iter_hf_weights(
    model: torch.nn.Module, model_json: dict[str, Any], groups: Groups
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream the model's weights to rank 0 under their Hugging Face names.

    Every rank must exhaust the iterator; only rank 0 gets items. One parameter is gathered at a
    time, so rank 0 never holds the model twice.

    Communicates: per parameter an all-gather over tp_group in its stage, then one send per tensor
        to
    rank 0. Data-parallel replicas other than the first take no part.
    """
    if groups.dp_rank != 0:
        return
    parameters = dict(model.named_parameters())
    for pair in build_weight_table(model_json, groups.pp_size):
        if groups.pp_rank != pair.stage:
            if groups.rank == 0:
                # The dtype is that of every other weight, since the whole model has one.
                dtype = next(iter(parameters.values())).dtype
                sender = dist.get_global_rank(groups.pp_group, pair.stage)
                for name, shape in zip(pair.hf_names, pair.hf_shapes, strict=True):
                    tensor = torch.empty(shape, dtype=dtype, device=groups.device)
                    dist.recv(tensor, src=sender)
                    yield name, tensor
            continue
        parameter = parameters[_find_parameter(pair, parameters)].detach().contiguous()
        shards = [parameter]
        if groups.tp_size > 1 and pair.layout != "replicated":
            shards = [torch.empty_like(parameter) for _ in range(groups.tp_size)]
            dist.all_gather(shards, parameter, group=groups.tp_group)
        if groups.tp_rank != 0:
            continue
        tensors = merge(shards, pair.layout, pair.hf_shapes, model_json["num_key_value_heads"])
        for name, tensor in zip(pair.hf_names, tensors, strict=True):
            if groups.rank == 0:
                yield name, tensor
            else:
                dist.send(tensor.contiguous(), dst=dist.get_global_rank(groups.pp_group, 0))


def save_hf_model(
    model: torch.nn.Module, source: str, out: Path, model_json: dict[str, Any], groups: Groups
) -> None:
    """Write the weights as a Hugging Face folder beside the files of the model that it came from.

    Called by every rank; rank 0 writes. The tensors go into one file.

    Communicates: as `iter_hf_weights`.
    """
    tensors = {
        # A clone, because a tensor of one rank is a view of the live parameter.
        name: tensor.to("cpu", copy=True)
        for name, tensor in iter_hf_weights(model, model_json, groups)
    }
    if groups.rank != 0:
        return
    out.mkdir(parents=True, exist_ok=True)
    for pattern in _COMPANIONS:
        for file in Path(source).glob(pattern):
            shutil.copyfile(file, out / file.name)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


def _find_parameter(pair: WeightPair, parameters: dict[str, torch.nn.Parameter]) -> str:
    for name in pair.megatron_names:
        if name in parameters:
            return name
    raise AssertionError(f"no parameter named {' or '.join(pair.megatron_names)}")


def _find_tensor_files(path: str) -> dict[str, Path]:
    """Map every tensor name of the folder to its file."""
    index = Path(path) / "model.safetensors.index.json"
    if index.is_file():
        return {
            name: Path(path) / file
            for name, file in json.loads(index.read_text())["weight_map"].items()
        }
    file = Path(path) / "model.safetensors"
    if not file.is_file():
        raise ValueError(
            f"model.path={path}: has neither model.safetensors nor model.safetensors.index.json; "
            "give a folder with safetensors weights."
        )
    with safe_open(file, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), file)


def _read_tensor(
    files: dict[str, Path], path: str, name: str, shape: tuple[int, ...]
) -> torch.Tensor:
    if name not in files:
        raise ValueError(f"model.path={path}: has no tensor {name}, which config.json asks for.")
    with safe_open(files[name], framework="pt") as tensors:
        tensor = tensors.get_tensor(name)
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"model.path={path}: tensor {name} has shape {tuple(tensor.shape)}, but config.json "
            f"asks for {shape}."
        )
    return tensor
