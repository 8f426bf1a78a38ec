"""A trainer of one rank that holds whole Hugging Face tensors, for tests of engines."""

import torch

from megatron_stapo.config import load_model_json
from megatron_stapo.reshard.plan import Holding, build_plan
from megatron_stapo.rollout.engine_parts import list_engine_parts
from megatron_stapo.rollout.weight_transfer import Region, exchange, format_buckets, pack


class SingleTrainer:
    """Sends tensors to the ranks of one vLLM engine."""

    def __init__(self, config, bucket_bytes=1 << 20):
        self.parts = list_engine_parts(load_model_json(config.model.path), config.rollout)
        self._bucket_bytes = bucket_bytes
        self._group = None

    def update(self, weights, policy_version, on_bucket=lambda number: None):
        """An update by these tensors, a probe; on_bucket is called before each."""
        return _Update(self, weights, policy_version, on_bucket)


class _Update:
    def __init__(self, trainer, weights, policy_version, on_bucket):
        self.policy_version = policy_version
        self.is_probe = True
        self.hashes = None
        self.base_version = None
        self._trainer, self._on_bucket = trainer, on_bucket
        self._weights = weights
        holdings = [
            Holding(name, Region.whole(tensor.shape), name, 0, 0)
            for name, tensor in weights.items()
        ]
        self.receivers = range(1, 1 + len(trainer.parts))
        self.plan = build_plan(
            [holdings],
            trainer.parts,
            self.receivers,
            element_bytes=next(iter(weights.values())).element_size(),
            bucket_bytes=trainer._bucket_bytes,
        )

    def format_schedules(self):
        return [format_buckets(self.plan.list_buckets(rank)) for rank in self.receivers]

    def send(self, connect_info, store):
        trainer = self._trainer
        if store is not None:
            trainer._group = connect_info.connect(store, 0, torch.device("cpu"))
        for number, sends in enumerate(self.plan.sends):
            self._on_bucket(number)
            messages = []
            for message in sends.get(0, ()):
                views = [h.view(self._weights[h.parameter], r) for h, r in message.pieces]
                messages.append((message.receiver, pack(message.form, views)))
            exchange(trainer._group, messages, [])
