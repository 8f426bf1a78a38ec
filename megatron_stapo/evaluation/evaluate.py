"""Samples and judges benchmarks: what the trainer between steps and `stapo eval` share."""

import dataclasses
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron_stapo.config import Config, load_model_json
from megatron_stapo.data.benchmarks import BENCHMARKS, check_size, resolve_benchmark
from megatron_stapo.data.prompts import build_prompts
from megatron_stapo.data.sources import load_problems
from megatron_stapo.evaluation.paper import find_scale
from megatron_stapo.evaluation.report import RESULTS_FILE, write_results
from megatron_stapo.evaluation.samples import (
    JOURNAL_FILE,
    SAMPLES_FILE,
    Sample,
    SampleJournal,
    save_samples,
)
from megatron_stapo.evaluation.statistics import BenchmarkResult, compute_result
from megatron_stapo.rewards import Verdict
from megatron_stapo.rewards.judge import Judge, Pending, Question
from megatron_stapo.rewards.math_equivalence import explain_unparsable
from megatron_stapo.rollout import Engine
from megatron_stapo.types import Prompt, RolloutGroup, Sampling

DEFAULT_NUM_SAMPLES = 4
"""Of a benchmark that is not the paper's."""


@dataclass(frozen=True, kw_only=True)
class LoadedBenchmark:
    """A benchmark's problems, ready for the engine."""

    name: str
    prompts: list[Prompt]
    num_samples: int
    """Responses per problem."""
    notes: list[str]
    """What a reader of its numbers must know."""


def load_benchmarks(config: Config) -> list[LoadedBenchmark]:
    """Load evaluation.benchmarks.

    Rows that repeat a problem count once: one published copy of AIME24 has each 32 times.

    Raises:
        ValueError: an unknown or repeated name; of `load_problems`; a prompt over
            data.max_prompt_tokens, which would change what the benchmark measures.
    """
    evaluation = config.evaluation
    benchmarks: list[LoadedBenchmark] = []
    for text in evaluation.benchmarks:
        name, source = resolve_benchmark(text)
        if name in {b.name for b in benchmarks}:
            raise ValueError(
                f"evaluation.benchmarks: {name} is given twice; tell them apart as NAME=SOURCE."
            )
        problems, report = load_problems(source)
        notes = [note for note in (report.format(), check_size(name, len(problems))) if note]
        problems = problems[: evaluation.num_problems]
        if config.reward.rule == "math_verify":
            rows = [p.row for p in problems if explain_unparsable(p.answer)]
            if rows:
                notes.append(
                    f"the rule can match no answer to {len(rows)} of {len(problems)} problems, "
                    f"whose ground truth it does not read: rows {_shorten(rows)}"
                )
        prompts = build_prompts(problems, config.data.prompt_suffix, config.model.path)
        for prompt in prompts:
            if len(prompt.token_ids) > config.data.max_prompt_tokens:
                raise ValueError(
                    f"data.max_prompt_tokens={config.data.max_prompt_tokens}: row "
                    f"{prompt.prompt_id} of benchmark {name} has {len(prompt.token_ids)} tokens; "
                    "raise the limit."
                )
        published = BENCHMARKS.get(name)
        num_samples = evaluation.num_samples or (
            published.paper_num_samples if published else DEFAULT_NUM_SAMPLES
        )
        benchmarks.append(
            LoadedBenchmark(name=name, prompts=prompts, num_samples=num_samples, notes=notes)
        )
    return benchmarks


def evaluate(
    benchmarks: Sequence[LoadedBenchmark],
    *,
    engine: Engine,
    judge: Judge,
    tokenizer: Any,
    sampling: Sampling,
    journal: SampleJournal,
    on_progress: Callable[[int, int], None] = lambda num_done, num_all: None,
) -> list[Sample]:
    """Sample what the journal lacks, and judge it.

    Args:
        on_progress: called with the numbers of samples there and wanted, as they come.

    Returns:
        The samples wanted, in the order of benchmark, problem and number.

    Mutates: the journal gets every new sample as soon as the rule has judged it.
    """
    wanted = [
        (benchmark.name, prompt, number)
        for benchmark in benchmarks
        for prompt in benchmark.prompts
        for number in range(benchmark.num_samples)
    ]
    missing = [
        (name, prompt, number)
        for name, prompt, number in wanted
        if (name, prompt.prompt_id, number) not in journal.samples
    ]
    num_present = len(wanted) - len(missing)
    open_samples: deque[tuple[int, RolloutGroup, Pending]] = deque()
    num_written = 0

    def write_judged(wait: bool) -> None:
        nonlocal num_written
        while open_samples and (wait or open_samples[0][2].rule.done()):
            index, group, pending = open_samples.popleft()
            journal.append(_build_sample(*missing[index], group, pending))
            # A large evaluation's tokens and log-probabilities would fill the memory.
            group.rollouts.clear()
            num_written += 1
            on_progress(num_present + num_written, len(wanted))

    def submit(index: int, group: RolloutGroup) -> None:
        _, prompt, _ = missing[index]
        (rollout,) = group.rollouts
        response = tokenizer.decode(rollout.token_ids, skip_special_tokens=True)
        pending = judge.submit(
            prompt.problem, prompt.answer, response, rollout.finish_reason == "length"
        )
        open_samples.append((index, group, pending))
        write_judged(wait=False)

    engine.generate(
        [
            replace(prompt, prompt_id=compute_sample_id(name, prompt.prompt_id, number))
            for name, prompt, number in missing
        ],
        1,
        sampling,
        submit,
    )
    write_judged(wait=True)
    return _ask_model(
        [journal.samples[name, prompt.prompt_id, number] for name, prompt, number in wanted], judge
    )


def evaluate_into(
    folder: Path,
    config: Config,
    benchmarks: Sequence[LoadedBenchmark],
    *,
    engine: Engine,
    judge: Judge,
    tokenizer: Any,
    on_progress: Callable[[int, int], None] = lambda num_done, num_all: None,
) -> list[BenchmarkResult]:
    """Evaluate, going on with the samples of the folder's journal.

    Args:
        folder: exists; gets the journal, samples.parquet and results.json.

    Returns:
        A result per benchmark.
    """
    sampling = Sampling(
        temperature=config.evaluation.temperature,
        top_p=config.evaluation.top_p,
        max_response_tokens=config.max_evaluation_response_tokens,
    )
    with SampleJournal(folder / JOURNAL_FILE) as journal:
        samples = evaluate(
            benchmarks,
            engine=engine,
            judge=judge,
            tokenizer=tokenizer,
            sampling=sampling,
            journal=journal,
            on_progress=on_progress,
        )
    save_samples(samples, folder / SAMPLES_FILE)
    results = [
        compute_result(b.name, [s for s in samples if s.benchmark == b.name]) for b in benchmarks
    ]
    write_results(
        folder / RESULTS_FILE,
        results,
        settings={
            "model": config.model.path,
            **dataclasses.asdict(sampling),
            "seed": config.seed,
            "rule": config.reward.rule,
            "verifier": config.reward.verifier_model if config.reward.verifier_url else None,
        },
        notes={b.name: b.notes for b in benchmarks},
        scale=find_scale(load_model_json(config.model.path)["hidden_size"]),
    )
    return results


def compute_sample_id(benchmark: str, row: int, number: int) -> int:
    """What stands for the prompt_id in a sample's seed: another for every sample of an evaluation,
    whatever else is sampled."""
    key = f"{benchmark}/{row}/{number}".encode()
    return int.from_bytes(hashlib.sha256(key).digest()[:8], "big")


def _build_sample(
    name: str, prompt: Prompt, number: int, group: RolloutGroup, pending: Pending
) -> Sample:
    (rollout,) = group.rollouts
    verdict = pending.rule.result()
    return Sample(
        benchmark=name,
        row=prompt.prompt_id,
        sample=number,
        problem=prompt.problem,
        answer=prompt.answer,
        response=pending.response,
        num_tokens=len(rollout.token_ids),
        is_truncated=rollout.finish_reason == "length",
        rule_correct=verdict.correct,
        rule_outcome=verdict.outcome,
        extracted=verdict.extracted,
    )


def _ask_model(samples: list[Sample], judge: Judge) -> list[Sample]:
    """Add the model verifier's word; its cache keeps a resumed evaluation from asking again."""
    questions = [
        Question(
            problem=s.problem,
            answer=s.answer,
            response=s.response,
            rule=Verdict(correct=s.rule_correct, outcome=s.rule_outcome, extracted=s.extracted),
        )
        for s in samples
    ]
    return [
        replace(sample, model_verdict=reply)
        for sample, reply in zip(samples, judge.ask_model(questions), strict=True)
    ]


def _shorten(rows: Sequence[int], num_shown: int = 10) -> str:
    shown = ", ".join(map(str, rows[:num_shown]))
    return shown if len(rows) <= num_shown else f"{shown}, ..."
