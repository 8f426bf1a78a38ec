"""An optimizer step's streams and numbers on disk, for `stapo replay`.

Each rank that reports tokens writes its own; nothing is gathered. `dumps/step_000012/update_1` is
the first update of the twelfth step.
"""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from megatron_stapo.checkpoint.folder import replace_durably
from megatron_stapo.config import Config, to_dict
from megatron_stapo.types import Microbatch, Minibatch, Update

if TYPE_CHECKING:
    from megatron_stapo.parallel.groups import Groups

DUMPS_FOLDER = "dumps"
UPDATE_FILE = "update.json"

_MAX_FOLDERS_SHOWN = 8


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
        """
        interval = self._config.checkpoint.dump_interval_steps
        is_due = interval is not None and step % interval == 0
        if not (is_due or update.is_skipped):
            return
        folder = name_dump(Path(self._config.run_dir), step, number)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if self._groups.reports:
                content = save(_flatten(minibatch.microbatches))
                replace_durably(folder / f"rank_{self._groups.rank}.safetensors", content)
            if self._groups.rank == 0:
                record = {
                    "step": step,
                    "update": number,
                    "phase": phase,
                    "num_updates": num_updates,
                    "num_sequences": minibatch.num_sequences,
                    "num_microbatches": minibatch.num_microbatches,
                    "num_rank_files": self._groups.dp_size * self._groups.cp_size,
                    "loss": update.loss if math.isfinite(update.loss) else None,
                    "grad_norm": update.grad_norm if math.isfinite(update.grad_norm) else None,
                    "lr": update.lr,
                    "is_skipped": update.is_skipped,
                    "config": to_dict(self._config),
                }
                replace_durably(folder / UPDATE_FILE, json.dumps(record, indent=2).encode())
        except OSError as error:
            # A dump is for people; training does not depend on it.
            print(f"{folder}: not written ({error.strerror})", flush=True)


def name_dump(run_dir: Path, step: int, number: int) -> Path:
    """Folder of the dump of an update."""
    return run_dir / DUMPS_FOLDER / f"step_{step:06d}" / f"update_{number}"


def load_dump(folder: Path) -> tuple[dict[str, Any], list[Microbatch]]:
    """Read the record of `StepDump.after_update` and the microbatches of all ranks.

    Raises:
        ValueError: the folder is not a dump, or a rank's file is damaged or missing.
    """
    file = folder / UPDATE_FILE
    try:
        record: dict[str, Any] = json.loads(file.read_text())
        num_rank_files = record["num_rank_files"]
    except FileNotFoundError:
        found = sorted(str(path.parent) for path in folder.glob(f"**/{UPDATE_FILE}"))
        give = f"a folder such as RUN_DIR/{DUMPS_FOLDER}/step_000012/update_1"
        if found:
            give = f"one of {', '.join(found[:_MAX_FOLDERS_SHOWN])}"
            give += ", ..." if len(found) > _MAX_FOLDERS_SHOWN else ""
        raise ValueError(f"DUMP={folder}: has no {UPDATE_FILE}; give {give}.") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"dump {file}: is damaged ({error!r}); restore it.") from error
    files = sorted(folder.glob("rank_*.safetensors"))
    if len(files) != num_rank_files:
        raise ValueError(
            f"dump {folder}: has the streams of {len(files)} of {num_rank_files} ranks; "
            "restore the missing files."
        )
    microbatches = []
    for file in files:
        try:
            microbatches += _unflatten(load_file(file))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            raise ValueError(f"dump {file}: is damaged ({error!r}); restore it.") from error
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
