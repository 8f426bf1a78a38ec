"""Which part of every Hugging Face tensor a rank of a vLLM engine takes.

vLLM cuts heads, MLPs and the vocabulary over its tensor-parallel ranks, and layers over its stages.
`shard_tensor` holds its loaders to what stands here.

Source: vllm 0.32.0, model_executor/layers/{linear,vocab_parallel_embedding}.py,
    fused_moe/routed_experts.py, models/qwen3.py, models/qwen3_moe.py, distributed/utils.py.
"""

from typing import Any

from megatron_stapo.config import RolloutConfig
from megatron_stapo.rollout.fp8_weights import BLOCK_SIZE
from megatron_stapo.rollout.weight_transfer import Part, Region

_VOCAB_MULTIPLE = 64
"""vLLM pads the vocabulary to it before it cuts it."""


def list_parts(
    model_json: dict[str, Any],
    tp_rank: int,
    tp_size: int,
    pp_rank: int,
    pp_size: int,
    *,
    is_fp8: bool = False,
) -> list[list[Part]]:
    """List what a rank takes, in the order of the network.

    Args:
        model_json: config.json of a Qwen3 model. Its heads, MLPs and experts can be cut: see
            `check_engine_layout`.
        is_fp8: the engine quantises its layers.

    Returns:
        A list for every module, that is for every set of tensors that vLLM loads as one.
    """
    hidden, head_dim = model_json["hidden_size"], model_json["head_dim"]
    vocab, num_layers = model_json["vocab_size"], model_json["num_hidden_layers"]
    num_kv_heads, num_experts = model_json["num_key_value_heads"], model_json.get("num_experts", 0)
    is_tied = model_json["tie_word_embeddings"]
    is_first, is_last = pp_rank == 0, pp_rank == pp_size - 1

    def whole(name: str, *shape: int) -> Part:
        return Part(f"{name}.weight", shape, Region.whole(shape))

    def rows(name: str, num_rows: int, num_columns: int, rank: int, size: int) -> Part:
        mine = num_rows // size
        region = Region(rank * mine, (rank + 1) * mine, 0, num_columns)
        return Part(f"{name}.weight", (num_rows, num_columns), region)

    def columns(name: str, num_rows: int, num_columns: int) -> Part:
        mine = num_columns // tp_size
        region = Region(0, num_rows, tp_rank * mine, (tp_rank + 1) * mine)
        return Part(f"{name}.weight", (num_rows, num_columns), region)

    def vocabulary(name: str) -> Part:
        mine = -(-vocab // _VOCAB_MULTIPLE) * _VOCAB_MULTIPLE // tp_size
        first, end = (min(rank * mine, vocab) for rank in (tp_rank, tp_rank + 1))
        return Part(f"{name}.weight", (vocab, hidden), Region(first, end, 0, hidden))

    def mlp(name: str, size: int) -> tuple[list[Part], Part]:
        halves = [rows(f"{name}.{p}_proj", size, hidden, tp_rank, tp_size) for p in ("gate", "up")]
        return halves, columns(f"{name}.down_proj", hidden, size)

    modules = []
    if is_first or (is_last and is_tied):
        modules.append([vocabulary("model.embed_tokens")])
    num_q = model_json["num_attention_heads"] * head_dim
    # A KV head is not cut: where there are more ranks than heads, several have the same.
    kv_cut = (tp_rank * min(tp_size, num_kv_heads) // tp_size, min(tp_size, num_kv_heads))
    for layer in _list_layers(num_layers, pp_rank, pp_size):
        prefix = f"model.layers.{layer}"
        attention = f"{prefix}.self_attn"
        modules += [
            [whole(f"{prefix}.input_layernorm", hidden)],
            [
                rows(f"{attention}.q_proj", num_q, hidden, tp_rank, tp_size),
                *(
                    rows(f"{attention}.{p}_proj", num_kv_heads * head_dim, hidden, *kv_cut)
                    for p in ("k", "v")
                ),
            ],
            [whole(f"{attention}.q_norm", head_dim)],
            [whole(f"{attention}.k_norm", head_dim)],
            [columns(f"{attention}.o_proj", hidden, num_q)],
            [whole(f"{prefix}.post_attention_layernorm", hidden)],
        ]
        if not num_experts:
            halves, down = mlp(f"{prefix}.mlp", model_json["intermediate_size"])
            modules += [halves, [down]]
            continue
        modules.append([whole(f"{prefix}.mlp.gate", num_experts, hidden)])
        experts: list[Part] = []
        for expert in range(num_experts):
            halves, down = mlp(
                f"{prefix}.mlp.experts.{expert}", model_json["moe_intermediate_size"]
            )
            experts += [*halves, down]
        modules.append(experts)
    if is_last:
        modules.append([whole("model.norm", hidden)])
        if not is_tied:
            modules.append([vocabulary("lm_head")])
    return [_mark_fp8(module) for module in modules] if is_fp8 else modules


def _mark_fp8(module: list[Part]) -> list[Part]:
    """Mark the parts whose blocks begin where they do.

    vLLM cuts blocks after it has fused q, k and v, or gate and up, so each of these has to end with
    a block; of a mixture's experts it fuses the same.
    """
    alone = (".o_proj.weight", ".down_proj.weight")
    fit = all(p.region.num_rows % BLOCK_SIZE == 0 for p in module if not p.name.endswith(alone))
    return [
        part._replace(is_fp8="_proj" in part.name and (fit or part.name.endswith(alone)))
        for part in module
    ]


def list_engine_parts(model_json: dict[str, Any], config: RolloutConfig) -> list[list[list[Part]]]:
    """`list_parts` of every rank of an engine, in their order: that of a stage come together."""
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    return [
        list_parts(
            model_json,
            tp_rank,
            tp_size,
            pp_rank,
            pp_size,
            is_fp8=config.quantization == "fp8",
        )
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    ]


def _list_layers(num_layers: int, pp_rank: int, pp_size: int) -> range:
    """The layers of a stage: what is left over goes to the stages before the last."""
    sizes = [num_layers // pp_size] * pp_size
    for index in range(num_layers % pp_size):
        sizes[-2 - index] += 1
    first = sum(sizes[:pp_rank])
    return range(first, first + sizes[pp_rank])
