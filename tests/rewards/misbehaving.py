"""A rule for the tests of workers and pool: the response says what it does."""

import ctypes
import os
import signal
import sys
import time

from megatron_stapo.rewards import Verdict

_state = {"warm": False}


def warm_up():
    _state["warm"] = True


def recurse(depth):
    return recurse(depth + 1) + 1


def judge(response, answer):
    word, _, rest = response.partition(" ")
    if word == "sleep":
        time.sleep(float(rest))
    elif word == "spin":
        while True:
            pass
    elif word == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(100)
    elif word == "exit":
        os._exit(3)
    elif word == "segfault":
        ctypes.string_at(0)
    elif word == "abort":
        os.abort()
    elif word == "memory":
        # Touched, so that the limit is met and not merely promised.
        return Verdict(correct=True, outcome="judged", extracted=str(len(b"x" * (8 << 30))))
    elif word == "recursion":
        recurse(0)
    elif word == "raise":
        raise ValueError(rest)
    elif word == "print":
        print('{"id": 1, "correct": true, "outcome": "judged", "extracted": null}', flush=True)
        sys.stderr.write("x" * 200_000)
    elif word == "modules":
        loaded = sorted({"torch", "numpy", "transformers"} & set(sys.modules))
        return Verdict(correct=_state["warm"], outcome="judged", extracted=",".join(loaded))
    elif word == "pid":
        return Verdict(correct=True, outcome="judged", extracted=f"{os.getpid()} {os.getppid()}")
    return Verdict(correct=response == answer, outcome="judged", extracted=response[:200])
