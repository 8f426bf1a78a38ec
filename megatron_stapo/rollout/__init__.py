"""Responses out: one `Engine` protocol, one file per inference engine.

Every response is a function of the weights and of `compute_request_seed`, never of the order of
calls or of what is sampled beside it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from megatron_stapo.types import Prompt, RolloutGroup, Sampling

if TYPE_CHECKING:
    from megatron_stapo.rollout.weight_transfer import WeightUpdate


class EngineDiedError(RuntimeError):
    """An engine is gone; its host starts it again."""


@dataclass(frozen=True, kw_only=True)
class SamplingRequest:
    """Rank 0's wish that all ranks sample together, in the engines that they hold.

    What is sampled, rank 0 hands out as it goes.
    """

    num_samples: int
    """Per prompt."""
    sampling: Sampling


@dataclass(frozen=True, kw_only=True)
class SleepMemory:
    """GPU memory that an engine in the trainer's ranks gives back for the update, in bytes; None
    where vLLM cannot sleep, as on a CPU."""

    freed_bytes: int | None
    """Device memory free after falling asleep, less before."""
    held_bytes: int | None
    """What the engine has taken of the device since before it was made, less what it freed."""


class Engine(Protocol):
    """An inference engine, or a pool of them, as rank 0 of the trainer sees it.

    It starts with the weights of model.path, as policy version 0. Its maker may give it an on_wait,
    which `generate` calls every second or oftener while it waits, and which may raise to abandon
    the call; the engine then serves on. `generate` runs in a thread beside the other methods.
    """

    @property
    def policy_version(self) -> int:
        """Of the newest weights that it was given: `generate` samples from no others."""
        ...

    @property
    def is_serving(self) -> bool:
        """Whether any engine of the pool has these weights and answers."""
        ...

    def list_stale(self, policy_version: int) -> list[int]:
        """Numbers of the engines that answer and have other weights than of this version."""
        ...

    def take_request(self) -> SamplingRequest | None:
        """What a call of `generate` wants of all ranks, once; None from engines that sample by
        themselves."""
        ...

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_group: Callable[[int, RolloutGroup], None] | None = None,
    ) -> list[RolloutGroup]:
        """Sample num_samples responses per prompt from the current weights, in the prompts' order.

        An engine of a pool that dies is no error: its prompts go to the others, or wait until one
        of them has come back and got the weights.

        A response ends with the first stop token, or after max_response_tokens. Sample i of a
        prompt is seeded with `compute_request_seed` plus i.

        Args:
            on_group: called with a prompt's index and its responses as soon as they are complete,
                in any order, while others are still being sampled.

        Raises:
            RuntimeError: no engine came back, or one returned something malformed.
        """
        ...

    def update_weights(self, update: "WeightUpdate", engine_index: int = 0) -> None:
        """Replace all weights of one engine and stamp its later rollouts with their version.

        Raises:
            EngineDiedError: the engine died or timed out.
            RuntimeError: a tensor is missing, unknown, repeated or misshapen. The engine cannot be
                used afterwards.
        """
        ...

    def close(self) -> None:
        """Release what the trainer holds of the engine. Safe to call twice."""
        ...


def compute_request_seed(seed: int, policy_version: int, prompt_id: int) -> int:
    """Derive the seed of a prompt's samples from what identifies them, not from the order of calls.

    Returns:
        An integer in [0, 2**31); sample i of the prompt uses it plus i.
    """
    key = f"{seed}/{policy_version}/{prompt_id}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") >> 1
