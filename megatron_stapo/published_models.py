"""config.json of the published Qwen3 models, for plans on a machine that does not have them.

Only what shapes the network. The names are the folders' on the hub; Qwen3-32B and Qwen3-235B-A22B
were published without a Base model.

Source: config.json of huggingface.co/Qwen/NAME.
"""

from typing import Any

_COMMON = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
}

_MIXTURE = {
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}

_MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-1.7B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "Qwen3-4B": {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
    },
    "Qwen3-14B": {
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
    },
    "Qwen3-32B": {
        "hidden_size": 5120,
        "intermediate_size": 25_600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
    },
    "Qwen3-30B-A3B": {
        **_MIXTURE,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "Qwen3-235B-A22B": {
        **_MIXTURE,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
}

_WITHOUT_BASE = ("Qwen3-32B", "Qwen3-235B-A22B")

PUBLISHED: dict[str, dict[str, Any]] = {
    **{name: _COMMON | shape for name, shape in _MODELS.items()},
    **{
        # The base models were trained on shorter sequences.
        f"{name}-Base": _COMMON | shape | {"max_position_embeddings": 32_768}
        for name, shape in _MODELS.items()
        if name not in _WITHOUT_BASE
    },
}
"""What config.json of the model of this name says."""
