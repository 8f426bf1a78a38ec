import json
from pathlib import Path
from typing import Any

from megatron_stapo.observability.summary import format_summary, write_summary

STEPS = [
    {
        "step": step,
        "time": 0.0,
        "metrics": {
            "reward_mean": 0.1 * step,
            "accuracy": 0.1 * step,
            "entropy_mean": 2.0,
            "entropy_threshold": None,
            "num_response_tokens": 100 * step,
            "num_candidates": 5,
            "num_masked": 3,
            "masked_frac": 0.03 / step,
            "logprob_gap_mean": 1e-6,
            "logprob_gap_max": gap,
            "grad_norm": 1.0,
        },
        "seconds": {"rollout": 2.0, "update": 0.5},
    }
    for step, gap in [(1, 1e-5), (2, 3e-5), (3, None)]
]
BEFORE, BETWEEN, AFTER = (
    {
        "event": "accuracy",
        "time": 0.0,
        "value": value,
        "standard_error": error,
        "after_steps": after_steps,
        "benchmarks": {"own": value},
    }
    for value, error, after_steps in ((0.25, 0.01, 0), (0.4, None, 2), (0.5, 0.02, 3))
)


def summarize(run_dir: Path, records: list[dict], torn: str = "", **end: str) -> dict[str, Any]:
    text = "".join(json.dumps(record) + "\n" for record in records)
    (run_dir / "metrics.jsonl").write_text(text + torn)
    end = {"status": "finished", "reason": ""} | end
    summary = write_summary(run_dir, num_steps=3, total_s=12.0, **end)  # type: ignore[arg-type]
    assert json.loads((run_dir / "summary.json").read_text()) == summary
    return summary


def count_colors(path: Path) -> int:
    from matplotlib.image import imread

    image = imread(path)
    assert image.shape[:2] == (800, 1500)
    return len({tuple(pixel) for row in image[::4, ::4] for pixel in row})


def test_a_whole_run_is_summed_up(tmp_path: Path) -> None:
    summary = summarize(tmp_path, [BEFORE, *STEPS, BETWEEN, AFTER])
    assert summary["num_steps_completed"] == 3
    assert (summary["accuracy_before"], summary["accuracy_after"]) == (0.25, 0.5)
    assert summary["logprob_gap_max"] == 3e-5
    assert (summary["num_candidates"], summary["num_masked"]) == (15, 9)
    # 9 of 600 tokens; the mean of the steps' shares would be 0.018.
    assert summary["masked_frac"] == 0.015
    assert summary["seconds"]["rollout"] == 6.0 and summary["seconds"]["sync"] == 0.0
    text = format_summary(summary)
    assert text.startswith("finished after 3 of 3 steps in 12 s\n")
    assert "0.2500 +- 0.0100 after 0, 0.4000 after 2, 0.5000 +- 0.0200 after 3" in text
    assert "9 of 600 (1.5000%), from 15 candidates" in text
    assert summary["paths"]["curves"] in text


def test_the_curves_are_drawn(tmp_path: Path) -> None:
    summarize(tmp_path, [BEFORE, *STEPS, BETWEEN, AFTER])
    drawn = count_colors(tmp_path / "curves.png")
    summarize(tmp_path, [])
    assert drawn > count_colors(tmp_path / "curves.png") > 1


def test_a_run_without_a_step_has_a_summary(tmp_path: Path) -> None:
    summary = summarize(tmp_path, [], status="failed", reason="the rollout engine died.")
    assert summary["status"] == "failed" and summary["reason"] == "the rollout engine died."
    assert summary["num_steps_completed"] == 0
    absent = ("accuracy_before", "accuracy_after", "logprob_gap_max", "masked_frac")
    assert all(summary[name] is None for name in absent)
    assert "failed after 0 of 3 steps" in format_summary(summary)


def test_a_run_that_never_wrote_a_record_has_a_summary(tmp_path: Path) -> None:
    summary = write_summary(tmp_path, status="interrupted", reason="", num_steps=3, total_s=1.0)
    assert summary["num_steps_completed"] == 0


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    summary = summarize(tmp_path, [BEFORE, STEPS[0]], torn='{"step": 2, "metr')
    assert summary["num_steps_completed"] == 1
    assert summary["logprob_gap_max"] == 1e-5
