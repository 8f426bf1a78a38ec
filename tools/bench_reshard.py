"""Shard to shard, beside gathering every tensor and broadcasting it: bytes and time, in one run.

    .venv/bin/python tools/bench_reshard.py [--layers 4] [--hidden 1024] [--repeats 3]

Four processes over gloo: two trainer ranks (TP 2) send a random Qwen3 in bfloat16 to the two ranks
of an engine (TP 2): as they are, for an engine in FP8, and only what a step of 1e-6 has changed.
The rival does what a loader of full tensors needs: rank 0 gathers each tensor and broadcasts it, in
buckets of the same size. All end with every part at its receiver.
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
from megatron_stapo.rollout import delta
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
        ("shard to shard", partial(bench.shard, "all")),
        ("shard to shard, FP8", partial(bench.shard, "fp8")),
        ("shard to shard, delta", partial(bench.shard, "delta")),
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
    if rank == 0:
        print(f"of the weights {bench.changed_share:.2%} have changed in bfloat16")
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
        self._before, self._full = {}, {}
        for pair in self._table:
            for name, shape in zip(pair.hf_names, pair.hf_shapes, strict=True):
                # Initialised as Qwen3 is, and moved as by Adam, whose steps are its learning rate.
                weight = 0.02 * torch.randn(shape, generator=generator)
                step = 1e-6 * torch.randn(shape, generator=generator).clamp(-1, 1)
                self._before[name] = weight.bfloat16()
                self._full[name] = (weight + step).bfloat16()
        num_changed = sum(int((self._before[n] != w).sum()) for n, w in self._full.items())
        self.changed_share = num_changed / sum(w.numel() for w in self._full.values())
        self._mine_before, self._mine = (
            {
                pair.name: shard(
                    [full[name] for name in pair.hf_names], pair.layout, rank, 2, 8
                ).contiguous()
                for pair in self._table
                if rank in TRAINER
            }
            for full in (self._before, self._full)
        )
        holdings = [
            [h for pair in self._table for h in list_holdings(pair.name, pair, tp_rank, 2, 8)]
            for tp_rank in range(2)
        ]
        self._parts, self._plans = {}, {}
        for way in ("all", "fp8", "delta"):
            parts = [
                list_parts(self._json, rank, 2, 0, 1, is_fp8=way == "fp8") for rank in range(2)
            ]
            self._parts[way] = parts
            self._plans[way] = build_plan(
                holdings,
                parts,
                ENGINE,
                element_bytes=2,
                bucket_bytes=BUCKET_BYTES,
                is_delta=way == "delta",
            )
        self._kept = {}
        if rank in ENGINE:
            for part in (part for module in self._parts["delta"][rank - 2] for part in module):
                self._kept[part.name] = _cut(self._before, part).contiguous()
        self._trainer_group = dist.new_group(list(TRAINER))

    def shard(self, way: str) -> int:
        """Execute a plan; returns the bytes that this rank received."""
        received_bytes, plan = 0, self._plans[way]
        base = self._kept if way == "delta" else None
        for number, bucket in enumerate(plan.list_buckets(self._rank)):
            counts, sends = [], []
            for message in plan.sends[number].get(self._rank, ()):
                views = [h.view(self._mine[h.parameter], region) for h, region in message.pieces]
                if base is None:
                    sends.append((message.receiver, pack(message.form, views)))
                    continue
                olds = [h.view(self._mine_before[h.parameter], r) for h, r in message.pieces]
                found, flat = delta.encode(views, olds)
                counts.append((message.receiver, torch.tensor(found)))
                if len(flat):
                    sends.append((message.receiver, flat))
            reception = Reception(bucket, torch.bfloat16, torch.device("cpu"), base=base)
            if base is not None:
                exchange(dist.group.WORLD, counts, reception.counts)
                reception.allocate()
            received = reception.counts + reception.receives
            received_bytes += sum(tensor.nbytes for _, tensor in received)
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
        for part in (p for module in self._parts["all"][self._rank - 2] for p in module):
            if part.name in full:
                self._check(part, _cut(full, part).contiguous())
        return flat.nbytes

    def _check(self, part: Part, tensor: torch.Tensor) -> None:
        if not self.is_checking:
            return
        assert hash_part(part, tensor) == hash_part(part, _cut(self._full, part)), part.name


def _cut(tensors: dict[str, torch.Tensor], part: Part) -> torch.Tensor:
    """The view of a full tensor that shows a part: [rows, columns]."""
    full = tensors[part.name]
    matrix = full if full.dim() > 1 else full[:, None]
    return Region.whole(part.shape).cut(matrix, part.region)


if __name__ == "__main__":
    main()
