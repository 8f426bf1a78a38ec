"""Which runs go on with what a folder holds, and which begin anew."""

import dataclasses
import json

import pytest

from megatron_stapo.config import to_dict
from megatron_stapo.launch.run_folder import claim_run_folder
from megatron_stapo.launch.training import continues
from tests.workers import build_config


@pytest.fixture
def old(tmp_path):
    config = dataclasses.replace(build_config(tmp_path), num_steps=8)
    (tmp_path / "config.json").write_text(json.dumps(to_dict(config)))
    return config


def add_checkpoint(run_dir):
    (run_dir / "checkpoints" / "step_000002").mkdir(parents=True)


def finish(run_dir, num_steps):
    summary = {"status": "finished", "num_steps": num_steps}
    (run_dir / "summary.json").write_text(json.dumps(summary))


def test_an_unfinished_run_goes_on(tmp_path, old):
    assert continues(tmp_path, old, changed=False)
    add_checkpoint(tmp_path)
    assert continues(tmp_path, old, changed=False)
    layout = dataclasses.replace(old.parallel, data_parallel_size=2)
    assert continues(tmp_path, dataclasses.replace(old, parallel=layout), changed=False)


def test_another_experiment_is_refused_by_name_where_something_would_be_lost(tmp_path, old):
    other = dataclasses.replace(old, seed=3)
    assert not continues(tmp_path, other, changed=False)  # no checkpoint: set aside
    add_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"seed: 0 -> 3.*--changed.*--fresh"):
        continues(tmp_path, other, changed=False)
    assert continues(tmp_path, other, changed=True)


@pytest.mark.parametrize("content", ["{", "[]", None])
def test_checkpoints_without_their_settings_are_not_left_behind(tmp_path, old, content):
    file = tmp_path / "config.json"
    file.unlink() if content is None else file.write_text(content)
    assert not continues(tmp_path, old, changed=False)
    add_checkpoint(tmp_path)
    with pytest.raises(ValueError, match=r"has checkpoints.*no config.json.*can be read.*--fresh"):
        continues(tmp_path, old, changed=True)


def test_a_finished_run_begins_anew_unless_it_is_extended(tmp_path, old):
    add_checkpoint(tmp_path)
    finish(tmp_path, 8)
    assert not continues(tmp_path, old, changed=False)
    with pytest.raises(ValueError, match=r"num_steps=8.*has finished 8.*ask for more"):
        continues(tmp_path, old, changed=True)
    longer = dataclasses.replace(old, num_steps=9)
    assert continues(tmp_path, longer, changed=False)
    other = dataclasses.replace(longer, seed=1)
    with pytest.raises(ValueError, match=r"holds a run with other settings \(.*seed: 0 -> 1"):
        continues(tmp_path, other, changed=False)
    assert continues(tmp_path, other, changed=True)


@pytest.mark.parametrize("summary", ["{}", "[]", "{", '{"status": "failed", "num_steps": 8}'])
def test_a_run_without_the_summary_of_a_finished_one_goes_on(tmp_path, old, summary):
    add_checkpoint(tmp_path)
    (tmp_path / "summary.json").write_text(summary)
    assert continues(tmp_path, old, changed=False)


def test_settings_are_those_of_the_newest_checkpoint(tmp_path, old):
    add_checkpoint(tmp_path)
    # An attempt with --changed that ended before it saved anything.
    other = dataclasses.replace(old, seed=3)
    (tmp_path / "config.json").write_text(json.dumps(to_dict(other)))
    file = tmp_path / "checkpoints" / "step_000002" / "config.json"
    file.write_text(json.dumps(to_dict(old)))
    assert continues(tmp_path, old, changed=False)
    with pytest.raises(ValueError, match=r"seed: 0 -> 3"):
        continues(tmp_path, other, changed=False)


def test_fewer_steps_than_a_checkpoint_has_are_refused(tmp_path, old):
    add_checkpoint(tmp_path)
    assert continues(tmp_path, dataclasses.replace(old, num_steps=2), changed=False)
    with pytest.raises(ValueError, match=r"num_steps=1: .* has a checkpoint of 2 steps"):
        continues(tmp_path, dataclasses.replace(old, num_steps=1), changed=False)


def test_an_empty_folder_is_nothing_to_go_on_from(tmp_path):
    assert not continues(tmp_path / "new", build_config(tmp_path), changed=False)


def test_an_attempt_that_went_on_keeps_what_the_run_needs(tmp_path):
    run_dir = tmp_path / "run"
    for _ in range(2):
        with claim_run_folder(run_dir, lambda run_dir: (run_dir / "config.json").exists()):
            for name in ("config.json", "metrics.jsonl", "stop"):
                (run_dir / name).write_text("1")
            (run_dir / "checkpoints").mkdir(exist_ok=True)
    assert sorted(path.name for path in (run_dir / "attempts" / "1").iterdir()) == [
        "metrics.jsonl",
        "stop",
    ]
    assert (run_dir / "checkpoints").is_dir() and not run_dir.with_name("run.1").exists()
