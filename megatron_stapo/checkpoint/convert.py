"""Checkpoints to Hugging Face folders and back: `stapo export` and `stapo import`.

Invariant: no tensor changes but by the cast to the model's dtype, and OUT has its name only once it
is whole. Both stream: they hold one file's tensors at a time, whatever the model's size, and need
neither Megatron nor a process group, for which torch's distributed checkpointing is enough.
"""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan

from megatron_stapo.checkpoint.folder import (
    CHECKPOINTS_FOLDER,
    HF_FOLDER,
    MANIFEST_FILE,
    STATE_FILE,
    TrainerState,
    digest_file,
    explain_os_error,
    find_fault,
    format_state,
    list_checkpoints,
    list_files,
    publish,
    read_state,
    read_versions,
    sync,
    write_durably,
)
from megatron_stapo.checkpoint.tensors import WEIGHTS, StoredTensors
from megatron_stapo.config import load_model_json
from megatron_stapo.model.hf_folder import (
    MAX_FILE_BYTES,
    copy_companions,
    find_tensor_files,
    read_tensor,
    set_dtype,
    write_tensors,
)
from megatron_stapo.model.weights import WeightPair, build_weight_table, locate, merge, shard

_PREFIX = f"{WEIGHTS}."

# What Megatron's `dist_checkpointing.load` looks for beside the tensors: its own file, and an
# object in the form of its ShardedObject, which holds what is no tensor. Ours is in state.json.
_MEGATRON_FILE = "metadata.json"
_MEGATRON_FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_MEGATRON_COMMON_KEY = "common_state/shard_0_1"
_MEGATRON_COMMON: list[dict[str, Any]] = [{}]


def find_checkpoint(path: Path) -> Path:
    """The checkpoint at a path: the folder itself, or the newest one of a run folder or of its
    folder of checkpoints.

    Raises:
        ValueError: it is neither.
    """
    if (path / MANIFEST_FILE).is_file():
        return path
    checkpoints = list_checkpoints(path.parent if path.name == CHECKPOINTS_FOLDER else path)
    if not checkpoints:
        raise ValueError(
            f"CHECKPOINT={path}: is neither a checkpoint, having no {MANIFEST_FILE}, nor a run "
            "folder with one; give a folder such as RUN_DIR/checkpoints/step_000010, or RUN_DIR."
        )
    return checkpoints[-1]


def export_checkpoint(
    checkpoint: Path, out: Path, model: Path | None = None, max_file_bytes: int = MAX_FILE_BYTES
) -> int:
    """Write a checkpoint's weights as a Hugging Face folder.

    The tensors are in the dtype that the model trained in, or, of an import, each in its own.

    Args:
        model: folder whose config.json, tokenizer and generation config are taken instead of those
            that the checkpoint holds.

    Returns:
        Steps whose updates the weights contain.

    Raises:
        ValueError: the checkpoint is damaged or does not hold the model's weights, or out is taken.
    """
    _check_is_free(out)
    if fault := find_fault(checkpoint, list(list_files(checkpoint))):
        raise ValueError(f"{fault} Export another checkpoint.")
    source = model or checkpoint / HF_FOLDER
    if model is None and not source.is_dir():
        raise ValueError(
            f"checkpoint {checkpoint}: has no folder {HF_FOLDER}/ with config.json and tokenizer; "
            "name the folder of the model that it was trained from with --model."
        )
    model_json = load_model_json(str(source))
    table = build_weight_table(model_json)
    stored = StoredTensors(checkpoint)
    _check_stored(stored, table, source)
    state = read_state(checkpoint)

    def read(pair: WeightPair) -> list[torch.Tensor]:
        tensor = stored.read(_PREFIX + pair.name, state.dtype)
        return merge([tensor], pair.layout, pair.hf_shapes, model_json["num_key_value_heads"])

    tensors = (item for pair in table for item in zip(pair.hf_names, read(pair), strict=True))
    with _write_aside(out) as partial:
        copy_companions(source, partial)
        if state.dtype is not None:
            set_dtype(partial, state.dtype)
        write_tensors(partial, tensors, max_file_bytes)
        _sync(partial)
        partial.rename(out)
    return state.num_steps_done


def import_model(model: Path, out: Path, max_file_bytes: int = MAX_FILE_BYTES) -> None:
    """Write a Hugging Face folder as a checkpoint of zero steps: weights and no moments.

    Each tensor keeps its own dtype.

    Raises:
        ValueError: the folder does not hold the weights that its config.json asks for, or others
            beside them, or out is taken.
    """
    _check_is_free(out)
    model_json = load_model_json(str(model))
    files = find_tensor_files(str(model))
    table = build_weight_table(model_json)
    _check_names(model, files, table)

    def read(pair: WeightPair) -> torch.Tensor:
        tensors = _read_pair(model, files, pair)
        return shard(tensors, pair.layout, 0, 1, model_json["num_key_value_heads"])

    with _write_aside(out) as partial:
        _write_stored(partial, model, files, table, read, max_file_bytes)
        (partial / _MEGATRON_FILE).write_text(json.dumps(_MEGATRON_FORMAT))
        copy_companions(model, partial / HF_FOLDER)
        state = TrainerState(
            num_steps_done=0,
            num_updates=0,
            num_skipped_in_a_row=0,
            optimizer_step=0,
            stream_position=0,
            prompts_digest="",
            dtype=None,
            world_size=1,
            versions=read_versions(),
        )
        write_durably(partial / STATE_FILE, format_state(state))
        _sync(partial)
        paths = sorted(path for path in partial.rglob("*") if path.is_file())
        publish(partial, out, {str(path.relative_to(partial)): digest_file(path) for path in paths})


def _check_stored(stored: StoredTensors, table: list[WeightPair], source: Path) -> None:
    """Raises ValueError where the checkpoint lacks a weight of the table or holds another one."""
    asks = f"which {source / 'config.json'} asks for"
    for pair in table:
        key, (shape, _) = _PREFIX + pair.name, locate(pair, 0, 1)
        if key not in stored.tensors:
            raise ValueError(f"checkpoint {stored.checkpoint}: has no tensor {key}, {asks}.")
        about = stored.tensors[key]
        if tuple(about.size) != shape:
            raise ValueError(
                f"checkpoint {stored.checkpoint}: tensor {key} has shape {tuple(about.size)}, not "
                f"{shape}, {asks}."
            )
        # Reading would leave what no piece holds as it happens to lie in memory.
        num_stored = sum(math.prod(chunk.sizes) for chunk in about.chunks)
        if num_stored != math.prod(shape):
            raise ValueError(
                f"checkpoint {stored.checkpoint}: tensor {key} is stored with {num_stored} of its "
                f"{math.prod(shape)} elements."
            )
    known = {_PREFIX + pair.name for pair in table}
    for key in stored.tensors:
        if key.startswith(_PREFIX) and key not in known:
            raise ValueError(
                f"checkpoint {stored.checkpoint}: holds a tensor {key}, which no weight of "
                f"{source / 'config.json'} is; give the model that it was trained from."
            )


def _check_names(model: Path, files: dict[str, Path], table: list[WeightPair]) -> None:
    """Raises ValueError for a tensor of the folder that would be lost."""
    known = {name for pair in table for name in pair.hf_names}
    for name in sorted(files.keys() - known):
        if name == "lm_head.weight":
            # Published folders with a tied head hold it all the same.
            embedding = table[0]
            (theirs,) = _read_pair(model, files, embedding)
            ours = read_tensor(files, str(model), name, embedding.hf_shapes[0])
            if torch.equal(ours, theirs):
                continue
        raise ValueError(
            f"MODEL={model}: has a tensor {name} that its config.json does not ask for, so it "
            "would be lost; give a Qwen3 model as transformers writes it."
        )


def _read_pair(model: Path, files: dict[str, Path], pair: WeightPair) -> list[torch.Tensor]:
    return [
        read_tensor(files, str(model), name, shape)
        for name, shape in zip(pair.hf_names, pair.hf_shapes, strict=True)
    ]


class _StreamingPlanner(DefaultSavePlanner):
    """Reads a tensor at the moment that it is written."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._read = read

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self._read(index.fqn)


def _write_stored(
    folder: Path,
    model: Path,
    files: dict[str, Path],
    table: list[WeightPair],
    read: Callable[[WeightPair], torch.Tensor],
    max_file_bytes: int,
) -> None:
    """Write the weights as a checkpoint of torch's distributed checkpointing.

    Its writer keeps what it has written until it closes a file, and writes one file per rank. So a
    plan per file is given to it, each as that of a rank. `checkpoint.save` knows one plan only.

    Raises:
        ValueError: a tensor is missing, has another shape, or cannot be stored with its like.
    """
    plans = [create_default_local_save_plan({_MEGATRON_COMMON_KEY: _MEGATRON_COMMON}, True)]
    num_bytes = 0
    for pair in table:
        # Tensors of a folder are mapped, so that this reads their headers alone.
        dtypes = {tensor.dtype for tensor in _read_pair(model, files, pair)}
        if len(dtypes) > 1:
            raise ValueError(
                f"MODEL={model}: {', '.join(pair.hf_names)} have the dtypes "
                f"{', '.join(sorted(map(str, dtypes)))}, but are stored as one tensor; give them "
                "one dtype."
            )
        shape, _ = locate(pair, 0, 1)
        tensor = torch.empty(shape, dtype=dtypes.pop(), device="meta")
        if num_bytes + tensor.nbytes > max_file_bytes:
            plans.append(SavePlan([]))
            num_bytes = 0
        num_bytes += tensor.nbytes
        plans[-1].items.extend(
            create_default_local_save_plan({_PREFIX + pair.name: tensor}, True).items
        )

    pairs = {_PREFIX + pair.name: pair for pair in table}
    planner = _StreamingPlanner(
        lambda key: _MEGATRON_COMMON if key == _MEGATRON_COMMON_KEY else read(pairs[key])
    )
    writer = FileSystemWriter(folder)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, metadata = planner.create_global_plan(plans)
    plans = writer.prepare_global_plan(plans)
    writer.finish(metadata, [writer.write_data(plan, planner).wait() for plan in plans])


def _check_is_free(out: Path) -> None:
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ValueError(f"OUT={out}: exists and is not empty; give a new or an empty folder.")


@contextmanager
def _write_aside(out: Path) -> Iterator[Path]:
    """Yield a new folder beside out that the block fills and renames; remove it if it fails."""
    # A name that nobody gives to anything else: what a process that was killed has left is removed.
    place = out.resolve()
    partial = place.with_name(f".{place.name}.stapo_partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ValueError(
            f"OUT={out}: cannot be written ({explain_os_error(error)}); give another folder."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _sync(folder: Path) -> None:
    """Wait until everything in a folder is on the disk."""
    for path in [folder, *folder.rglob("*")]:
        sync(path)
