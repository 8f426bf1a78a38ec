"""Brings the rollout engines to the trainer's weights, shard to shard.

For every engine a `Plan` is made once. Each trainer rank sends what its part of the model has of
each engine rank's, and no tensor is gathered. Rank 0 talks to the engine; what it tells the other
ranks is one broadcast before an update, and what they tell each other one gather after it.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_stapo.config import Config, load_model_json
from megatron_stapo.model.weights import HfWeights
from megatron_stapo.parallel.groups import Groups, agree
from megatron_stapo.reshard.plan import Holding, Plan, build_plan, list_rank_holdings
from megatron_stapo.rollout import Engine, EngineDiedError, delta
from megatron_stapo.rollout.engine_parts import list_engine_parts
from megatron_stapo.rollout.weight_transfer import (
    Bucket,
    ConnectInfo,
    Hashes,
    Part,
    Reception,
    Region,
    TransferGroup,
    exchange,
    format_buckets,
    hash_part,
    pack,
)


class WeightSync:
    """The way from one trainer's model to the engines."""

    def __init__(
        self, config: Config, weights: HfWeights, engine: Engine | None, groups: Groups
    ) -> None:
        """Args: engine is rank 0's; None on every other rank, but where it is colocated."""
        self._config = config
        self._weights = weights
        self._groups = groups
        self._engine = engine
        model_json = load_model_json(config.model.path)
        self._parts = list_engine_parts(model_json, config.rollout)
        is_colocated = config.rollout.placement == "colocated"
        if is_colocated:  # the engines get theirs together
            self._parts *= config.num_engines
        self._num_engines = 1 if is_colocated else config.rollout.num_engines
        self._holdings = list_rank_holdings(
            weights, groups.tp_size, model_json["num_key_value_heads"]
        )
        self._own: dict[str, list[Holding]] = defaultdict(list)
        for holding in self._holdings[groups.rank]:
            self._own[holding.name].append(holding)
        self._dtype = getattr(torch, config.model.dtype)
        self.rank, self.world_size = groups.rank, groups.world_size
        # The transformers engine is rank 0's; a server's ranks are numbered after the trainer's.
        self.is_local = not config.rollout.has_servers
        """Whether the engines are in processes of the trainer."""
        first = 0 if self.is_local else groups.world_size
        self.receivers = range(first, first + len(self._parts))
        """Numbers of an engine's ranks."""
        self._plans: dict[int, Plan] = {}
        self._links: dict[int, TransferGroup] = {}
        self._versions: dict[int, int] = {}
        """Of the weights that each engine keeps. As all that follows, the same on every rank."""
        self._kept: dict[str, torch.Tensor] = {}
        """With reshard.delta, this rank's parameters as they travelled last."""
        self._kept_version: int | None = None
        self._has_probed: set[int] = set()

    def execute(
        self, policy_version: int, engine_indices: Sequence[int] | None = None
    ) -> str | None:
        """Send all weights; the engines' next rollouts sample from them.

        Called by every rank.

        Args:
            engine_indices: the engines that get them, the same on every rank; None: all. Colocated
                ones get them together.

        Returns:
            Why an engine did not take them, the same on every rank, so that the step can be saved
            before the run ends; None where each did, or died.

        Communicates: for every engine a broadcast from rank 0, the plan's messages, and a gather;
            where a probe is due, as `HfWeights.stream` before it.
        """
        indices: Sequence[int] = range(self._num_engines)
        if engine_indices is not None and self._num_engines > 1:
            indices = engine_indices
        interval = self._config.reshard.probe_interval_steps
        is_due = policy_version > 0 and policy_version % interval == 0
        probed = [index for index in indices if is_due or index not in self._has_probed]
        expected = self._hash_weights() if probed else None
        error = None
        for index in indices:
            # Where one refuses, the others get theirs all the same.
            hashes = expected if index in probed else None
            error = self._update(policy_version, index, hashes) or error
        if self._config.reshard.delta and self._kept_version != policy_version:
            self._keep(policy_version)
        return error

    def find_base_version(self, index: int) -> int | None:
        """See `WeightUpdate`."""
        is_kept = self._kept_version is not None and self._versions.get(index) == self._kept_version
        return self._kept_version if is_kept else None

    def find_plan(self, index: int) -> Plan:
        """The plan of an engine's updates, made on first use; the same on every rank."""
        if index not in self._plans:
            self._plans[index] = build_plan(
                self._holdings,
                self._parts,
                self.receivers,
                element_bytes=self._dtype.itemsize,
                bucket_bytes=self._config.reshard.bucket_bytes,
                turn=index,
                is_delta=self._config.reshard.delta,
            )
        return self._plans[index]

    def send(self, index: int, connect_info: ConnectInfo, store: dist.Store | None) -> None:
        """Send this rank's messages to an engine's ranks.

        Args:
            store: where the ranks have yet to connect; None where they are connected.

        Raises:
            RuntimeError: a rank of the engine is gone, or silent for too long.
        """
        if store is not None:
            self._drop_link(index)
            self._links[index] = connect_info.connect(store, self.rank, self._groups.device)
        plan = self.find_plan(index)
        only_changes = store is None and self.find_base_version(index) is not None
        for number in range(len(plan.sends)):
            if only_changes:
                counts, packed = self._pack_changes(plan, number)
                exchange(self._links[index], counts, [])
            else:
                packed = self._pack(plan, number)
            exchange(self._links[index], packed, [])

    def exchange_locally(self, plan: Plan, number: int) -> list[tuple[Part, torch.Tensor]]:
        """Exchange one bucket among the trainer's ranks; returns what this one receives."""
        bucket = plan.receives[number].get(self.rank, Bucket(parts=[], messages=[]))
        reception = Reception(bucket, self._dtype, self._groups.device, self.rank, self._read)
        exchange(dist.group.WORLD, self._pack(plan, number), reception.receives)
        return reception.unpack()

    def _pack(self, plan: Plan, number: int) -> list[tuple[int, torch.Tensor]]:
        """This rank's messages of one bucket, each with its receiver."""
        packed = []
        for message in plan.sends[number].get(self.rank, ()):
            if message.receiver == self.rank:
                continue
            views = [self._view(holding, region) for holding, region in message.pieces]
            packed.append((message.receiver, pack(message.form, views)))
        return packed

    def _pack_changes(
        self, plan: Plan, number: int
    ) -> tuple[list[tuple[int, torch.Tensor]], list[tuple[int, torch.Tensor]]]:
        """Likewise, what changed: how many elements of every piece, and where to what."""
        counts, packed = [], []
        for message in plan.sends[number].get(self.rank, ()):
            news = [self._view(holding, region) for holding, region in message.pieces]
            olds = [h.view(self._kept[h.parameter], region) for h, region in message.pieces]
            found, flat = delta.encode(news, olds)
            counts.append((message.receiver, torch.tensor(found, device=flat.device)))
            if len(flat):
                packed.append((message.receiver, flat))
        return counts, packed

    def _keep(self, policy_version: int) -> None:
        """Copy this rank's parameters to the host's memory."""
        for name in {holding.parameter for holding in self._holdings[self.rank]}:
            parameter = self._weights.find_parameter(name).detach()
            if name not in self._kept:
                self._kept[name] = torch.empty(
                    parameter.shape,
                    dtype=parameter.dtype,
                    device="cpu",
                    pin_memory=parameter.device.type == "cuda",
                )
            self._kept[name].copy_(parameter)
        self._kept_version = policy_version

    def _view(self, holding: Holding, region: Region) -> torch.Tensor:
        return holding.view(self._weights.find_parameter(holding.parameter).detach(), region)

    def _read(self, name: str, region: Region) -> torch.Tensor:
        """A region of a tensor that this rank holds."""
        holding = next(h for h in self._own[name] if h.region.intersect(region) == region)
        return self._view(holding, region)

    def _update(self, policy_version: int, index: int, expected: Hashes | None) -> str | None:
        update = _Update(self, policy_version, index, expected is not None)
        error, has_died = None, False
        try:
            if self._engine is not None:
                self._engine.update_weights(update, index)
        except EngineDiedError:
            has_died = True
        except Exception as refused:
            error = f"{refused}"
        try:
            update.follow()
            if self.rank == 0 and expected is not None and not (error or has_died):
                _compare(update.hashes, expected, index)
        except Exception as failed:
            error = error or f"{failed}"
        died = torch.tensor(int(has_died), device=self._groups.device)
        dist.broadcast(died, src=0)
        # Its end is what the others' messages failed of.
        error = None if died.item() else agree(error, self._groups)
        self._versions[index] = policy_version
        if died.item() or error:
            self._drop_link(index)
        elif expected is not None:
            self._has_probed.add(index)
        return error

    def _drop_link(self, index: int) -> None:
        self._versions.pop(index, None)
        if group := self._links.pop(index, None):
            # Takes messages that nobody receives off the GPU.
            group.abort()

    def _hash_weights(self) -> Hashes:
        """What every rank of an engine should hold, from the gathered tensors; on rank 0.

        It shares no line with the plan. One tensor at a time is whole on rank 0.
        """
        takers: dict[str, list[tuple[int, Part]]] = defaultdict(list)
        for rank, modules in enumerate(self._parts):
            for part in (part for module in modules for part in module):
                takers[part.name].append((rank, part))
        hashes: Hashes = [{} for _ in self._parts]
        for name, tensor in self._weights.stream():
            for rank, part in takers[name]:
                matrix = tensor if tensor.dim() > 1 else tensor[:, None]
                cut = Region.whole(part.shape).cut(matrix, part.region)
                hashes[rank][name] = hash_part(part, cut)
        return hashes


class _Update:
    """One rank's part in one update of one engine; see `WeightUpdate`."""

    def __init__(self, sync: WeightSync, policy_version: int, index: int, is_probe: bool) -> None:
        self.policy_version = policy_version
        self.is_probe = is_probe
        self.hashes: Hashes = [{} for _ in sync.receivers]
        self.base_version = sync.find_base_version(index)
        self._sync = sync
        self._index = index
        self._has_told = False
        self._num_exchanged = 0

    def format_schedules(self) -> list[str]:
        plan = self._sync.find_plan(self._index)
        return [format_buckets(plan.list_buckets(rank)) for rank in self._sync.receivers]

    def send(self, connect_info: ConnectInfo, store: dist.Store | None) -> None:
        self._tell((connect_info, store is not None))
        self._sync.send(self._index, connect_info, store)

    def receive(self) -> Iterator[tuple[Part, torch.Tensor]]:
        for bucket in self._exchange_locally():
            if self.is_probe:
                self.hashes[self._sync.rank] |= {p.name: hash_part(p, t) for p, t in bucket}
            yield from bucket

    def follow(self) -> None:
        """Do what is left: on a rank that does not drive the engine, all of its part."""
        if self._sync.is_local:
            for _ in self._exchange_locally():
                pass
            if self.is_probe:
                self._gather_hashes()
        elif self._sync.rank == 0:
            if not self._has_told:
                self._tell(None)
        else:
            received: list[Any] = [None]
            dist.broadcast_object_list(received, src=0)
            if received[0] is not None:
                connect_info, is_new = received[0]
                store = connect_info.open_store() if is_new else None
                self._sync.send(self._index, connect_info, store)

    def _exchange_locally(self) -> Iterator[list[tuple[Part, torch.Tensor]]]:
        plan = self._sync.find_plan(self._index)
        while self._num_exchanged < len(plan.sends):
            number = self._num_exchanged
            self._num_exchanged += 1
            parts = self._sync.exchange_locally(plan, number)
            yield parts
            parts.clear()  # the next bucket needs its memory

    def _gather_hashes(self) -> None:
        """Bring the ranks' hashes to rank 0."""
        rank, sync = self._sync.rank, self._sync
        gathered: list[Any] | None = [None] * sync.world_size if rank == 0 else None
        mine = self.hashes[rank] if rank in sync.receivers else {}
        dist.gather_object(mine, gathered, dst=0)
        if gathered is not None:
            self.hashes = gathered[: len(sync.receivers)]

    def _tell(self, message: tuple[ConnectInfo, bool] | None) -> None:
        self._has_told = True
        dist.broadcast_object_list([message], src=0)


def _compare(received: Hashes, expected: Hashes, index: int) -> None:
    """Raises: RuntimeError: a rank of the engine has other weights than the trainer."""
    for rank, (theirs, ours) in enumerate(zip(received, expected, strict=True)):
        if wrong := sorted(name for name in theirs | ours if theirs.get(name) != ours.get(name)):
            raise RuntimeError(
                f"after the weight update rank {rank} of engine {index} holds other values than "
                f"the trainer in {len(wrong)} of {len(ours)} tensors, first in {wrong[0]}."
            )
