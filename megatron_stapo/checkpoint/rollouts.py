"""A step's rollouts on disk, from the moment they are judged until a checkpoint contains the step.

Sampling is most of a step's time. A run that goes on from an earlier checkpoint takes the rollouts
of the steps after it from here, and repeats only their updates. A checkpoint holds those of the
next step as well where they were sampled ahead: the weights that sampled them are gone.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from megatron_stapo.checkpoint.folder import AHEAD_FILE, replace_durably
from megatron_stapo.types import Prompt, Rollout, RolloutGroup

ROLLOUTS_FOLDER = "rollouts"


@dataclass(frozen=True, kw_only=True)
class StepRollouts:
    """What rank 0 has before a step is packed."""

    groups: list[RolloutGroup]
    """Rewarded, with advantages."""
    metrics: dict[str, float]
    stream_position: int
    """After the step's draws."""
    config: dict[str, Any]
    """`config.to_dict` of the run that sampled them."""


def name_rollouts(run_dir: Path, step: int) -> Path:
    """File of the rollouts of a step, counted from 1."""
    return run_dir / ROLLOUTS_FOLDER / f"step_{step:06d}.safetensors"


def save_rollouts(path: Path, rollouts: StepRollouts) -> None:
    """Write a step's rollouts, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(exist_ok=True)
    replace_durably(path, format_rollouts(rollouts))


def format_rollouts(rollouts: StepRollouts) -> bytes:
    """What the file of a step's rollouts holds."""
    sequences = [rollout for group in rollouts.groups for rollout in group.rollouts]
    tensors = {
        "prompt_tokens": _join([group.prompt.token_ids for group in rollouts.groups]),
        "prompt_lengths": torch.tensor([len(group.prompt.token_ids) for group in rollouts.groups]),
        "response_tokens": _join([rollout.token_ids for rollout in sequences]),
        "response_lengths": torch.tensor([len(rollout.token_ids) for rollout in sequences]),
        "rollout_logprobs": torch.tensor(
            [x for rollout in sequences for x in rollout.rollout_logprobs], dtype=torch.float64
        ),
    }
    record = {
        "metrics": rollouts.metrics,
        "stream_position": rollouts.stream_position,
        "config": rollouts.config,
        "groups": [
            {
                "prompt": _drop(asdict(group.prompt), "token_ids"),
                "rollouts": [
                    _drop(asdict(rollout), "token_ids", "rollout_logprobs")
                    for rollout in group.rollouts
                ],
            }
            for group in rollouts.groups
        ],
    }
    text = json.dumps(record)
    metadata = {"record": text, "sha256": _digest(tensors, text)}
    return save(tensors, metadata)


def load_rollouts(path: Path) -> StepRollouts:
    """Read what `save_rollouts` wrote.

    Raises:
        ValueError: the file is damaged.
        FileNotFoundError: there is none.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            metadata = file.metadata()
        if _digest(tensors, metadata["record"]) != metadata["sha256"]:
            raise ValueError("its content has changed since it was written")
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"rollouts {path}: damaged ({error}).") from error
    record = json.loads(metadata["record"])
    prompts = _split(tensors["prompt_tokens"], tensors["prompt_lengths"])
    lengths = tensors["response_lengths"]
    responses = zip(
        _split(tensors["response_tokens"], lengths),
        _split(tensors["rollout_logprobs"], lengths),
        strict=True,
    )
    groups = []
    for group, token_ids in zip(record["groups"], prompts, strict=True):
        rollouts = []
        for values in group["rollouts"]:
            response, logprobs = next(responses)
            rollouts.append(Rollout(token_ids=response, rollout_logprobs=logprobs, **values))
        prompt = Prompt(token_ids=token_ids, **group["prompt"])
        groups.append(RolloutGroup(prompt=prompt, rollouts=rollouts))
    return StepRollouts(
        groups=groups,
        metrics=record["metrics"],
        stream_position=record["stream_position"],
        config=record["config"],
    )


def restore_ahead(run_dir: Path, checkpoint: Path, num_steps_done: int) -> None:
    """Put the rollouts that the checkpoint holds of the next step, if any, where it looks for them.

    Raises:
        OSError: they cannot be written.
    """
    ahead = checkpoint / AHEAD_FILE
    if ahead.exists():
        path = name_rollouts(run_dir, num_steps_done + 1)
        path.parent.mkdir(exist_ok=True)
        replace_durably(path, ahead.read_bytes())


def remove_rollouts(run_dir: Path, num_steps_done: int) -> None:
    """Remove the rollouts of the steps that a checkpoint contains."""
    last = name_rollouts(run_dir, num_steps_done).name
    for path in (run_dir / ROLLOUTS_FOLDER).glob("step_*.safetensors"):
        if path.name <= last:
            path.unlink()


def _join(sequences: Sequence[Sequence[int]]) -> torch.Tensor:
    return torch.tensor([x for sequence in sequences for x in sequence], dtype=torch.int32)


def _split(values: torch.Tensor, lengths: torch.Tensor) -> list[Any]:
    return [part.tolist() for part in values.split(lengths.tolist())]


def _drop(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def _digest(tensors: dict[str, torch.Tensor], text: str) -> str:
    digest = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        digest.update(tensors[name].numpy().tobytes())
    return digest.hexdigest()
