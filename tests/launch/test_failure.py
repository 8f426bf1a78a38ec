"""Which rank is to blame, from torchrun's table and the ranks' logs; real failures: test_launch."""

import os
from pathlib import Path

import pytest

from megatron_stapo.launch.failure import describe_failure
from megatron_stapo.rollout.engine_host import END_MARK, START_MARK

TRACEBACK = """Traceback (most recent call last):
  File "train.py", line 1, in <module>
    main()
ZeroDivisionError: first

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 2, in <module>
    main()
{error}
[W1202 09:00:00 process_group.cpp] a warning at exit
"""
TRAINER_FAILED = {"trainer": {"state": "FAILED", "exit_code": 1}}


def format_torchrun_entry(rank: int, exit_code: int) -> str:
    return (
        f"[{rank}]:\n  time      : 2026-12-02_09:04:21\n  host      : localhost\n"
        f"  rank      : {rank} (local_rank: {rank})\n"
        f"  exitcode  : {exit_code} (pid: 13954)\n  error_file: <N/A>\n"
    )


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Logs of three ranks that end in the order 2, 0, 1, each with its own exception."""
    logs = tmp_path / "logs"
    logs.mkdir()
    for age, rank in enumerate((1, 0, 2)):
        text = TRACEBACK.format(error=f"ValueError: rank {rank}")
        log = logs / f"trainer_rank{rank}.log"
        log.write_text("".join(f"[rank{rank}]: {line}\n" for line in text.splitlines()))
        os.utime(log, (1000 - age, 1000 - age))
    return logs


@pytest.mark.parametrize(
    ("exit_codes", "reason"),
    [
        ({1: 1}, "trainer rank 1 ended with exit code 1: ValueError: rank 1"),
        # torchrun stops the others, whose logs may be older.
        ({0: -15, 1: 1, 2: -15}, "trainer rank 1 ended with exit code 1: ValueError: rank 1"),
        # Rank 1 lost its peer: the log that ended first tells why.
        ({0: 1, 1: 1}, "trainer rank 0 ended with exit code 1: ValueError: rank 0"),
        ({0: 1, 1: 1, 2: -6}, "trainer rank 2 was killed by SIGABRT: ValueError: rank 2"),
        ({1: -15}, "trainer rank 1 was killed by SIGTERM: ValueError: rank 1"),
    ],
)
def test_the_first_rank_to_fail_is_named(
    logs: Path, exit_codes: dict[int, int], reason: str
) -> None:
    entries = [format_torchrun_entry(*item) for item in exit_codes.items()]
    (logs / "torchrun.log").write_text("Failures:\n" + "".join(entries))
    found, details = describe_failure(TRAINER_FAILED, 0, logs.parent)
    assert found == reason
    assert details.endswith("a warning at exit")


def test_a_rank_that_lost_its_peer_is_not_to_blame(logs: Path) -> None:
    """torchrun sees rank 1 end first, and stops rank 0 while it prints what ended the run."""
    error = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]"
    (logs / "trainer_rank1.log").write_text(TRACEBACK.format(error=error))
    os.utime(logs / "trainer_rank1.log", (900, 900))
    entries = [format_torchrun_entry(0, -15), format_torchrun_entry(1, 1)]
    (logs / "torchrun.log").write_text("Failures:\n" + "".join(entries))
    found, _ = describe_failure(TRAINER_FAILED, 0, logs.parent)
    assert found == "trainer rank 0 was killed by SIGTERM: ValueError: rank 0"


def test_a_rank_that_hung_is_named_by_one_that_waited_for_it(logs: Path) -> None:
    """torchrun kills rank 1, which hangs; rank 2 lost rank 0 when that had waited long enough."""
    waited = "RuntimeError: rank 0 (tp 0, pp 0) waited 5 s (parallel.timeout_s) in x; rank 1 (tp 1)"
    lost = "RuntimeError: rank 2 (tp 0, pp 1) lost its connection to another rank in x; rank 1"
    (logs / "trainer_rank0.log").write_text(TRACEBACK.format(error=waited))
    (logs / "trainer_rank1.log").write_text("")
    (logs / "trainer_rank2.log").write_text(TRACEBACK.format(error=lost))
    for age, rank in enumerate((0, 2, 1)):
        os.utime(logs / f"trainer_rank{rank}.log", (1000 - age, 1000 - age))
    entries = [format_torchrun_entry(0, 1), format_torchrun_entry(1, -9)]
    entries.append(format_torchrun_entry(2, 1))
    (logs / "torchrun.log").write_text("Failures:\n" + "".join(entries))
    found, _ = describe_failure(TRAINER_FAILED, 0, logs.parent)
    assert found == f"trainer rank 0 ended with exit code 1: {waited}"


def test_an_engine_that_ended_is_the_cause_even_if_the_trainer_ended_too(logs: Path) -> None:
    (logs / "engine.log").write_text("loading\n\nout of memory\n")
    outcome = TRAINER_FAILED | {"engine": {"state": "FAILED", "exit_code": 3}}
    found, details = describe_failure(outcome, 0, logs.parent)
    assert found == "the rollout engine ended with exit code 3."
    assert details.splitlines() == [
        f"last lines of {logs}/engine.log:",
        "  loading",
        "  out of memory",
    ]


def test_an_engine_that_is_given_up_has_its_hosts_last_words_in_the_reason(logs: Path) -> None:
    (logs / "engine_1.log").write_text(
        f"{START_MARK} 0 of engine 1\n{TRACEBACK.format(error='MemoryError: of an earlier life')}"
        f"{START_MARK} 1 of engine 1\nKilled\n{END_MARK}engine 1 is not started again; look.\n"
    )
    # It has saved and ended in order.
    outcome = {"trainer": {"state": "SUCCEEDED", "exit_code": 0}}
    outcome["engine_1"] = {"state": "FAILED", "exit_code": 1}
    found, _ = describe_failure(outcome, 0, logs.parent)
    assert found == (
        "the rollout engine 1 ended with exit code 1: engine 1 is not started again; look."
    )


def test_the_engine_failed_of_what_it_logged_first(logs: Path) -> None:
    core = "(EngineCore_DP0 pid=8) ERROR 12-02 09:40:20 [core.py:1] "
    server = "(APIServer pid=7) "
    (logs / "engine.log").write_text(
        f"{core}Traceback (most recent call last):\n{core}  File x\n{core}MemoryError: no room\n"
        f"{server}Traceback (most recent call last):\n{server}RuntimeError: core\n"
    )
    outcome = {"engine": {"state": "FAILED", "exit_code": 1}}
    found, _ = describe_failure(outcome, 0, logs.parent)
    assert found == "the rollout engine ended with exit code 1: MemoryError: no room"


def test_a_process_that_wrote_no_log_is_named_all_the_same(logs: Path) -> None:
    assert describe_failure(None, -9, logs.parent) == (
        "NeMo-Run was killed by SIGKILL.",
        f"last lines of {logs}/nemo_run.log:\n  (the log is empty)",
    )


def test_an_evaluation_is_blamed_with_its_own_log(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "evaluation.log").write_text(TRACEBACK.format(error="RuntimeError: no worker"))
    outcome = {"evaluation": {"state": "FAILED", "exit_code": 1}}
    reason, details = describe_failure(outcome, 0, tmp_path)
    assert reason == "the evaluation ended with exit code 1: RuntimeError: no worker"
    assert "evaluation.log" in details
