"""Brings the rollout engines to the trainer's weights.

The weights stream through rank 0 one parameter at a time; nothing holds a second full model.
"""

from collections.abc import Sequence

from megatron_stapo.model.weights import HfWeights
from megatron_stapo.parallel.groups import Groups, agree
from megatron_stapo.rollout import Engine, EngineDiedError
from megatron_stapo.rollout.colocated import ColocatedEngine


class WeightSync:
    """The way from one trainer's model to the engines."""

    def __init__(
        self, weights: HfWeights, engine: Engine | None, groups: Groups, num_engines: int
    ) -> None:
        """Args: engine is rank 0's; None on every other rank, but where it is colocated."""
        self._weights = weights
        self._groups = groups
        self._engine = engine
        self._num_engines = num_engines

    def execute(
        self, policy_version: int, engine_indices: Sequence[int] | None = None
    ) -> str | None:
        """Send all weights; the engines' next rollouts sample from them.

        Called by every rank.

        Args:
            engine_indices: the engines that get them, the same on every rank; None: all.

        Returns:
            Why an engine did not take them, the same on every rank, so that the step can be saved
            before the run ends; None where each did, or died.

        Communicates: for every engine as `HfWeights.stream`; rank 0 then to the engine; an
            all-reduce of an integer. To colocated engines once as `HfWeights.stream_to_all`.
        """
        if isinstance(self._engine, ColocatedEngine):
            return agree(self._load(self._engine, policy_version), self._groups)
        error = None
        for index in range(self._num_engines) if engine_indices is None else engine_indices:
            # Where one refuses, the other ranks send to the rest all the same.
            error = self._send(policy_version, index) or error
        return agree(error, self._groups)

    def _load(self, engine: ColocatedEngine, policy_version: int) -> str | None:
        weights = self._weights.stream_to_all()
        error = None
        try:
            engine.update_weights(weights, policy_version)
        except Exception as refused:
            error = f"{refused}"
        for _ in weights:  # the other ranks go on sending
            pass
        return error

    def _send(self, policy_version: int, index: int) -> str | None:
        weights = self._weights.stream()
        error = None
        has_died = False
        if self._engine is not None:
            try:
                self._engine.update_weights(weights, policy_version, index)
            except EngineDiedError:
                has_died = True
            except Exception as refused:
                error = f"{refused}"
        for _ in weights:
            # The other ranks go on sending; what an engine leaves behind without an error is one.
            if not has_died:
                error = error or "the engine left weights behind"
        return error
