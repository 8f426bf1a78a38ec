import subprocess
import sys
from dataclasses import replace
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
from megatron_stapo.launch.tasks import build_evaluation_tasks, build_script


@pytest.fixture
def config() -> Config:
    return Config(
        name="base",
        num_steps=1,
        model=ModelConfig(path="model"),
        parallel=ParallelConfig(device="cpu", data_parallel_size=2),
        data=DataConfig(source="train.jsonl"),
    )


def test_a_vllm_run_is_a_server_and_ranks_that_know_its_address(config: Config) -> None:
    engine, trainer = build_tasks(config)
    assert (engine.name, engine.num_ranks) == ("engine", 0)
    assert (trainer.name, trainer.num_ranks) == ("trainer", 2)
    port = engine.argv[engine.argv.index("--port") + 1]
    assert trainer.argv[-1] == f"http://127.0.0.1:{port}"
    assert trainer.argv[1:5] == ["-m", "megatron_stapo.train", "--run-dir", "runs/base"]


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
    port = engine.argv[engine.argv.index("--port") + 1]
    assert evaluation.argv[-1] == f"http://127.0.0.1:{port}"
    assert evaluation.argv[1:5] == ["-m", "megatron_stapo.evaluation.run", "--run-dir", "runs/base"]


def test_the_engine_holds_the_longest_sequence_of_training_or_evaluation(config: Config) -> None:
    def find_length(config: Config) -> str:
        engine = build_evaluation_tasks(config)[0]
        return engine.argv[engine.argv.index("--max-model-len") + 1]

    assert find_length(config) == str(1024 + 15360)
    evaluation = EvaluationConfig(benchmarks=("aime24",), max_response_tokens=20480)
    assert find_length(replace(config, evaluation=evaluation)) == str(1024 + 20480)
