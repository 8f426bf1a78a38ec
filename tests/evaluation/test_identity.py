"""A folder goes on as the evaluation that it holds, and as no other."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from megatron_stapo.config import EvaluationConfig
from megatron_stapo.evaluation.evaluate import LoadedBenchmark
from megatron_stapo.evaluation.identity import check_identity, compute_identity
from megatron_stapo.types import Prompt
from tests.workers import build_config


def build_benchmark(name, answers):
    prompts = [
        Prompt(prompt_id=row, problem=f"P{row}", answer=answer, token_ids=[row])
        for row, answer in enumerate(answers)
    ]
    return LoadedBenchmark(name=name, prompts=prompts, num_samples=2, notes=[])


@pytest.fixture
def config(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    save_file({"a": torch.zeros(4)}, model / "model.safetensors")
    return build_config(model, evaluation__benchmarks=("own",))


def check(config, folder, benchmarks):
    check_identity(folder, compute_identity(config, benchmarks))


def test_more_problems_samples_and_benchmarks_are_the_same_evaluation(config, tmp_path):
    check(config, tmp_path, [build_benchmark("own", "12")])
    check(config, tmp_path, [build_benchmark("own", "123"), build_benchmark("new", "4")])
    grown = dataclasses.replace(
        config, evaluation=EvaluationConfig(benchmarks=("own",), num_samples=9)
    )
    check(grown, tmp_path, [build_benchmark("own", "1")])
    held = json.loads((tmp_path / "evaluation.json").read_text())["benchmarks"]
    assert {name: len(rows) for name, rows in held.items()} == {"own": 3, "new": 1}


def test_other_problems_weights_or_settings_are_refused(config, tmp_path):
    benchmarks = [build_benchmark("own", "12")]
    check(config, tmp_path, benchmarks)
    with pytest.raises(ValueError, match=r"benchmark own: .* holds samples of other problems"):
        check(config, tmp_path, [build_benchmark("own", "13")])
    evaluation = dataclasses.replace(config.evaluation, top_p=0.9)
    with pytest.raises(ValueError, match=r"evaluation.top_p=0.9: .* evaluation.top_p=1.0; give"):
        check(dataclasses.replace(config, evaluation=evaluation), tmp_path, benchmarks)
    save_file({"a": torch.ones(4)}, config.model.path + "/model.safetensors")
    with pytest.raises(ValueError, match=r"model=.* holds samples of model=.*; give another --out"):
        check(config, tmp_path, benchmarks)
