"""Reads and writes Hugging Face folders: tensors in safetensors, and the files beside them.

Both go tensor by tensor, so that no process holds a model to read or write it.
"""

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

MAX_FILE_BYTES = 2_000_000_000
"""Of a file of tensors, but for one that is larger by itself. Its writer holds so much memory."""

_COMPANIONS = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
)
"""What a Hugging Face folder holds beside its tensors."""

_INDEX_FILE = "model.safetensors.index.json"
_PARTIAL_SUFFIX = ".partial"


def list_companions(folder: Path) -> list[Path]:
    """Configuration and tokenizer of a model: what its folder holds beside tensors."""
    return [file for pattern in _COMPANIONS for file in sorted(folder.glob(pattern))]


def copy_companions(source: Path, target: Path) -> list[Path]:
    """Copy configuration and tokenizer of a model into a folder, which is made.

    Returns:
        The files in target.
    """
    target.mkdir(parents=True, exist_ok=True)
    return [Path(shutil.copyfile(file, target / file.name)) for file in list_companions(source)]


def set_dtype(folder: Path, dtype: str) -> None:
    """Make config.json say what the tensors are written in, under the key that it has for it."""
    path = folder / "config.json"
    model_json = json.loads(path.read_text())
    # transformers 5 writes dtype, published folders have torch_dtype.
    keys = [key for key in ("dtype", "torch_dtype") if key in model_json] or ["dtype"]
    model_json |= dict.fromkeys(keys, dtype)
    path.write_text(json.dumps(model_json, indent=2) + "\n")


def write_tensors(
    folder: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write model.safetensors, or numbered files and their index where one does not hold all.

    Files take their names once all are written: the number of files is in the name, and a folder
    that was cut short is no model.

    Args:
        tensors: by name. Held, as a copy, until a file is full.
    """
    # Of an earlier model: loaders prefer a single file to an index, or read every file.
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    held: dict[str, torch.Tensor] = {}
    names_by_file: list[list[str]] = []
    num_bytes = total_bytes = 0

    def write_held() -> None:
        path = folder / f"model-{len(names_by_file)}.safetensors{_PARTIAL_SUFFIX}"
        save_file(held, path, metadata={"format": "pt"})
        # safetensors lets nobody but the owner read it, whatever the umask.
        os.umask(umask := os.umask(0o077))
        path.chmod(0o666 & ~umask)
        names_by_file.append(list(held))
        held.clear()

    for name, tensor in tensors:
        if held and num_bytes + tensor.nbytes > max_file_bytes:
            write_held()
            num_bytes = 0
        # A copy, because what streams may be a view of a live parameter or of a larger tensor.
        held[name] = tensor.to("cpu", copy=True)
        num_bytes += tensor.nbytes
        total_bytes += tensor.nbytes
    write_held()

    weight_map: dict[str, str] = {}
    for number, names in enumerate(names_by_file):
        file = "model.safetensors"
        if len(names_by_file) > 1:
            file = f"model-{number + 1:05d}-of-{len(names_by_file):05d}.safetensors"
        partial = folder / f"model-{number}.safetensors{_PARTIAL_SUFFIX}"
        partial.rename(folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(names_by_file) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
        (folder / _INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def find_tensor_files(path: str) -> dict[str, Path]:
    """Map every tensor name of the folder to its file.

    Raises:
        ValueError: the folder has no safetensors, or a damaged file.
    """
    index = Path(path) / _INDEX_FILE
    if index.is_file():
        return {
            name: Path(path) / file
            for name, file in json.loads(index.read_text())["weight_map"].items()
        }
    file = Path(path) / "model.safetensors"
    if not file.is_file():
        raise ValueError(
            f"model.path={path}: has neither model.safetensors nor {_INDEX_FILE}; "
            "give a folder with safetensors weights."
        )
    try:
        with safe_open(file, framework="pt") as tensors:
            return dict.fromkeys(tensors.keys(), file)
    except SafetensorError as error:
        raise ValueError(f"{file}: is damaged ({error}); restore it.") from error


def read_tensor(
    files: dict[str, Path], path: str, name: str, shape: tuple[int, ...]
) -> torch.Tensor:
    """Read one tensor of a folder.

    Raises:
        ValueError: it is missing or has another shape, or its file is damaged.
    """
    if name not in files:
        raise ValueError(f"model.path={path}: has no tensor {name}, which config.json asks for.")
    try:
        with safe_open(files[name], framework="pt") as tensors:
            tensor: torch.Tensor = tensors.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{files[name]}: is damaged ({error}); restore it.") from error
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"model.path={path}: tensor {name} has shape {tuple(tensor.shape)}, but config.json "
            f"asks for {shape}."
        )
    return tensor
