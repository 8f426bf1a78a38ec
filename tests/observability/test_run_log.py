import errno
import json
import os
from pathlib import Path

import pytest


@pytest.fixture
def run_log(tmp_path: Path):
    from megatron_stapo.observability import RunLog

    run_log = RunLog(tmp_path)
    yield run_log
    run_log.close()


def read_lines(run_dir: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_lines_are_on_disk_at_once_and_non_finite_values_are_null(run_log, tmp_path: Path) -> None:
    run_log.log_event("accuracy", value=0.25)
    metrics = {"loss": 0.5, "entropy_threshold": float("nan"), "ratio_max": float("inf")}
    run_log.log_step(1, metrics | {"absent": None}, {"rollout": 2.0})
    event, step = read_lines(tmp_path)
    assert (event["event"], event["value"]) == ("accuracy", 0.25)
    assert step["step"] == 1 and step["seconds"] == {"rollout": 2.0}
    assert step["metrics"] == {
        "loss": 0.5,
        "entropy_threshold": None,
        "ratio_max": None,
        "absent": None,
    }


def test_a_run_that_goes_on_has_the_lines_of_its_checkpoint_and_no_later_ones(tmp_path) -> None:
    from megatron_stapo.observability import RunLog

    first = RunLog(tmp_path)
    first.log_step(1, {"loss": 0.5}, {})
    history = first.read_bytes()
    first.log_step(2, {"loss": 0.4}, {})
    first.close()
    second = RunLog(tmp_path, history)
    second.log_step(2, {"loss": 0.3}, {})
    second.close()
    assert [(r["step"], r["metrics"]["loss"]) for r in read_lines(tmp_path)] == [(1, 0.5), (2, 0.3)]


def test_a_full_disk_delays_lines_and_ends_no_run(run_log, tmp_path: Path, monkeypatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(os, "write", refuse)
        full.setattr(run_log._tensorboard, "flush", refuse)
        run_log.log_step(1, {"loss": 0.5}, {})
        assert (tmp_path / "metrics.jsonl").read_bytes() == b""
        first, ended = run_log.read()
        assert first["metrics"] == {"loss": 0.5}
        assert (ended["event"], ended["value"]) == ("tensorboard_ended", "No space left on device")
    run_log.log_step(2, {"loss": 0.25}, {})
    assert [record.get("step") for record in read_lines(tmp_path)] == [1, None, 2]


def test_tensorboard_has_the_finite_values(run_log, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step in (1, 2):
        metrics = {"loss": float(step), "ratio_max": float("nan")}
        run_log.log_step(step, metrics, {"rollout": 2.0})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["seconds/rollout", "step/loss"]
    assert [(e.step, e.value) for e in events.Scalars("step/loss")] == [(1, 1.0), (2, 2.0)]
