"""Brings the rollout engine to the trainer's weights.

The weights stream through rank 0 one parameter at a time; nothing holds a second full model.
"""

from megatron_stapo.model.weights import HfWeights
from megatron_stapo.parallel.groups import Groups, agree
from megatron_stapo.rollout import Engine


class WeightSync:
    """The way from one trainer's model to one engine."""

    def __init__(self, weights: HfWeights, engine: Engine | None, groups: Groups) -> None:
        """Args: engine is rank 0's; None on every other rank."""
        self._weights = weights
        self._groups = groups
        self._engine = engine

    def execute(self, policy_version: int) -> str | None:
        """Send all weights; the engine's next rollout samples from them.

        Called by every rank.

        Returns:
            Why the engine did not take them, the same on every rank, so that the step can be saved
            before the run ends; None where it did.

        Communicates: as `HfWeights.stream`; rank 0 then to the engine; an all-reduce of an integer.
        """
        weights = self._weights.stream()
        error = None
        if self._engine is not None:
            try:
                self._engine.update_weights(weights, policy_version)
            except Exception as refused:
                error = f"{refused}"
        for _ in weights:
            # The other ranks go on sending; what an engine leaves behind without an error is one.
            error = error or "the engine left weights behind"
        return agree(error, self._groups)
