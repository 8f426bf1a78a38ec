"""What runs inside vLLM's worker processes: the receiving end of the weight transfer.

The only file that imports vllm. vLLM imports it in every worker, for `--worker-extension-cls` names
`Registration`.

Invariant: a worker receives every bucket that is announced before it looks at it, so that a refused
one leaves no end waiting for the other.
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from megatron_stapo.rollout.vllm_server import WEIGHT_TRANSFER_BACKEND
from megatron_stapo.rollout.weight_transfer import (
    BucketInfo,
    Checklist,
    ConnectInfo,
    broadcast,
    connect,
    unpack,
)


class StapoWeightTransferEngine(WeightTransferEngine[ConnectInfo, BucketInfo]):
    """Receives buckets over gloo or NCCL and loads them as vLLM loads a checkpoint.

    vLLM's layer-wise reload keeps a layer's tensors until the layer is complete, then repeats what
    loading did to them: it fuses, shards and repacks into the memory that the running model reads.
    Loading into the model at once would fail where layers are repacked, as on a CPU.
    """

    init_info_cls = ConnectInfo
    update_info_cls = BucketInfo

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        """Join the trainer's group."""
        store = dist.TCPStore(init_info.host, init_info.port, is_master=False)
        rank = 1 + self.parallel_config.rank
        self._group = connect(store, rank, init_info.world_size, self.device)

    def start_weight_update(self) -> None:
        """Prepare every layer for new weights."""
        shapes = _read_checkpoint_shapes(self.model_config.model)
        if "lm_head.weight" not in dict(self.model.named_parameters()):
            # The head is tied, although some folders hold it a second time.
            shapes.pop("lm_head.weight", None)
        self._checklist = Checklist(shapes)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive one bucket and load it."""
        self.receive_weights(self.parse_update_info(update_info))
        # The base class synchronizes whatever the device, and a CPU is no accelerator.
        if self.device.type == "cuda":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: BucketInfo) -> None:
        """Receive one bucket and load it.

        Raises:
            RuntimeError: a tensor that the checkpoint does not have.
        """
        # New memory for every bucket, since layers keep parts of it until they are complete.
        dtype = getattr(torch, update_info.dtype)
        flat = torch.empty(update_info.num_elements, dtype=dtype, device=self.device)
        broadcast(self._group, flat).wait()
        for name, shape in zip(update_info.names, update_info.shapes, strict=True):
            self._checklist.take(name, shape)
        self.model.load_weights(unpack(update_info, flat))

    def finish_weight_update(self) -> None:
        """Finish the layers that received no tensor of their own.

        Raises:
            RuntimeError: tensors are missing.
        """
        self._checklist.check_complete()
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            # There the head multiplies with a packed copy of its weight. A tied head receives no
            # tensor, so vLLM 0.32 leaves it with the copy of the old embedding.
            for module in self.model.modules():
                if isinstance(module, ParallelLMHead):
                    module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Leave the group, if it was ever made."""
        self._group = None


def _read_checkpoint_shapes(path: str) -> dict[str, list[int]]:
    """Shapes in the files that the server started from: all that an update must bring again."""
    shapes: dict[str, list[int]] = {}
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 it is no mapping
                shapes[name] = tensors.get_slice(name).get_shape()
    return shapes


class Registration:
    """An empty mix-in for vLLM's worker. Naming it is how vLLM comes to import this module."""


WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER_BACKEND, StapoWeightTransferEngine)
