"""Judges responses in worker processes that no answer can stall or bring down.

A thread per worker hands it one request at a time and waits for the answer, its death or the
limit. The limit counts from the moment a warmed-up child is given the request: neither queueing nor
start-up is in it. Workers are plain subprocesses: `multiprocessing` would import the trainer's main
module, and torch with it, in each of them.
"""

import contextlib
import json
import os
import queue
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any, Self

from megatron_stapo.rewards import Verdict

MEMORY_BYTES = 2 << 30
"""Address space of the process that judges, of which Python and sympy take about 0.2 GiB."""
MAX_TEXT_CHARS = 1_000_000
"""Of response and ground truth together; 32,000 tokens of text have a fifth of it."""
_MAX_FRUITLESS_STARTS = 3
"""Starts in a row of a worker that dies before it has answered anything."""
_NUM_STDERR_LINES = 15
_CLOSED = "The verifier pool was closed before the verdict."


@dataclass(frozen=True)
class _Task:
    response: str
    answer: str
    future: Future[Verdict]


class _WorkerDiedError(Exception):
    """The worker process itself ended, not the child that judges."""


class VerifierPool:
    """A rule behind a queue. Close it, or use it in a `with` statement."""

    def __init__(self, rule: str, num_workers: int, timeout_s: float) -> None:
        """Start the workers without waiting for them.

        Args:
            rule: one of `worker.RULE_PATHS`, or module:function of a function like them.
            num_workers: processes that judge.
            timeout_s: seconds of wall clock that one response may take.

        Raises:
            ValueError: no worker, or no time.
        """
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers} must be >= 1.")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s} must be > 0 seconds.")
        self._rule = rule
        self._timeout_s = timeout_s
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_closed = False
        self._failure: str | None = None
        self._workers = [_Worker(rule, timeout_s) for _ in range(num_workers)]
        self._threads = [
            # The interpreter may exit without close: the workers see their input end.
            threading.Thread(target=self._serve, args=(worker,), name="verifier", daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, response: str, answer: str) -> Future[Verdict]:
        """Hand in one response.

        Args:
            response: decoded text of any content; more than MAX_TEXT_CHARS are refused.
            answer: the ground truth.

        Returns:
            A future of the verdict; timeout and crash are verdicts, too. It holds a RuntimeError
            with the last lines of its error output where no worker can be started at all.

        Raises:
            RuntimeError: the pool is closed.
        """
        future: Future[Verdict] = Future()
        if len(response) + len(answer) > MAX_TEXT_CHARS:
            # Not handed over: copying it would cost more than judging a hundred others.
            future.set_result(Verdict(correct=False, outcome="refused", extracted=None))
            return future
        with self._lock:
            if self._is_closed:
                raise RuntimeError("The verifier pool is closed; submit before close.")
            if self._failure is not None:
                future.set_exception(RuntimeError(self._failure))
            else:
                self._tasks.put(_Task(response, answer, future))
        return future

    def close(self) -> None:
        """End the workers, a stuck one included; what has no verdict gets a RuntimeError.

        Safe to repeat.
        """
        with self._lock:
            self._is_closed = True
        for worker in self._workers:
            worker.stop()
        self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._drain(_CLOSED)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self, worker: "_Worker") -> None:
        num_fruitless = 0
        try:
            while not self._is_closed:
                try:
                    # Ready before a task is taken: an idle worker takes it, and at once.
                    worker.make_ready()
                    task = self._tasks.get()
                    if task is None:
                        # Pass it on to the next thread.
                        self._tasks.put(None)
                        return
                    if task.future.set_running_or_notify_cancel():
                        self._judge(worker, task)
                        num_fruitless = 0
                except _WorkerDiedError:
                    num_fruitless += 1
                    if self._is_closed:
                        return
                    if num_fruitless >= _MAX_FRUITLESS_STARTS or not worker.has_started:
                        self._fail(worker.describe_death())
                        return
                    worker.release()
        except Exception as error:
            self._fail(repr(error))
            raise
        finally:
            worker.stop()
            worker.release()

    def _judge(self, worker: "_Worker", task: _Task) -> None:
        """Set the task's verdict.

        A process that ends is asked about the response again, in another: it may have been killed
        from outside, which is no fault of the response's. A second end is.
        """
        crash = Verdict(correct=False, outcome="crash", extracted=None)
        verdict = crash
        for is_last in (False, True):
            try:
                worker.make_ready()
                verdict = worker.judge(task.response, task.answer)
            except Exception:
                if self._is_closed:
                    task.future.set_exception(RuntimeError(_CLOSED))
                    raise
                if is_last or not worker.has_started:
                    task.future.set_result(crash)
                    raise
                worker.release()
                continue
            if verdict.outcome != "crash":
                break
        task.future.set_result(verdict)

    def _fail(self, reason: str) -> None:
        with self._lock:
            self._failure = f"The verifier {self._rule!r} cannot run in a worker process: {reason}"
        self._drain(self._failure)

    def _drain(self, reason: str) -> None:
        is_closed = False
        while True:
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
            if task is None:
                is_closed = True
            elif task.future.set_running_or_notify_cancel():
                task.future.set_exception(RuntimeError(reason))
        if is_closed:
            # Other threads may still wait for it.
            self._tasks.put(None)


class _Worker:
    """One worker process, used by one thread; `stop` alone is called from others."""

    def __init__(self, rule: str, timeout_s: float) -> None:
        self._rule = rule
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._is_stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: IO[bytes] | None = None
        self._unread = b""
        self._announced_pid = 0
        self._child_pid = 0
        self._child_pidfd = -1
        self._num_requests = 0
        self.has_started = False
        """Whether a child has ever been ready to answer."""

    def make_ready(self) -> None:
        """Return when a child waits for a request.

        Raises:
            _WorkerDiedError: the process ended or was stopped instead.
        """
        if self._process is None:
            self._start()
        while self._child_pidfd < 0 or self._is_child_dead():
            self._forget_child()
            if not self._announced_pid:
                self._receive(deadline=None)
                continue
            with self._lock, contextlib.suppress(ProcessLookupError):
                self._child_pid, self._announced_pid = self._announced_pid, 0
                self._child_pidfd = os.pidfd_open(self._child_pid)
            self.has_started = True

    def judge(self, response: str, answer: str) -> Verdict:
        """Have the waiting child judge one response.

        Raises:
            _WorkerDiedError: the process ended or was stopped.
        """
        process = self._process
        assert process is not None and process.stdin is not None
        self._num_requests += 1
        request = dict(pid=self._child_pid, id=self._num_requests, response=response, answer=answer)
        # The blank line ends what a killed predecessor may have left of its request.
        unsent = memoryview(("\n" + json.dumps(request) + "\n").encode())
        deadline = time.monotonic() + self._timeout_s
        stdin = process.stdin.fileno()
        while len(unsent):
            ready = self._wait(deadline, stdin)
            if not ready:
                return self._kill_child()
            if stdin not in ready:
                # It answers only what it has read whole: the child or the process has ended.
                break
            try:
                unsent = unsent[os.write(stdin, unsent[: 1 << 16]) :]
            except BrokenPipeError:
                raise _WorkerDiedError from None
        while True:
            message = self._receive(deadline)
            if message is None:
                return self._kill_child()
            if message.pop("id", None) == self._num_requests:
                return Verdict(**message)
            if "died" in message or "pid" in message:
                # Its successor may be announced before its end is seen here.
                return Verdict(correct=False, outcome="crash", extracted=None)

    def stop(self) -> None:
        """Kill the process and its child; whoever waits for them gets _WorkerDiedError."""
        with self._lock:
            self._is_stopped = True
            self._end_process()

    def describe_death(self) -> str:
        """The last lines that the process wrote to its error output."""
        if self._stderr is None:
            return "it was not started"
        self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(self._stderr.tell() - 10_000, 0))
        lines = self._stderr.read().decode(errors="replace").splitlines()
        status = self._process.poll() if self._process else None
        return "\n".join([f"exit status {status}", *lines[-_NUM_STDERR_LINES:]])

    def _start(self) -> None:
        with self._lock:
            if self._is_stopped:
                raise _WorkerDiedError
            self._unread, self._announced_pid = b"", 0
            # A file cannot fill up and block the worker as a pipe would.
            self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "megatron_stapo.rewards.worker"),
                    *(self._rule, str(MEMORY_BYTES), str(os.getpid())),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                bufsize=0,
                # What the owner can import, the worker can.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            )
            assert self._process.stdin is not None
            os.set_blocking(self._process.stdin.fileno(), False)

    def release(self) -> None:
        """End the process and close its pipes; `make_ready` starts another."""
        with self._lock:
            self._end_process()
            self._forget_child()
            process, self._process = self._process, None
            if process is not None and process.stdin is not None and process.stdout is not None:
                process.stdin.close()
                process.stdout.close()
            if self._stderr is not None:
                self._stderr.close()
                self._stderr = None

    def _end_process(self) -> None:
        process = self._process
        if process is None:
            return
        process.kill()
        process.wait()
        # The kernel kills the child with its parent, a moment later.
        if self._child_pidfd >= 0:
            _poll({self._child_pidfd: select.POLLIN}, 5.0)

    def _wait(self, deadline: float | None, writable: int = -1) -> set[int]:
        """Wait for output, the child's end, or room in the pipe; empty at the deadline."""
        assert self._process is not None and self._process.stdout is not None
        events = {self._process.stdout.fileno(): select.POLLIN}
        if self._child_pidfd >= 0:
            events[self._child_pidfd] = select.POLLIN
        if writable >= 0:
            events[writable] = select.POLLOUT
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        return _poll(events, left)

    def _receive(self, deadline: float | None) -> dict[str, Any] | None:
        """The next message; None at the deadline, {"died": pid} where the child ended first."""
        assert self._process is not None and self._process.stdout is not None
        stdout = self._process.stdout.fileno()
        while b"\n" not in self._unread:
            ready = self._wait(deadline)
            if not ready:
                return None
            if stdout in ready:
                data = os.read(stdout, 1 << 16)
                if not data:
                    self._process.wait()
                    raise _WorkerDiedError
                self._unread += data
            else:
                return {"died": self._child_pid}
        line, _, self._unread = self._unread.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        self._announced_pid = message.get("pid", self._announced_pid)
        return message

    def _kill_child(self) -> Verdict:
        signal.pidfd_send_signal(self._child_pidfd, signal.SIGKILL)
        self._forget_child()
        return Verdict(correct=False, outcome="timeout", extracted=None)

    def _is_child_dead(self) -> bool:
        return bool(_poll({self._child_pidfd: select.POLLIN}, 0.0))

    def _forget_child(self) -> None:
        with self._lock:
            if self._child_pidfd >= 0:
                os.close(self._child_pidfd)
                self._child_pidfd = -1


def _poll(events: dict[int, int], timeout_s: float | None) -> set[int]:
    # Not select.select: a trainer has more than 1,024 files open.
    poll = select.poll()
    for file, event in events.items():
        poll.register(file, event)
    return {file for file, _ in poll.poll(None if timeout_s is None else timeout_s * 1000)}
