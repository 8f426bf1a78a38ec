import dataclasses

import pytest

from megatron_stapo.config import ParallelConfig, RolloutConfig, find_model_json, list_stage_layers
from megatron_stapo.plan.accelerators import (
    ACCELERATORS,
    GIB,
    HEAD_CHUNK_TOKENS,
    TRAINER_ALLOWANCE_BYTES,
)
from megatron_stapo.plan.memory import (
    compute_engine_memory,
    compute_layer_activations,
    compute_stage_state,
    compute_trainer_memory,
    count_layers_in_flight,
)
from megatron_stapo.plan.shape import build_shape
from tests.layouts import Layout
from tests.plan.workers import measure_mlp_activations, measure_state
from tests.tiny_model import VOCAB_SIZE
from tests.workers import build_groups


def build(name):
    return build_shape(find_model_json(name))


EIGHT = build("Qwen3-8B")


def test_weights_gradients_and_optimizer_of_8b_are_18_bytes_per_parameter_on_one_gpu():
    state = compute_stage_state(EIGHT, ParallelConfig(), 0, 36, "bfloat16")
    assert state.num_params == EIGHT.num_params == 8_190_735_360
    assert (state.weights, state.gradients) == (2 * 8_190_735_360, 4 * 8_190_735_360)
    assert state.optimizer == 12 * 8_190_735_360


def test_data_and_context_parallel_ranks_share_the_optimizer_alone():
    one = compute_stage_state(EIGHT, ParallelConfig(), 0, 36, "bfloat16")
    parallel = ParallelConfig(data_parallel_size=4, context_parallel_size=2)
    eight = compute_stage_state(EIGHT, parallel, 0, 36, "bfloat16")
    assert (eight.weights, eight.gradients) == (one.weights, one.gradients)
    assert eight.optimizer == one.optimizer / 8


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (Layout(tp=2, sp=True, dp=2), "bfloat16"),
        (Layout(tp=2, sp=True, dp=2), "float32"),
        (Layout(model="untied", pp=2, cp=2, budget=60), "bfloat16"),
        (Layout(pp=3, first=2), "bfloat16"),
        (Layout(model="experts", tp=2, sp=True, dp=2, ep=2), "bfloat16"),
        (Layout(model="experts", pp=2, dp=2, ep=2), "bfloat16"),
    ],
    ids=str,
)
def test_state_is_what_megatron_allocates(rank_pool, tiny_models, layout, dtype):
    config = layout.build_config(tiny_models[layout.model], model__dtype=dtype)
    shape = build_shape(find_model_json(config.model.path))
    parallel = config.parallel
    measured = rank_pool.run(
        measure_state, parallel.world_size, config, build_groups(config, VOCAB_SIZE)
    )
    stages = list_stage_layers(parallel, shape.num_layers)
    expected = []
    for rank in measured:
        state = compute_stage_state(shape, parallel, rank["stage"], stages[rank["stage"]], dtype)
        assert (rank["weights"], rank["gradients"]) == (state.weights, state.gradients)
        expected.append(state.optimizer)
        # Megatron starts every tensor at a multiple of 64 entries and rounds the buffer's shards.
        assert 0 <= rank["padding"] <= 4 * (64 * rank["num_tensors"] + 2 * 128 * len(measured))
        # So that the cut between shards moves by as much.
        bytes_per_param = 12 if dtype == "bfloat16" else 8
        slack = bytes_per_param / 4 * rank["padding"]
        assert abs(rank["optimizer"] - state.optimizer) <= slack
    assert sum(rank["optimizer"] for rank in measured) == pytest.approx(sum(expected), rel=1e-12)


@pytest.mark.distributed
def test_a_dense_mlp_keeps_its_input_and_five_widths_per_token(rank_pool, tiny_models):
    config = Layout(model="untied").build_config(tiny_models["untied"], model__dtype="bfloat16")
    shape = build_shape(find_model_json(config.model.path))
    (measured,) = rank_pool.run(measure_mlp_activations, 1, config, 64)
    narrow = dataclasses.replace(shape, ffn_size=0)
    widths = compute_layer_activations(shape, ParallelConfig()) - compute_layer_activations(
        narrow, ParallelConfig()
    )
    assert measured == 64 * (2 * shape.hidden_size + widths)


def test_a_layer_of_8b_keeps_186_kb_per_token():
    norms = 2 * (2 + 2) * 4096
    attention = 2 * (4096 + 1024 + 1024) + 2 * (4096 + 1024) + 2 * 4096
    mlp = 2 * (2 + 1 + 1 + 1) * 12288
    layer = compute_layer_activations(EIGHT, ParallelConfig())
    assert layer == norms + attention + mlp == 186_368


def test_sequence_parallelism_cuts_the_norms_too():
    without = ParallelConfig(tensor_model_parallel_size=4)
    both = ParallelConfig(tensor_model_parallel_size=4, sequence_parallel=True)
    assert compute_layer_activations(EIGHT, both) == 186_368 / 4
    assert compute_layer_activations(EIGHT, without) == (186_368 - 32_768) / 4 + 32_768


def test_a_layer_of_experts_keeps_eight_experts_per_token():
    shape = build("Qwen3-30B-A3B")
    norms = 2 * (2 + 2) * 2048
    attention = 2 * (4096 + 512 + 512) + 2 * (4096 + 512) + 2 * 4096
    router = 3 * 4 * 128
    experts = 8 * 2 * (2048 + (2 + 1 + 1 + 1 + 1) * 768)
    layer = compute_layer_activations(shape, ParallelConfig())
    assert layer == norms + attention + router + experts


@pytest.mark.parametrize(
    ("stage", "chunks", "num_microbatches", "in_flight"),
    [
        (0, 1, 16, 4),
        (3, 1, 16, 1),
        (0, 1, 2, 2),
        # Interleaved: 2 x 3 + 1 x 4 + 1 chunks of 5 layers; stage 3: 0 + 4 + 1.
        (0, 2, 16, 11 / 2),
        (3, 2, 16, 5 / 2),
        (0, 2, 4, 4),
    ],
)
def test_layers_in_flight(stage, chunks, num_microbatches, in_flight):
    parallel = ParallelConfig(
        pipeline_model_parallel_size=4, virtual_pipeline_model_parallel_size=chunks
    )
    assert count_layers_in_flight(parallel, stage, 10, num_microbatches) == 10 * in_flight


def test_full_recompute_keeps_the_layers_inputs_and_two_layers():
    memory = compute_trainer_memory(EIGHT, ParallelConfig(recompute="full"), 1000, 8)
    assert memory.parts["activations"] == 1000 * (36 * 2 * 4096 + 2 * 186_368)
    memory = compute_trainer_memory(EIGHT, ParallelConfig(), 1000, 8)
    assert memory.parts["activations"] == 1000 * 37 * 186_368


def test_the_head_of_8b_takes_a_chunk_two_gradients_and_four_hidden_streams():
    memory = compute_trainer_memory(EIGHT, ParallelConfig(), 16384, 8)
    chunk = 2048 * 151_936 * 6
    assert memory.parts["head"] == chunk + 8 * 151_936 * 4096 + 4 * 2 * 16384 * 4096


def test_the_reference_is_a_copy_of_the_weights():
    memory = compute_trainer_memory(EIGHT, ParallelConfig(), 1000, 8, has_reference=True)
    assert memory.parts["reference"] == memory.parts["weights"]


def test_layers_in_fp8_hold_their_weights_twice_more_a_byte_each():
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    memory = compute_trainer_memory(EIGHT, parallel, 1000, 8, fp8_layer_frac=34 / 36)
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288
    assert memory.parts["FP8 weights"] == pytest.approx(34 * layer / 2 * 2)


def test_the_chunk_of_logits_is_the_heads():
    from megatron_stapo.ops.logprobs import CHUNK_TOKENS

    assert HEAD_CHUNK_TOKENS == CHUNK_TOKENS


def test_an_engine_gives_the_cache_what_the_weights_leave():
    # 0.92 x 95 GiB; 8.19 B parameters; logits 12 x 256 x 151,936; 8192 x (8 x 4096 + 4 x 12,288).
    rollout = RolloutConfig(tensor_parallel_size=1, max_num_seqs=256)
    memory = compute_engine_memory(EIGHT, rollout, ACCELERATORS["h20"])
    kept = 2 * 8_190_735_360 + 12 * 256 * 151_936 + 8192 * (8 * 4096 + 4 * 12_288) + 3 * GIB
    cache = 0.92 * 95 * GIB - kept
    assert memory.parts["KV cache"] == pytest.approx(cache)
    assert memory.kv_tokens == pytest.approx(cache / 147_456)
    assert sum(memory.parts.values()) == pytest.approx(95 * GIB)


def test_a_given_cache_is_taken_where_there_is_room():
    rollout = RolloutConfig(kv_cache_bytes=GIB)
    memory = compute_engine_memory(EIGHT, rollout, ACCELERATORS["h20"])
    assert memory.kv_tokens == GIB / 147_456
    rollout = RolloutConfig(kv_cache_bytes=1000 * GIB)
    memory = compute_engine_memory(EIGHT, rollout, ACCELERATORS["h20"])
    assert memory.parts["KV cache"] < 95 * GIB


def test_the_stages_of_an_engine_share_layers_and_cache():
    one = RolloutConfig(tensor_parallel_size=4)
    two = RolloutConfig(tensor_parallel_size=4, pipeline_parallel_size=2)
    shape = build("Qwen3-30B-A3B")
    whole, half = (
        compute_engine_memory(shape, rollout, ACCELERATORS["h20"]) for rollout in (one, two)
    )
    table = 2 * 151_936 * 2048
    assert whole.parts["weights"] == 2 * shape.num_params / 4
    assert half.parts["weights"] == pytest.approx((shape.num_params - table) / 4 + table / 4)
    assert half.kv_tokens > 2 * whole.kv_tokens


def test_what_stays_beside_a_colocated_engine_is_all_but_activations_and_head():
    parallel = ParallelConfig(pipeline_model_parallel_size=2)
    memory = compute_trainer_memory(EIGHT, parallel, 1000, 8, engine_bytes=GIB)
    assert memory.parts["engine asleep"] == GIB
    stages = [compute_stage_state(EIGHT, parallel, stage, 18, "bfloat16") for stage in range(2)]
    fullest = max(s.weights + s.gradients + s.optimizer for s in stages)
    assert memory.resident == fullest + TRAINER_ALLOWANCE_BYTES


def test_a_colocated_engine_has_what_the_trainer_leaves():
    rollout = RolloutConfig(placement="colocated", kv_cache_bytes=1000 * GIB)
    alone, beside = (
        compute_engine_memory(EIGHT, rollout, ACCELERATORS["h20"], trainer_bytes=taken)
        for taken in (0, 30 * GIB)
    )
    assert beside.parts["KV cache"] == alone.parts["KV cache"] - 30 * GIB
