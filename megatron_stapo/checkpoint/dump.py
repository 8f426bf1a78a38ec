"""An optimizer step's streams and numbers on disk, for `stapo replay`.

Each rank that reports tokens writes its own; nothing is gathered. `dumps/step_000012/update_1` is
the first update of the twelfth step.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors.torch import load, save

from megatron_stapo.checkpoint.folder import replace_durably
from megatron_stapo.config import Config, from_dict, to_dict
from megatron_stapo.types import Microbatch, Minibatch, Update

if TYPE_CHECKING:
    from megatron_stapo.parallel.groups import Groups

DUMPS_FOLDER = "dumps"
UPDATE_FILE = "update.json"

_MAX_FOLDERS_SHOWN = 8
_KEYS = {"step", "update", "phase", "num_updates", "num_sequences", "num_microbatches", "loss"}
_KEYS |= {"grad_norm", "lr", "is_skipped"}


class StepDump:
    """Dumps the updates that are due, and every one that was left out."""

    def __init__(self, config: Config, groups: "Groups") -> None:
        """Nothing is written yet."""
        self._config = config
        self._groups = groups

    def after_update(
        self,
        step: int,
        number: int,
        minibatch: Minibatch,
        phase: str,
        update: Update,
        num_updates: int,
    ) -> None:
        """Write this rank's part, if the update is due or was left out.

        Args:
            step: counted from 1.
            number: of the update in the step, from 1.
            num_updates: optimizer steps taken before it.

        Communicates: a gather of names and checksums, where something is written.
        """
        interval = self._config.checkpoint.dump_interval_steps
        is_due = interval is not None and step % interval == 0
        if not (is_due or update.is_skipped):
            return
        folder = name_dump(Path(self._config.run_dir), step, number)
        written: list[Any] = [None] * self._groups.world_size
        dist.all_gather_object(written, self._write_part(folder, minibatch))
        if self._groups.rank != 0:
            return
        record = {
            "step": step,
            "update": number,
            "phase": phase,
            "num_updates": num_updates,
            "num_sequences": minibatch.num_sequences,
            "num_microbatches": minibatch.num_microbatches,
            "loss": update.loss if math.isfinite(update.loss) else None,
            "grad_norm": update.grad_norm if math.isfinite(update.grad_norm) else None,
            "lr": update.lr,
            "is_skipped": update.is_skipped,
            "files": dict(part for part in written if part),
            "config": to_dict(self._config),
        }
        try:
            replace_durably(folder / UPDATE_FILE, json.dumps(record, indent=2).encode())
        except OSError as error:
            print(f"{folder}: not written ({error.strerror})", flush=True)

    def _write_part(self, folder: Path, minibatch: Minibatch) -> tuple[str, str] | None:
        """Name and SHA-256 of this rank's file; None where it has none."""
        if not self._groups.reports:
            return None
        name = f"rank_{self._groups.rank}.safetensors"
        content = save(_flatten(minibatch.microbatches))
        try:
            folder.mkdir(parents=True, exist_ok=True)
            replace_durably(folder / name, content)
        except OSError as error:
            # A dump is for people; training does not depend on it.
            print(f"{folder / name}: not written ({error.strerror})", flush=True)
        return name, hashlib.sha256(content).hexdigest()


def name_dump(run_dir: Path, step: int, number: int) -> Path:
    """Folder of the dump of an update."""
    return run_dir / DUMPS_FOLDER / f"step_{step:06d}" / f"update_{number}"


def load_dump(folder: Path) -> tuple[dict[str, Any], list[Microbatch]]:
    """Read the record of `StepDump.after_update` and the microbatches of all ranks.

    Raises:
        ValueError: the folder is not a dump, or a file of it is damaged or missing.
    """
    file = folder / UPDATE_FILE
    try:
        record: dict[str, Any] = json.loads(file.read_text())
        digests: dict[str, str] = dict(record["files"])
        from_dict(record["config"])
        missing = _KEYS - record.keys()
    except (FileNotFoundError, NotADirectoryError):
        found = sorted(str(path.parent) for path in folder.glob(f"**/{UPDATE_FILE}"))
        give = f"a folder such as RUN_DIR/{DUMPS_FOLDER}/step_000012/update_1"
        if found:
            give = f"one of {', '.join(found[:_MAX_FOLDERS_SHOWN])}"
            give += ", ..." if len(found) > _MAX_FOLDERS_SHOWN else ""
        raise ValueError(f"DUMP={folder}: has no {UPDATE_FILE}; give {give}.") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"dump {file}: is damaged ({error!r}); restore it.") from error
    if missing:
        raise ValueError(f"dump {file}: is damaged (has no {', '.join(missing)}); restore it.")
    microbatches = []
    for name, digest in digests.items():
        file = folder / name
        try:
            content = file.read_bytes()
        except OSError as error:
            raise ValueError(f"dump {file}: cannot be read ({error.strerror}).") from error
        if hashlib.sha256(content).hexdigest() != digest:
            raise ValueError(f"dump {file}: is not what the run wrote; restore it.")
        microbatches += _unflatten(load(content))
    return record, sorted(microbatches, key=lambda m: m.microbatch_id)


def _flatten(microbatches: Sequence[Microbatch]) -> dict[str, torch.Tensor]:
    tensors = {}
    for number, m in enumerate(microbatches):
        for name, value in vars(m).items():
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
            tensors[f"{number}/{name}"] = tensor.detach().to("cpu").contiguous().clone()
    return tensors


def _unflatten(tensors: dict[str, torch.Tensor]) -> list[Microbatch]:
    values: dict[int, dict[str, Any]] = {}
    for key, tensor in tensors.items():
        number, name = key.split("/")
        values.setdefault(int(number), {})[name] = tensor
    required = {f.name for f in dataclasses.fields(Microbatch) if f.init}
    microbatches = []
    for _, streams in sorted(values.items()):
        streams["microbatch_id"] = int(streams["microbatch_id"])
        m = Microbatch(**{name: streams.pop(name) for name in required})
        for name, stream in streams.items():
            setattr(m, name, stream)
        microbatches.append(m)
    return microbatches
