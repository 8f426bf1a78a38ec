"""What is left of a world in a process that goes on."""

import pytest

from tests.tiny_model import VOCAB_SIZE
from tests.workers import build_config, build_groups, list_threads, run_step

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("tied", {"tensor_model_parallel_size": 2}),
        ("experts", {"pipeline_model_parallel_size": 2}),
    ],
)
def test_a_world_that_was_left_leaves_no_thread(rank_pool, tiny_models, model, sizes):
    config = build_config(
        tiny_models[model], **{f"parallel__{name}": size for name, size in sizes.items()}
    )
    rank_pool.run(run_step, 2, config, build_groups(config, VOCAB_SIZE), 1)
    for threads in rank_pool.run(list_threads, 2):
        left = [name for name in threads if "gloo" in name or "tcpstore" in name]
        assert not left
