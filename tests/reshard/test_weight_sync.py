"""Real Megatron shards to engines' parts over gloo, in pairs of layouts."""

import pytest

from tests.layouts import Layout
from tests.tiny_model import build_tiny_model
from tests.workers import reshard_to_engines, sync_changes

BUCKET_BYTES = 100_000
"""About a layer of the dense models, and below the largest module of the experts."""

PAIRS = [
    (Layout(tp=4), [(1, 1), (2, 1), (4, 1), (1, 4)]),
    (Layout(pp=4), [(1, 1), (2, 1), (2, 2)]),
    (Layout(tp=2, sp=True, pp=2, vpp=2), [(1, 1), (4, 1), (1, 2)]),
    (Layout(tp=2, cp=2), [(2, 1), (2, 2)]),
    (Layout(pp=3, first=2), [(1, 1), (1, 3)]),
    (Layout(model="untied", tp=2, pp=2, first=3), [(1, 1), (4, 1), (2, 2)]),
    (Layout(model="untied", dp=4), [(1, 1), (2, 1), (1, 4)]),
    (Layout(model="untied", pp=2, vpp=2, dp=2), [(2, 1), (1, 3)]),
    (Layout(model="experts", dp=4, ep=4), [(1, 1), (2, 1), (4, 1)]),
    (Layout(model="experts", tp=2, sp=True, dp=2, ep=2), [(1, 1), (4, 1), (2, 2)]),
    (Layout(model="experts", pp=2, vpp=2, tp=2, sp=True, ep=2), [(1, 1), (2, 1), (1, 2)]),
]


def test_there_are_pairs_enough():
    assert sum(len(engines) for _, engines in PAIRS) >= 20


FP8_PAIRS = [
    (Layout(model="untied", tp=2, sp=True, dp=2), [(1, 1), (2, 1), (4, 1)]),
    (Layout(pp=2, dp=2), [(1, 1), (2, 2)]),
    (Layout(model="experts", tp=2, sp=True, dp=2, ep=2), [(1, 1), (2, 1), (4, 1)]),
]


@pytest.fixture(scope="module")
def block_models(tmp_path_factory):
    """Models that FP8's blocks of 128 x 128 fit, but for gate and up of TP 4."""
    sizes = {"hidden_size": 128, "head_dim": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    experts = sizes | {"moe_intermediate_size": 128}
    return {
        "tied": build_tiny_model(tmp_path_factory.mktemp("tied"), True, sizes=sizes),
        "untied": build_tiny_model(tmp_path_factory.mktemp("untied"), False, sizes=sizes),
        "experts": build_tiny_model(tmp_path_factory.mktemp("experts"), False, 4, experts),
    }


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "engines"), FP8_PAIRS, ids=str)
def test_engines_in_fp8_get_what_they_keep_in_half_the_bytes(
    rank_pool, block_models, layout, engines
):
    config = layout.build_config(
        block_models[layout.model], model__dtype="bfloat16", rollout__quantization="fp8"
    )
    bucket_bytes = 4 << 20

    results = rank_pool.run(
        reshard_to_engines, config.parallel.world_size, config, engines, bucket_bytes
    )

    for number, engine in enumerate(engines):
        for rank, of_rank in enumerate(results):
            found = of_rank[number]
            where = f"{layout} to engine {engine}, rank {rank}: {found}"
            assert found["wrong"] == [], where
            assert found["num_parts"] == found["num_expected"], where
            assert found["received_bytes"] == found["planned_bytes"], where
            if found["least_bytes"] and engine[0] < 4:
                # Of the rest the embedding is most.
                assert found["received_bytes"] < 0.75 * found["least_bytes"], where
            assert found["received_bytes"] <= found["least_bytes"], where
            assert found["peak_bytes"] <= found["planned_peak_bytes"], where
        assert sum(of_rank[number]["num_parts"] for of_rank in results) > 0


@pytest.mark.distributed
@pytest.mark.parametrize(("layout", "engines"), PAIRS, ids=str)
def test_engines_get_every_bit_and_no_byte_too_many(rank_pool, tiny_models, layout, engines):
    config = layout.build_config(tiny_models[layout.model])

    results = rank_pool.run(
        reshard_to_engines, config.parallel.world_size, config, engines, BUCKET_BYTES
    )

    for number, engine in enumerate(engines):
        for rank, of_rank in enumerate(results):
            found = of_rank[number]
            where = f"{layout} to engine {engine}, rank {rank}: {found}"
            assert found["wrong"] == [], where
            assert found["num_parts"] == found["num_expected"], where
            assert found["received_bytes"] == found["least_bytes"], where
            assert found["received_bytes"] == found["planned_bytes"], where
            assert found["peak_bytes"] <= found["planned_peak_bytes"], where
            if layout.model != "experts":
                assert found["planned_peak_bytes"] <= BUCKET_BYTES, where
        assert sum(of_rank[number]["num_parts"] for of_rank in results) > 0


@pytest.mark.distributed
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("share", [0.02, 0.9])
def test_only_what_changed_is_sent_to_an_engine_that_keeps_the_rest(
    rank_pool, tiny_models, dtype, share
):
    """Replicas hold the same, so that both trainer ranks change the same."""
    config = Layout(model="untied", tp=1, dp=2).build_config(
        tiny_models["untied"],
        model__dtype=dtype,
        rollout__engine="vllm",
        rollout__tensor_parallel_size=2,
        reshard__delta=True,
        reshard__probe_interval_steps=1,
    )
    updates, _ = rank_pool.run(sync_changes, 2, config, share)

    element_bytes = {"bfloat16": 2, "float32": 4}[dtype]
    assert [update["base_version"] for update in updates] == [None, 0, None, 2]
    for update in updates:
        assert update["wrong"] == []
        least = update["all_bytes"]
        if update["base_version"] is not None:
            least *= min(1, share * (4 + element_bytes) / element_bytes)
        # Beside the number of changes in every piece.
        assert 0.9 * least < update["received_bytes"] < 1.1 * least + 8 * 500
