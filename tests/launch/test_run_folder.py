import errno
import os
from pathlib import Path

import pytest

from megatron_stapo.launch.run_folder import claim_run_folder


def test_a_folder_in_use_is_refused_with_its_process_and_untouched(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with claim_run_folder(run_dir):
        (run_dir / "metrics.jsonl").write_text("live\n")
        in_use = f"in use by the live run of process {os.getpid()};"
        with pytest.raises(ValueError, match=in_use), claim_run_folder(run_dir):
            pass
        assert (run_dir / "metrics.jsonl").read_text() == "live\n"


def test_earlier_runs_are_moved_aside_one_by_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    for n in range(3):
        with claim_run_folder(run_dir):
            assert [entry.name for entry in run_dir.iterdir()] == ["stapo.lock"]
            (run_dir / "logs").mkdir()
            (run_dir / "logs" / "engine.log").write_text(str(n))
    kept = [run_dir.with_name(name) / "logs" / "engine.log" for name in ("run.1", "run.2", "run")]
    assert [file.read_text() for file in kept] == ["0", "1", "2"]
    assert f"the earlier run of {run_dir} is now in {run_dir}.2" in capsys.readouterr().out
    aside = run_dir.with_name("run.1")
    with claim_run_folder(aside, lambda run_dir: True):
        assert [file.read_text() for file in aside.rglob("engine.log")] == ["0"]


def test_what_cannot_be_moved_aside_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with claim_run_folder(tmp_path):
        (tmp_path / "metrics.jsonl").write_text("old")

    def refuse(path: Path, target: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "rename", refuse)
    for goes_on in (lambda run_dir: True, lambda run_dir: False):
        with (
            pytest.raises(ValueError, match=r"cannot be moved \(.*Permission denied.*metrics"),
            claim_run_folder(tmp_path, goes_on),
        ):
            pass


@pytest.mark.parametrize("name", ["two words", "\u00f6", "a'b"])
def test_a_name_that_no_script_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="starts no script in"), claim_run_folder(tmp_path / name):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["", "model"])
def test_a_folder_with_files_of_others_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with (
        pytest.raises(ValueError, match="holds files that are not a run's"),
        claim_run_folder(tmp_path / name),
    ):
        pass
    assert (tmp_path / "model" / "config.json").exists()
