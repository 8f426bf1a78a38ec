"""Entry point of every trainer rank, and the training loop.

torchrun starts one process per rank: `python -m megatron_stapo.train --run-dir DIR [--engine-url
URL]`. Rank 0 drives, see `driver`.
"""

import argparse
import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_stapo import config as config_module
from megatron_stapo.config import Config
from megatron_stapo.data.prompts import load_stop_token_ids
from megatron_stapo.driver import Driver, Timer
from megatron_stapo.observability import RunLog
from megatron_stapo.parallel.context_parallel import slice_microbatch
from megatron_stapo.parallel.groups import Groups, destroy_distributed, init_distributed
from megatron_stapo.reshard.weight_sync import WeightSync
from megatron_stapo.rollout import Engine
from megatron_stapo.rollout.connect import build_engine
from megatron_stapo.trainer.trainer import Trainer
from megatron_stapo.types import Minibatch


def train(config: Config, groups: Groups, engine: Engine | None, run_log: RunLog | None) -> None:
    """Train for config.num_steps steps, and evaluate before, after and between as asked.

    Every rank calls it; engine and run_log are rank 0's and None elsewhere.
    """
    trainer = Trainer(config, groups)
    weight_sync = WeightSync(trainer.weights, engine)
    driver = Driver(config, engine, run_log) if engine and run_log else None
    if driver:
        driver.evaluate(num_steps_done=0)
    for step in range(config.num_steps):
        timer = Timer()
        minibatches = scatter_minibatches(driver.collect(timer) if driver else None, groups)
        with timer("score"):
            trainer.score(minibatches)  # old_logprobs_T, logprobs_T, entropy_T
        updates = []
        for minibatch, phase in itertools.product(minibatches, trainer.phases):
            with timer("threshold"):
                trainer.assign_loss_masks(minibatch, phase)  # response and S2T, over all ranks
            with timer("update"):
                updates.append(trainer.update(minibatch))
        with timer("sync"):
            weight_sync.execute(policy_version=step + 1)
        metrics = trainer.pop_metrics()
        if driver:
            driver.log_step(step + 1, metrics, updates, timer)
            driver.evaluate(num_steps_done=step + 1)
    if driver:
        driver.close()
    trainer.weights.save(Path(config.run_dir) / "model")


def scatter_minibatches(
    per_dp_rank: list[list[Minibatch]] | None, groups: Groups
) -> list[Minibatch]:
    """Hand every rank the mini-batches of its data-parallel rank.

    Args:
        per_dp_rank: rank 0's, indexed by data-parallel rank; None on other ranks. A
            context-parallel rank gets its part of every sequence.

    Communicates: a scatter from rank 0 to all ranks, each getting its own part alone.
    """
    parts = None
    if per_dp_rank is not None:
        parts = [
            [
                dataclasses.replace(
                    minibatch,
                    microbatches=[
                        slice_microbatch(m, cp_rank, groups.cp_size) for m in minibatch.microbatches
                    ],
                )
                for minibatch in per_dp_rank[dp_rank]
            ]
            for dp_rank, cp_rank in groups.cells
        ]
    received: list[Any] = [None]
    dist.scatter_object_list(received, parts, src=0)
    for minibatch in received[0]:
        for microbatch in minibatch.microbatches:
            microbatch.move_to(groups.device)
    return received[0]


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--engine-url")
    arguments = parser.parse_args()
    config = config_module.from_dict(json.loads((arguments.run_dir / "config.json").read_text()))
    groups = init_distributed(config.parallel, config.seed)
    engine = run_log = None
    if groups.rank == 0:
        run_log = RunLog(arguments.run_dir)
        run_log.log_event("waiting_for_engine")
        engine = build_engine(config, arguments.engine_url, load_stop_token_ids(config.model.path))
        run_log.log_event("engine_ready")
    train(config, groups, engine, run_log)
    if engine is not None and run_log is not None:
        engine.close()
        run_log.close()
    destroy_distributed()


if __name__ == "__main__":
    main()
