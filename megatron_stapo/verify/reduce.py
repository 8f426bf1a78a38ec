"""Shrinks a recipe to what `stapo verify` runs. Never imports torch: the launcher does this."""

import dataclasses
from pathlib import Path

from megatron_stapo.config import Config, EvaluationConfig, ParallelConfig, load_model_json

MAX_PROMPT_TOKENS = 16
MAX_RESPONSE_TOKENS = 48
MAX_GROUP_SIZE = 4
MODEL_FOLDER = "model"


def reduce_config(config: Config) -> tuple[Config, int]:
    """Keep the recipe's layout and algorithm; shrink what only costs time.

    The model gets one layer per chunk, two in the middle of an uneven pipeline and on a single
    stage; float32, because round-off is what is measured; a mini-batch of a few short sequences,
    two to a microbatch. Dynamic sampling and length rules, which choose sequences, are off.

    Returns:
        The config, and the layers of its model.

    Raises:
        ValueError: the recipe asks for a loss that depends on the layout by definition.
    """
    if config.algorithm.aggregation == "verl_microbatch_mean":
        raise ValueError(
            "algorithm.aggregation=verl_microbatch_mean: depends on the microbatches by "
            "definition, so there is nothing to verify; use another."
        )
    parallel, num_layers = _reduce_depth(
        config.parallel, load_model_json(config.model.path)["num_hidden_layers"]
    )
    group_size = min(config.rollout.group_size, MAX_GROUP_SIZE)
    num_prompts = max(4, -(-2 * parallel.data_parallel_size // group_size))
    longest = MAX_PROMPT_TOKENS + MAX_RESPONSE_TOKENS
    longest += -longest % parallel.sequence_multiple
    run_dir = f"{config.run_dir}_verify"
    reduced = dataclasses.replace(
        config,
        run_dir=run_dir,
        num_steps=1,
        log_quadrants=False,
        model=dataclasses.replace(
            config.model, path=str(Path(run_dir) / MODEL_FOLDER), dtype="float32"
        ),
        parallel=parallel,
        data=dataclasses.replace(
            config.data,
            max_prompt_tokens=MAX_PROMPT_TOKENS,
            max_microbatch_tokens=2 * longest // parallel.context_parallel_size,
        ),
        rollout=dataclasses.replace(
            config.rollout,
            engine="transformers",  # none is started
            placement="disaggregated",
            tensor_parallel_size=1,
            num_prompts_per_step=num_prompts,
            group_size=group_size,
            max_response_tokens=MAX_RESPONSE_TOKENS,
        ),
        algorithm=dataclasses.replace(
            config.algorithm,
            num_prompts_per_minibatch=num_prompts,
            dynamic_sampling=False,
            filter_truncated=False,
            overlong_buffer_tokens=0,
        ),
        optimizer=dataclasses.replace(config.optimizer, num_warmup_steps=0),
        evaluation=EvaluationConfig(),
    )
    return reduced, num_layers


def _reduce_depth(parallel: ParallelConfig, max_layers: int) -> tuple[ParallelConfig, int]:
    """The layout with as few layers as keep its shape, or as it is where the model has no more."""
    chunks = parallel.virtual_pipeline_model_parallel_size
    has_first = parallel.num_layers_in_first_pipeline_stage is not None
    has_last = parallel.num_layers_in_last_pipeline_stage is not None
    first = chunks if has_first else None
    last = None if not has_last else 2 * chunks if has_first else chunks
    num_even = parallel.pipeline_model_parallel_size - has_first - has_last
    is_plain_pipeline = parallel.pipeline_model_parallel_size > 1 and not has_first and not has_last
    num_layers = (first or 0) + (last or 0) + num_even * chunks * (1 if is_plain_pipeline else 2)
    if num_layers > max_layers:
        return parallel, max_layers
    reduced = dataclasses.replace(
        parallel,
        num_layers_in_first_pipeline_stage=first,
        num_layers_in_last_pipeline_stage=last,
    )
    return reduced, num_layers
