import pytest
import torch

from megatron_stapo.config import find_model_json
from megatron_stapo.plan.shape import build_shape
from megatron_stapo.published_models import PUBLISHED

# Billions, and KV cache bytes per token in bf16, as published.
FIGURES = {
    "Qwen3-1.7B": (1.72, 114_688),
    "Qwen3-8B": (8.19, 147_456),
    "Qwen3-14B": (14.77, 163_840),
    "Qwen3-32B": (32.76, 262_144),
    "Qwen3-30B-A3B": (30.53, 98_304),
    "Qwen3-235B-A22B": (235.09, 192_512),
}


@pytest.mark.parametrize("name", FIGURES)
def test_parameters_and_cache_are_as_published(name):
    shape = build_shape(find_model_json(name))
    billions, cache = FIGURES[name]
    assert round(shape.num_params / 1e9, 2) == billions
    assert shape.kv_bytes_per_token == cache


def count_parameters(model_json):
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    kind = (Qwen3Config, Qwen3ForCausalLM)
    if model_json["model_type"] == "qwen3_moe":
        kind = (Qwen3MoeConfig, Qwen3MoeForCausalLM)
    config, model = kind
    with torch.device("meta"):
        return sum(p.numel() for p in model(config(**model_json)).parameters())


@pytest.mark.parametrize("name", [name for name in PUBLISHED if not name.endswith("-Base")])
def test_parameters_are_those_of_transformers_model(name):
    # Layers are alike: two tell as much as all.
    model_json = {**PUBLISHED[name], "num_hidden_layers": 2}
    assert build_shape(model_json).num_params == count_parameters(model_json)


def test_a_token_of_235b_passes_22_billion_parameters():
    shape = build_shape(find_model_json("Qwen3-235B-A22B"))
    layer = shape.cut_layer_params + shape.whole_layer_params + shape.active_expert_layer_params
    total = shape.num_layers * layer + 2 * shape.embedding_params
    assert round(total / 1e9) == 22


def test_base_models_differ_in_length_alone():
    base, post = PUBLISHED["Qwen3-8B-Base"], PUBLISHED["Qwen3-8B"]
    assert {key for key in base if base[key] != post[key]} == {"max_position_embeddings"}
