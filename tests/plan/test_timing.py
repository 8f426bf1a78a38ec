import dataclasses
import math

import pytest

from megatron_stapo.config import ParallelConfig, find_model_json
from megatron_stapo.plan.accelerators import (
    ACCELERATORS,
    DECODE_OVERHEAD_S,
    DP_IMBALANCE,
    HBM_EFFICIENCY,
    LINK_EFFICIENCY,
    SYNC_EFFICIENCY,
    SYNC_OVERHEAD_S,
)
from megatron_stapo.plan.shape import build_shape
from megatron_stapo.plan.timing import (
    compute_rollout_time,
    compute_sync_time,
    compute_training_time,
)
from megatron_stapo.plan.workload import Workload, sample_response_lengths

H20 = ACCELERATORS["h20"]
# Reaches its peaks.
IDEAL = dataclasses.replace(
    H20,
    gemm_efficiency=1.0,
    expert_efficiency=1.0,
    hbm_bytes_per_s=4.0e12 / HBM_EFFICIENCY,
    nvlink_bytes_per_s=math.inf,
    network_bytes_per_s=math.inf,
)


def build(name):
    return build_shape(find_model_json(name))


def build_workload(mean, num_sequences=2048, longest=15360, **changes):
    return Workload(
        **{
            "num_prompts": num_sequences // 8,
            "num_sequences": num_sequences,
            "num_minibatches": 4,
            "response_tokens": sample_response_lengths(mean, longest),
            "prompt_tokens": 0,
            **changes,
        }
    )


def train(shape, workload, accelerator=IDEAL, budget=16384, **sizes):
    return compute_training_time(shape, ParallelConfig(**sizes), workload, budget, accelerator, 8)


# Seconds on 64 H20 at their peaks, for 2048 responses of at most 15,360 tokens, log-normal with a
# deviation of 0.8 of the mean: derived apart from this code. Mean, score, update with one forward
# of the head, share of its second forward, sampling with a GPU per engine.
LIMITS = [
    ("Qwen3-1.7B", 4000, 4, 12, 0.044, 33),
    ("Qwen3-1.7B", 7300, 7, 23, 0.041, 60),
    ("Qwen3-8B", 4000, 15, 47, 0.022, 84),
    ("Qwen3-8B", 7300, 29, 90, 0.021, 118),
    ("Qwen3-8B", 15360, 66, 207, 0.020, 201),
    ("Qwen3-14B", 7300, 52, 160, 0.015, None),
    ("Qwen3-14B", 15360, 116, 357, 0.014, None),
]


@pytest.mark.parametrize(("name", "mean", "score", "update", "head", "sampling"), LIMITS)
def test_training_at_the_peak_takes_the_derived_time(name, mean, score, update, head, sampling):
    time = train(build(name), build_workload(mean), data_parallel_size=64)
    # Rounded to seconds there, over lengths that were drawn.
    assert time.score / DP_IMBALANCE == pytest.approx(score, abs=0.6, rel=0.08)
    assert time.update / DP_IMBALANCE == pytest.approx(update * (1 + head), abs=0.6, rel=0.08)


@pytest.mark.parametrize(
    ("name", "mean", "sampling"), [(row[0], row[1], row[5]) for row in LIMITS if row[5]]
)
def test_sampling_at_the_peak_takes_the_derived_time(name, mean, sampling):
    time = compute_rollout_time(
        build(name),
        build_workload(mean),
        IDEAL,
        num_engines=64,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        max_num_seqs=256,
        kv_tokens=1e9,
    )
    assert time.num_at_a_time == 32
    seconds = time.total - 15360 * DECODE_OVERHEAD_S
    assert seconds == pytest.approx(sampling, rel=0.1)


def test_a_token_of_8b_decodes_in_four_milliseconds_alone():
    # 16.4 GB less the embedding, of which one row is read, at 4.0 TB/s.
    time = compute_rollout_time(
        build("Qwen3-8B"),
        build_workload(1, num_sequences=1, longest=1),
        IDEAL,
        num_engines=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        max_num_seqs=256,
        kv_tokens=1e9,
    )
    weights = 2 * (8_190_735_360 - 151_936 * 4096)
    assert time.total == pytest.approx(weights / 4.0e12 + DECODE_OVERHEAD_S, rel=1e-3)


def test_what_does_not_fit_the_cache_waits():
    def sample(kv_tokens):
        return compute_rollout_time(
            build("Qwen3-8B"),
            build_workload(1000, num_sequences=64, longest=1000),
            H20,
            num_engines=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            max_num_seqs=256,
            kv_tokens=kv_tokens,
        )

    whole, half = sample(64_000), sample(32_000)
    assert (whole.num_at_a_time, half.num_at_a_time) == (64, 32)
    # Twice as many steps, each with half the cache to read.
    assert 1.3 * whole.total < half.total < 2 * whole.total


def test_full_recompute_is_a_forward_more():
    shape, workload = build("Qwen3-8B"), build_workload(7300)
    none = train(shape, workload, data_parallel_size=64)
    full = train(shape, workload, data_parallel_size=64, recompute="full")
    head = 2 * 151_936 * 4096 * 7300 * 2048 / 64 / 148e12
    forward = none.score - head * DP_IMBALANCE
    assert full.update - none.update == pytest.approx(forward, rel=1e-3)
    assert full.score == none.score


def test_layers_in_fp8_take_half_the_time_of_their_products():
    shape, workload = build("Qwen3-8B"), build_workload(7300)
    ideal = dataclasses.replace(IDEAL, fp8_efficiency=1.0)
    parallel = ParallelConfig(data_parallel_size=64)
    bf16, fp8 = (
        compute_training_time(shape, parallel, workload, 16384, ideal, 8, fp8_layer_frac=frac)
        for frac in (0.0, 34 / 36)
    )
    tokens = 2048 * workload.mean_response_tokens / 64 * DP_IMBALANCE
    products = 2 * shape.cut_layer_params * tokens / 148e12
    assert bf16.score - fp8.score == pytest.approx(34 * products / 2)
    assert bf16.update - fp8.update == pytest.approx(3 * 34 * products / 2)


def test_the_bubble_is_the_stages_before_the_last_over_chunks_and_microbatches():
    # Two stages of equal layers, but the head on the last: 18 layers of the first wait for it.
    shape, workload = build("Qwen3-8B"), build_workload(7300)
    time = train(shape, workload, data_parallel_size=32, pipeline_model_parallel_size=2)
    assert time.num_microbatches == math.ceil(7300 * 2048 / 4 / 32 / (0.95 * 16384))
    busy = time.score + time.update - time.bubble
    assert time.bubble == pytest.approx(busy / time.num_microbatches)
    chunks = train(
        shape,
        workload,
        data_parallel_size=32,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
    )
    assert chunks.bubble == pytest.approx(busy / chunks.num_microbatches / 2)


def test_tensor_parallelism_moves_ten_gathers_per_layer():
    shape, workload = build("Qwen3-8B"), build_workload(7300)
    linked = dataclasses.replace(IDEAL, nvlink_bytes_per_s=450e9)
    sizes = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "data_parallel_size": 32}
    time = train(shape, workload, linked, **sizes)
    tokens = 2048 * workload.mean_response_tokens / 32 * DP_IMBALANCE
    gather = tokens * 4096 * 2 / 2 / (450e9 * LINK_EFFICIENCY)
    # Four forward, in scoring and in the update, and six backward.
    assert time.communication == pytest.approx(36 * 14 * gather)


def test_gradients_go_to_shards_and_weights_come_back_once_per_update():
    shape, workload = build("Qwen3-8B"), build_workload(7300)
    linked = dataclasses.replace(IDEAL, network_bytes_per_s=50e9)
    time = train(shape, workload, linked, data_parallel_size=64)
    moved = shape.num_params * (4 + 2) * 63 / 64
    assert time.communication == pytest.approx(4 * moved / (50e9 * LINK_EFFICIENCY))


def test_experts_exchange_eight_copies_of_a_token_twice_each_way():
    shape, workload = build("Qwen3-30B-A3B"), build_workload(7300)
    linked = dataclasses.replace(IDEAL, nvlink_bytes_per_s=450e9)
    time = train(shape, workload, linked, data_parallel_size=64, expert_model_parallel_size=8)
    tokens = 2048 * workload.mean_response_tokens / 64 * DP_IMBALANCE
    shuffle = tokens * 8 * 2048 * 2 * 7 / 8 / (450e9 * LINK_EFFICIENCY)
    assert time.communication == pytest.approx(48 * 6 * shuffle)


def test_a_resync_is_bound_by_the_fullest_link():
    rate = 50e9 * SYNC_EFFICIENCY
    # Eight ranks receive 2 GB each, of 40 that send 2.4 GB each for six engines.
    assert compute_sync_time(16e9, 40, 6, 8, H20) == pytest.approx(SYNC_OVERHEAD_S + 2.4e9 / rate)
    assert compute_sync_time(16e9, 40, 1, 8, H20) == pytest.approx(SYNC_OVERHEAD_S + 2e9 / rate)
