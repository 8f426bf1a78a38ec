"""The tensors of a checkpoint, one at a time, in one process and without Megatron."""

from pathlib import Path

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

WEIGHTS = "weights"
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Kinds of tensors; a key is KIND.NAME."""


class StoredTensors:
    """The tensors of a checkpoint, read one at a time, however many pieces hold each."""

    def __init__(self, checkpoint: Path) -> None:
        """Read the metadata."""
        self.checkpoint = checkpoint
        self._reader = FileSystemReader(checkpoint)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self.tensors = {
            key: value
            for key, value in self._metadata.state_dict_metadata.items()
            if isinstance(value, TensorStorageMetadata)
        }
        """Key -> shape, dtype and pieces."""

    def read(self, key: str, dtype: str | None = None) -> torch.Tensor:
        """Read one tensor, each piece cast as it is copied to its place; None: as it is stored."""
        about = self.tensors[key]
        tensor = torch.empty(
            about.size, dtype=getattr(torch, dtype) if dtype else about.properties.dtype
        )
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.set_up_planner({key: tensor}, self._metadata, is_coordinator=True)
        self._reader.read_data(planner.create_local_plan(), planner).wait()
        return tensor
