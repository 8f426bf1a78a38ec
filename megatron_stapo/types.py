"""The records that pass between rooms: what a step reads, makes and reports.

Python objects until packing; tensors after. Every `[T]` stream of a `Microbatch` is indexed by the
position whose logits predict the token, so that streams, labels and hidden states share one index
in every layout; `data.packing` makes that one shift.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One problem, ready for the engine."""

    prompt_id: int
    """Row of the source; part of the seed of every response, and what tells prompts apart."""
    problem: str
    answer: str
    token_ids: list[int]
    """Chat template applied, generation prompt included."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How responses are drawn."""

    temperature: float
    """Divides the logits."""
    top_p: float
    """Only the likeliest tokens that together have this probability are drawn."""
    max_response_tokens: int


@dataclass(kw_only=True)
class Rollout:
    """One sampled response."""

    token_ids: list[int]
    """The tokens that the engine sampled, the stop token included."""
    rollout_logprobs: list[float]
    """Nats; the engine's log-probability of each token, after temperature."""
    finish_reason: Literal["stop", "length"]
    """length: cut at max_response_tokens."""
    policy_version: int
    """Number of completed steps of the weights that sampled it."""
    is_correct: bool | None = None
    """Set by `rewards`. What filters and accuracies look at."""
    reward: float = float("nan")
    """Reward units; set from is_correct, before any length penalty."""
    advantage: float = float("nan")
    """Set by `algo`."""


@dataclass(kw_only=True)
class RolloutGroup:
    """The G responses to one prompt."""

    prompt: Prompt
    rollouts: list[Rollout]


@dataclass(kw_only=True)
class Microbatch:
    """Whole sequences packed into one forward-backward pass of T tokens; B of them.

    A stream's entry t describes `labels_T[t]`, the token after position t of the same sequence. The
    last position of a sequence and padding have none: the label is 0 and the response mask False.
    Under context parallelism a rank's streams hold T / cp of the entries.
    """

    token_ids_T: "torch.Tensor"
    """[T] int64."""
    labels_T: "torch.Tensor"
    """[T] int64. The token that position t predicts."""
    position_ids_T: "torch.Tensor"
    """[T] int64, from 0 in each sequence."""
    sequence_ids_T: "torch.Tensor"
    """[T] int64. Number of the sequence in its mini-batch, prompt x G + sample; -1 on padding."""
    cu_seqlens: "torch.Tensor"
    """[B + 1] int32. Starts of the sequences, padding included, and T."""
    microbatch_id: int
    """Number of the microbatch among all data-parallel ranks' of its mini-batch."""
    response_mask_T: "torch.Tensor"
    """[T] bool. True where the label is a token that the policy sampled."""
    advantages_T: "torch.Tensor"
    """[T] fp32. Constant within a response, 0 outside."""
    rollout_logprobs_T: "torch.Tensor"
    """[T] fp32, nats. The engine's; 0 outside responses."""
    # Set by the trainer, on the last pipeline stage.
    old_logprobs_T: "torch.Tensor" = field(init=False)
    """[T] fp32, nats. The trainer's before the step's first update."""
    ref_logprobs_T: "torch.Tensor" = field(init=False)
    """[T] fp32, nats. The reference model's; set where the loss has a KL term."""
    logprobs_T: "torch.Tensor" = field(init=False)
    """[T] fp32, nats. Of the current policy, without gradient: what S2T decides on."""
    entropy_T: "torch.Tensor" = field(init=False)
    """[T] fp32, nats. Of the current policy."""
    collision_T: "torch.Tensor" = field(init=False)
    """[T] fp32. Sum of squared probabilities; set with log_quadrants."""
    loss_mask_T: "torch.Tensor" = field(init=False)
    """[T] bool. Response mask and token mask: the tokens of numerator and denominator."""
    loss_weights_T: "torch.Tensor" = field(init=False)
    """[T] fp32. What makes a sum over tokens the mean that algorithm.aggregation asks for."""
    trained_logprobs_T: "torch.Tensor" = field(init=False)
    """[T] fp32, nats. Of the update's own forward pass; what its loss was computed from."""
    sequence_logratio_T: "torch.Tensor" = field(init=False)
    """[T] fp32, nats. Mean of logprobs - old_logprobs over the sequence; set for gspo."""

    def move_to(self, device: "torch.device") -> None:
        """Move the streams that packing made. Mutates: every tensor field set so far."""
        for name, value in vars(self).items():
            if hasattr(value, "to"):
                setattr(self, name, value.to(device))


@dataclass(kw_only=True)
class Minibatch:
    """The microbatches of this data-parallel rank that share one optimizer step."""

    microbatches: list[Microbatch]
    num_microbatches: int
    """Over all data-parallel ranks."""
    num_sequences: int
    """Over all data-parallel ranks."""
    expert_counts_LE: "torch.Tensor | None" = None
    """[L, E] float64. Assignments of the mini-batch's tokens to experts, by layer of this pipeline
    stage; None without experts."""
    num_updates_scored: int = -1
    """Optimizer steps taken before logprobs_T and entropy_T were computed; -1 before any."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """What became of one optimizer step."""

    loss: float
    """The weighted sum over all trained tokens of all ranks / their number."""
    grad_norm: float
    """Before clipping; NaN where the step is left out."""
    lr: float
    is_skipped: bool
    """The loss or a gradient was not finite, and nothing has changed."""
