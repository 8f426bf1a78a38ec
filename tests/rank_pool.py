"""Processes that play the ranks of a distributed test, started once and reused by every test.

A rank that fails or hangs fails the test with its traceback, and the pool starts afresh.
"""

import gc
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

NUM_RANKS = 4


class RankPool:
    """At most four ranks. Use the `rank_pool` fixture."""

    def __init__(self) -> None:
        self._ranks: list[tuple[mp.Process, Connection]] = []

    def run(
        self, function: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 240
    ) -> list[Any]:
        """Call function(*args) on world_size ranks under torchrun's environment.

        Returns:
            What each rank returned, by rank.
        """
        context = mp.get_context("spawn")
        while len(self._ranks) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        # As torchrun's: no rank takes it along, and nobody else gets its port before it listens.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(world_size):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(store.port),
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            }
            self._ranks[rank][1].send((environment, function, args))
        waiting = dict(enumerate(connection for _, connection in self._ranks[:world_size]))
        results: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting.values()), timeout=timeout_s)
            for rank, connection in list(waiting.items()):
                if connection not in ready:
                    continue
                try:
                    failure, results[rank] = connection.recv()
                except EOFError:
                    failure = "the process died"
                if failure:
                    self.close()
                    raise AssertionError(f"rank {rank} failed:\n{failure}")
                del waiting[rank]
            if not ready:
                self.close()
                raise AssertionError(f"ranks {sorted(waiting)} hang after {timeout_s} s")
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """Kill every rank."""
        for process, connection in self._ranks:
            process.kill()
            process.join()
            connection.close()
        self._ranks.clear()


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            environment, function, args = connection.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            connection.send((None, function(*args)))
        except BaseException:
            connection.send((traceback.format_exc(), None))
        # A model is full of cycles. What is left of it holds its process groups, each of which
        # runs three threads, one of them awake a hundred times a second.
        gc.collect()
        # What is left are modules, which the next collection need not look at: 0.2 s of it.
        gc.freeze()
