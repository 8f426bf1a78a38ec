"""What runs inside vLLM's worker processes: the receiving end of the weight transfer.

With `vllm_rank` the only file that imports vllm. vLLM imports it in every worker, for
`--worker-extension-cls` names `Registration`.

Invariant: a worker receives every bucket that is announced before it looks at it, so that a refused
one leaves no end waiting for the other.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from vllm.config import ModelConfig
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


class WeightReload:
    """One replacement of all weights of a model that runs.

    vLLM's layer-wise reload keeps a layer's tensors until the layer is complete, then repeats what
    loading did to them: it fuses, shards and repacks into the memory that the running model reads.
    Loading into the model at once would fail where layers are repacked, as on a CPU.
    """

    def __init__(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Prepare every layer for new weights. The caller has set vLLM's current config."""
        self._model, self._model_config = model, model_config
        shapes = _read_checkpoint_shapes(model_config.model)
        if "lm_head.weight" not in dict(model.named_parameters()):
            # The head is tied, although some folders hold it a second time.
            shapes.pop("lm_head.weight", None)
        self._checklist = Checklist(shapes)
        initialize_layerwise_reload(model)

    def load(self, named_tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load some of the tensors, full ones under their Hugging Face names.

        Layers keep them, or parts of them, until they are complete.

        Raises:
            RuntimeError: a tensor that the checkpoint does not have.
        """
        self._model.load_weights(self._check(named_tensors))

    def finish(self) -> None:
        """Finish the layers that received no tensor of their own.

        Raises:
            RuntimeError: tensors are missing.
        """
        self._checklist.check_complete()
        finalize_layerwise_reload(self._model, self._model_config)
        for module in self._model.modules():
            # On a CPU the head multiplies with a packed copy of its weight. A tied head receives no
            # tensor, so vLLM 0.32 leaves it with the copy of the old embedding.
            if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
                module.quant_method.process_weights_after_loading(module)

    def _check(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in named_tensors:
            self._checklist.take(name, tensor.shape)
            yield name, tensor


class StapoWeightTransferEngine(WeightTransferEngine[ConnectInfo, BucketInfo]):
    """Receives buckets over gloo or NCCL and loads them as vLLM loads a checkpoint."""

    init_info_cls = ConnectInfo
    update_info_cls = BucketInfo

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        """Join the trainer's group."""
        store = dist.TCPStore(init_info.host, init_info.port, is_master=False)
        rank = 1 + self.parallel_config.rank
        self._group = connect(store, rank, init_info.world_size, self.device)

    def start_weight_update(self) -> None:
        """Prepare every layer for new weights."""
        self._reload = WeightReload(self.model, self.model_config)

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
        self._reload.load(unpack(update_info, flat))

    def finish_weight_update(self) -> None:
        """Finish the layers that received no tensor of their own.

        Raises:
            RuntimeError: tensors are missing.
        """
        self._reload.finish()

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
