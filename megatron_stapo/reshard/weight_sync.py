"""Brings the rollout engine to the trainer's weights.

The weights stream through rank 0 one parameter at a time; nothing holds a second full model.
"""

import torch

from megatron_stapo.config import load_model_json
from megatron_stapo.model.weights import iter_hf_weights
from megatron_stapo.parallel.groups import Groups
from megatron_stapo.rollout import Engine


class WeightSync:
    """The way from one trainer's model to one engine."""

    def __init__(
        self, model: torch.nn.Module, model_path: str, engine: Engine | None, groups: Groups
    ) -> None:
        """Args: engine is rank 0's; None on every other rank."""
        self._model = model
        self._model_json = load_model_json(model_path)
        self._engine = engine
        self._groups = groups

    def execute(self, policy_version: int) -> None:
        """Send all weights; the engine's next rollout samples from them.

        Called by every rank.

        Communicates: as `iter_hf_weights`; rank 0 then to the engine.
        """
        weights = iter_hf_weights(self._model, self._model_json, self._groups)
        if self._engine is not None:
            self._engine.update_weights(weights, policy_version)
        for _ in weights:
            raise AssertionError("the engine left weights behind")
