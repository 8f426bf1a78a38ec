"""Names the rank that a hung collective waits for, and the last collective of every rank.

A thread of every rank reports to the store of the world, once a second, which collective the rank
is in, or left last, and which line its main thread executes. The collectives come from torch's
flight recorder, which counts them for each group; that a rank waits in a send or receive, which
gloo's does not record, is read off its main thread. A stopped rank leaves its last report: the
store is torchrun's, and no rank takes it along. Ages compare the clocks of machines, which must
agree to a second.

Never run on a GPU: the entries of NCCL's flight recorder, and the message printed shortly before
NCCL ends the process, where gloo raises in the main thread.
"""

import dataclasses
import json
import linecache
import re
import reprlib
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from megatron_stapo.parallel.groups import Groups

_PACKAGE = f"{Path(__file__).parents[1]}/"
_MAX_NAMED_RANKS = 4

_TIMED_OUT = re.compile(r"gloo/transport.*(Timed out|timeout)|NCCL.*timeout")
_LOST_PEER = re.compile(r"Connection (closed|reset) by peer|remote process exited")


@contextmanager
def watch(groups: Groups, timeout_s: float) -> Iterator[None]:
    """Say who is missing when a collective of the block fails.

    Args:
        timeout_s: of the groups' collectives; parallel.timeout_s.

    Communicates: a barrier over all ranks; in the block, each rank with the store once a second.

    Raises:
        RuntimeError: from the error of a collective that timed out or lost a peer: this rank, the
            collective, and where the ranks stand that it missed.
    """
    watchdog = _Watchdog(groups, timeout_s)
    try:
        yield
    except RuntimeError as error:
        if explanation := watchdog.explain(error):
            raise RuntimeError(explanation) from error
        raise
    finally:
        watchdog.stop()


@dataclass(frozen=True, kw_only=True)
class _Report:
    """Where a rank stands. Times are seconds of the wall clock."""

    rank: str
    """With its coordinates."""
    time_s: float
    is_waiting: bool
    """In the collective; otherwise that was its last."""
    collective: str
    since_s: float
    """When the rank was first seen in the collective, or out of it."""
    place: str
    """The line that the main thread executes."""

    def __str__(self) -> str:
        if self.is_waiting:
            return f"in {self.place}, waiting in {self.collective}"
        age_s = time.time() - self.since_s
        return f"in {self.place}, {age_s:.1f} s after its last collective, {self.collective}"


class _Watchdog:
    """The thread that reports one rank, and what it reads of the others."""

    def __init__(self, groups: Groups, timeout_s: float) -> None:
        self._groups = groups
        self._timeout_s = timeout_s
        self._interval_s = min(1.0, timeout_s / 10)
        # Far above an interval, so that a rank on a busy machine does not look stopped.
        self._patience_s = 5 * self._interval_s
        # A connection of its own: the main thread may block in the other one.
        self._store = dist.group.WORLD.get_group_store().clone()
        self._main_thread = threading.get_ident()
        self._last: _Report | None = None
        self._finding: str | None = None
        self._has_ended = threading.Event()
        self._report()
        dist.barrier()  # from here on the store has a report of every rank
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._has_ended.set()
        self._thread.join()

    def explain(self, error: RuntimeError) -> str | None:
        """Why a collective failed; None if the error is of another kind."""
        has_timed_out = _TIMED_OUT.search(str(error))
        if not has_timed_out and not _LOST_PEER.search(str(error)):
            return None
        # Of ranks that wait alike, the first to time out cuts off the others.
        if finding := self._finding:
            return finding
        own = self._observe(_find_origin(error))
        if has_timed_out:
            return self._describe_hang(own)
        # Until the silence of a dead rank shows.
        time.sleep(self._patience_s + self._interval_s)
        silent = _name_silent(self._read_reports(), self._patience_s)
        lost = f"{own.rank} lost its connection to another rank in {own.collective}"
        return f"{lost}; {silent or 'every rank still reports.'}"

    def _run(self) -> None:
        # A finding is made before the first rank's time-out, after which they end one another.
        longest_wait_s = self._timeout_s - 3 * self._interval_s
        while not self._has_ended.wait(self._interval_s):
            try:
                report = self._report()
                is_overdue = report.is_waiting and report.time_s - report.since_s > longest_wait_s
                self._finding = self._describe_hang(report) if is_overdue else None
            except dist.DistError:
                return  # the store has ended, and so has the run
            if self._finding and self._groups.device.type == "cuda":
                # NCCL ends the process, and raises nothing in the main thread.
                raise RuntimeError(self._finding)

    def _report(self) -> _Report:
        self._last = self._observe(sys._current_frames()[self._main_thread])
        value = json.dumps(dataclasses.asdict(self._last))
        self._store.set(f"watchdog/{self._groups.rank}", value)
        return self._last

    def _read_reports(self) -> list[_Report]:
        ranks = range(self._groups.world_size)
        return [_Report(**json.loads(self._store.get(f"watchdog/{rank}"))) for rank in ranks]

    def _observe(self, frame: FrameType) -> _Report:
        is_cuda = self._groups.device.type == "cuda"
        dump = c10d._dump_nccl_trace_json if is_cuda else c10d._dump_fr_trace_json
        entries = json.loads(dump(includeCollectives=True, onlyActive=False))["entries"]
        # Gloo leaves every entry's state at "scheduled", and retires it when it has ended.
        pending = [e for e in entries if not e["retired"] and e["state"] != "completed"]
        # The oldest one is what the rank waits for.
        collective = _name_collective(pending[0] if pending else entries[-1])
        is_waiting = bool(pending)
        if not is_waiting and _is_in_send_or_receive(frame):
            collective, is_waiting = f"a send or receive after {collective}", True
        now_s = time.time()
        last = self._last
        is_same = last and (last.collective, last.is_waiting) == (collective, is_waiting)
        return _Report(
            rank=str(self._groups),
            time_s=now_s,
            is_waiting=is_waiting,
            collective=collective,
            since_s=last.since_s if last and is_same else now_s,
            place=_name_place(frame),
        )

    def _describe_hang(self, own: _Report) -> str:
        # The neighbours of the rank that hangs wait too, each in a collective of its own.
        reports = self._read_reports()
        waited = f"{own.rank} waited {self._timeout_s:g} s (parallel.timeout_s) in {own.collective}"
        missing = (
            _name_silent(reports, self._patience_s)
            or _name_absent(reports, self._patience_s)
            or _name_waiting(reports)
        )
        return f"{waited}; {missing}"


def _name_silent(reports: Sequence[_Report], patience_s: float) -> str | None:
    """The ranks that report no more, the one that stopped first before the others."""
    now_s = time.time()
    named = [
        f"{r.rank} has not reported for {now_s - r.time_s:.1f} s: it was {r}"
        for r in sorted(reports, key=lambda r: r.time_s)
        if now_s - r.time_s > patience_s
    ]
    remedy = "It is stopped or dead, or its machine is: see its log and its machine."
    return f"{_join(named)}. {remedy}" if named else None


def _name_absent(reports: Sequence[_Report], patience_s: float) -> str | None:
    """The ranks that report, but are in no collective, the one that left its last one first before
    the others."""
    named = [
        f"{r.rank} reports, but has not joined: it is {r}"
        for r in sorted(reports, key=lambda r: r.since_s)
        # One that left a collective just now is on its way to the next.
        if not r.is_waiting and r.time_s - r.since_s > patience_s
    ]
    remedy = "If it is only slow there, raise parallel.timeout_s; if not, it is stuck."
    return f"{_join(named)}. {remedy}" if named else None


def _name_waiting(reports: Sequence[_Report]) -> str:
    named = [f"{r.rank} is {r}" for r in reports]
    return (
        f"no rank is missing: {_join(named)}. In different collectives, the ranks took different "
        "branches; in one and the same, they lost the network between them."
    )


def _join(named: Sequence[str]) -> str:
    rest = len(named) - _MAX_NAMED_RANKS
    return "; ".join(named[:_MAX_NAMED_RANKS]) + (f"; and {rest} ranks more" if rest > 0 else "")


def _name_collective(entry: dict[str, Any]) -> str:
    """Of an entry of the flight recorder: operation, number in its group, and group."""
    operation = entry["profiling_name"].split(":")[-1]
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    name, description = entry["process_group"]
    try:
        ranks = dist.get_process_group_ranks(c10d._resolve_process_group(name))
    except RuntimeError:  # a group that is not the world's, as the one with the engine
        return f"{operation} number {number} of {description}"
    return f"{operation} number {number} of ranks {reprlib.repr(ranks)} ({description})"


def _find_origin(error: BaseException) -> FrameType:
    """The innermost frame of the error's traceback."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return frame


def _is_in_send_or_receive(frame: FrameType) -> bool:
    """Whether the frame waits in torch's functions, or for a request in Megatron's pipeline."""
    file = frame.f_code.co_filename
    if file == dist.distributed_c10d.__file__:
        return frame.f_code.co_name in ("send", "recv")
    line = linecache.getline(file, frame.f_lineno)
    return "/megatron/core/pipeline_parallel/" in file and ".wait()" in line


def _name_place(frame: FrameType) -> str:
    """The innermost line of this package; of the whole program where no line is this package's."""
    # Not this module's own, and not cpu_device's mode, which encloses every function of torch.
    frames = [
        frame
        for frame, _ in traceback.walk_stack(frame)
        if frame.f_code.co_filename != __file__ and frame.f_code.co_name != "__torch_function__"
    ]
    ours = [frame for frame in frames if frame.f_code.co_filename.startswith(_PACKAGE)]
    frame = (ours or frames)[0]
    file = Path(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({file.parent.name}/{file.name}:{frame.f_lineno})"
