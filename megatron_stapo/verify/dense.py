"""The update of a mini-batch without any layout: transformers' model in float64, one process, one
sequence at a time, full softmax.

It shares with the trainer the algorithm (`algo`, `trainer.masks`, `trainer.loss`, which the tests
hold to a reference of their own) and nothing of the model, the head, packing or communication.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from megatron_stapo.algo.advantage import reweight_advantages
from megatron_stapo.config import Config
from megatron_stapo.rollout.transformers_engine import split_experts
from megatron_stapo.trainer.loss import compute_loss
from megatron_stapo.trainer.masks import MaskAssigner, Phase
from megatron_stapo.trainer.metrics import StepSums
from megatron_stapo.types import Microbatch, Minibatch, RolloutGroup
from megatron_stapo.verify.problem import perturb
from megatron_stapo.verify.snapshot import TokenSnapshot, snapshot_microbatches


@dataclass(kw_only=True)
class DenseStep:
    """What the update should compute."""

    tokens: TokenSnapshot
    loss: float
    grad_norm: float
    """Before clipping."""
    gradients: dict[str, torch.Tensor]
    """float64, by Hugging Face name, after clipping."""
    num_candidates: int


def compute_dense_step(
    config: Config, groups: Sequence[RolloutGroup], model_json: dict[str, int], phase: Phase
) -> DenseStep:
    """Score, mask and differentiate a mini-batch.

    Args:
        config: its model folder holds the weights.
        groups: the whole mini-batch.
        phase: the tokens of the update.
    """
    model = AutoModelForCausalLM.from_pretrained(
        config.model.path,
        dtype=torch.float64,
        experts_implementation="eager",  # the grouped products have no float64
    )
    # transformers' embedding withholds the gradient of the padding token, which may be sampled.
    model.get_input_embeddings().padding_idx = None
    algorithm = config.algorithm
    has_balance = algorithm.router_aux_loss_coef > 0
    microbatches, inputs = [], []
    sequences = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    for number, (prompt, rollout) in enumerate(sequences):
        inputs.append(torch.tensor(prompt.token_ids + rollout.token_ids))
        microbatches.append(
            _build_microbatch(number, len(prompt.token_ids), rollout.token_ids, rollout.advantage)
        )
    minibatch = Minibatch(
        microbatches=microbatches, num_microbatches=len(sequences), num_sequences=len(sequences)
    )

    def score(number: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        """Log-probabilities, entropies, and each layer's router probabilities."""
        m = microbatches[number]
        extra = {"output_router_logits": True} if has_balance else {}
        output = model(inputs[number][None], **extra)
        logits = output.logits[0, m.position_ids_T] / config.rollout.temperature
        all_logprobs = logits.log_softmax(-1)
        entropy = -(all_logprobs.exp() * all_logprobs).sum(-1)
        logprobs = all_logprobs.gather(-1, m.labels_T[:, None])[:, 0]
        return logprobs, entropy, [r.softmax(-1) for r in getattr(output, "router_logits", ())]

    counts_LE: torch.Tensor | None = None
    with torch.no_grad():
        for number, m in enumerate(microbatches):
            m.logprobs_T, entropy_T, routers = score(number)
            # Of the dtype in which the quantile selects, so that a token never misses itself.
            m.entropy_T = entropy_T.float()
            m.old_logprobs_T = m.logprobs_T
            if algorithm.kl_coef > 0:
                m.ref_logprobs_T = m.logprobs_T
            m.advantages_T = reweight_advantages(
                m.advantages_T, m.old_logprobs_T, algorithm.advantage_reweighting
            )
            if has_balance:
                counts = torch.stack([_count_choices(r, model_json) for r in routers])
                counts_LE = counts if counts_LE is None else counts_LE + counts
    perturb(minibatch)
    sums = StepSums()
    assigner = MaskAssigner(minibatch, algorithm, config.rollout, None, sums)
    num_trained = max(assigner.assign(phase, config.seed, 0), 1)
    loss = 0.0
    for number, m in enumerate(microbatches):
        logprobs, _, routers = score(number)
        loss_sum, _, _ = compute_loss(logprobs, m, algorithm, sums)
        total = loss_sum / num_trained
        loss += float(total)
        if counts_LE is not None:
            balance = _compute_balance_loss(routers, counts_LE, model_json["num_experts_per_tok"])
            total = total + algorithm.router_aux_loss_coef * balance
        if total.requires_grad:
            total.backward()
    gradients = _collect_gradients(model)
    grad_norm = float(sum(g.square().sum() for g in gradients.values()) ** 0.5)
    clip = min(1.0, config.optimizer.max_grad_norm / (grad_norm + 1e-6))
    return DenseStep(
        tokens=snapshot_microbatches(microbatches),
        loss=loss,
        grad_norm=grad_norm,
        gradients={name: clip * gradient for name, gradient in gradients.items()},
        num_candidates=int(sums.total("num_candidates")),
    )


def _build_microbatch(
    number: int, prompt_size: int, response: list[int], advantage: float
) -> Microbatch:
    """The response tokens of one sequence, and nothing else."""
    size = len(response)
    return Microbatch(
        token_ids_T=torch.zeros(size, dtype=torch.int64),  # not read
        labels_T=torch.tensor(response, dtype=torch.int64),
        position_ids_T=torch.arange(prompt_size - 1, prompt_size - 1 + size),
        sequence_ids_T=torch.full((size,), number),
        cu_seqlens=torch.tensor([0, size]),
        microbatch_id=number,
        response_mask_T=torch.ones(size, dtype=torch.bool),
        advantages_T=torch.full((size,), advantage, dtype=torch.float64),
        rollout_logprobs_T=torch.zeros(size, dtype=torch.float64),
    )


def _collect_gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By the names of a Hugging Face folder; zeros where nothing reached a parameter."""
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients.update(split_experts(name, gradient))
    return gradients


def _compute_balance_loss(
    routers: Sequence[torch.Tensor], counts_LE: torch.Tensor, topk: int
) -> torch.Tensor:
    """One sequence's part of the sum over layers of E sum_e (share of e) x (mean probability of e),
    share and mean over the mini-batch."""
    num_tokens = counts_LE[0].sum() / topk
    parts = [
        len(counts) * (counts / counts.sum() * probs.sum(0) / num_tokens).sum()
        for probs, counts in zip(routers, counts_LE, strict=True)
    ]
    return torch.stack(parts).sum()


def _count_choices(probs: torch.Tensor, model_json: dict[str, int]) -> torch.Tensor:
    chosen = probs.topk(model_json["num_experts_per_tok"], dim=-1).indices.flatten()
    return chosen.bincount(minlength=model_json["num_experts"]).double()
