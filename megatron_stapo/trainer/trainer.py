"""Scores, masks and updates: what happens to a step's mini-batches on the trainer's ranks.

Sums, never means. The loss function hands Megatron a masked sum and a masked count; Megatron adds
the counts of all data-parallel ranks and divides the gradients once. Nothing here scales a
gradient.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module

from megatron_stapo.algo.policy_loss import compute_policy_loss
from megatron_stapo.algo.s2t import (
    compute_entropy_threshold,
    compute_s2t_mask,
    select_candidates,
)
from megatron_stapo.config import Config, load_model_json
from megatron_stapo.model.qwen3 import build_model
from megatron_stapo.model.weights import load_hf_weights
from megatron_stapo.parallel.groups import Groups
from megatron_stapo.trainer.head import run_model
from megatron_stapo.trainer.metrics import StepSums
from megatron_stapo.types import Microbatch, Minibatch


class Trainer:
    """The actor and its optimizer."""

    def __init__(self, config: Config, groups: Groups) -> None:
        """Build the model, load its weights, wrap both in Megatron's DDP and optimizer."""
        self.config = config
        self.groups = groups
        self.num_updates = 0
        """Optimizer steps taken."""
        self.sums = StepSums()
        model = build_model(config.model, config.parallel, groups)
        load_hf_weights(model, config.model.path, load_model_json(config.model.path), groups)
        self.model = model
        """This rank's GPTModel, unwrapped; its parameters are the live weights."""
        if config.model.dtype == "bfloat16":
            model = Float16Module(model.config, model)
        self.ddp = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                grad_reduce_in_fp32=True,
                average_in_collective=False,
                check_for_nan_in_grad=True,
            ),
            model,
        )
        model.config.finalize_model_grads_func = finalize_model_grads
        model.config.no_sync_func = self.ddp.no_sync
        self.optimizer = _build_optimizer(config, self.ddp)

    def score(self, minibatches: Sequence[Minibatch]) -> None:
        """Compute log-probabilities and entropies under the weights as they are.

        Mutates: old_logprobs_T, logprobs_T and entropy_T of every microbatch; the step's sums.
        """
        for minibatch in minibatches:
            self._compute_statistics(minibatch)
            if not self.groups.is_last_stage:
                continue
            for microbatch in minibatch.microbatches:
                microbatch.old_logprobs_T = microbatch.logprobs_T
                mask_T = microbatch.response_mask_T
                gap = (microbatch.logprobs_T - microbatch.rollout_logprobs_T)[mask_T].abs().double()
                self.sums.add(
                    num_response_tokens=len(gap),
                    entropy=microbatch.entropy_T[mask_T].double().sum().item(),
                    logprob_gap=gap.sum().item(),
                )
                if len(gap):
                    self.sums.raise_to(logprob_gap_max=gap.max().item())

    def assign_loss_masks(self, minibatch: Minibatch) -> None:
        """Decide which tokens train: response tokens that S2T keeps under the current weights.

        The statistics come from a pass without gradient over the whole mini-batch, or from `score`
        where the weights have not moved since. With S2T off there is nothing to decide and no pass.

        Mutates: loss_mask_T of every microbatch; the step's sums.

        Communicates: see `_agree_on_threshold`.
        """
        algorithm = self.config.algorithm
        is_off = algorithm.prob_threshold == 0 or algorithm.entropy_quantile == 0
        if not is_off and minibatch.num_updates_scored != self.num_updates:
            self._compute_statistics(minibatch)
        if not self.groups.is_last_stage:
            return
        if is_off:
            for microbatch in minibatch.microbatches:
                microbatch.loss_mask_T = microbatch.response_mask_T
            return
        candidates = [
            select_candidates(
                m.logprobs_T, m.advantages_T, m.response_mask_T, algorithm.prob_threshold
            )
            for m in minibatch.microbatches
        ]
        entropy_N = torch.cat(
            [m.entropy_T[c] for m, c in zip(minibatch.microbatches, candidates, strict=True)]
        )
        threshold = self._agree_on_threshold(entropy_N)
        for microbatch, candidate_mask_T in zip(minibatch.microbatches, candidates, strict=True):
            s2t_mask_T = compute_s2t_mask(candidate_mask_T, microbatch.entropy_T, threshold)
            microbatch.loss_mask_T = microbatch.response_mask_T & s2t_mask_T
            self.sums.add(
                num_candidates=candidate_mask_T.sum().item(), num_masked=(~s2t_mask_T).sum().item()
            )
        if threshold > -math.inf and self.groups.dp_rank == 0:
            self.sums.add(num_thresholds=1, entropy_threshold=threshold)

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        """Take one optimizer step on the tokens of loss_mask_T.

        Mutates: the weights, the optimizer, num_updates, the step's sums.

        Returns:
            loss: the sum over all trained tokens of all ranks / their number; grad_norm: before
            clipping; lr. The same on every rank.

        Raises:
            RuntimeError: a gradient is not finite; no weight has changed.
        """
        self.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] = self._compute_lr()
        outputs = self._run_schedule(minibatch, self._compute_loss, forward_only=False)
        loss = self._reduce_loss(outputs)
        _, grad_norm, _ = self.optimizer.step()
        metrics = {"loss": loss, "grad_norm": float(grad_norm), "lr": self._compute_lr()}
        self.num_updates += 1
        return metrics

    def pop_metrics(self) -> dict[str, float]:
        """Reduce the step's sums over all ranks and start anew. Same result on every rank."""
        metrics = self.sums.reduce(self.groups)
        self.sums = StepSums()
        return metrics

    @torch.no_grad()
    def _compute_statistics(self, minibatch: Minibatch) -> None:
        outputs = self._run_schedule(minibatch, _return_streams, forward_only=True)
        if self.groups.is_last_stage:
            for microbatch, streams in zip(minibatch.microbatches, outputs, strict=True):
                microbatch.logprobs_T, microbatch.entropy_T = streams
                if not streams.isfinite().all():
                    position = int((~streams.isfinite()).any(0).nonzero()[0])
                    raise RuntimeError(
                        f"{self.groups}: log-probability or entropy of the token at position "
                        f"{position} of a microbatch is not finite; the weights have diverged: "
                        "lower optimizer.lr."
                    )
        minibatch.num_updates_scored = self.num_updates

    def _agree_on_threshold(self, entropy_N: torch.Tensor) -> float:
        """The entropy threshold over the candidates of all data-parallel ranks.

        Communicates: over dp_group an all-gather of one count, then of the padded entropies, so
            that a rank without candidates takes the same part; over tp_group a broadcast of the
            threshold.
        """
        groups = self.groups
        count = torch.tensor([len(entropy_N)], device=groups.device)
        counts = [torch.empty_like(count) for _ in range(groups.dp_size)]
        dist.all_gather(counts, count, group=groups.dp_group)
        sizes = [int(count) for count in counts]
        padded = entropy_N.new_zeros(max(sizes))
        padded[: len(entropy_N)] = entropy_N
        gathered = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(gathered, padded, group=groups.dp_group)
        threshold = compute_entropy_threshold(
            torch.cat([row[:size] for row, size in zip(gathered, sizes, strict=True)]),
            self.config.algorithm.entropy_quantile,
        )
        agreed = torch.tensor([threshold], dtype=torch.float64, device=groups.device)
        dist.broadcast(agreed, src=dist.get_global_rank(groups.tp_group, 0), group=groups.tp_group)
        return agreed.item()

    def _run_schedule(
        self,
        minibatch: Minibatch,
        loss_function: Callable[..., Any],
        forward_only: bool,
    ) -> list[Any]:
        """Megatron's pipeline schedule over the microbatches; on the last stage their outputs."""

        def forward_step(
            microbatches: Iterator[Microbatch], model: torch.nn.Module
        ) -> tuple[torch.Tensor, Callable[..., Any]]:
            microbatch = next(microbatches)
            output = run_model(model, microbatch, self.groups, self.config.rollout.temperature)
            return output, lambda streams, **_: loss_function(streams, microbatch)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(minibatch.microbatches),
            model=[self.ddp],
            num_microbatches=len(minibatch.microbatches),
            seq_length=self.config.max_sequence_tokens,  # unused: the lengths vary
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _compute_loss(
        self, streams: torch.Tensor, microbatch: Microbatch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Masked sum and masked count, in the form that calculate_per_token_loss asks for."""
        algorithm = self.config.algorithm
        logprobs_T, _ = streams
        loss_T = compute_policy_loss(
            logprobs_T,
            microbatch.old_logprobs_T,
            microbatch.advantages_T,
            algorithm.clip_low,
            algorithm.clip_high,
            algorithm.dual_clip,
        )
        mask_T = microbatch.loss_mask_T
        # where, not a product: what a masked token holds must not reach the sum.
        loss_sum = torch.where(mask_T, loss_T, 0.0).sum()
        num_tokens = mask_T.sum(dtype=torch.int32)
        ratio = (logprobs_T.detach() - microbatch.old_logprobs_T)[mask_T].exp()
        if len(ratio):
            advantages = microbatch.advantages_T[mask_T]
            clipped = ((advantages > 0) & (ratio > 1 + algorithm.clip_high)) | (
                (advantages < 0) & (ratio < 1 - algorithm.clip_low)
            )
            self.sums.add(num_trained=len(ratio), num_clipped=clipped.sum().item())
            self.sums.raise_to(ratio_max=ratio.max().item())
        return loss_sum, num_tokens, torch.stack([loss_sum.detach().double(), num_tokens.double()])

    def _reduce_loss(self, outputs: list[torch.Tensor]) -> float:
        """Token mean over all ranks. Communicates: an all-reduce of two doubles over all ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=self.groups.device)
        if self.groups.is_last_stage and self.groups.tp_rank == 0:
            total += torch.stack(outputs).sum(0)
        dist.all_reduce(total)
        return (total[0] / total[1].clamp(min=1)).item()

    def _compute_lr(self) -> float:
        """Learning rate of the next update: linear warm-up, the full rate from its end on."""
        optimizer = self.config.optimizer
        warmup = max(optimizer.num_warmup_steps, 1)
        return optimizer.lr * min(1.0, (self.num_updates + 1) / warmup)


def _return_streams(streams: torch.Tensor, _microbatch: Microbatch) -> torch.Tensor:
    return streams


def _build_optimizer(config: Config, model: DistributedDataParallel) -> Any:
    optimizer = config.optimizer
    return get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=optimizer.lr,
            min_lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.eps,
            clip_grad=optimizer.max_grad_norm,
            bf16=config.model.dtype == "bfloat16",
            params_dtype=getattr(torch, config.model.dtype),
            use_distributed_optimizer=True,
        ),
        [model],
    )
