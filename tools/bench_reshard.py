"""Shard to shard, beside gathering every tensor and broadcasting it: bytes and time, in one run.

    .venv/bin/python tools/bench_reshard.py [--layers 4] [--hidden 1024] [--repeats 3]

Four processes over gloo: two trainer ranks (TP 2) send a random Qwen3 in bfloat16 to the two ranks
of an engine (TP 2), as they are and for an engine in FP8. The rival does what a loader of full
tensors needs: rank 0 gathers each tensor and broadcasts it, in buckets of the same size. All end
with every part at its receiver.
"""

import argparse
import os
import socket
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_stapo.model.weights import build_weight_table, merge, shard
from megatron_stapo.reshard.plan import build_plan, list_holdings
from megatron_stapo.rollout.engine_parts import list_parts
from megatron_stapo.rollout.weight_transfer import (
    Part,
    Reception,
    Region,
    exchange,
    hash_part,
    pack,
)

TRAINER, ENGINE = (0, 1), (2, 3)
BUCKET_BYTES = 64 << 20


def main() -> None:
    """Start the ranks; rank 0 prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    mp.spawn(_run, (port, arguments.layers, arguments.hidden, arguments.repeats), nprocs=4)


def _run(rank: int, port: int, num_layers: int, hidden: int, repeats: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=4)
    bench = _Bench(rank, num_layers, hidden)
    ways = (
        ("gather and broadcast", bench.broadcast),
        ("shard to shard", partial(bench.shard, is_fp8=False)),
        ("shard to shard, FP8", partial(bench.shard, is_fp8=True)),
    )
    for name, move in ways:
        bench.is_checking = True
        move()
        bench.is_checking = False
        seconds = []
        for _ in range(repeats):
            dist.barrier()
            start = time.perf_counter()
            received_bytes = move()
            dist.barrier()
            seconds.append(time.perf_counter() - start)
        counts: list[Any] = [None] * 4
        dist.all_gather_object(counts, received_bytes)
        if rank == 0:
            print(
                f"{name:22} {statistics.median(seconds):6.2f} s (median of {repeats}); received by "
                f"trainer ranks {_megabytes(counts[:2])}, engine ranks {_megabytes(counts[2:])} MB"
            )
    dist.destroy_process_group()


def _megabytes(counts: list[int]) -> str:
    return " and ".join(f"{count / 1e6:.1f}" for count in counts)


class _Bench:
    def __init__(self, rank: int, num_layers: int, hidden: int) -> None:
        self._json = {
            "hidden_size": hidden,
            "head_dim": 128,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": 8,
            "vocab_size": 32768,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": num_layers,
            "tie_word_embeddings": True,
        }
        self._rank = rank
        self.is_checking = False
        """Whether to compare what arrives with what was sent, which is not to be timed."""
        self._table = build_weight_table(self._json)
        generator = torch.Generator().manual_seed(0)
        self._full = {
            name: torch.randn(shape, generator=generator).bfloat16()
            for pair in self._table
            for name, shape in zip(pair.hf_names, pair.hf_shapes, strict=True)
        }
        self._mine = {}
        if rank in TRAINER:
            for pair in self._table:
                tensors = [self._full[name] for name in pair.hf_names]
                self._mine[pair.name] = shard(tensors, pair.layout, rank, 2, 8).contiguous()
        holdings = [
            [h for pair in self._table for h in list_holdings(pair.name, pair, tp_rank, 2, 8)]
            for tp_rank in range(2)
        ]
        self._parts, self._plans = {}, {}
        for is_fp8 in (False, True):
            parts = [list_parts(self._json, rank, 2, 0, 1, is_fp8=is_fp8) for rank in range(2)]
            self._parts[is_fp8] = parts
            self._plans[is_fp8] = build_plan(
                holdings, parts, ENGINE, element_bytes=2, bucket_bytes=BUCKET_BYTES
            )
        self._trainer_group = dist.new_group(list(TRAINER))

    def shard(self, is_fp8: bool) -> int:
        """Execute the plan; returns the bytes that this rank received."""
        received_bytes, plan = 0, self._plans[is_fp8]
        for number, bucket in enumerate(plan.list_buckets(self._rank)):
            sends = []
            for message in plan.sends[number].get(self._rank, ()):
                views = [h.view(self._mine[h.parameter], region) for h, region in message.pieces]
                sends.append((message.receiver, pack(message.form, views)))
            reception = Reception(bucket, torch.bfloat16, torch.device("cpu"))
            received_bytes += sum(tensor.nbytes for _, tensor in reception.receives)
            exchange(dist.group.WORLD, sends, reception.receives)
            for part, tensor in reception.unpack():
                self._check(part, tensor)
        return received_bytes

    def broadcast(self) -> int:
        """Gather on rank 0, broadcast to the engine, cut there; returns bytes received."""
        received_bytes, held, held_bytes = 0, [], 0
        for pair in self._table:
            if self._rank in TRAINER:
                shards = [torch.empty_like(self._mine[pair.name]) for _ in TRAINER]
                dist.all_gather(shards, self._mine[pair.name], group=self._trainer_group)
                # An all-gather over two ranks brings each what the other has.
                received_bytes += self._mine[pair.name].nbytes
                tensors = merge(shards, pair.layout, pair.hf_shapes, 8)
            else:
                tensors = [torch.empty(shape, dtype=torch.bfloat16) for shape in pair.hf_shapes]
            for name, tensor in zip(pair.hf_names, tensors, strict=True):
                held.append((name, tensor))
                held_bytes += tensor.nbytes
            if held_bytes >= BUCKET_BYTES:
                received_bytes += self._send(held)
                held, held_bytes = [], 0
        return received_bytes + self._send(held)

    def _send(self, held: list[tuple[str, torch.Tensor]]) -> int:
        if not held or self._rank == 1:
            return 0
        if self._rank == 0:
            flat = torch.cat([tensor.reshape(-1) for _, tensor in held])
            for receiver in ENGINE:
                dist.send(flat, receiver)
            return 0
        flat = torch.empty(sum(tensor.numel() for _, tensor in held), dtype=torch.bfloat16)
        dist.recv(flat, 0)
        pieces = flat.split([tensor.numel() for _, tensor in held])
        full = {n: p.view(t.shape) for (n, t), p in zip(held, pieces, strict=True)}
        for part in (p for module in self._parts[False][self._rank - 2] for p in module):
            if part.name in full:
                matrix = full[part.name]
                matrix = matrix if matrix.dim() > 1 else matrix[:, None]
                cut = Region.whole(part.shape).cut(matrix, part.region)
                self._check(part, cut.contiguous())
        return flat.nbytes

    def _check(self, part: Part, tensor: torch.Tensor) -> None:
        if not self.is_checking:
            return
        full = self._full[part.name]
        full = full if full.dim() > 1 else full[:, None]
        expected = Region.whole(full.shape).cut(full, part.region)
        assert hash_part(part, tensor) == hash_part(part, expected), part.name


if __name__ == "__main__":
    main()
