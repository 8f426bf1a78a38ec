"""Ranks, hosts and coordinates, held to Megatron's own rank generator and to real groups."""

import warnings
from dataclasses import replace

import pytest

from megatron_stapo.config import (
    ClusterConfig,
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
)
from megatron_stapo.launch.placement import (
    build_process_table,
    count_hosts,
    format_process_table,
)
from tests.workers import report_coordinates


def build(gpus_per_node=8, rollout=None, **parallel):
    return Config(
        name="test",
        num_steps=1,
        model=ModelConfig(path="nowhere"),
        data=DataConfig(source="nowhere"),
        parallel=ParallelConfig(**parallel),
        cluster=ClusterConfig(num_gpus_per_node=gpus_per_node),
        rollout=rollout or RolloutConfig(engine="transformers"),
    )


LAYOUTS = [
    dict(tensor_model_parallel_size=2, context_parallel_size=2, data_parallel_size=3),
    dict(
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=4,
        context_parallel_size=2,
        data_parallel_size=4,
        expert_model_parallel_size=8,
        sequence_parallel=True,
    ),
    dict(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        data_parallel_size=6,
        expert_model_parallel_size=4,
        sequence_parallel=True,
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_coordinates_are_those_of_megatrons_rank_generator(layout):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.parallel_state import RankGenerator
    config = build(**layout)
    table = build_process_table(config)
    parallel = config.parallel
    order = "tp-cp-ep-dp-pp"
    stage_size = parallel.world_size // parallel.pipeline_model_parallel_size
    ep_size = parallel.expert_model_parallel_size
    dense = RankGenerator(
        tp=parallel.tensor_model_parallel_size,
        ep=1,
        dp=parallel.data_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        order=order,
    )
    experts = RankGenerator(
        tp=1,
        ep=ep_size,
        dp=stage_size // ep_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=1,
        order=order,
    )
    generators = {"tp": dense, "cp": dense, "dp": dense, "pp": dense, "ep": experts}
    for axis, generator in generators.items():
        for group in generator.get_ranks(axis):
            for coordinate, rank in enumerate(group):
                assert table[rank].rank == rank
                assert getattr(table[rank], axis) == coordinate, (axis, rank)


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout",
    [
        dict(tensor_model_parallel_size=2, data_parallel_size=2, expert_model_parallel_size=4),
        dict(pipeline_model_parallel_size=2, context_parallel_size=2),
    ],
)
def test_the_groups_that_ranks_join_have_the_coordinates_of_the_table(rank_pool, layout):
    config = build(device="cpu", **layout)
    joined = rank_pool.run(report_coordinates, 4, config)
    expected = [(p.tp, p.cp, p.ep, p.dp, p.pp) for p in build_process_table(config)]
    assert [coordinates for coordinates, _ in joined] == expected
    assert joined[0][1] == [(p.dp, p.cp) for p in build_process_table(config)]


def test_engines_follow_the_trainer_and_stay_on_one_host():
    rollout = RolloutConfig(num_engines=3, tensor_parallel_size=2, pipeline_parallel_size=2)
    config = build(rollout=rollout, tensor_model_parallel_size=2, data_parallel_size=5)
    table = build_process_table(config)
    trainer = [(p.host, p.gpu) for p in table if p.role == "trainer"]
    assert trainer == [(rank // 8, rank % 8) for rank in range(10)]
    # Ten ranks leave six slots on host 1: one engine of four fits, the next begins on host 2.
    for engine, places in enumerate([(1, range(2, 6)), (2, range(0, 4)), (2, range(4, 8))]):
        host, gpus = places
        found = [p for p in table if p.role == f"engine {engine}"]
        assert [(p.host, p.gpu) for p in found] == [(host, gpu) for gpu in gpus]
        assert [(p.tp, p.pp) for p in found] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert count_hosts(table) == 3
    line = format_process_table(table).splitlines()[11]
    assert line.split() == ["1", "2", "engine", "0", "0", "0", "0", "0", "0", "0"]


def test_no_two_processes_share_a_gpu():
    rollout = RolloutConfig(num_engines=7, tensor_parallel_size=3)
    table = build_process_table(build(rollout=rollout, data_parallel_size=13))
    places = [(p.host, p.gpu) for p in table]
    assert len(set(places)) == len(places) == 13 + 21
    for engine in range(7):
        assert len({p.host for p in table if p.engine == engine}) == 1


def test_what_would_span_hosts_is_refused_by_name():
    config = build(gpus_per_node=4, tensor_model_parallel_size=3, data_parallel_size=2)
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=3.*use one of \[1, 2, 4\]"):
        build_process_table(config)
    one_host = replace(config, cluster=ClusterConfig(num_gpus_per_node=6))
    assert count_hosts(build_process_table(one_host)) == 1
    rollout = RolloutConfig(tensor_parallel_size=8, pipeline_parallel_size=2)
    with pytest.raises(ValueError, match=r"pipeline_parallel_size=2: an engine of 16 ranks.*=8"):
        build_process_table(build(rollout=rollout))


COLOCATED = RolloutConfig(placement="colocated", kv_cache_bytes=1, tensor_parallel_size=2)


def test_colocated_engines_have_the_trainers_processes():
    config = build(rollout=COLOCATED, tensor_model_parallel_size=2, data_parallel_size=6)
    table = build_process_table(config)
    assert len(table) == 12 and count_hosts(table) == 2
    assert [p.role for p in table] == [f"trainer+engine {rank // 2}" for rank in range(12)]
    assert len({(p.host, p.gpu) for p in table}) == 12
    last = format_process_table(table).splitlines()[-1]
    assert last.split() == ["1", "3", "trainer+engine", "5", "11", "1", "0", "0", "5", "0"]


def test_a_colocated_engine_that_would_span_hosts_is_refused():
    rollout = replace(COLOCATED, tensor_parallel_size=4)
    config = build(gpus_per_node=6, rollout=rollout, data_parallel_size=12)
    with pytest.raises(
        ValueError, match=r"an engine of 4 ranks would span hosts .*=6; use engines"
    ):
        build_process_table(config)
