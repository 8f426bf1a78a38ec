"""The engines that a config names, as one call for the trainer and the evaluation."""

from collections.abc import Callable, Sequence

from megatron_stapo.config import Config
from megatron_stapo.rollout import Engine


def build_engine(
    config: Config,
    engine_urls: Sequence[str],
    stop_token_ids: Sequence[int],
    on_wait: Callable[[], None] = lambda: None,
    log_event: Callable[..., None] = lambda name, **values: None,
) -> Engine:
    """Connect to the engines; waits until they serve.

    Args:
        engine_urls: of the vLLM servers; none with rollout.engine=transformers.
        stop_token_ids: tokens that end a response.
        on_wait: see `Engine`.
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
