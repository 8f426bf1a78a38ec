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

from megatron_stapo.algo.advantage import reweight_advantages
from megatron_stapo.algo.token_mask import check_finite
from megatron_stapo.config import Config, load_model_json
from megatron_stapo.model.qwen3 import build_model
from megatron_stapo.model.router import RouterBalance, release_graph
from megatron_stapo.model.weights import HfWeights
from megatron_stapo.parallel.groups import Groups, fail_together
from megatron_stapo.trainer.head import run_model
from megatron_stapo.trainer.loss import compute_loss
from megatron_stapo.trainer.masks import MaskAssigner, Phase
from megatron_stapo.trainer.metrics import StepSums
from megatron_stapo.trainer.precision import PrecisionGuard
from megatron_stapo.types import Microbatch, Minibatch, Update


class Trainer:
    """The actor and its optimizer."""

    def __init__(self, config: Config, groups: Groups) -> None:
        """Build the model, load its weights, wrap both in Megatron's DDP and optimizer."""
        self.config = config
        self.groups = groups
        self.num_updates = 0
        """Optimizer steps taken."""
        self.num_skipped_in_a_row = 0
        """Updates left out since the last one that was taken."""
        self.sums = StepSums()
        chunks = build_model(config.model, config.parallel, config.precision, groups)
        self.weights = HfWeights(
            chunks, config.model.path, load_model_json(config.model.path), groups
        )
        """The live weights of this rank's chunks."""
        self.weights.load()
        self.balance = RouterBalance(chunks, config.algorithm.router_aux_loss_coef, groups)
        self.ddp = [_wrap_ddp(chunk, number) for number, chunk in enumerate(chunks)]
        model_config = chunks[0].config
        model_config.finalize_model_grads_func = finalize_model_grads
        no_sync = [ddp.no_sync for ddp in self.ddp]
        model_config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.precision_guard = PrecisionGuard(config.precision, chunks)
        self.optimizer = _build_optimizer(config, self.ddp)
        self.phases: tuple[Phase, ...] = ("all",)
        """Each mini-batch makes one update per phase, after its masks are assigned anew."""
        if config.algorithm.lopti_prob_threshold is not None:
            self.phases = ("rare", "common")
        self._reference: list[torch.Tensor] = []
        if config.algorithm.kl_coef > 0:
            self._reference = [p.detach().clone() for c in chunks for p in c.parameters()]

    def score(self, minibatches: Sequence[Minibatch]) -> None:
        """Compute log-probabilities and entropies under the weights as they are.

        Mutates: old_logprobs_T, logprobs_T and entropy_T of every microbatch, ref_logprobs_T where
        the loss has a KL term, advantages_T where they are reweighted; the step's sums.

        Raises:
            RuntimeError: a log-probability or entropy is not finite; on every rank.
        """
        for minibatch in minibatches:
            if self._reference:
                self._compute_reference(minibatch)
            self._compute_statistics(minibatch)
            if not self.groups.is_last_stage:
                continue
            for m in minibatch.microbatches:
                m.old_logprobs_T = m.logprobs_T
                m.advantages_T = reweight_advantages(
                    m.advantages_T, m.old_logprobs_T, self.config.algorithm.advantage_reweighting
                )
                mask_T = m.response_mask_T
                gap = (m.logprobs_T - m.rollout_logprobs_T)[mask_T].abs().double()
                if len(gap):
                    self.sums.add(
                        num_response_tokens=len(gap),
                        entropy=m.entropy_T[mask_T].double().sum().item(),
                        logprob_gap=gap.sum().item(),
                    )
                    self.sums.raise_to(logprob_gap_max=gap.max().item())

    def assign_loss_masks(self, minibatch: Minibatch, phase: Phase = "all") -> None:
        """Decide which tokens train and with what weight, under the weights as they are.

        The statistics of the scoring pass serve until the first update; after it they are computed
        again, so that every decision is the current policy's. An algorithm that decides nothing
        by them takes no pass.

        Mutates: as `MaskAssigner.assign`; the routers' load; the step's sums.

        Communicates: as `MaskAssigner.assign` on the last stage; with a load-balancing loss a
            broadcast of one integer over pp_group.
        """
        if self._needs_statistics and minibatch.num_updates_scored != self.num_updates:
            self._compute_statistics(minibatch)
        num_trained = 0
        if self.groups.is_last_stage:
            assigner = MaskAssigner(
                minibatch,
                self.config.algorithm,
                self.config.rollout,
                self.groups.dp_cp_group,
                self.sums,
            )
            num_trained = assigner.assign(phase, self.config.seed, self.num_updates)
        if self.balance.is_on:
            count = torch.tensor(num_trained, device=self.groups.device)
            last = dist.get_global_rank(self.groups.pp_group, self.groups.pp_size - 1)
            dist.broadcast(count, src=last, group=self.groups.pp_group)
            self.balance.set_load(minibatch.expert_counts_LE, int(count))

    def update(self, minibatch: Minibatch) -> Update:
        """Take one optimizer step on the tokens of loss_mask_T.

        Where the loss or a gradient is not finite on any rank, every rank leaves the step out: the
        weights, the moments and the learning rate stay as they are.

        Mutates: the weights, the optimizer, num_updates, num_skipped_in_a_row, the step's sums.

        Returns:
            The same on every rank.

        Communicates: Megatron's schedule, reductions and clipping; an all-reduce of two doubles and
            one of an integer over all ranks.
        """
        for ddp in self.ddp:
            ddp.zero_grad_buffer()
        self.optimizer.zero_grad()
        lr = self._compute_lr()
        for group in self.optimizer.param_groups:
            group["lr"] = lr

        def compute(streams: torch.Tensor, m: Microbatch) -> tuple[torch.Tensor, ...]:
            m.trained_logprobs_T = streams[0].detach()
            return compute_loss(streams[0], m, self.config.algorithm, self.sums)

        outputs = self._run_schedule(minibatch, compute, forward_only=False)
        release_graph(self.ddp)
        loss = self._reduce_loss(outputs)
        if not self._is_finite(loss):
            self.num_skipped_in_a_row += 1
            return Update(loss=loss, grad_norm=math.nan, lr=lr, is_skipped=True)
        _, grad_norm, _ = self.optimizer.step()
        self.num_updates += 1
        self.num_skipped_in_a_row = 0
        return Update(loss=loss, grad_norm=float(grad_norm), lr=lr, is_skipped=False)

    def pop_metrics(self) -> dict[str, float]:
        """Reduce the step's sums over all ranks and start anew. Same result on every rank."""
        metrics = self.sums.reduce(self.groups)
        self.sums = StepSums()
        return metrics

    @property
    def _needs_statistics(self) -> bool:
        algorithm = self.config.algorithm
        return (
            algorithm.masks_tokens
            or algorithm.policy_loss in ("gspo", "clip_cov")
            or self.balance.is_on
            or self.config.log_quadrants
        )

    @torch.no_grad()
    def _compute_statistics(self, minibatch: Minibatch) -> None:
        self.balance.start_counting()
        outputs = self._run_schedule(minibatch, _return_streams, forward_only=True)
        minibatch.expert_counts_LE = self.balance.stop_counting()
        error = None
        if self.groups.is_last_stage:
            try:
                for m, streams in zip(minibatch.microbatches, outputs, strict=True):
                    m.logprobs_T, m.entropy_T = streams[:2]
                    if self.config.log_quadrants:
                        m.collision_T = streams[2]
                    where = (m.response_mask_T, m.sequence_ids_T, m.position_ids_T)
                    check_finite("log-probability", m.logprobs_T, *where)
                    check_finite("entropy", m.entropy_T, *where)
            except ValueError as refused:
                error = str(refused)
        fail_together(error, self.groups)
        minibatch.num_updates_scored = self.num_updates

    @torch.no_grad()
    def _compute_reference(self, minibatch: Minibatch) -> None:
        """Set ref_logprobs_T by a pass with the reference weights in the parameters' place."""
        parameters = [p for ddp in self.ddp for p in ddp.parameters()]
        live = [p.data for p in parameters]
        for parameter, weight in zip(parameters, self._reference, strict=True):
            parameter.data = weight
        outputs = self._run_schedule(minibatch, _return_streams, forward_only=True)
        for parameter, weight in zip(parameters, live, strict=True):
            parameter.data = weight
        if self.groups.is_last_stage:
            for m, streams in zip(minibatch.microbatches, outputs, strict=True):
                m.ref_logprobs_T = streams[0]

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
            output = run_model(
                model,
                microbatch,
                self.groups,
                self.config.rollout.temperature,
                with_collision=self.config.log_quadrants and forward_only,
            )
            return output, lambda streams, **_: loss_function(streams, microbatch)

        iterators = [iter(minibatch.microbatches) for _ in self.ddp]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.ddp,
            num_microbatches=len(minibatch.microbatches),
            seq_length=self.config.max_sequence_tokens,  # unused: the lengths vary
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _reduce_loss(self, outputs: list[torch.Tensor]) -> float:
        """Weighted token mean over all ranks. Communicates: an all-reduce of two doubles over all
        ranks."""
        total = torch.zeros(2, dtype=torch.float64, device=self.groups.device)
        if self.groups.reports:
            total += torch.stack(outputs).sum(0)
        dist.all_reduce(total)
        return (total[0] / total[1].clamp(min=1)).item()

    def _is_finite(self, loss: float) -> bool:
        """Whether the loss and the gradients that this rank has reduced are finite, on all ranks.

        The largest entry tells, and needs no memory; a norm of squares could overflow.
        """
        buffers = [b for ddp in self.ddp for b in [*ddp.buffers, *ddp.expert_parallel_buffers]]
        largest = [torch.linalg.vector_norm(b.grad_data, ord=math.inf) for b in buffers]
        is_finite = math.isfinite(loss) and bool(torch.stack(largest).isfinite().all())
        num_broken = torch.tensor(int(not is_finite), device=self.groups.device)
        dist.all_reduce(num_broken)
        return not num_broken.item()

    def _compute_lr(self) -> float:
        """Learning rate of the next update: linear warm-up, the full rate from its end on."""
        optimizer = self.config.optimizer
        warmup = max(optimizer.num_warmup_steps, 1)
        return optimizer.lr * min(1.0, (self.num_updates + 1) / warmup)


def _return_streams(streams: torch.Tensor, _microbatch: Microbatch) -> torch.Tensor:
    return streams


def _wrap_ddp(chunk: torch.nn.Module, number: int) -> DistributedDataParallel:
    """Args: number of the chunk on its rank."""
    config = chunk.config
    return DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            average_in_collective=False,
            # Trainer.update looks for it, and leaves the step out instead of ending the run.
            check_for_nan_in_grad=False,
        ),
        Float16Module(config, chunk) if config.bf16 else chunk,
        # As Megatron does: later chunks gain nothing from buckets.
        disable_bucketing=number > 0,
    )


def _build_optimizer(config: Config, model: list[DistributedDataParallel]) -> Any:
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
        model,
    )
