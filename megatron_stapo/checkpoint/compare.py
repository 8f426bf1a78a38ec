"""Two runs that should have come to the same step: everything a checkpoint holds, side by side."""

import hashlib
import io
import json
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from megatron_stapo.checkpoint.folder import METRICS_FILE, name_checkpoint, read_state
from megatron_stapo.checkpoint.rollouts import load_rollouts, name_rollouts
from megatron_stapo.checkpoint.tensors import MOMENTS, WEIGHTS, StoredTensors

_NAMES = dict(zip((WEIGHTS, *MOMENTS), ("main weights", "first moments", "second moments")))
# What tells how long something took, and not what came of it.
_TIMINGS = ("tokens_per_s",)
# Differences of numbers of order one: what rounding leaves in them does not shrink with them. They
# are measured as shares of this at least, so that a bound of 1e-2 allows log-probabilities 1e-4
# nats, as `stapo verify` does, and the loss 1e-5.
_ROUNDED = {"logprob_gap_mean": 1e-2, "logprob_gap_max": 1e-2, "kl_mean": 1e-3, "loss": 1e-3}


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One thing that both runs have."""

    what: str
    first: str
    """Hash or value, in short."""
    second: str
    difference: float
    """Of weights the largest root mean square of any tensor's, of moments the same as a share of
    the tensor's own, of other floats the largest relative one; inf where anything else differs."""

    @property
    def is_equal(self) -> bool:
        """Bit for bit."""
        return self.first == self.second


def compare_runs(first: Path, second: Path, num_steps: int, from_step: int) -> list[Comparison]:
    """Compare what two runs hold after the same number of steps.

    Args:
        first: run folder.
        second: run folder.
        num_steps: after which both have a checkpoint.
        from_step: first step of which both have kept the rollouts, counted from 1.

    Raises:
        ValueError: a checkpoint or a rollout file is missing or damaged.
    """
    folders = [name_checkpoint(run_dir, num_steps) for run_dir in (first, second)]
    states = [read_state(folder) for folder in folders]
    rows = [*_compare_tensors(*folders)]
    names = ("num_steps_done", "num_updates", "optimizer_step", "stream_position")
    rows += [
        _compare_values(name.replace("_", " "), *(getattr(state, name) for state in states))
        for name in names
    ]
    random_states = [_read_random_states(folder) for folder in folders]
    rows.append(_compare_values("random states of every rank", *random_states))
    for step in range(from_step, num_steps + 1):
        rows += _compare_rollouts(first, second, step)
    rows += _compare_metrics(*(read_metrics(folder) for folder in folders))
    return rows


def read_metrics(checkpoint: Path) -> dict[int, dict[str, float | None]]:
    """Step -> metrics, without timings, of the checkpoint's record."""
    records = [json.loads(line) for line in (checkpoint / METRICS_FILE).read_text().splitlines()]
    return {
        record["step"]: {
            name: value for name, value in record["metrics"].items() if name not in _TIMINGS
        }
        for record in records
        if "step" in record
    }


def _compare_tensors(first: Path, second: Path) -> Iterator[Comparison]:
    stored = [StoredTensors(first), StoredTensors(second)]
    for kind, what in _NAMES.items():
        keys = [sorted(k for k in s.tensors if k.startswith(f"{kind}.")) for s in stored]
        digests = [hashlib.sha256(), hashlib.sha256()]
        difference = 0.0 if keys[0] == keys[1] else math.inf
        for key in keys[0]:
            pair = [s.read(key) for s in stored if key in s.tensors]
            for digest, tensor in zip(digests, pair, strict=False):
                digest.update(key.encode())
                digest.update(tensor.contiguous().view(torch.uint8).numpy())
            if len(pair) == 2:
                distance = _compute_rms(pair[0].double() - pair[1].double())
                if kind != WEIGHTS and distance:
                    distance /= max(map(_compute_rms, pair))
                difference = max(difference, distance)
        yield Comparison(
            what=what,
            first=digests[0].hexdigest()[:16],
            second=digests[1].hexdigest()[:16],
            difference=difference,
        )


def _compute_rms(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().mean().sqrt())


def _compare_rollouts(first: Path, second: Path, step: int) -> Iterator[Comparison]:
    groups = [load_rollouts(name_rollouts(run_dir, step)).groups for run_dir in (first, second)]
    both = [[r for group in groups_of for r in group.rollouts] for groups_of in groups]
    prompts = [[group.prompt.prompt_id for group in groups_of] for groups_of in groups]
    yield _compare_values(f"prompts of step {step}", *prompts)
    yield _compare_values(
        f"responses of step {step}", *([r.token_ids for r in rollouts] for rollouts in both)
    )
    yield _compare_values(
        f"engine's log-probs of step {step}",
        *([x for r in rollouts for x in r.rollout_logprobs] for rollouts in both),
    )
    yield _compare_values(
        f"rewards of step {step}", *([r.reward for r in rollouts] for rollouts in both)
    )


def _compare_metrics(
    first: dict[int, dict[str, float | None]], second: dict[int, dict[str, float | None]]
) -> Iterator[Comparison]:
    for step in sorted(first.keys() | second.keys()):
        ours, theirs = first.get(step, {}), second.get(step, {})
        differences = [
            _measure(ours.get(name, math.inf), theirs.get(name, math.inf), _ROUNDED.get(name, 0.0))
            for name in ours.keys() | theirs.keys()
        ]
        yield Comparison(
            what=f"metrics of step {step}",
            first=_digest(sorted(ours.items())),
            second=_digest(sorted(theirs.items())),
            difference=max(differences, default=0.0),
        )


def _compare_values(what: str, first: Any, second: Any) -> Comparison:
    if isinstance(first, int) and isinstance(second, int):
        return Comparison(
            what=what, first=str(first), second=str(second), difference=abs(first - second)
        )
    texts = [_digest(value) for value in (first, second)]
    return Comparison(
        what=what, first=texts[0], second=texts[1], difference=_measure(first, second)
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _measure(first: Any, second: Any, scale: float = 0.0) -> float:
    """Largest relative difference of two nests of numbers; inf where another thing differs.

    Args:
        scale: what a difference is a share of, if both numbers are smaller.
    """
    if first == second:
        return 0.0
    if isinstance(first, float) and isinstance(second, float):
        if not (math.isfinite(first) and math.isfinite(second)):
            return math.inf
        return abs(first - second) / max(abs(first), abs(second), scale)
    if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
        return max(_measure(*pair, scale) for pair in zip(first, second, strict=True))
    return math.inf


def _read_random_states(checkpoint: Path) -> dict[str, str]:
    """Rank -> digest of its generators' states."""
    reader = FileSystemReader(checkpoint)
    keys = [
        key
        for key, value in reader.read_metadata().state_dict_metadata.items()
        if isinstance(value, BytesStorageMetadata) and key.startswith("random_states")
    ]
    state: dict[str, Any] = {key: io.BytesIO() for key in keys}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it reads in one process, as it is told to
        load(state, storage_reader=reader, no_dist=True)
    digests = {}
    for key in sorted(keys):
        value = state[key]
        if isinstance(value, io.BytesIO):
            value.seek(0)
            value = torch.load(value, weights_only=True)
        digests[key] = _digest(_to_plain(value))
    return digests


def _to_plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return [(key, _to_plain(value[key])) for key in sorted(value)]
    if isinstance(value, list | tuple):
        return [_to_plain(item) for item in value]
    return value
