"""Sampling, judging and resuming, with an engine whose responses are known."""

import dataclasses
import json
from collections import Counter

import pyarrow.parquet
import pytest
from transformers import AutoTokenizer

from megatron_stapo.config import EvaluationConfig, RewardConfig
from megatron_stapo.evaluation.evaluate import (
    compute_sample_id,
    evaluate_into,
    load_benchmarks,
)
from megatron_stapo.evaluation.report import format_results, read_results
from megatron_stapo.evaluation.samples import Sample
from megatron_stapo.published_models import PUBLISHED
from megatron_stapo.rewards.judge import Judge
from megatron_stapo.types import Rollout, RolloutGroup
from tests.workers import build_config

ANSWERS = ["1/2", "7", "x+1"]
RESPONSES = [
    r"It is \boxed{\frac{1}{2}}.",
    r"It is \boxed{7}.",
    r"It is \boxed{1 + x}.",
    "no box",
]


class ScriptedEngine:
    """Responds to a sample by its id alone; fails after a number of groups."""

    def __init__(self, tokenizer, max_groups=10**9):
        self._tokenizer = tokenizer
        self._max_groups = max_groups
        self.drawn = []

    def generate(self, prompts, num_samples, sampling, on_group=None):
        assert num_samples == 1
        for index, prompt in enumerate(prompts):
            if len(self.drawn) == self._max_groups:
                raise RuntimeError("the engine died")
            self.drawn.append(prompt.prompt_id)
            text = RESPONSES[prompt.prompt_id % 4]
            token_ids = self._tokenizer.encode(text)
            is_cut = prompt.prompt_id % 7 == 0
            rollout = Rollout(
                token_ids=token_ids if is_cut else [*token_ids, 2],
                rollout_logprobs=[-0.5] * len(token_ids),
                finish_reason="length" if is_cut else "stop",
                policy_version=0,
            )
            on_group(index, RolloutGroup(prompt=prompt, rollouts=[rollout]))


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "own.jsonl"
    rows = [{"problem": f"Problem {i}?", "answer": a} for i, a in enumerate(ANSWERS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def config(tmp_path, source, tokenizer_folder):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).write_bytes((type(source)(tokenizer_folder) / name).read_bytes())
    (model / "config.json").write_text(json.dumps({**PUBLISHED["Qwen3-0.6B"], "hidden_size": 48}))
    config = build_config(
        model, data__prompt_suffix="", data__max_prompt_tokens=80, data__max_microbatch_tokens=200
    )
    return dataclasses.replace(
        config,
        evaluation=EvaluationConfig(benchmarks=(f"own={source}", f"again={source}"), num_samples=5),
        reward=RewardConfig(num_workers=1),
    )


def run(config, folder, max_groups=10**9):
    """Returns the engine and the results."""
    folder.mkdir(exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    engine = ScriptedEngine(tokenizer, max_groups)
    judge = Judge(config.reward, folder)
    try:
        results = evaluate_into(
            folder,
            config,
            load_benchmarks(config),
            engine=engine,
            judge=judge,
            tokenizer=tokenizer,
        )
    finally:
        judge.close()
    return engine, results


def load_samples(path):
    """Of samples.parquet; a column that contradicts its fields fails."""
    samples = []
    for row in pyarrow.parquet.read_table(path).to_pylist():
        is_correct = row.pop("is_correct")
        samples.append(Sample(**row))
        assert samples[-1].is_correct is is_correct
    return samples


def test_every_sample_is_kept_and_counted(config, tmp_path):
    engine, results = run(config, tmp_path / "out")
    samples = load_samples(tmp_path / "out" / "samples.parquet")
    assert [s.key for s in samples] == [
        (name, row, number) for name in ("own", "again") for row in range(3) for number in range(5)
    ]
    assert len(set(engine.drawn)) == len(samples) == 30
    for sample in samples:
        sample_id = compute_sample_id(*sample.key)
        assert sample.response == RESPONSES[sample_id % 4]
        assert sample.answer == ANSWERS[sample.row]
        assert sample.rule_correct == (sample_id % 4 == sample.row)
        assert sample.rule_outcome == ("no_answer" if sample_id % 4 == 3 else "judged")
        assert sample.is_truncated == (sample_id % 7 == 0)
        assert sample.num_tokens == len(sample.response.encode()) + (not sample.is_truncated)
    for result in results:
        own = [s for s in samples if s.benchmark == result.benchmark]
        assert result.accuracy == sum(s.is_correct for s in own) / 15
        assert result.outcomes == Counter(s.rule_outcome for s in own)


@pytest.mark.parametrize("max_groups", [0, 1, 13, 29])
def test_an_interrupted_evaluation_comes_to_the_identical_result(config, tmp_path, max_groups):
    run(config, tmp_path / "whole")
    with pytest.raises(RuntimeError, match="the engine died"):
        run(config, tmp_path / "out", max_groups)
    journal = tmp_path / "out" / "samples.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    if lines:  # as a kill in the middle of a write leaves it
        journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:-20])
    engine, _ = run(config, tmp_path / "out")
    assert len(engine.drawn) == 30 - max(len(lines) - 1, 0)
    tables = [read_results(tmp_path / name / "results.json") for name in ("out", "whole")]
    assert tables[0] == tables[1]
    assert format_results(tables[0], "STAPO") == format_results(tables[1], "STAPO")
    parquet = [load_samples(tmp_path / name / "samples.parquet") for name in ("out", "whole")]
    assert parquet[0] == parquet[1]


def test_an_evaluation_grows(config, tmp_path):
    run(config, tmp_path / "out")
    larger = dataclasses.replace(
        config, evaluation=dataclasses.replace(config.evaluation, num_samples=7)
    )
    engine, results = run(larger, tmp_path / "out")
    assert len(engine.drawn) == 2 * 3 * 2
    assert {result.num_samples for result in results} == {7}
    assert run(larger, tmp_path / "whole")[1] == results
    # And a smaller table can be read from the larger one's samples.
    engine, results = run(config, tmp_path / "out")
    assert engine.drawn == [] and {result.num_samples for result in results} == {5}


def test_the_table_names_what_the_rule_cannot_read(config, source, tmp_path):
    with open(source, "a") as file:
        file.write(json.dumps({"problem": "Broken?", "answer": "\\frac{1}{"}) + "\n")
    run(config, tmp_path / "out")
    table = format_results(read_results(tmp_path / "out" / "results.json"), "STAPO")
    assert "own: the rule can match no answer to 1 of 4 problems" in table
    assert "rows 3" in table


def test_a_prompt_over_the_limit_is_refused(config):
    config = dataclasses.replace(
        config, data=dataclasses.replace(config.data, max_prompt_tokens=20)
    )
    with pytest.raises(ValueError, match=r"data.max_prompt_tokens=20: row 0 of benchmark own has"):
        load_benchmarks(config)


def test_a_name_given_twice_is_refused(config, source):
    evaluation = EvaluationConfig(benchmarks=(f"own={source}", f"own={source}"))
    with pytest.raises(ValueError, match="own is given twice; tell them apart as NAME=SOURCE"):
        load_benchmarks(dataclasses.replace(config, evaluation=evaluation))
