import json
import time
from pathlib import Path

import pytest

from megatron_stapo.observability.progress import (
    MetricsFollower,
    ProgressPrinter,
    format_event,
    format_heading,
    format_step,
)

STEP = {
    "step": 3,
    "time": 0.0,
    "metrics": {
        "reward_mean": -0.5,
        "accuracy": 0.25,
        "entropy_mean": 1.234,
        "num_candidates": 123456,
        "num_masked": 98765,
        "masked_frac": 0.000123,
        "logprob_gap_mean": 1.2e-5,
        "logprob_gap_max": 3.4e-3,
        "tokens_per_s": 1234.6,
    },
    "seconds": {"rollout": 4.0, "reward": 0.1, "score": 1.0, "update": 2.5, "sync": 0.4},
}


def test_the_follower_returns_each_whole_line_once(tmp_path: Path) -> None:
    follower = MetricsFollower(tmp_path)
    assert follower.read_new() == []
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for written, read in [
            ('{"step": 1}\n{"st', [{"step": 1}]),
            ("ep", []),
            ('": 2}\n', [{"step": 2}]),
            ('{"step": 3}\n{"step": 4}\n', [{"step": 3}, {"step": 4}]),
            ('{"torn": ', []),
        ]:
            file.write(written)
            file.flush()
            assert follower.read_new() == read


def test_a_step_is_one_line_under_its_heading() -> None:
    heading, line = format_heading(), format_step(STEP, 40)
    assert len(line) == len(heading) <= 150
    assert " ".join(line.split()) == (
        "3/40 -0.500 0.250 1.234 123456 98765 0.0123% 1.2e-05 3.4e-03 1235 "
        "4.0 0.1 1.0 - 2.5 0.4 8.0"
    )


def test_a_missing_value_is_a_dash() -> None:
    line = format_step({"step": 1, "metrics": {"accuracy": None}, "seconds": {}}, 40)
    assert set(line.split()) == {"1/40", "-", "0.0"}


@pytest.mark.parametrize(
    ("event", "text"),
    [
        ({"event": "engine_ready"}, "engine ready"),
        (
            {"event": "accuracy", "value": 0.123456, "after_steps": 0},
            "accuracy: 0.1235, after steps 0",
        ),
        (
            {"event": "accuracy", "value": 0.5, "benchmarks": {"aime24": 0.25, "own": 0.75}},
            "accuracy: 0.5, aime24 0.25, own 0.75",
        ),
    ],
)
def test_an_event_reads_as_words(event: dict, text: str) -> None:
    assert format_event(event | {"time": 0.0}) == text


def test_the_heading_comes_again_every_twenty_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    printer = ProgressPrinter(tmp_path, num_steps=21)
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, 22):
            file.write(json.dumps(STEP | {"step": step, "time": time.time()}) + "\n")
            file.flush()
            printer.print_new()
    lines = capsys.readouterr().out.splitlines()
    assert [n for n, line in enumerate(lines) if line == format_heading()] == [0, 21]
    assert len(lines) == 23


def test_what_an_earlier_attempt_recorded_is_not_printed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = [STEP | {"step": 1, "time": time.time() - 60}]
    printer = ProgressPrinter(tmp_path, num_steps=4)
    records += [{"event": "going_on", "time": time.time()}, STEP | {"step": 2, "time": time.time()}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    printer.print_new()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("going on")
    assert [line.split()[0] for line in lines[2:]] == ["2/4"]
    assert printer.num_steps_shown == 1
