"""A Qwen3 network in numbers: parameters by how they are cut, work and KV cache per token."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder of equal layers; those of the experts are 0 in a dense model."""

    num_layers: int
    hidden_size: int
    query_size: int
    """Attention heads x head size."""
    kv_size: int
    """KV heads x head size: of the keys, and again of the values."""
    head_dim: int
    ffn_size: int
    """Of the dense MLP, which a mixture does not have."""
    vocab_size: int
    is_tied: bool
    """The head is the embedding."""
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_ffn_size: int = 0

    @property
    def cut_layer_params(self) -> int:
        """Of a layer, cut by tensor parallelism: attention, and the dense MLP."""
        attention = self.hidden_size * (2 * self.query_size + 2 * self.kv_size)
        return attention + (0 if self.num_experts else 3 * self.hidden_size * self.ffn_size)

    @property
    def expert_layer_params(self) -> int:
        """Of a layer, cut by expert parallelism."""
        return self.num_experts * 3 * self.hidden_size * self.expert_ffn_size

    @property
    def whole_layer_params(self) -> int:
        """Of a layer, on every rank: the norms, and the router."""
        return 2 * self.hidden_size + 2 * self.head_dim + self.num_experts * self.hidden_size

    @property
    def embedding_params(self) -> int:
        """Of the embedding, and again of a head that is not tied to it."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All parameters, a tied head counted once."""
        layer = self.cut_layer_params + self.expert_layer_params + self.whole_layer_params
        tables = 1 if self.is_tied else 2
        return self.num_layers * layer + tables * self.embedding_params + self.hidden_size

    @property
    def active_expert_layer_params(self) -> int:
        """Of a layer's experts, those that one token passes."""
        return self.num_experts_per_token * 3 * self.hidden_size * self.expert_ffn_size

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of all layers, bf16."""
        return self.num_layers * 2 * self.kv_size * 2


def build_shape(model_json: dict[str, Any]) -> ModelShape:
    """Args: model_json: of `config.find_model_json`."""
    has_experts = "num_experts" in model_json
    head_dim = model_json["head_dim"]
    return ModelShape(
        num_layers=model_json["num_hidden_layers"],
        hidden_size=model_json["hidden_size"],
        query_size=model_json["num_attention_heads"] * head_dim,
        kv_size=model_json["num_key_value_heads"] * head_dim,
        head_dim=head_dim,
        ffn_size=model_json["intermediate_size"],
        vocab_size=model_json["vocab_size"],
        is_tied=model_json["tie_word_embeddings"],
        num_experts=model_json["num_experts"] if has_experts else 0,
        num_experts_per_token=model_json["num_experts_per_tok"] if has_experts else 0,
        expert_ffn_size=model_json["moe_intermediate_size"] if has_experts else 0,
    )
