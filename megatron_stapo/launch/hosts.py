"""One run on several hosts: the head supervises, and a member on every other host runs its part.

Every member keeps one TCP connection to the head. Over it come its tasks, its outcome and the word
to stop; both ends beat once a second, so that each notices within `LOST_S` that the other, or the
network between them, is gone, and then ends its own tasks. Nothing else has to be told who runs
where: the head knows the members' addresses from their connections, and hands them on.

Whoever reaches the head's port while the hosts assemble can join the run, as whoever reaches
torchrun's or the engines' ports can disturb it: hosts need a network that strangers do not reach.
"""

import contextlib
import dataclasses
import json
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from megatron_stapo.launch.experiment import (
    SUCCEEDED,
    Outcome,
    find_lost_engine,
    read_outcome,
    start_experiment,
)
from megatron_stapo.launch.tasks import LOGS_FOLDER, Host, Task, find_free_ports
from megatron_stapo.rollout.engine_host import is_engine
from megatron_stapo.rollout.processes import adopt_orphans, kill_descendants

JOIN_TIMEOUT_S = 900.0
"""Longest wait for every host to be up: images are pulled and caches filled first."""
LOST_S = 30.0
"""A host that is not heard for so long is lost."""
_BEAT_S = 1.0
_POLL_S = 0.2
# What other hosts have to tell why they ended, too, once one has: the cause may be among them.
_GRACE_S = 3.0
# NeMo-Run gives each of a host's tasks ten seconds between SIGTERM and SIGKILL, one by one.
_STOP_TIMEOUT_S = 120.0
_MAX_LINE_BYTES = 1 << 20
# Of a host: one for each engine that it may hold, and one for the trainer's world.
_NUM_PORTS = 32


class _Peer:
    """One end of a connection: JSON lines in and out, and beats."""

    def __init__(self, connection: socket.socket) -> None:
        self.address = str(connection.getpeername()[0])
        self.own_address = str(connection.getsockname()[0])
        self.is_lost = False
        self._connection = connection
        connection.settimeout(LOST_S)
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._is_closed = threading.Event()
        for run in (self._read, self._beat):
            threading.Thread(target=run, daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; one that cannot be sent shows that the other end is lost."""
        try:
            with self._lock:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.is_lost = True

    def receive(self) -> dict[str, Any] | None:
        """The next message that has come, if any."""
        with contextlib.suppress(queue.Empty):
            return self._inbox.get_nowait()
        return None

    def close(self) -> None:
        """End the connection; the other end reads what was sent before."""
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _read(self) -> None:
        try:
            with self._connection.makefile("rb") as stream:
                while line := stream.readline(_MAX_LINE_BYTES):
                    if message := json.loads(line):
                        self._inbox.put(message)
        except (OSError, ValueError):
            pass  # cut off, or not one of ours
        self.is_lost = True

    def _beat(self) -> None:
        while not self._is_closed.wait(_BEAT_S) and not self.is_lost:
            self.send({})


class Head:
    """The first host's view of the others."""

    def __init__(
        self,
        num_hosts: int,
        port: int,
        run_dir: str,
        build_tasks: Callable[[Sequence[Host]], list[list[Task]]],
    ) -> None:
        """Listen for the members.

        Args:
            num_hosts: with the head's own; 1 listens to nobody.
            port: TCP port that the members were told.
            run_dir: members of another run are turned away.
            build_tasks: from the hosts to the tasks of each.

        Raises:
            ValueError: the port is taken.
        """
        self.failure = ""
        """A host that did not come, or is lost: why the run has failed."""
        self.lost_engine = ""
        """An engine of a member that has ended: the trainer may live on to save."""
        self._num_hosts, self._run_dir, self._build_tasks = num_hosts, run_dir, build_tasks
        self._peers: dict[int, _Peer] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._trainers: set[int] = set()
        self._received: list[int] = []
        self._failed_at_s: float | None = None
        if num_hosts > 1:
            try:
                self._listener = socket.create_server(("", port), backlog=num_hosts)
            except OSError as error:
                raise ValueError(
                    f"--port={port}: cannot listen on it ({error.strerror}); give a free one."
                ) from error
            self._listener.settimeout(_POLL_S)

    def assemble(self, received: list[int]) -> list[Task]:
        """Wait for every member, and tell each its tasks.

        Args:
            received: signals that ask for an end, to which those of members are added.

        Returns:
            The head's own tasks; none where the run ends before it starts.
        """
        self._received = received
        hosts: dict[int, Host] = {}
        if self._num_hosts > 1:
            with self._listener:
                self._admit_all(hosts)
        if received or self.failure:
            return []
        # The members' way to the head is the other hosts' way, too.
        address = self._peers[1].own_address if self._peers else "127.0.0.1"
        hosts[0] = _describe_host(address)
        print("hosts:", ", ".join(hosts[i].address for i in range(self._num_hosts)), flush=True)
        tasks = self._build_tasks([hosts[i] for i in range(self._num_hosts)])
        for index, peer in self._peers.items():
            peer.send({"tasks": [dataclasses.asdict(task) for task in tasks[index]]})
            if any(task.num_ranks for task in tasks[index]):
                self._trainers.add(index)
        return tasks[0]

    def must_end(self) -> bool:
        """Whether a member's trainer has failed, or a member is lost, and the others had time to
        tell."""
        for index, peer in self._peers.items():
            while message := peer.receive():
                if "signal" in message:
                    self._received.append(message["signal"])
                if "outcome" in message:
                    outcome = self._outcomes[index] = message["outcome"] or {}
                    self.lost_engine = self.lost_engine or find_lost_engine(outcome)
                    if message["outcome"] is None:
                        self._fail(
                            f"host {index} ({peer.address}): NeMo-Run was killed or has failed; "
                            f"see {self._run_dir}/{LOGS_FOLDER}/nemo_run_host{index}.log."
                        )
                    elif _has_failed(outcome):
                        self._failed_at_s = self._failed_at_s or time.monotonic()
            if peer.is_lost and index not in self._outcomes:
                self._fail(
                    f"host {index} ({peer.address}) is lost: it, or the network to it, was not "
                    f"heard for {LOST_S:.0f} s or has closed the connection."
                )
        return self._failed_at_s is not None and time.monotonic() > self._failed_at_s + _GRACE_S

    def conclude(self, own: Outcome | None) -> Outcome | None:
        """Stop the members once they had time to end by themselves.

        Args:
            own: the outcome of the head's tasks.

        Returns:
            The outcome over all hosts; of trainers, one that failed before one that succeeded.
        """
        if own and not self._received:
            deadline_s = time.monotonic() + _GRACE_S
            while not self._trainers <= self._outcomes.keys() and time.monotonic() < deadline_s:
                self.must_end()
                time.sleep(_POLL_S)
        for peer in self._peers.values():
            peer.send({"stop": True})
        deadline_s = time.monotonic() + _STOP_TIMEOUT_S
        # A member closes its end when none of its processes is left.
        while time.monotonic() < deadline_s and not all(p.is_lost for p in self._peers.values()):
            time.sleep(_POLL_S)
        for peer in self._peers.values():
            peer.close()
        if own is None:
            return None
        outcome: Outcome = {}
        for part in (own, *self._outcomes.values()):
            for name, end in part.items():
                if name not in outcome or outcome[name]["state"] == SUCCEEDED:
                    outcome[name] = end
        return outcome

    def _admit_all(self, hosts: dict[int, Host]) -> None:
        """Wait for every member, and fill in its host; stop on a signal or a failure."""
        deadline_s = time.monotonic() + JOIN_TIMEOUT_S
        waiting: list[_Peer] = []
        while len(hosts) < self._num_hosts - 1 and not self._received and not self.must_end():
            if time.monotonic() > deadline_s:
                missing = [i for i in range(1, self._num_hosts) if i not in hosts]
                self._fail(
                    f"hosts {missing} of {self._num_hosts} did not join in {JOIN_TIMEOUT_S:.0f} s; "
                    "their own output tells why."
                )
                return
            with contextlib.suppress(TimeoutError):
                waiting.append(_Peer(self._listener.accept()[0]))
            for peer in list(waiting):
                if message := peer.receive():
                    waiting.remove(peer)
                    self._admit(message, peer, hosts)

    def _admit(self, message: dict[str, Any], peer: _Peer, hosts: dict[int, Host]) -> None:
        index = int(message.get("index", 0))
        is_ours = message.get("run_dir") == self._run_dir and index in range(1, self._num_hosts)
        if not is_ours or index in hosts:
            peer.send({"stop": True})
            peer.close()
            return
        self._peers[index] = peer
        hosts[index] = Host(**message["host"])

    def _fail(self, why: str) -> None:
        self.failure = self.failure or why
        self._failed_at_s = self._failed_at_s or time.monotonic()


def run_member(index: int, head: tuple[str, int], run_dir: str) -> int:
    """Run this host's part of the run until the head says stop, or is gone.

    Args:
        index: of the host, from 1.
        head: address, or name, and port.

    Returns:
        Exit code: 0, whatever became of the tasks, of which the head tells; 1 without the head.
    """
    adopt_orphans()
    received: list[int] = []
    for kind in (signal.SIGINT, signal.SIGTERM):
        signal.signal(kind, lambda signum, frame: received.append(signum))
    peer = _join(head, received)
    if peer is None:
        print(f"stapo: error: no head at {head[0]}:{head[1]}", file=sys.stderr)
        return 1
    hello = {"index": index, "run_dir": run_dir}
    peer.send(hello | {"host": dataclasses.asdict(_describe_host(peer.own_address))})
    experiment, num_told, is_over, is_stopped = None, 0, False, False
    told: Outcome | None = None
    while not is_stopped and not peer.is_lost:
        while message := peer.receive():
            is_stopped = is_stopped or "stop" in message
            if "tasks" in message:
                tasks = [Task(**values) for values in message["tasks"]]
                # A shared file system may show the head's folder late.
                (Path(run_dir) / LOGS_FOLDER).mkdir(exist_ok=True, parents=True)
                experiment = start_experiment(tasks, Path(run_dir), index)
        for signum in received[num_told:]:
            # The head decides, because its rank saves; it stops this host in the end.
            peer.send({"signal": signum})
            num_told += 1
        if experiment and not is_over:
            is_over = experiment.poll() is not None
            outcome = read_outcome(Path(run_dir), index)
            # An engine may end long before the trainer's ranks, which save then.
            if outcome != told or (is_over and outcome is None):
                peer.send({"outcome": outcome})
                told = outcome
        time.sleep(_POLL_S)
    if experiment and experiment.poll() is None:
        experiment.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            experiment.wait(_STOP_TIMEOUT_S)
    kill_descendants()
    peer.close()
    if not is_stopped:
        print(f"stapo: error: lost the head at {head[0]}:{head[1]}", file=sys.stderr)
    return 0 if is_stopped else 1


def _join(head: tuple[str, int], received: list[int]) -> _Peer | None:
    deadline_s = time.monotonic() + JOIN_TIMEOUT_S
    while time.monotonic() < deadline_s and not received:
        with contextlib.suppress(OSError):
            return _Peer(socket.create_connection(head, timeout=LOST_S))
        time.sleep(_POLL_S)
    return None


def _describe_host(address: str) -> Host:
    return Host(
        address=address,
        interface=find_interface(address),
        ports=find_free_ports(_NUM_PORTS, address),
    )


def find_interface(address: str) -> str:
    """Name of this machine's network interface that has the address."""
    names = [
        name
        for name, entries in psutil.net_if_addrs().items()
        if any(entry.address.partition("%")[0] == address for entry in entries)
    ]
    # All of 127.0.0.0/8 is the loopback's, which names one address of it.
    return names[0] if names else "lo"


def _has_failed(outcome: Outcome) -> bool:
    """Whether the run cannot even save."""
    states = [end["state"] for name, end in outcome.items() if not is_engine(name)]
    return not outcome or any(state != SUCCEEDED for state in states)
