"""Brings the rollout engine to the trainer's weights.

The weights stream through rank 0 one parameter at a time; nothing holds a second full model.
"""

from megatron_stapo.model.weights import HfWeights
from megatron_stapo.rollout import Engine


class WeightSync:
    """The way from one trainer's model to one engine."""

    def __init__(self, weights: HfWeights, engine: Engine | None) -> None:
        """Args: engine is rank 0's; None on every other rank."""
        self._weights = weights
        self._engine = engine

    def execute(self, policy_version: int) -> None:
        """Send all weights; the engine's next rollout samples from them.

        Called by every rank.

        Communicates: as `HfWeights.stream`; rank 0 then to the engine.
        """
        weights = self._weights.stream()
        if self._engine is not None:
            self._engine.update_weights(weights, policy_version)
        for _ in weights:
            raise AssertionError("the engine left weights behind")
