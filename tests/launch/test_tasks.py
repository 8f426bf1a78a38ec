import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from megatron_stapo.config import (
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    ParallelConfig,
)
from megatron_stapo.launch import Task, build_tasks
from megatron_stapo.launch.tasks import (
    Host,
    build_evaluation_tasks,
    build_host_tasks,
    build_script,
)
from megatron_stapo.rollout.vllm_server import build_server_arguments


@pytest.fixture
def config() -> Config:
    return Config(
        name="base",
        num_steps=1,
        model=ModelConfig(path="model"),
        parallel=ParallelConfig(device="cpu", data_parallel_size=2),
        data=DataConfig(source="train.jsonl"),
    )


def find_urls(argv: list[str]) -> list[str]:
    return [url for option, url in pairwise(argv) if option == "--engine-url"]


@pytest.mark.parametrize("num_engines", [1, 3])
def test_a_vllm_run_is_hosts_and_ranks_that_know_their_addresses(
    config: Config, num_engines: int
) -> None:
    config = replace(config, rollout=replace(config.rollout, num_engines=num_engines))
    *engines, trainer = build_tasks(config)
    assert [(t.name, t.num_ranks) for t in engines] == (
        [("engine", 0)] if num_engines == 1 else [(f"engine_{i}", 0) for i in range(3)]
    )
    assert (trainer.name, trainer.num_ranks) == ("trainer", 2)
    host = ["-m", "megatron_stapo.rollout.engine_host", "--run-dir", "runs/base"]
    for index, engine in enumerate(engines):
        assert engine.argv[1:-4] == [*host, "--index", str(index)]
        assert engine.argv[-4:-1] == ["--host", "127.0.0.1", "--port"]
    ports = [engine.argv[-1] for engine in engines]
    assert len(set(ports)) == num_engines
    assert find_urls(trainer.argv) == [f"http://127.0.0.1:{port}" for port in ports]
    assert trainer.argv[1:5] == ["-m", "megatron_stapo.train", "--run-dir", "runs/base"]


def test_a_colocated_run_is_the_trainer_alone(config: Config) -> None:
    rollout = replace(config.rollout, placement="colocated", kv_cache_bytes=1)
    config = replace(config, rollout=rollout)
    [trainer] = build_tasks(config)
    assert not find_urls(trainer.argv)
    assert trainer.env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    host = Host(address="10.0.0.1", interface="eth0", ports=[1])
    [[trainer]] = build_host_tasks(config, [host])
    assert (trainer.name, trainer.num_ranks) == ("trainer", 2)
    assert trainer.env["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    # An evaluation has no trainer to live in.
    assert [task.name for task in build_evaluation_tasks(config)] == ["engine", "evaluation"]


def test_every_engine_has_gpus_of_its_own_beside_the_trainer(config: Config) -> None:
    config = replace(
        config,
        parallel=replace(config.parallel, device="cuda"),
        rollout=replace(
            config.rollout, num_engines=2, tensor_parallel_size=2, pipeline_parallel_size=2
        ),
    )
    first, second, trainer = build_tasks(config)
    assert first.env == {"CUDA_VISIBLE_DEVICES": "2,3,4,5"}
    assert second.env == {"CUDA_VISIBLE_DEVICES": "6,7,8,9"}
    assert trainer.num_ranks == 2 and "CUDA_VISIBLE_DEVICES" not in trainer.env


def test_a_transformers_run_is_the_ranks_alone(config: Config) -> None:
    config = replace(config, rollout=replace(config.rollout, engine="transformers"))
    (trainer,) = build_tasks(config)
    assert "--engine-url" not in trainer.argv


def test_a_script_hands_over_arguments_and_environment_as_they_are(tmp_path: Path) -> None:
    value = """a b "c" 'd' $HOME `id` \\ *"""
    program = "import os, sys; print(sys.argv[1]); print(os.environ['KEY'], file=sys.stderr)"
    task = Task(
        name="trainer", argv=[sys.executable, "-c", program, value], env={"KEY": value}, num_ranks=4
    )
    run_dir = tmp_path / "a folder"
    (run_dir / "logs").mkdir(parents=True)
    script = build_script(run_dir, task)
    result = subprocess.run(["bash", "-c", script], env={"RANK": "3"}, capture_output=True)
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
    assert (run_dir / "logs" / "trainer_rank3.log").read_text() == f"{value}\n{value}\n"


def test_an_evaluation_is_a_server_and_one_process(config: Config) -> None:
    engine, evaluation = build_evaluation_tasks(config)
    assert (evaluation.name, evaluation.num_ranks) == ("evaluation", 0)
    assert find_urls(evaluation.argv) == [f"http://127.0.0.1:{engine.argv[-1]}"]
    assert evaluation.argv[1:5] == ["-m", "megatron_stapo.evaluation.run", "--run-dir", "runs/base"]


def test_the_engine_holds_the_longest_sequence_of_training_or_evaluation(config: Config) -> None:
    def find_length(config: Config) -> str:
        argv = build_server_arguments(config, "127.0.0.1", 1)
        return argv[argv.index("--max-model-len") + 1]

    assert find_length(config) == str(1024 + 15360)
    evaluation = EvaluationConfig(benchmarks=("aime24",), max_response_tokens=20480)
    assert find_length(replace(config, evaluation=evaluation)) == str(1024 + 20480)


def test_every_host_gets_its_torchrun_and_its_engines_with_gpus_of_their_own(
    config: Config,
) -> None:
    config = replace(
        config,
        parallel=ParallelConfig(data_parallel_size=12),
        rollout=replace(config.rollout, num_engines=3, tensor_parallel_size=4),
    )
    hosts = [
        Host(address=f"10.0.0.{n}", interface=f"eth{n}", ports=[n * 100, n * 100 + 1])
        for n in (1, 2, 3)
    ]
    first, second, third = build_host_tasks(config, hosts)
    urls = ["http://10.0.0.2:200", "http://10.0.0.3:300", "http://10.0.0.3:301"]
    assert [task.name for task in second] == ["engine_0", "trainer"]
    assert [task.name for task in third] == ["engine_1", "engine_2"]
    (trainer,) = first
    expected = ["-m", "megatron_stapo.train", "--run-dir", "runs/base"]
    expected += [word for url in urls for word in ("--engine-url", url)]
    assert trainer.argv[1:] == expected == second[1].argv[1:]
    for rank, (task, num_ranks) in enumerate([(trainer, 8), (second[1], 4)]):
        assert (task.num_ranks, task.num_hosts, task.host_rank) == (num_ranks, 2, rank)
        assert task.master == "10.0.0.1:100"
        assert task.env["GLOO_SOCKET_IFNAME"] == f"eth{rank + 1}"
    engines = [second[0], *third]
    visible = [engine.env["CUDA_VISIBLE_DEVICES"] for engine in engines]
    assert visible == ["4,5,6,7", "0,1,2,3", "4,5,6,7"]
    for index, engine in enumerate(engines):
        address, _, port = urls[index].removeprefix("http://").partition(":")
        assert engine.argv[1:] == [
            *["-m", "megatron_stapo.rollout.engine_host", "--run-dir", "runs/base"],
            *["--index", str(index), "--host", address, "--port", port],
        ]
