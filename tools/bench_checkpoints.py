"""Times checkpoints: what training waits for, and what a thread writes, by bytes per rank.

    .venv/bin/python tools/bench_checkpoints.py [--rounds 5]

Each line is a model and a number of data-parallel ranks; the medians are rank 0's.
"""

import argparse
import dataclasses
import json
import os
import socket
import statistics
import tempfile
from pathlib import Path

import torch
import torch.multiprocessing as mp

from megatron_stapo.config import Config, DataConfig, ModelConfig, ParallelConfig

# Layers of the model, ranks: the model, twice the ranks, twice both.
CASES = ((4, 1), (4, 2), (8, 2))


def main() -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    num_rounds = parser.parse_args().rounds
    print("layers  ranks  MB per rank  stall s  written s")
    for num_layers, num_ranks in CASES:
        with tempfile.TemporaryDirectory(dir=".") as folder:
            _write_model(Path(folder) / "model", num_layers)
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            arguments = (num_ranks, port, folder, num_rounds)
            mp.spawn(_run_rank, arguments, nprocs=num_ranks)
            result = json.loads((Path(folder) / "result.json").read_text())
        stall, written, num_bytes = (result[name] for name in ("stall", "written", "bytes"))
        print(
            f"{num_layers:6}  {num_ranks:5}  {num_bytes / 1e6:11.0f}  {stall:7.3f}  {written:9.3f}"
        )


def _write_model(folder: Path, num_layers: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=2048,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def _run_rank(rank: int, num_ranks: int, port: int, folder: str, num_rounds: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    from megatron_stapo.checkpoint.folder import DriverState, list_checkpoints
    from megatron_stapo.checkpoint.save import Checkpointer
    from megatron_stapo.parallel.groups import destroy_distributed, init_distributed
    from megatron_stapo.trainer.trainer import Trainer

    config = Config(
        name="bench",
        num_steps=num_rounds,
        run_dir=str(Path(folder) / "run"),
        model=ModelConfig(path=str(Path(folder) / "model"), dtype="float32"),
        parallel=ParallelConfig(device="cpu", data_parallel_size=num_ranks),
        data=DataConfig(source=""),
    )
    config = dataclasses.replace(
        config, checkpoint=dataclasses.replace(config.checkpoint, keep_last=1)
    )
    groups = init_distributed(config.parallel, config.seed)
    events: list[dict[str, float]] = []
    is_driver = rank == 0
    checkpointer = Checkpointer(
        config,
        Trainer(config, groups),
        0,
        (lambda: DriverState(stream_position=0, prompts_digest="", metrics=b"", accuracies={}))
        if is_driver
        else None,
        (lambda name, **values: events.append(values)) if is_driver else None,
    )
    for step in range(1, num_rounds + 1):
        if error := checkpointer.finish(step):
            raise RuntimeError(error)
    if is_driver:
        [checkpoint] = list_checkpoints(Path(config.run_dir))
        result = {
            "stall": statistics.median(event["stall_s"] for event in events),
            "written": statistics.median(event["seconds"] for event in events),
            "bytes": (checkpoint / "__0_0.distcp").stat().st_size,
        }
        (Path(folder) / "result.json").write_text(json.dumps(result))
    destroy_distributed()


if __name__ == "__main__":
    main()
