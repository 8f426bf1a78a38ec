"""What the ranks of this room's distributed tests run."""

from typing import Any

import torch

from megatron_stapo.config import Config
from megatron_stapo.types import RolloutGroup
from tests.workers import build_minibatches, joined_world


def measure_state(config: Config, rollout_groups: list[RolloutGroup]) -> dict[str, Any]:
    """Bytes that a rank's trainer holds after an update; padding of its buffers beside them."""
    with joined_world(config) as groups:
        from megatron_stapo.trainer.trainer import Trainer

        trainer = Trainer(config, groups)
        minibatches = build_minibatches(config, groups, rollout_groups)
        trainer.score(minibatches)
        trainer.assign_loss_masks(minibatches[0])
        trainer.update(minibatches[0])
        parameters = [p for ddp in trainer.ddp for p in ddp.parameters()]
        # One DistributedOptimizer for the experts and one for the rest.
        parts = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
        held = [
            tensor
            for part in parts
            for state in part.optimizer.state.values()
            for name, tensor in state.items()
            if name in ("exp_avg", "exp_avg_sq")
        ]
        held += [
            tensor
            for part in parts
            for group in part.shard_fp32_from_float16_groups
            for tensor in group
        ]
        buffers = [b for ddp in trainer.ddp for b in [*ddp.buffers, *ddp.expert_parallel_buffers]]
        gradients = sum(p.main_grad.nbytes for p in parameters)
        return {
            "stage": groups.pp_rank,
            "weights": sum(p.nbytes for p in parameters),
            "gradients": gradients,
            "optimizer": sum(tensor.nbytes for tensor in held),
            "padding": sum(b.grad_data.nbytes for b in buffers) - gradients,
            "num_tensors": len(parameters),
        }


def measure_mlp_activations(config: Config, num_tokens: int) -> int:
    """Bytes that backward needs of a dense MLP, beside its weights."""
    with joined_world(config) as groups:
        from megatron_stapo.model.qwen3 import build_model

        (model,) = build_model(config.model, config.parallel, config.precision, groups)
        mlp = model.decoder.layers[0].mlp
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        saved = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        size = model.config.hidden_size
        hidden = torch.randn(num_tokens, 1, size, dtype=torch.float32, requires_grad=True)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            output = mlp(hidden.to(model.config.params_dtype))  # kept alive: no storage is reused
        del output
        return sum(saved.values())
