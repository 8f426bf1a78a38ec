"""What the ranks of `test_colocated` run: scripted engines, rank 0's thread and the rounds."""

import threading
import time
from concurrent.futures import Future
from typing import Any

from megatron_stapo.config import Config
from megatron_stapo.rollout import SamplingRequest, SleepMemory
from megatron_stapo.types import Prompt, Rollout, Sampling
from tests.workers import joined_world

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_response_tokens=40)


class ScriptedRank:
    """An engine whose prompt of n tokens takes n steps; a response tells who sampled it."""

    def __init__(self, engine: int, fails_at: int | None = None, fails_after_s: float = 0) -> None:
        self.log: list[Any] = []
        self.version = 0
        self._engine = engine
        self._open: dict[int, tuple[int, int]] = {}
        self._num_steps = 0
        self._fails_at, self._fails_after_s = fails_at, fails_after_s

    def add(self, index: int, prompt: Prompt, request: SamplingRequest) -> None:
        self.log.append(prompt.prompt_id)
        self._open[index] = (len(prompt.token_ids), request.num_samples)

    def step(self, max_steps: int) -> list[tuple[int, list[Rollout]]]:
        self._num_steps += 1
        if self._num_steps == self._fails_at:
            time.sleep(self._fails_after_s)
            raise RuntimeError("a broken kernel")
        done = []
        for index, (num_left, num_samples) in list(self._open.items()):
            self._open[index] = (num_left - max_steps, num_samples)
            if num_left <= max_steps:
                del self._open[index]
                rollout = Rollout(
                    token_ids=[self._engine],
                    rollout_logprobs=[-1.0],
                    finish_reason="stop",
                    policy_version=self.version,
                )
                done.append((index, [rollout] * num_samples))
        return done

    def abort(self) -> None:
        self.log.append(("abort", len(self._open)))
        self._open.clear()

    def load(self, named_tensors: Any, policy_version: int) -> None:
        self.version = policy_version

    def sleep(self) -> SleepMemory:
        return SleepMemory(freed_bytes=10 + self._engine, held_bytes=3 - self._engine)

    def close(self) -> None:
        pass


def build_prompts(lengths: list[int]) -> list[Prompt]:
    return [
        Prompt(prompt_id=100 + i, problem="", answer="", token_ids=[0] * length)
        for i, length in enumerate(lengths)
    ]


def run_calls(
    config: Config,
    calls: list[tuple[list[int], int]],
    failures: dict[int, tuple[int, float]],
    stop_after: int | None,
) -> dict[str, Any]:
    """Let rank 0 generate, call after call.

    Args:
        calls: prompt lengths and number of samples of each.
        failures: rank -> the round in which its engine fails, and after how many seconds.
        stop_after: groups of the first call after which rank 0 is asked to stop.
    """
    with joined_world(config) as groups:
        import torch.distributed as dist

        from megatron_stapo.rollout.colocated import ColocatedEngine

        engine_index = groups.rank // config.rollout.num_engine_ranks
        rank_engine = ScriptedRank(engine_index, *failures.get(groups.rank, ()))
        seen: list[tuple[int, int]] = []
        """On rank 0: the index of every group as it came, and its call."""

        def check_stop() -> None:
            if stop_after is not None and len(seen) >= stop_after and seen[-1][1] == 0:
                seen.append((-1, 1))
                raise InterruptedError("stop")

        engine = ColocatedEngine(config, groups, rank_engine, check_stop)

        def generate(number: int) -> list[tuple[int, list[int]]]:
            lengths, num_samples = calls[number]
            sampled = engine.generate(
                build_prompts(lengths),
                num_samples,
                SAMPLING,
                lambda index, group: seen.append((index, number)),
            )
            return [
                (group.prompt.prompt_id, [r.token_ids[0] for r in group.rollouts])
                for group in sampled
            ]

        outcomes: list[Any] = []
        failed: list[str | None] = []
        for number in range(len(calls)):
            future: Future[Any] = Future()
            if groups.rank == 0:
                threading.Thread(target=_settle, args=(future, generate, number)).start()
            while True:
                request = None
                while groups.rank == 0 and request is None and not future.done():
                    request = engine.take_request()
                shared = [request]
                dist.broadcast_object_list(shared, src=0)
                if shared[0] is None:
                    break
                failed.append(engine.sample(shared[0]))
            if groups.rank == 0:
                outcomes.append(repr(e) if (e := future.exception()) else future.result())
        memory = engine.sleep()
        return {
            "outcomes": outcomes,
            "seen": seen,
            "log": rank_engine.log,
            "failed": failed,
            "memory": (memory.freed_bytes, memory.held_bytes),
        }


def _settle(future: "Future[Any]", generate: Any, number: int) -> None:
    try:
        future.set_result(generate(number))
    except BaseException as error:
        future.set_exception(error)
