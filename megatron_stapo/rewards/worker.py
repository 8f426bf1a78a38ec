r"""The process that judges: `python -m megatron_stapo.rewards.worker RULE MEMORY_BYTES OWNER_PID`.

It imports the rule and warms it up once, then forks a child that answers requests and may be killed
at any moment; another child takes its place within milliseconds, without importing anything. The
process has one thread, so a fork copies a consistent state. Nothing outlives the owner: the
parent ends when its standard input is closed or the owner dies, and a child with its parent.

Both directions are JSON, one object a line, in ASCII (NULs and lone surrogates are escaped):

- out: {"pid": n} as soon as child n can answer; {"id": i, "correct": ..., ...} as an answer;
- in: {"pid": n, "id": i, "response": ..., "answer": ...}. A child skips what is not for it: the
  rest of a request that killed its predecessor.

An answer is shorter than PIPE_BUF and so written whole or not at all.
"""

import ctypes
import gc
import importlib
import json
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import NoReturn

from megatron_stapo.rewards import MAX_EXTRACTED_CHARS, Verdict

Rule = Callable[[str, str], Verdict]

RULE_PATHS = {
    "math_verify": "megatron_stapo.rewards.math_equivalence:judge",
    "dapo": "megatron_stapo.rewards.dapo:judge",
    "exact_box": "megatron_stapo.rewards.exact_box:judge",
}
"""Where each rule lives, as module:function."""

_PR_SET_PDEATHSIG = 1
_QUICK_DEATH_S = 0.05
_MAX_QUICK_DEATHS = 50
"""Children in a row that die at once: then the fault is the worker's, not a request's."""


def load_rule(rule: str) -> Rule:
    """Import a rule and run its module's `warm_up`, where there is one.

    Args:
        rule: one of RULE_PATHS, or module:function.
    """
    module_name, _, function = RULE_PATHS.get(rule, rule).partition(":")
    module = importlib.import_module(module_name)
    warm_up = getattr(module, "warm_up", None)
    if warm_up:
        warm_up()
    judge: Rule = getattr(module, function)
    return judge


def main(rule: str, memory_bytes: int, owner_pid: int) -> None:
    """Serve until the owner closes standard input or dies.

    Args:
        rule: one of RULE_PATHS, or module:function.
        memory_bytes: address space of a child; what asks for more is a crash.
        owner_pid: the process that started this one.
    """
    _die_with_parent(owner_pid)
    # Ctrl-C reaches the whole group; the owner decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A rule that prints must not write into the protocol.
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    judge = load_rule(rule)
    # A child that collects garbage would otherwise copy every page it inherits.
    gc.collect()
    gc.freeze()
    own_pid = os.getpid()
    quick_deaths = 0
    while True:
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            _serve(judge, memory_bytes, own_pid, requests, answers)
        pidfd = os.pidfd_open(child)
        os.write(answers, f'{{"pid": {child}}}\n'.encode())
        owner_left = _wait(pidfd, requests)
        if owner_left:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(pidfd)
        if owner_left:
            return
        quick_deaths = quick_deaths + 1 if time.monotonic() - started < _QUICK_DEATH_S else 0
        if quick_deaths > _MAX_QUICK_DEATHS:
            sys.exit(f"{quick_deaths} children in a row died within {_QUICK_DEATH_S} s")


def _wait(pidfd: int, requests: int) -> bool:
    """Wait for the child to end or the owner to hang up; whether it was the owner."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.register(requests, 0)  # a hang-up is reported unasked; the data is the child's
    while True:
        ready = dict(poll.poll())
        if requests in ready:
            return True
        if pidfd in ready:
            return False


def _die_with_parent(parent_pid: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        # It died before the request above; nobody would ever send the signal.
        os._exit(0)


def _serve(
    judge: Rule, memory_bytes: int, parent_pid: int, requests: int, answers: int
) -> NoReturn:
    """Answer requests until killed or until standard input ends; never returns."""
    _die_with_parent(parent_pid)
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pid = os.getpid()
    try:
        for line in open(requests, "rb", buffering=1 << 16, closefd=False):  # noqa: SIM115
            request = _read_request(line, pid)
            if request is None:
                continue
            verdict = _judge_safely(judge, request["response"], request["answer"])
            reply = json.dumps({"id": request["id"], **asdict(verdict)}) + "\n"
            os.write(answers, reply.encode())
        os._exit(0)
    finally:
        # Whatever ends the loop, the parent's stack below is not for this process.
        os._exit(1)


def _read_request(line: bytes, pid: int) -> dict[str, str] | None:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) and request.get("pid") == pid else None


def _judge_safely(judge: Rule, response: str, answer: str) -> Verdict:
    """A rule that raises, out of memory or of stack included, has crashed; its child lives on."""
    try:
        verdict = judge(response, answer)
    except Exception as error:
        sys.stderr.write(f"{type(error).__name__}: {str(error)[:500]!r}\n")
        return Verdict(correct=False, outcome="crash", extracted=None)
    assert verdict.extracted is None or len(verdict.extracted) <= MAX_EXTRACTED_CHARS
    return verdict


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
