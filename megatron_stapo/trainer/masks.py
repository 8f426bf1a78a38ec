"""Decides which tokens of a mini-batch train, and with what weight, over all ranks at once.

Runs on the last pipeline stage before every update, when log-probabilities and entropies of the
whole mini-batch are known. Everything that depends on more than one token is reduced here over
dp_cp_group, in shapes that do not depend on the rank, so that no layout changes the outcome; the
mathematics is `algo`'s.
"""

import math
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from megatron_stapo.algo.aggregation import compute_loss_weights, compute_unit_ids, count_units
from megatron_stapo.algo.off_policy import compute_sequence_mask
from megatron_stapo.algo.policy_loss import compute_covariance, select_clip_cov_candidates
from megatron_stapo.algo.s2t import select_rare
from megatron_stapo.algo.theory import (
    compute_entropy_change,
    compute_gradient_weights,
    compute_quadrants,
    compute_squared_gradient_norm,
)
from megatron_stapo.algo.token_mask import (
    TOKEN_MASK_RULES,
    compute_keys,
    compute_token_mask,
    compute_uniforms,
    select_tokens,
)
from megatron_stapo.config import AlgorithmConfig, RolloutConfig
from megatron_stapo.ops.quantile import compute_order_statistic, compute_quantile
from megatron_stapo.trainer.metrics import QUADRANTS, StepSums
from megatron_stapo.types import Microbatch, Minibatch

Phase = Literal["all", "rare", "common"]
"""The tokens of an update: all, or Lopti's two halves by the probability of the sampling policy."""


class MaskAssigner:
    """One mini-batch's masks and weights."""

    def __init__(
        self,
        minibatch: Minibatch,
        algorithm: AlgorithmConfig,
        rollout: RolloutConfig,
        group: ProcessGroup | None,
        sums: StepSums,
    ) -> None:
        """Args: group shares the mini-batch's tokens, None for this process alone; sums takes the
        counts of what is masked."""
        self._minibatch = minibatch
        self._microbatches = minibatch.microbatches
        self._algorithm = algorithm
        self._rollout = rollout
        self._group = group
        self._device = minibatch.microbatches[0].token_ids_T.device
        self._sums = sums

    def assign(self, phase: Phase, seed: int, num_updates: int) -> int:
        """Set loss_mask_T, loss_weights_T and, for gspo, sequence_logratio_T.

        Sequences first, then tokens, then weights, so that a token that cannot train enters no
        population and no denominator.

        Args:
            phase: the tokens of this update.
            seed: with num_updates, of the random choices.
            num_updates: optimizer steps taken.

        Returns:
            Tokens of the denominator, over all ranks.
        """
        algorithm = self._algorithm
        for m in self._microbatches:
            m.loss_mask_T = m.response_mask_T
        if algorithm.sequence_mask_min is not None or algorithm.sequence_mask_max is not None:
            self._mask_sequences()
        threshold = math.nan
        if algorithm.masks_tokens:
            threshold = self._mask_tokens(seed, num_updates)
        if phase != "all":
            assert algorithm.lopti_prob_threshold is not None
            for m in self._microbatches:
                is_rare_T = select_rare(m.old_logprobs_T, algorithm.lopti_prob_threshold)
                m.loss_mask_T = m.loss_mask_T & (is_rare_T if phase == "rare" else ~is_rare_T)
        if algorithm.policy_loss == "gspo":
            ratios = self._average_by_sequence(
                [m.logprobs_T - m.old_logprobs_T for m in self._microbatches]
            )
            for m, ratio_T in zip(self._microbatches, ratios, strict=True):
                m.sequence_logratio_T = ratio_T
        num_trained = self._assign_loss_weights()
        if algorithm.policy_loss == "clip_cov":
            self._drop_high_covariance(num_trained, seed, num_updates)
        if all(hasattr(m, "collision_T") for m in self._microbatches):
            self._add_quadrants(threshold)
        return num_trained

    def _mask_sequences(self) -> None:
        algorithm = self._algorithm
        ratios = self._average_by_sequence(
            [m.old_logprobs_T - m.rollout_logprobs_T for m in self._microbatches]
        )
        for m, ratio_T in zip(self._microbatches, ratios, strict=True):
            keep_T = compute_sequence_mask(
                ratio_T, algorithm.sequence_mask_min, algorithm.sequence_mask_max
            )
            self._sums.add(num_sequence_masked=(m.loss_mask_T & ~keep_T).sum().item())
            m.loss_mask_T = m.loss_mask_T & keep_T

    def _mask_tokens(self, seed: int, num_updates: int) -> float:
        """Returns the threshold. Communicates: as `compute_quantile`."""
        algorithm = self._algorithm
        rule = TOKEN_MASK_RULES[algorithm.token_mask]

        def select(which: Literal["candidates", "responses"], m: Microbatch) -> torch.Tensor:
            return select_tokens(
                which, m.logprobs_T, m.advantages_T, m.loss_mask_T, algorithm.prob_threshold
            )

        keys = [
            compute_keys(
                rule.key,
                m.entropy_T,
                compute_uniforms(seed, num_updates, m.sequence_ids_T, m.position_ids_T),
            )
            for m in self._microbatches
        ]
        threshold = math.inf
        if algorithm.token_mask != "rare":
            population = [
                keys_T[select(rule.population, m)]
                for keys_T, m in zip(keys, self._microbatches, strict=True)
            ]
            threshold = compute_quantile(
                torch.cat(population), algorithm.entropy_quantile, self._group
            )
        for m, keys_T in zip(self._microbatches, keys, strict=True):
            gate_T = select(rule.gate, m)
            keep_T = compute_token_mask(gate_T, keys_T, threshold)
            m.loss_mask_T = m.loss_mask_T & keep_T
            self._sums.add(num_candidates=gate_T.sum().item(), num_masked=(~keep_T).sum().item())
        if math.isfinite(threshold) and (self._group is None or self._group.rank() == 0):
            self._sums.add(num_thresholds=1, entropy_threshold=threshold)
        return threshold

    def _assign_loss_weights(self) -> int:
        """Returns the trained tokens of all ranks. Communicates: an all-reduce of one integer per
        unit of the aggregation over the group."""
        kind, group_size = self._algorithm.aggregation, self._rollout.group_size
        num_sequences = self._minibatch.num_sequences
        units = [
            compute_unit_ids(kind, m.sequence_ids_T, group_size, m.microbatch_id)
            for m in self._microbatches
        ]
        num_units = count_units(kind, num_sequences, group_size, self._minibatch.num_microbatches)
        counts_U = torch.zeros(num_units, dtype=torch.int64, device=self._device)
        for m, units_T in zip(self._microbatches, units, strict=True):
            counts_U += units_T[m.loss_mask_T].bincount(minlength=num_units)
        self._all_reduce(counts_U)
        for m, units_T in zip(self._microbatches, units, strict=True):
            m.loss_weights_T = compute_loss_weights(
                kind, units_T, counts_U, num_sequences, self._rollout.max_response_tokens
            )
        return int(counts_U.sum())

    def _drop_high_covariance(self, num_trained: int, seed: int, num_updates: int) -> None:
        """Clip-Cov: the drawn tokens lose their gradient and stay in the denominator.

        Communicates: over the group an all-reduce of two doubles, one of an integer, and as
            `compute_order_statistic`.
        """
        algorithm = self._algorithm
        sums = torch.zeros(2, dtype=torch.float64, device=self._device)
        for m in self._microbatches:
            for i, stream_T in enumerate((m.advantages_T, m.logprobs_T)):
                sums[i] += stream_T[m.loss_mask_T].sum(dtype=torch.float64)
        self._all_reduce(sums)
        mean_advantage, mean_logprob = (sums / max(num_trained, 1)).tolist()
        candidates, uniforms = [], []
        for m in self._microbatches:
            covariance_T = compute_covariance(
                m.advantages_T, m.logprobs_T, mean_advantage, mean_logprob
            )
            candidates.append(
                select_clip_cov_candidates(
                    covariance_T,
                    m.loss_mask_T,
                    (m.logprobs_T - m.old_logprobs_T).exp(),
                    m.advantages_T,
                    algorithm.clip_low,
                    algorithm.clip_high,
                    algorithm.clip_cov_min,
                    algorithm.clip_cov_max,
                )
            )
            uniforms.append(compute_uniforms(seed, num_updates, m.sequence_ids_T, m.position_ids_T))
        drawn = torch.cat([u[c] for u, c in zip(uniforms, candidates, strict=True)])
        num_candidates = torch.tensor(len(drawn), device=self._device)
        self._all_reduce(num_candidates)
        num_dropped = max(int(algorithm.clip_cov_frac * num_trained), 1)
        last = math.inf
        if num_candidates > num_dropped:
            last = compute_order_statistic(drawn, num_dropped - 1, self._group)
        for m, uniforms_T, candidates_T in zip(
            self._microbatches, uniforms, candidates, strict=True
        ):
            dropped_T = candidates_T & (uniforms_T <= last)
            m.loss_weights_T = m.loss_weights_T.masked_fill(dropped_T, 0.0)
            self._sums.add(num_covariance_dropped=dropped_T.sum().item())

    def _average_by_sequence(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Mean over each sequence's response tokens, at each of its positions.

        Communicates: an all-reduce of two doubles per sequence over the group; a sequence may be
            cut over context-parallel ranks.
        """
        num_sequences = self._minibatch.num_sequences
        totals = torch.zeros(2, num_sequences, dtype=torch.float64, device=self._device)
        for m, values_T in zip(self._microbatches, values, strict=True):
            ids = m.sequence_ids_T[m.response_mask_T]
            totals[0].index_add_(0, ids, values_T[m.response_mask_T].double())
            totals[1].index_add_(0, ids, torch.ones_like(ids, dtype=torch.float64))
        self._all_reduce(totals)
        means = (totals[0] / totals[1].clamp(min=1)).float()
        # Padding takes any sequence's value: no mask selects it.
        return [means[m.sequence_ids_T.clamp(min=0)] for m in self._microbatches]

    def _all_reduce(self, sums: torch.Tensor) -> None:
        if self._group is not None:
            dist.all_reduce(sums, group=self._group)

    def _add_quadrants(self, threshold: float) -> None:
        """Add the gradient norms of tokens with positive advantage, by probability and entropy."""
        algorithm = self._algorithm
        for m in self._microbatches:
            mask_T = m.response_mask_T & (m.advantages_T > 0)
            logprobs, entropy = m.logprobs_T[mask_T], m.entropy_T[mask_T]
            weights = compute_gradient_weights(
                (logprobs - m.old_logprobs_T[mask_T]).exp(),
                m.advantages_T[mask_T],
                algorithm.clip_low,
                algorithm.clip_high,
            )
            norms = compute_squared_gradient_norm(logprobs, m.collision_T[mask_T], weights).sqrt()
            changes = compute_entropy_change(logprobs, entropy, weights)
            quadrants = compute_quadrants(logprobs, entropy, algorithm.prob_threshold, threshold)
            for number, name in enumerate(QUADRANTS):
                own = quadrants == number
                self._sums.add(
                    **{
                        f"num_{name}": own.sum().item(),
                        f"grad_norm_{name}": norms[own].double().sum().item(),
                        f"entropy_change_{name}": changes[own].double().sum().item(),
                    }
                )
