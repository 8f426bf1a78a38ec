"""The engines that a config names, as one call for the trainer and the evaluation."""

import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from megatron_stapo.config import Config
from megatron_stapo.rollout import Engine

if TYPE_CHECKING:
    from megatron_stapo.parallel.groups import Groups
    from megatron_stapo.rollout.colocated import ColocatedEngine


def build_engine(
    config: Config,
    engine_urls: Sequence[str],
    stop_token_ids: Sequence[int],
    on_wait: Callable[..., None] = lambda *can_end: None,
    log_event: Callable[..., None] = lambda name, **values: None,
) -> Engine:
    """Connect to the engines; waits until they serve.

    Args:
        engine_urls: of the vLLM servers; none with rollout.engine=transformers.
        stop_token_ids: tokens that end a response.
        on_wait: see `Engine`, and `EnginePool` for its argument.
        log_event: `RunLog.log_event`, for engines that die and come back.

    Raises:
        RuntimeError: an engine does not answer within rollout.start_timeout_s.
    """
    # Each brings libraries that the other does without.
    if config.rollout.engine == "transformers":
        from megatron_stapo.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(config, stop_token_ids, on_wait)
    from megatron_stapo.rollout.pool import EnginePool
    from megatron_stapo.rollout.vllm_engine import VllmEngine

    assert len(engine_urls) == config.rollout.num_engines
    engines = [VllmEngine(config, url, stop_token_ids) for url in engine_urls]
    return EnginePool(config, engines, on_wait, log_event)


def build_colocated_engine(
    config: Config,
    groups: "Groups",
    stop_token_ids: Sequence[int],
    on_wait: Callable[[], None] = lambda: None,
) -> "ColocatedEngine":
    """Make this rank's part of the engines in the trainer's ranks. Every rank calls it.

    Args:
        stop_token_ids: tokens that end a response.
        on_wait: rank 0's, see `Engine`.

    Communicates: vLLM makes its groups, over all ranks; then an all-reduce.

    Raises:
        RuntimeError: on every rank, where the engine does not start on one.
    """
    from megatron_stapo.parallel.groups import fail_together
    from megatron_stapo.rollout.colocated import ColocatedEngine
    from megatron_stapo.rollout.vllm_rank import VllmRank

    rank_engine, error = None, None
    try:
        rank_engine = VllmRank(config, stop_token_ids)
    except Exception as failed:
        traceback.print_exc()
        error = f"the vLLM engine of this rank does not start: {failed}"
    fail_together(error, groups)
    assert rank_engine is not None
    return ColocatedEngine(config, groups, rank_engine, on_wait)
