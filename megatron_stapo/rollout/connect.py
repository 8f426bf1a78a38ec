"""The engine that a config names, as one call for the trainer and the evaluation."""

from collections.abc import Callable, Sequence

from megatron_stapo.config import Config
from megatron_stapo.rollout import Engine


def build_engine(
    config: Config,
    engine_url: str | None,
    stop_token_ids: Sequence[int],
    on_wait: Callable[[], None] = lambda: None,
) -> Engine:
    """Connect to the engine; waits until it serves.

    Args:
        engine_url: of the vLLM server; None with rollout.engine=transformers.
        stop_token_ids: tokens that end a response.
        on_wait: see `Engine`.
    """
    # Each brings libraries that the other does without.
    if config.rollout.engine == "transformers":
        from megatron_stapo.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(config, stop_token_ids, on_wait)
    from megatron_stapo.rollout.vllm_engine import VllmEngine

    assert engine_url is not None
    return VllmEngine(config, engine_url, stop_token_ids, on_wait)
