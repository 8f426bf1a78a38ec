"""A random Qwen3 that four ranks can share: large weights, so that every path moves the numbers."""

from pathlib import Path

import torch

VOCAB_SIZE = 96


def build_tiny_model(folder: Path, tied: bool) -> Path:
    """Write a Hugging Face folder without tokenizer; head_dim differs from hidden / heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=16,
            tie_word_embeddings=tied,
            max_position_embeddings=256,
            initializer_range=0.2,
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder
