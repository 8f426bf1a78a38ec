"""Responses out: one `Engine` protocol, one file per inference engine."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from megatron_stapo.types import Prompt, RolloutGroup

if TYPE_CHECKING:
    import torch


class Engine(Protocol):
    """An inference engine as rank 0 of the trainer sees it."""

    def generate(
        self, prompts: Sequence[Prompt], num_samples: int, max_response_tokens: int
    ) -> list[RolloutGroup]:
        """Sample num_samples responses per prompt from the current weights, in the prompts' order.

        The same weights, policy version and prompt id give the same seeds whatever the order of the
        calls.

        Raises:
            RuntimeError: the engine died, timed out, or returned something malformed.
        """
        ...

    def update_weights(
        self, named_tensors: Iterable[tuple[str, "torch.Tensor"]], policy_version: int
    ) -> None:
        """Replace all weights and stamp later rollouts with policy_version.

        Args:
            named_tensors: Hugging Face names and full tensors, each yielded once. Consumed lazily,
                so that no more than one bucket of the model is held at a time.
            policy_version: number of completed steps of the new weights.
        """
        ...

    def close(self) -> None:
        """Release what the trainer holds of the engine. Safe to call twice."""
        ...


def compute_request_seed(seed: int, policy_version: int, prompt_id: int, sample: int) -> int:
    """Derive a request's sampling seed from what identifies it, not from the order of calls.

    Returns:
        An integer in [0, 2**31).
    """
    key = f"{seed}/{policy_version}/{prompt_id}/{sample}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:4], "big") >> 1
