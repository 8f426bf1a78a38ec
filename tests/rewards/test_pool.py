"""Workers and pool. The limits are contracts, so these tests have clocks."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter
from concurrent.futures import CancelledError
from typing import get_args, get_type_hints

import psutil
import pytest

from megatron_stapo.config import RewardConfig
from megatron_stapo.rewards.pool import MAX_TEXT_CHARS, VerifierPool
from megatron_stapo.rewards.worker import RULE_PATHS

MISBEHAVING = "tests.rewards.misbehaving:judge"
TIMEOUT_S = 0.4
MARGIN_S = 1.0
"""Beyond the limit, on a machine whose cores others use, too."""


def list_workers(pid=None):
    """Worker processes below a process, their children included."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [
            child
            for child in psutil.Process(pid or os.getpid()).children(recursive=True)
            if "megatron_stapo.rewards.worker" in " ".join(child.cmdline())
        ]
    return []


def list_own_workers(pool):
    """Those of one pool: another may just be replacing a child."""
    pids = [worker._process.pid for worker in pool._workers if worker._process]
    return [process for pid in pids for process in (psutil.Process(pid), *list_workers(pid))]


def wait_for_end(processes, seconds=5.0):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return alive


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(MISBEHAVING, 2, TIMEOUT_S) as pool:
        yield pool
    assert not list_workers()


def test_every_rule_answers_from_a_worker():
    assert set(RULE_PATHS) == set(get_args(get_type_hints(RewardConfig)["rule"]))
    responses = {
        "math_verify": r"\boxed{0.5}",
        "dapo": r"Answer: $\frac12$",
        "exact_box": r"\boxed{\frac{1}{2}}",
    }
    pools = {rule: VerifierPool(rule, 1, 10.0) for rule in RULE_PATHS}
    futures = {rule: pools[rule].submit(responses[rule], r"\frac{1}{2}") for rule in RULE_PATHS}
    for rule in RULE_PATHS:
        verdict = futures[rule].result()
        assert (verdict.correct, verdict.outcome) == (True, "judged")
        pools[rule].close()


def test_results_belong_to_their_requests(pool):
    futures = [pool.submit(f"answer {i}", f"answer {i - i % 3}") for i in range(200)]
    for i, future in enumerate(futures):
        verdict = future.result()
        assert verdict.extracted == f"answer {i}"
        assert verdict.correct == (i % 3 == 0)


@pytest.mark.parametrize(
    "text",
    ["", "\x00", "\ud800 \udfff", '"}\n{"id": 1}\n', "\U0001f600" * 300, "x" * 400_000],
    ids=["empty", "nul", "surrogates", "frames", "astral", "long"],
)
def test_any_text_arrives_whole(pool, text):
    verdict = pool.submit(text, text).result()
    assert (verdict.correct, verdict.extracted) == (True, text[:200])
    assert not pool.submit(text, text + " ").result().correct


def test_more_text_than_any_response_has_is_refused(pool):
    verdict = pool.submit("x" * MAX_TEXT_CHARS, "x").result(timeout=0)
    assert (verdict.correct, verdict.outcome, verdict.extracted) == (False, "refused", None)


def test_a_worker_is_warm_and_has_no_torch(pool):
    verdict = pool.submit("modules", "").result()
    assert (verdict.correct, verdict.extracted) == (True, "")


@pytest.mark.parametrize(
    ("request_text", "outcome"),
    [
        ("spin", "timeout"),
        ("sleep 100", "timeout"),
        ("ignore-term", "timeout"),
        ("exit", "crash"),
        ("segfault", "crash"),
        ("abort", "crash"),
        ("memory", "crash"),
        ("recursion", "crash"),
        ("raise x", "crash"),
    ],
)
def test_a_verifier_that_misbehaves_costs_its_response_alone(pool, request_text, outcome):
    # So that neither the start of the workers nor other tests are in the time.
    assert pool.submit("fine", "fine").result().correct
    start = time.monotonic()
    verdict = pool.submit(request_text, "5").result()
    assert (verdict.correct, verdict.outcome, verdict.extracted) == (False, outcome, None)
    assert time.monotonic() - start < TIMEOUT_S + MARGIN_S
    futures = [pool.submit("fine", "fine") for _ in range(4)]
    assert all(future.result().correct for future in futures)


def test_output_of_a_verifier_does_not_reach_the_protocol(pool):
    verdict = pool.submit("print", "5").result()
    assert (verdict.correct, verdict.extracted) == (False, "print")


def test_every_outcome_is_counted_once(pool):
    words = ["fine", "spin", "exit", "segfault", "raise x", "memory"] * 4
    futures = [pool.submit(word, "fine") for word in words]
    outcomes = Counter(future.result().outcome for future in futures)
    assert outcomes == {"judged": 4, "timeout": 4, "crash": 16}


def test_a_death_is_never_lost_however_many_follow_each_other(pool):
    # A successor may be announced before its predecessor's end is seen.
    futures = [pool.submit(word, "fine") for word in ["exit", "segfault", "fine"] * 100]
    outcomes = Counter(future.result(timeout=60).outcome for future in futures)
    assert outcomes == {"judged": 100, "crash": 200}


def test_the_limit_counts_neither_queueing_nor_start_up():
    with VerifierPool(MISBEHAVING, 1, TIMEOUT_S) as pool:
        # Together they wait three times the limit, and for the start of the worker.
        futures = [pool.submit(f"sleep {TIMEOUT_S / 2}", "") for _ in range(6)]
        assert {future.result().outcome for future in futures} == {"judged"}


def test_a_worker_killed_from_outside_costs_no_verdict(pool):
    """Neither the process nor its child, neither idle nor amid a response."""
    for which in (0, 1):
        pids = [int(pid) for pid in pool.submit("pid", "").result().extracted.split()]
        os.kill(pids[which], signal.SIGKILL)
        futures = [pool.submit("fine", "fine") for _ in range(20)]
        assert {future.result().outcome for future in futures} == {"judged"}
        futures = [pool.submit(f"sleep {TIMEOUT_S / 2}", "") for _ in range(4)]
        time.sleep(TIMEOUT_S / 4)
        for worker in list_own_workers(pool)[which : which + 1]:
            worker.kill()
        assert {future.result().outcome for future in futures} == {"judged"}


def test_a_worker_that_cannot_start_is_an_error_with_its_reason():
    with VerifierPool("tests.rewards.no_such_module:judge", 2, 1.0) as pool:
        for _ in range(3):
            with pytest.raises(RuntimeError, match=r"No module named .*no_such_module"):
                pool.submit("a", "b").result()


@pytest.mark.parametrize(("num_workers", "timeout_s"), [(0, 1.0), (1, 0.0), (1, float("nan"))])
def test_a_pool_without_workers_or_time_is_refused(num_workers, timeout_s):
    with pytest.raises(ValueError, match=r"must be >"):
        VerifierPool("exact_box", num_workers, timeout_s)


def test_close_is_prompt_while_a_verifier_is_stuck_and_leaves_nothing():
    pool = VerifierPool(MISBEHAVING, 2, 1000.0)
    assert pool.submit("fine", "fine").result().correct
    futures = [pool.submit("spin", "") for _ in range(5)]
    time.sleep(0.2)
    workers = list_own_workers(pool)
    assert len(workers) == 4
    start = time.monotonic()
    pool.close()
    assert time.monotonic() - start < MARGIN_S
    for future in futures:
        with pytest.raises((RuntimeError, CancelledError), match="closed"):
            future.result(timeout=0)
    assert not wait_for_end(workers)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit("a", "b")


def test_close_during_start_up_leaves_nothing():
    for delay in (0.0, 0.02, 0.1):
        pool = VerifierPool("math_verify", 2, 1.0)
        time.sleep(delay)
        workers = list_own_workers(pool)
        pool.close()
        assert not wait_for_end(workers)


OWNER = textwrap.dedent(
    f"""
    import os, sys, time
    from megatron_stapo.rewards.pool import VerifierPool
    pool = VerifierPool("{MISBEHAVING}", 2, 1000.0)
    pool.submit("fine", "fine").result()
    futures = [pool.submit("spin", "") for _ in range(2)]
    time.sleep(0.3)
    print("ready", flush=True)
    if sys.argv[1] == "exit":
        sys.exit()
    time.sleep(100)
    """
)


@pytest.mark.parametrize("ending", ["kill", "exit"])
def test_nothing_outlives_the_owner(ending):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, ending],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    ) as owner:
        # Before an owner that exits is gone.
        assert owner.stdout.readline() == b"ready\n"
        workers = list_workers(owner.pid) if ending == "kill" else []
        if ending == "kill":
            assert len(workers) == 4
            owner.kill()
        owner.wait()
    assert not wait_for_end(workers)
    time.sleep(0.2)
    assert not [
        process
        for process in psutil.process_iter()
        if f" {owner.pid}" in read_command(process)
        and "megatron_stapo.rewards.worker" in read_command(process)
    ]


def read_command(process):
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""
