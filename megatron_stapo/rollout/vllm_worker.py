"""What runs inside vLLM's worker processes: the receiving end of the weight transfer.

With `vllm_rank` the only file that imports vllm. vLLM imports it in every worker, for
`--worker-extension-cls` names `Registration`.

Invariant: a worker receives every bucket, also when it has refused one, so that no end waits for
the other.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.config import ModelConfig
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from megatron_stapo.config import load_model_json
from megatron_stapo.rollout.engine_parts import list_parts
from megatron_stapo.rollout.shard_tensor import ShardTensor
from megatron_stapo.rollout.vllm_server import FP8_QUANTIZATION, WEIGHT_TRANSFER_BACKEND
from megatron_stapo.rollout.weight_transfer import (
    Bucket,
    ConnectInfo,
    Part,
    Receiver,
    hash_part,
    name_hashes,
    name_schedule,
    parse_buckets,
)


@dataclass(frozen=True, kw_only=True)
class UpdateInfo:
    """What is to know of an update before it begins."""

    policy_version: int
    is_probe: bool
    """Whether to tell what was received."""
    base_version: int | None
    """See `WeightUpdate`."""


class StapoWeightTransferEngine(WeightTransferEngine[ConnectInfo, UpdateInfo]):
    """Receives this rank's parts over gloo or NCCL and loads them as vLLM loads a checkpoint."""

    init_info_cls = ConnectInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: ConnectInfo) -> None:
        """Read what this rank will receive, and hold it against its model.

        Raises:
            RuntimeError: names, shapes or parts are not those of the model.
        """
        self._connect_info = init_info
        self._receiver: Receiver | None = None
        self._store = init_info.open_store()
        schedule = self._store.get(name_schedule(self.parallel_config.rank))
        self._buckets = parse_buckets(schedule.decode())
        tp, pp = get_tp_group(), get_pp_group()
        check_schedule(
            self._buckets,
            self.model_config.model,
            [tp.rank_in_group, tp.world_size, pp.rank_in_group, pp.world_size],
            is_fp8=self.model_config.quantization == FP8_QUANTIZATION,
        )

    def start_weight_update(self) -> None:
        """Prepare every layer for new weights."""
        self._reload = WeightReload(self.model, self.model_config)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Receive all parts and load them."""
        self.receive_weights(self.parse_update_info(update_info))
        # The base class synchronizes whatever the device, and a CPU is no accelerator.
        if self.device.type == "cuda":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Receive all parts and load them.

        Raises:
            RuntimeError: a loader asks for another part.
        """
        if self._receiver is None:
            rank = self._connect_info.num_trainer_ranks + self.parallel_config.rank
            group = self._connect_info.connect(self._store, rank, self.device)
            dtype = self.model_config.dtype
            self._receiver = Receiver(group, self._buckets, dtype, self.device)
        hashes: dict[str, int] = {}
        refusal = None
        for parts in self._receiver.receive(update_info.base_version):
            if update_info.is_probe:
                hashes |= {part.name: hash_part(part, tensor) for part, tensor in parts}
            try:
                self._reload.load(parts)
            except Exception as error:
                refusal = refusal or error
        if refusal:
            raise refusal
        if update_info.is_probe:
            key = name_hashes(update_info.policy_version, self.parallel_config.rank)
            self._store.set(key, json.dumps(hashes))

    def finish_weight_update(self) -> None:
        """Finish the layers that received no tensor of their own."""
        self._reload.finish()

    def shutdown(self) -> None:
        """Leave the group, if it was ever made."""
        self._receiver = None


class WeightReload:
    """One replacement of all weights of a model that runs.

    vLLM's layer-wise reload keeps a layer's tensors until the layer is complete, then repeats what
    loading did to them: it fuses, quantises and repacks into the memory that the running model
    reads. Loading into the model at once would fail where layers are repacked, as on a CPU.
    """

    def __init__(self, model: torch.nn.Module, model_config: ModelConfig) -> None:
        """Prepare every layer for new weights. The caller has set vLLM's current config."""
        self._model, self._model_config = model, model_config
        self._sharded: set[str] = set()
        self._taken: set[str] = set()
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            # On a CPU experts are multiplied from packed weights. vLLM 0.32 packs them where it
            # builds their kernel and never again, so the kernel has to be built again as well.
            if isinstance(method, UnquantizedFusedMoEMethod) and module.w13_weight.is_cpu:
                method.moe_kernel = None
        initialize_layerwise_reload(model)

    def load(self, parts: Iterable[tuple[Part, torch.Tensor]]) -> None:
        """Give some of the parts to vLLM's loaders. Layers keep them until they are complete.

        Raises:
            RuntimeError: a loader asks for another part than is there.
        """
        self._model.load_weights(self._name(parts))

    def finish(self) -> None:
        """Finish the layers that received no tensor of their own.

        Raises:
            RuntimeError: a part was loaded by nobody.
        """
        if unused := sorted(self._sharded - self._taken):
            raise RuntimeError(f"weight {unused[0]}: the engine's model has not loaded it.")
        finalize_layerwise_reload(self._model, self._model_config)
        for module in self._model.modules():
            # On a CPU the head multiplies with a packed copy of its weight. A tied head receives no
            # tensor, so vLLM 0.32 leaves it with the copy of the old embedding.
            if isinstance(module, ParallelLMHead) and module.weight.device.type == "cpu":
                module.quant_method.process_weights_after_loading(module)

    def _name(
        self, parts: Iterable[tuple[Part, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        for part, tensor in parts:
            if part.is_whole:
                yield part.name, tensor
            else:
                self._sharded.add(part.name)
                yield part.name, ShardTensor(part, tensor, self._taken)


def check_schedule(buckets: Iterable[Bucket], path: str, place: list[int], *, is_fp8: bool) -> None:
    """Hold what a rank will receive against what its model has.

    Args:
        buckets: of all that the rank will receive.
        path: folder that the engine started from.
        place: tensor-parallel rank and size, pipeline rank and size.
        is_fp8: whether the engine quantises its weights.

    Raises:
        RuntimeError: names, shapes or parts are not those of the model.
    """
    sent = {part.name: part for bucket in buckets for part in bucket.parts}
    modules = list_parts(load_model_json(path), *place, is_fp8=is_fp8)
    expected = {part.name: part for module in modules for part in module}
    if wrong := sorted(n for n in sent | expected if sent.get(n) != expected.get(n)):
        raise RuntimeError(
            f"weight {wrong[0]}: the trainer sends {sent.get(wrong[0])}, and this engine's rank "
            f"takes {expected.get(wrong[0])}; {len(wrong)} tensors differ in this way."
        )
    shapes = _read_checkpoint_shapes(path)
    for name, part in sent.items():
        if shapes.pop(name, None) != list(part.shape):
            raise RuntimeError(f"weight {name}: {path} holds none of shape {list(part.shape)}.")


def _read_checkpoint_shapes(path: str) -> dict[str, list[int]]:
    """Shapes in the files that the server started from."""
    shapes: dict[str, list[int]] = {}
    for file in Path(path).glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 it is no mapping
                shapes[name] = tensors.get_slice(name).get_shape()
    return shapes


class Registration:
    """An empty mix-in for vLLM's worker. Naming it is how vLLM comes to import this module."""


WeightTransferEngineFactory.register_engine(WEIGHT_TRANSFER_BACKEND, StapoWeightTransferEngine)
