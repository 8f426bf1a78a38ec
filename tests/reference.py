"""A Qwen3, dense or with experts, and a STAPO step in plain float64 torch: one process, one
sequence at a time, full softmax.
Shares no code with the package. Weights are Hugging Face tensors by name.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file


@dataclass
class Sequence:
    prompt: list[int]
    response: list[int]
    advantage: float


@dataclass
class StepResult:
    logprobs: list[torch.Tensor]
    entropies: list[torch.Tensor]
    masks: list[torch.Tensor]
    num_candidates: int
    threshold: float
    loss: float
    gradients: dict[str, torch.Tensor]
    grad_norm: float


class ReferenceQwen3:
    def __init__(self, folder: Path) -> None:
        self.json = json.loads((folder / "config.json").read_text())
        self.num_experts = self.json.get("num_local_experts", 0)
        self.routings: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.weights = {
            name: tensor.double().requires_grad_()
            for name, tensor in load_file(folder / "model.safetensors").items()
        }

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """[S, V]."""
        w, c = self.weights, self.json
        length, head_dim = len(token_ids), c["head_dim"]
        num_q, num_kv = c["num_attention_heads"], c["num_key_value_heads"]

        def norm(x: torch.Tensor, name: str) -> torch.Tensor:
            return w[name] * x / torch.sqrt((x * x).mean(-1, keepdim=True) + c["rms_norm_eps"])

        rope = c.get("rope_parameters") or c
        inverse = rope["rope_theta"] ** (-torch.arange(0, head_dim, 2).double() / head_dim)
        angle = torch.arange(length).double()[:, None] * inverse
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]

        def rotate(x: torch.Tensor) -> torch.Tensor:
            a, b = x.split(head_dim // 2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        future = torch.ones(length, length).triu(1).bool()
        x = w["model.embed_tokens.weight"][torch.tensor(token_ids)]
        for layer in range(c["num_hidden_layers"]):
            p = f"model.layers.{layer}."
            h = norm(x, p + "input_layernorm.weight")
            q = (h @ w[p + "self_attn.q_proj.weight"].T).view(length, num_q, head_dim)
            k = (h @ w[p + "self_attn.k_proj.weight"].T).view(length, num_kv, head_dim)
            v = (h @ w[p + "self_attn.v_proj.weight"].T).view(length, num_kv, head_dim)
            q = rotate(norm(q, p + "self_attn.q_norm.weight"))
            k = rotate(norm(k, p + "self_attn.k_norm.weight"))
            k, v = (t.repeat_interleave(num_q // num_kv, dim=1) for t in (k, v))
            scores = torch.einsum("shd,thd->hst", q, k) / math.sqrt(head_dim)
            attention = scores.masked_fill(future, -math.inf).softmax(-1)
            mixed = torch.einsum("hst,thd->shd", attention, v).reshape(length, -1)
            x = x + mixed @ w[p + "self_attn.o_proj.weight"].T
            h = norm(x, p + "post_attention_layernorm.weight")
            x = x + (self.mix_experts(h, p) if self.num_experts else self.mlp(h, p + "mlp."))
        head = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        return norm(x, "model.norm.weight") @ head.T

    def mlp(self, h: torch.Tensor, p: str) -> torch.Tensor:
        w = self.weights
        gate = torch.nn.functional.silu(h @ w[p + "gate_proj.weight"].T)
        return (gate * (h @ w[p + "up_proj.weight"].T)) @ w[p + "down_proj.weight"].T

    def mix_experts(self, h: torch.Tensor, p: str) -> torch.Tensor:
        probs = (h @ self.weights[p + "mlp.gate.weight"].T).softmax(-1)
        chosen = probs.topk(self.json["num_experts_per_tok"], dim=-1)
        self.routings.append((p, probs, chosen.indices))
        shares = chosen.values / chosen.values.sum(-1, keepdim=True)
        rows = []
        for row, experts, share in zip(h, chosen.indices, shares, strict=True):
            parts = [self.mlp(row, f"{p}mlp.experts.{int(e)}.") for e in experts]
            rows.append(sum(s * part for s, part in zip(share, parts, strict=True)))
        return torch.stack(rows)

    def balance_loss(self) -> torch.Tensor:
        """Sum over layers of E sum_e (share of assignments) x (mean probability), over every token
        since the routings were cleared."""
        total = torch.zeros((), dtype=torch.float64)
        for layer in {p for p, _, _ in self.routings}:
            probs = torch.cat([x for p, x, _ in self.routings if p == layer])
            chosen = torch.cat([i.flatten() for p, _, i in self.routings if p == layer])
            share = chosen.bincount(minlength=self.num_experts).double() / len(chosen)
            total = total + self.num_experts * (share * probs.mean(0)).sum()
        return total

    def score(self, sequence: Sequence, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of every response token."""
        logits = self.logits(sequence.prompt + sequence.response)[len(sequence.prompt) - 1 : -1]
        all_logprobs = (logits / temperature).log_softmax(-1)
        labels = torch.tensor(sequence.response)[:, None]
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        return all_logprobs.gather(-1, labels)[:, 0], entropy.detach()


def reference_step(
    model: ReferenceQwen3,
    sequences: list[Sequence],
    old_logprobs: list[torch.Tensor] | None,
    prob_threshold: float,
    entropy_quantile: float,
    temperature: float,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    balance_coef: float = 0.0,
) -> StepResult:
    """Loss and gradient of one mini-batch; old_logprobs None means the current policy's.

    The load-balancing loss is in the gradient, not in the loss that is returned.
    """
    model.routings.clear()
    scores = [model.score(sequence, temperature) for sequence in sequences]
    logprobs, entropies = [s[0] for s in scores], [s[1] for s in scores]
    if old_logprobs is None:
        old_logprobs = [lp.detach() for lp in logprobs]
    rare = [
        (lp.detach().exp() < prob_threshold) & torch.tensor(s.advantage > 0)
        for lp, s in zip(logprobs, sequences, strict=True)
    ]
    population = torch.cat([h[r] for h, r in zip(entropies, rare, strict=True)]).numpy()
    threshold = np.quantile(population, entropy_quantile) if len(population) else -np.inf
    masks = [~(r & (h < threshold)) for r, h in zip(rare, entropies, strict=True)]
    total = torch.zeros((), dtype=torch.float64)
    for lp, old, mask, s in zip(logprobs, old_logprobs, masks, sequences, strict=True):
        ratio = (lp - old).exp()
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
        total = total - torch.minimum(ratio * s.advantage, clipped * s.advantage)[mask].sum()
    loss = total / sum(int(m.sum()) for m in masks)
    for weight in model.weights.values():
        weight.grad = None
    (loss + balance_coef * model.balance_loss()).backward()
    gradients = {name: weight.grad for name, weight in model.weights.items()}
    return StepResult(
        logprobs=[lp.detach() for lp in logprobs],
        entropies=entropies,
        masks=masks,
        num_candidates=len(population),
        threshold=float(threshold),
        loss=loss.item(),
        gradients=gradients,
        grad_norm=math.sqrt(sum(float((g * g).sum()) for g in gradients.values())),
    )
