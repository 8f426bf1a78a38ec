"""Several vLLM servers as one engine, of which any may die and come back.

Every prompt is one request, so that its samples share the prefix in one server's cache. A request
goes to the server with the fewest open samples; what a dead server has not answered goes to the
others. Responses do not depend on which server samples them, since the seed does not.

Invariant: no request reaches a server that has other weights than the newest ones the pool was
given. A server that was started again has those of model.path, and waits for `update_weights`.

An event loop in a thread of its own talks to the servers and watches their health, so that other
threads may sample and update weights at the same time.
"""

import asyncio
import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_stapo.config import Config
from megatron_stapo.rollout import EngineDiedError, SamplingRequest
from megatron_stapo.rollout.engine_host import request_restart
from megatron_stapo.rollout.vllm_engine import HEALTH_INTERVAL_S, ServerDiedError, VllmEngine
from megatron_stapo.types import Prompt, RolloutGroup, Sampling

if TYPE_CHECKING:
    from megatron_stapo.rollout.weight_transfer import WeightUpdate

_MAX_SENDS = 5
"""A request that so many servers died under ends the run: it may be what they died of."""

_WAIT_S = 0.5
"""Longest time between two calls of on_wait, and until a server that is back gets requests."""


@dataclass(kw_only=True, eq=False)
class _Member:
    """A server of the pool."""

    index: int
    engine: VllmEngine
    is_up: bool = True
    is_updating: bool = False
    """The trainer sends it weights."""
    num_open: int = 0
    """Samples that it has not answered."""
    requests: set["asyncio.Task[RolloutGroup]"] = field(default_factory=set)


class EnginePool:
    """The servers of a run; see `Engine`."""

    def __init__(
        self,
        config: Config,
        engines: Sequence[VllmEngine],
        on_wait: Callable[[bool], None] = lambda can_end: None,
        log_event: Callable[..., None] = lambda name, **values: None,
    ) -> None:
        """Watch the servers from now on.

        Args:
            config: of the run.
            engines: at least one; they answer.
            on_wait: see `Engine`; told whether a server is up, so that the call can end.
            log_event: `RunLog.log_event`; called from a thread of the pool.
        """
        self._config = config
        self._members = [_Member(index=i, engine=engine) for i, engine in enumerate(engines)]
        self._on_wait = on_wait
        self._log_event = log_event
        self._policy_version = 0
        self._last_up_s = time.monotonic()
        self._last_death = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="engines")
        self._thread.start()
        self._watches = [self._start(self._watch(member)) for member in self._members]

    @property
    def policy_version(self) -> int:
        """See `Engine`."""
        return self._policy_version

    @property
    def is_serving(self) -> bool:
        """See `Engine`."""
        return any(self._is_serving(member) for member in self._members)

    def list_stale(self, policy_version: int) -> list[int]:
        """See `Engine`."""
        return [
            member.index
            for member in self._members
            if member.is_up and member.engine.policy_version != policy_version
        ]

    def take_request(self) -> SamplingRequest | None:
        """See `Engine`."""
        return None

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_group: Callable[[int, RolloutGroup], None] | None = None,
    ) -> list[RolloutGroup]:
        """See `Engine`.

        Raises:
            RuntimeError: no server was up for rollout.start_timeout_s; or one refused a request, or
                sent something malformed.
        """
        answers: queue.SimpleQueue[tuple[int, RolloutGroup] | None] = queue.SimpleQueue()
        sampled = self._start(self._sample(prompts, num_samples, sampling, answers.put))
        sampled.add_done_callback(lambda future: answers.put(None))
        groups: dict[int, RolloutGroup] = {}
        try:
            while True:
                self._on_wait(any(member.is_up for member in self._members))
                with contextlib.suppress(queue.Empty):
                    answer = answers.get(timeout=_WAIT_S)
                    if answer is None:
                        break
                    index, group = answer
                    groups[index] = group
                    if on_group is not None:
                        on_group(index, group)
        finally:
            # The servers notice the closed connections and end what they were sampling.
            sampled.cancel()
        sampled.result()
        return [groups[index] for index in range(len(prompts))]

    def update_weights(self, update: "WeightUpdate", engine_index: int = 0) -> None:
        """See `Engine`."""
        member = self._members[engine_index]
        if not member.is_up:
            raise EngineDiedError(f"engine {engine_index} is down")
        member.is_updating = True
        # From here on nothing is sampled from older weights.
        self._policy_version = update.policy_version
        try:
            member.engine.update_weights(update)
        except RuntimeError as error:
            if not self._start(self._has_died(member, str(error))).result():
                raise  # it has refused them, and would again
            # Half of its weights are new: whatever answers there again has to be another server.
            member.engine.forget()
            raise EngineDiedError(str(error)) from error
        finally:
            member.is_updating = False

    def close(self) -> None:
        """See `Engine`."""
        if not self._thread.is_alive():
            return
        self._start(self._end_tasks()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        for member in self._members:
            member.engine.close()

    def _start(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _is_serving(self, member: _Member) -> bool:
        return member.is_up and member.engine.policy_version == self._policy_version

    def _choose(self, num_samples: int) -> _Member | None:
        """The server with the fewest open samples; None where all have enough.

        A server decodes max_num_seqs samples at a time and should never lack others that wait. What
        goes beyond these stays here, for whichever server is done first.
        """
        limit = 2 * self._config.rollout.max_num_seqs
        able = [
            member
            for member in self._members
            if self._is_serving(member)
            and (member.num_open == 0 or member.num_open + num_samples <= limit)
        ]
        return min(able, key=lambda member: member.num_open, default=None)

    async def _sample(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        tell: Callable[[tuple[int, RolloutGroup]], None],
    ) -> None:
        """Send a request for every prompt, again where its server dies, until all are answered."""
        waiting = deque(range(len(prompts)))
        num_sends = [0] * len(prompts)
        running: dict[asyncio.Task[RolloutGroup], tuple[int, _Member]] = {}

        def end(task: "asyncio.Task[RolloutGroup]") -> int:
            index, member = running.pop(task)
            member.requests.discard(task)
            member.num_open -= num_samples
            return index

        try:
            while waiting or running:
                while waiting and (member := self._choose(num_samples)):
                    index = waiting.popleft()
                    num_sends[index] += 1
                    task = asyncio.create_task(
                        member.engine.sample(prompts[index], num_samples, sampling)
                    )
                    running[task] = (index, member)
                    member.requests.add(task)
                    member.num_open += num_samples
                if not running:
                    self._check_outage()
                    await asyncio.sleep(_WAIT_S)
                    continue
                done, _ = await asyncio.wait(
                    running, timeout=_WAIT_S, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    error = None if task.cancelled() else task.exception()
                    if isinstance(error, ServerDiedError):
                        self._take_down(running[task][1], str(error))
                    index = end(task)
                    if task.cancelled() or isinstance(error, ServerDiedError):
                        if num_sends[index] == _MAX_SENDS:
                            raise RuntimeError(
                                f"prompt {prompts[index].prompt_id} was sent {_MAX_SENDS} times, "
                                f"and no engine lived to answer. The last one: {self._last_death}"
                            )
                        waiting.appendleft(index)
                    else:
                        tell((index, task.result()))
        finally:
            for task in list(running):
                end(task)
                task.cancel()

    def _check_outage(self) -> None:
        for watch in self._watches:
            if watch.done():
                watch.result()  # raises
        limit_s = self._config.rollout.start_timeout_s
        if any(member.is_up for member in self._members):
            self._last_up_s = time.monotonic()
        elif time.monotonic() - self._last_up_s > limit_s:
            raise RuntimeError(
                f"no engine has come back within rollout.start_timeout_s={limit_s:g} seconds. The "
                f"last one: {self._last_death}"
            )

    async def _watch(self, member: _Member) -> None:
        """Notice that the server dies, and that another one has taken its place."""
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
            is_healthy = await member.engine.is_healthy()
            if member.is_up and not is_healthy:
                self._take_down(
                    member, f"vLLM engine at {member.engine.url} does not answer that it is well"
                )
            elif not member.is_up and is_healthy and not member.is_updating:
                await self._bring_up(member)

    async def _has_died(self, member: _Member, reason: str) -> bool:
        if await member.engine.stays_healthy():
            return False
        self._take_down(member, reason)
        return True

    def _take_down(self, member: _Member, reason: str) -> None:
        if not member.is_up:
            return
        member.is_up = False
        self._last_up_s, self._last_death = time.monotonic(), reason
        unanswered = [
            task
            for task in member.requests
            if not task.done() or task.cancelled() or task.exception() is not None
        ]
        self._log_event(
            "engine_died",
            value=reason,
            index=member.index,
            num_requests_resent=len(unanswered),
        )
        for task in unanswered:
            task.cancel()

    async def _bring_up(self, member: _Member) -> None:
        """Take a server that answers again into the pool, as what it is: the old one or a new."""
        try:
            is_the_old_one = await member.engine.has_own_weights()
        except ServerDiedError:
            # The process that answers is well, and the one that holds the model hangs.
            request_restart(Path(self._config.run_dir), member.index)
            return
        # Before the first update both have the same label, and the same weights.
        if not is_the_old_one or member.engine.policy_version == 0:
            is_the_old_one = False
            member.engine.forget()
        member.is_up = True
        self._log_event(
            "engine_back" if is_the_old_one else "engine_restarted",
            index=member.index,
            policy_version=member.engine.policy_version,
        )
