"""Entry point of every trainer rank, and the training loop.

torchrun starts one process per rank: `python -m megatron_stapo.train --run-dir DIR [--engine-url
URL ...]`. Rank 0 drives, see `driver`.
"""

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_stapo import config as config_module
from megatron_stapo.checkpoint.dump import StepDump, name_dump
from megatron_stapo.checkpoint.folder import METRICS_FILE, read_config
from megatron_stapo.checkpoint.resume import choose_checkpoint, load_checkpoint
from megatron_stapo.checkpoint.rollouts import restore_ahead
from megatron_stapo.checkpoint.save import Checkpointer
from megatron_stapo.checkpoint.stop import StopCheck, withdraw_stop
from megatron_stapo.config import Config
from megatron_stapo.data.prompts import load_stop_token_ids
from megatron_stapo.driver import Driver, SyncRequest, Timer, Wish
from megatron_stapo.observability import RunLog
from megatron_stapo.parallel.context_parallel import slice_microbatch
from megatron_stapo.parallel.groups import (
    Groups,
    destroy_distributed,
    fail_together,
    init_distributed,
)
from megatron_stapo.parallel.watchdog import watch
from megatron_stapo.reshard.weight_sync import WeightSync
from megatron_stapo.rollout import Engine, SamplingRequest
from megatron_stapo.rollout.colocated import ColocatedEngine
from megatron_stapo.rollout.connect import build_colocated_engine, build_engine
from megatron_stapo.trainer.trainer import Trainer
from megatron_stapo.types import Minibatch


def train(
    config: Config,
    groups: Groups,
    engine: Engine | None,
    run_log: RunLog | None,
    checkpoint: Path | None,
) -> None:
    """Train up to config.num_steps steps, evaluating and saving as asked.

    Every rank calls it; run_log is rank 0's and None elsewhere, and so is engine but where the
    placement is colocated.

    Args:
        checkpoint: what the run goes on from, of `choose_checkpoint`.

    Raises:
        RuntimeError: what ended the run before its last step, after a checkpoint of the last whole
            step is written.
    """
    trainer = Trainer(config, groups)
    weight_sync = WeightSync(config, trainer.weights, engine, groups)
    state = load_checkpoint(checkpoint, trainer) if checkpoint else None
    step = state.num_steps_done if state else 0
    colocated = engine if isinstance(engine, ColocatedEngine) else None
    driver = None
    if engine and run_log:
        if checkpoint:
            restore_ahead(Path(config.run_dir), checkpoint, step)
        data = read_config(checkpoint).data if checkpoint else None
        driver = Driver(config, engine, run_log, state, data)
    checkpointer = Checkpointer(
        config,
        trainer,
        step,
        driver.read_state if driver else None,
        run_log.log_event if run_log else None,
    )
    dump = StepDump(config, groups)

    def follow(ask: Callable[[Driver], Any], timer: Timer) -> tuple[Any, str | None]:
        """Ask rank 0; where it wants weights sent, or all ranks to sample, do so and ask again.
        Returns its answer, and why an engine has refused."""
        while True:
            answer = scatter_minibatches(ask(driver) if driver else None, groups)
            if isinstance(answer, SyncRequest):
                with timer("sync"):
                    failure = weight_sync.execute(answer.policy_version, answer.engine_indices)
            elif isinstance(answer, SamplingRequest):
                assert colocated is not None
                failure = colocated.sample(answer)
            else:
                return answer, None
            if failure:
                return None, failure

    def sync(step: int, timer: Timer) -> str | None:
        return follow(lambda driver: driver.request_sync(step, timer), timer)[1]

    failure = sync(step, Timer())
    while step < config.num_steps and not failure:
        step += 1
        timer = Timer()
        minibatches, failure = follow(
            functools.partial(Driver.collect, step=step, timer=timer), timer
        )
        if minibatches is None:  # rank 0 has to end the run
            step -= 1
            break
        checkpointer.poll()  # written while rank 0 was sampling
        if colocated:
            with timer("sync"):
                memory = colocated.sleep()
            if driver:
                driver.note_sleep(memory)
        with timer("score"):
            trainer.score(minibatches)  # old_logprobs_T, logprobs_T, entropy_T
        updates = []
        for minibatch, phase in itertools.product(minibatches, trainer.phases):
            with timer("threshold"):
                trainer.assign_loss_masks(minibatch, phase)  # response and S2T, over all ranks
            num_updates = trainer.num_updates
            with timer("update"):
                updates.append(trainer.update(minibatch))
            dump.after_update(step, len(updates), minibatch, phase, updates[-1], num_updates)
            if trainer.num_skipped_in_a_row == config.optimizer.max_skipped_in_a_row:
                checkpointer.finish()
                raise RuntimeError(_explain_skips(config, step, len(updates)))
        failure = sync(step, timer)
        metrics = trainer.pop_metrics()
        doubt = trainer.precision_guard.check(step, metrics["logprob_gap_mean"])
        if driver:
            driver.log_step(step, metrics, updates, timer)
        if doubt and run_log:
            run_log.log_event("logprob_gap", value=doubt, after_steps=step)
        checkpointer.after_step(step)
    if step == config.num_steps and not failure:
        _, failure = follow(Driver.finish, Timer())
    unsaved = checkpointer.finish(step)
    if driver:
        driver.close()
        failure = failure or driver.describe_failure()
    fail_together("; and ".join(filter(None, (failure, unsaved))) or None, groups)
    if step == config.num_steps:
        trainer.weights.save(Path(config.run_dir) / "model")
        withdraw_stop(Path(config.run_dir))


def _explain_skips(config: Config, step: int, number: int) -> str:
    dump = name_dump(Path(config.run_dir), step, number)
    return (
        f"optimizer.max_skipped_in_a_row={config.optimizer.max_skipped_in_a_row}: the loss or the "
        f"gradient of so many updates in a row is not finite, the last in step {step}. `stapo "
        f"replay {dump}` shows its tokens. Lower optimizer.lr, or go on from an earlier checkpoint."
    )


def scatter_minibatches(
    per_dp_rank: list[list[Minibatch]] | Wish | None, groups: Groups
) -> list[Minibatch] | Wish | None:
    """Hand every rank the mini-batches of its data-parallel rank, or what rank 0 wants instead.

    Args:
        per_dp_rank: rank 0's, indexed by data-parallel rank; None on other ranks. A
            context-parallel rank gets its part of every sequence.

    Returns:
        What rank 0 gives, on every rank, where that is no list.

    Communicates: a scatter from rank 0 to all ranks, each getting its own part alone.
    """
    parts: list[Any] | None = None
    if groups.rank == 0 and not isinstance(per_dp_rank, list):
        parts = [per_dp_rank] * groups.world_size
    if isinstance(per_dp_rank, list):
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
    for minibatch in received[0] if isinstance(received[0], list) else ():
        for microbatch in minibatch.microbatches:
            microbatch.move_to(groups.device)
    return received[0]


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--engine-url", action="append", default=[], dest="engine_urls")
    arguments = parser.parse_args()
    config = config_module.from_dict(json.loads((arguments.run_dir / "config.json").read_text()))
    groups = init_distributed(config.parallel, config.seed)
    with watch(groups, config.parallel.timeout_s):
        _run(config, groups, arguments.run_dir, arguments.engine_urls)
    destroy_distributed()


def _run(config: Config, groups: Groups, run_dir: Path, engine_urls: list[str]) -> None:
    engine = run_log = None
    checkpoint, faults = choose_checkpoint(run_dir, groups)
    if groups.rank == 0:
        history = (checkpoint / METRICS_FILE).read_bytes() if checkpoint else b""
        run_log = RunLog(run_dir, history)
        for fault in faults:
            run_log.log_event("checkpoint_broken", value=fault)
        if checkpoint:
            run_log.log_event("going_on", value=str(checkpoint))
        run_log.log_event("waiting_for_engine")
    stop_token_ids = load_stop_token_ids(config.model.path)
    # What is sampled ahead cannot be sampled again once the step has trained.
    grace_s = config.checkpoint.stop_timeout_s / 2 if config.rollout.max_lag_steps else 0
    stop_check = StopCheck(run_dir, grace_s)
    if config.rollout.placement == "colocated":
        engine = build_colocated_engine(config, groups, stop_token_ids, stop_check)
    elif run_log is not None:
        engine = build_engine(config, engine_urls, stop_token_ids, stop_check, run_log.log_event)
    if run_log is not None:
        run_log.log_event("engine_ready")
    train(config, groups, engine, run_log, checkpoint)
    if engine is not None:
        engine.close()
    if run_log is not None:
        run_log.close()


if __name__ == "__main__":
    main()
