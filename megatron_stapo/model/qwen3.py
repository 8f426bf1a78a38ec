"""Builds Megatron's GPTModel for a Qwen3 model, dense or mixture of experts, from its config.json.

This file alone translates our config into Megatron's. The vocabulary is never padded.
"""

import dataclasses
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)

from megatron_stapo.config import (
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    load_model_json,
)
from megatron_stapo.model.cpu_layers import PackedAttention, RMSNorm
from megatron_stapo.model.router import BalancedRouter
from megatron_stapo.parallel.groups import Groups

# What this file builds. A folder that says otherwise describes another network.
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "use_sliding_window": False,
    "attention_dropout": 0.0,
    # Every layer of a mixture has experts.
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}


def build_model(
    config: ModelConfig, parallel: ParallelConfig, precision: PrecisionConfig, groups: Groups
) -> list[GPTModel]:
    """Build this rank's chunks of the model, their weights not yet loaded.

    Returns:
        One chunk, or virtual_pipeline_model_parallel_size in the order of the network.

    Communicates: for tied embeddings over several pipeline stages, one all-reduce of the embedding
    over its group.

    Raises:
        ValueError: config.json asks for something that this network does not have.
    """
    model_json = load_model_json(config.path)
    for key, value in _FIXED.items():
        if model_json.get(key, value) != value:
            raise ValueError(
                f"model.path={config.path}: config.json has {key}={model_json[key]}, but the Qwen3 "
                f"model here supports only {value}."
            )
    transformer_config = build_transformer_config(config, parallel, precision, model_json)
    num_chunks = parallel.virtual_pipeline_model_parallel_size
    return [
        GPTModel(
            config=transformer_config,
            transformer_layer_spec=_build_block_spec(
                transformer_config, groups.device, chunk if num_chunks > 1 else None
            ),
            vocab_size=model_json["vocab_size"],
            max_sequence_length=model_json["max_position_embeddings"],
            pre_process=groups.is_first_stage and chunk == 0,
            post_process=groups.is_last_stage and chunk == num_chunks - 1,
            share_embeddings_and_output_weights=model_json["tie_word_embeddings"],
            position_embedding_type="rope",
            rotary_base=_read_rope_theta(config.path, model_json),
            vp_stage=chunk if num_chunks > 1 else None,
        ).to(groups.device)
        for chunk in range(num_chunks)
    ]


def build_transformer_config(
    config: ModelConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    model_json: dict[str, Any],
) -> TransformerConfig:
    """Translate the model's and our settings into Megatron's.

    calculate_per_token_loss: the loss function returns sums, and Megatron divides the gradients
    once by the token count of all data- and context-parallel ranks.
    """
    dtype = getattr(torch, config.dtype)
    virtual_size = parallel.virtual_pipeline_model_parallel_size
    recompute: dict[str, Any] = {
        "none": {},
        "selective": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
        "full": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    }[parallel.recompute]
    experts: dict[str, Any] = {}
    if "num_experts" in model_json:
        experts = {
            "num_moe_experts": model_json["num_experts"],
            "moe_router_topk": model_json["num_experts_per_tok"],
            "moe_ffn_hidden_size": model_json["moe_intermediate_size"],
            # A softmax over the chosen logits is the softmax over all, normalised over the chosen.
            "moe_router_pre_softmax": not model_json["norm_topk_prob"],
            "moe_router_dtype": "fp32" if precision.match_engine else None,
            # `BalancedRouter` has its own, which does not depend on the microbatches.
            "moe_router_load_balancing_type": "none",
            "moe_grouped_gemm": parallel.device == "cuda",
            "expert_tensor_parallel_size": 1,
        }
    fp8: dict[str, Any] = {}
    if precision.fp8 != "none":
        first, last = precision.num_first_layers_bf16, precision.num_last_layers_bf16
        fp8 = {
            # One scale for a whole tensor leaves gradients, which spread the widest, too few
            # exponents in E4M3: hybrid gives them E5M2.
            "fp8": "hybrid" if precision.fp8 == "tensorwise" else "e4m3",
            "fp8_recipe": precision.fp8,
            "first_last_layers_bf16": first + last > 0,
            "num_layers_at_start_in_bf16": first,
            "num_layers_at_end_in_bf16": last,
        }
    return TransformerConfig(
        num_layers=model_json["num_hidden_layers"],
        hidden_size=model_json["hidden_size"],
        ffn_hidden_size=model_json["intermediate_size"],
        num_attention_heads=model_json["num_attention_heads"],
        num_query_groups=model_json["num_key_value_heads"],
        kv_channels=model_json["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=model_json["rms_norm_eps"],
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=virtual_size if virtual_size > 1 else None,
        num_layers_in_first_pipeline_stage=parallel.num_layers_in_first_pipeline_stage,
        num_layers_in_last_pipeline_stage=parallel.num_layers_in_last_pipeline_stage,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        # Interleaved over two stages, the next one is also the previous one: batched exchanges
        # would mix up the two directions.
        overlap_p2p_comm=virtual_size > 1,
        batch_p2p_comm=virtual_size == 1,
        # A microbatch holds as many tokens as its sequences have.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # Megatron asks for it, experts or not
        calculate_per_token_loss=True,
        # Every weight is loaded from the model's folder.
        perform_initialization=False,
        use_cpu_initialization=parallel.device == "cpu",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=not precision.match_engine,
        bias_dropout_fusion=False,
        apply_rope_fusion=not precision.match_engine,
        persist_layer_norm=False,
        **fp8,
        **recompute,
        **experts,
    )


def _build_block_spec(
    config: TransformerConfig, device: torch.device, vp_stage: int | None
) -> TransformerBlockSubmodules:
    if device.type == "cuda":
        block = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
    else:
        layer = _build_cpu_layer_spec(config)
        num_layers = get_num_layers_to_build(config, vp_stage=vp_stage)
        block = TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=RMSNorm)
    if config.num_moe_experts:
        for layer in block.layer_specs:
            _set_router(layer)
    return block


def _build_cpu_layer_spec(config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, qk_layernorm=True, normalization="RMSNorm"
    )
    submodules = layer.submodules
    attention = submodules.self_attention
    layer.submodules = dataclasses.replace(
        submodules,
        input_layernorm=RMSNorm,
        pre_mlp_layernorm=RMSNorm,
        self_attention=dataclasses.replace(
            attention,
            submodules=dataclasses.replace(
                attention.submodules,
                core_attention=PackedAttention,
                q_layernorm=RMSNorm,
                k_layernorm=RMSNorm,
            ),
        ),
    )
    return layer


def _set_router(layer: ModuleSpec) -> None:
    """Mutates: the builder of the layer's mixture of experts."""
    moe = layer.submodules.mlp
    submodules = dataclasses.replace(moe.keywords["submodules"], router=BalancedRouter)
    layer.submodules.mlp = partial(moe.func, **{**moe.keywords, "submodules": submodules})


def _read_rope_theta(path: str, model_json: dict[str, Any]) -> float:
    # transformers 5 writes rope_parameters; the published Qwen3 folders have the older two keys.
    rope = model_json.get("rope_parameters") or {
        "rope_theta": model_json.get("rope_theta"),
        **(model_json.get("rope_scaling") or {}),
    }
    if rope.get("rope_type", "default") != "default":
        raise ValueError(
            f"model.path={path}: config.json has rope_type={rope['rope_type']!r}; only the default "
            "rotary embedding is supported."
        )
    return rope["rope_theta"]
