"""Engines in the trainer's own ranks, awake for rollouts and asleep during the update.

Every rank holds its part of an engine in its own process (`RankEngine`, of `vllm_rank`): engine e
consists of the consecutive ranks e n to e n + n - 1. Rank 0's `generate` waits in a thread while
the ranks' main threads sample in rounds: rank 0 hands each engine the prompts that it has room for,
every engine makes so many decoding steps, and rank 0 collects what is done. A wish to stop, and an
error, reach every rank with the next round.

Invariant: all ranks call `sample`, `update_weights` and `sleep` in the same order. What goes wrong
on one of them is known to all when the call returns.
"""

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from megatron_stapo.config import Config
from megatron_stapo.parallel.groups import Groups, agree
from megatron_stapo.rollout import SamplingRequest, SleepMemory
from megatron_stapo.types import Prompt, Rollout, RolloutGroup, Sampling

_STEPS_PER_ROUND = 16
"""A tenth of a second to half of one on a GPU: what a round costs, four small collectives and the
wait for the slowest engine, is little beside it, and a group does not wait long to be judged."""

_WAIT_S = 0.5
"""Longest time between two calls of on_wait."""


class RankEngine(Protocol):
    """One rank's part of an engine. The ranks of an engine make the same calls."""

    def add(self, index: int, prompt: Prompt, request: SamplingRequest) -> None:
        """Queue a prompt; its group comes back under the index."""
        ...

    def step(self, max_steps: int) -> list[tuple[int, list[Rollout]]]:
        """Make decoding steps until all is done, at most so many; returns the complete groups."""
        ...

    def abort(self) -> None:
        """Forget what is queued and what is half done."""
        ...

    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int) -> None:
        """Replace all weights, in an engine that is awake or asleep; it is awake afterwards."""
        ...

    def sleep(self) -> SleepMemory:
        """Give the device's memory back, weights and KV cache; the next `load` wakes it."""
        ...

    def close(self) -> None:
        """Release what is held."""
        ...


@dataclass(kw_only=True)
class _Call:
    """A `generate` that waits for all ranks. Rank 0's alone."""

    prompts: Sequence[Prompt]
    request: SamplingRequest
    waiting: deque[int]
    """Prompts that no engine has."""
    answers: "queue.SimpleQueue[tuple[int, RolloutGroup] | Exception]" = field(
        default_factory=queue.SimpleQueue
    )
    is_abandoned: bool = False


@dataclass(frozen=True, kw_only=True)
class _Order:
    """What rank 0 wants of a rank in a round."""

    prompts: list[tuple[int, Prompt]]
    is_last: bool
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What a round has come to on a rank."""

    groups: list[tuple[int, list[Rollout]]]
    """From the first rank of an engine."""
    failure: str | None = None
    failed_at_s: float = 0.0
    """On the wall clock: the ranks that wait for one that failed fail after it."""


class ColocatedEngine:
    """The engines of a run in its trainer's ranks; see `Engine`, whose methods are rank 0's.

    Every rank has one.
    """

    def __init__(
        self,
        config: Config,
        groups: Groups,
        rank_engine: RankEngine,
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Args: rank_engine is this rank's, with the weights of model.path; on_wait is rank 0's,
        see `Engine`."""
        self._groups = groups
        self._num_engine_ranks = config.rollout.num_engine_ranks
        self._num_engines = config.num_engines
        self._max_num_seqs = config.rollout.max_num_seqs
        self._rank_engine = rank_engine
        self._on_wait = on_wait
        self._call: _Call | None = None
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self.policy_version = 0
        """See `Engine`."""
        self.is_serving = True
        """See `Engine`: an engine that fails ends the run."""

    def list_stale(self, policy_version: int) -> list[int]:
        """See `Engine`. They get their weights together."""
        return [] if policy_version == self.policy_version else list(range(self._num_engines))

    def take_request(self) -> SamplingRequest | None:
        """See `Engine`. All ranks have to call `sample` next."""
        with contextlib.suppress(queue.Empty):
            self._call = self._calls.get_nowait()
            return self._call.request
        return None

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_group: Callable[[int, RolloutGroup], None] | None = None,
    ) -> list[RolloutGroup]:
        """See `Engine`. Another thread has to serve `take_request`."""
        call = _Call(
            prompts=prompts,
            request=SamplingRequest(num_samples=num_samples, sampling=sampling),
            waiting=deque(range(len(prompts))),
        )
        self._calls.put(call)
        groups: dict[int, RolloutGroup] = {}
        try:
            while len(groups) < len(prompts):
                self._on_wait()
                with contextlib.suppress(queue.Empty):
                    answer = call.answers.get(timeout=_WAIT_S)
                    if isinstance(answer, Exception):
                        raise answer
                    index, group = answer
                    groups[index] = group
                    if on_group is not None:
                        on_group(index, group)
        finally:
            call.is_abandoned = True
        return [groups[index] for index in range(len(prompts))]

    def sample(self, request: SamplingRequest) -> str | None:
        """Sample on all ranks what rank 0's `generate` has asked for. Every rank calls it.

        Returns:
            Why a rank could not, the same on every rank; None where all is sampled or abandoned.

        Communicates: per round a scatter from rank 0 and a gather to it, over all ranks; the ranks
            of an engine among themselves.
        """
        call, self._call = self._call, None
        num_open = [0] * self._num_engines
        reports: list[_Report] = []
        while True:
            order = self._hand_out(call, num_open, reports)
            if order.is_last:
                self._rank_engine.abort()
                return order.failure
            reports = self._collect(self._run_round(order, request))

    def update_weights(
        self,
        named_tensors: Iterable[tuple[str, torch.Tensor]],
        policy_version: int,
        engine_index: int = 0,
    ) -> None:
        """See `Engine`. Every rank calls it with all tensors, for all engines."""
        self._rank_engine.load(named_tensors, policy_version)
        self.policy_version = policy_version

    def sleep(self) -> SleepMemory:
        """Give the engines' memory to the trainer, until `update_weights`. Every rank calls it.

        Returns:
            The least that a rank has freed, and the most that one still holds.

        Communicates: an all-gather over all ranks.

        Raises:
            RuntimeError: on every rank, where an engine does not fall asleep.
        """
        memory, error = None, None
        try:
            memory = self._rank_engine.sleep()
        except Exception as failed:
            error = f"the engine does not fall asleep: {failed}"
        if error := agree(error, self._groups):
            raise RuntimeError(error)
        gathered: list[SleepMemory | None] = [None] * self._groups.world_size
        dist.all_gather_object(gathered, memory)
        freed = [m.freed_bytes for m in gathered if m and m.freed_bytes is not None]
        held = [m.held_bytes for m in gathered if m and m.held_bytes is not None]
        return SleepMemory(freed_bytes=min(freed, default=None), held_bytes=max(held, default=None))

    def close(self) -> None:
        """See `Engine`; every rank calls it."""
        self._rank_engine.close()

    def _hand_out(
        self, call: _Call | None, num_open: list[int], reports: Sequence[_Report]
    ) -> _Order:
        """Rank 0 takes in the last round and says what the next one is."""
        orders: list[_Order] | None = None
        if call is not None:
            orders = self._plan_round(call, num_open, reports)
        received: list[_Order | None] = [None]
        dist.scatter_object_list(received, orders, src=0)
        assert received[0] is not None
        return received[0]

    def _plan_round(
        self, call: _Call, num_open: list[int], reports: Sequence[_Report]
    ) -> list[_Order]:
        num_samples = call.request.num_samples
        for rank, report in enumerate(reports):
            for index, rollouts in report.groups:
                num_open[rank // self._num_engine_ranks] -= num_samples
                group = RolloutGroup(prompt=call.prompts[index], rollouts=rollouts)
                call.answers.put((index, group))
        failed = [report for report in reports if report.failure]
        if failed:
            failure = min(failed, key=lambda report: report.failed_at_s).failure
            call.answers.put(RuntimeError(failure))
            return [_Order(prompts=[], is_last=True, failure=failure)] * self._groups.world_size
        prompts = self._assign_prompts(call, num_open)
        is_last = call.is_abandoned or not any(num_open)
        return [
            _Order(prompts=prompts[rank // self._num_engine_ranks], is_last=is_last)
            for rank in range(self._groups.world_size)
        ]

    def _assign_prompts(self, call: _Call, num_open: list[int]) -> list[list[tuple[int, Prompt]]]:
        """By engine. An engine decodes max_num_seqs samples at a time and should never lack others
        that wait; what goes beyond these goes to whichever is done first."""
        num_samples = call.request.num_samples
        prompts: list[list[tuple[int, Prompt]]] = [[] for _ in num_open]
        while call.waiting:
            engine = min(range(len(num_open)), key=num_open.__getitem__)
            if num_open[engine] and num_open[engine] + num_samples > 2 * self._max_num_seqs:
                break
            index = call.waiting.popleft()
            prompts[engine].append((index, call.prompts[index]))
            num_open[engine] += num_samples
        return prompts

    def _run_round(self, order: _Order, request: SamplingRequest) -> _Report:
        try:
            for index, prompt in order.prompts:
                self._rank_engine.add(index, prompt, request)
            groups = self._rank_engine.step(_STEPS_PER_ROUND)
        except Exception as error:
            return _Report(
                groups=[],
                failure=f"{self._groups}: the engine failed: {error!r}",
                failed_at_s=time.time(),
            )
        is_first = self._groups.rank % self._num_engine_ranks == 0
        return _Report(groups=groups if is_first else [])

    def _collect(self, report: _Report) -> list[_Report]:
        """By rank, on rank 0; nothing on the others."""
        is_rank_0 = self._groups.rank == 0
        reports: list[_Report | None] | None = None
        if is_rank_0:
            reports = [None] * self._groups.world_size
        dist.gather_object(report, reports, dst=0)
        return [r for r in reports or [] if r is not None]
