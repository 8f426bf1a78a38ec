"""No process outlives its run: the last resort after every orderly stop.

The invariant: a process that calls `adopt_orphans` before it starts anything has every process of
the run among its descendants, whatever sessions, groups or dead parents lie between. One walk over
the descendants finds them all.
"""

import ctypes
import os

import psutil

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent dies.

    Mutates: an attribute of this process, which its children do not inherit.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def kill_descendants() -> None:
    """Kill and reap every descendant of this process, until a walk finds none."""
    # A process that forks while it is being killed shows up in the next walk.
    while descendants := psutil.Process(os.getpid()).children(recursive=True):
        for process in descendants:
            process.kill()
        psutil.wait_procs(descendants, timeout=5)
