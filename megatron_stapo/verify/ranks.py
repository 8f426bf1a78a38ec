"""Entry point of a rank of `stapo verify`: one update in the recipe's layout, compared on rank 0
with the dense update.

torchrun starts it as `python -m megatron_stapo.verify.ranks --source MODEL --num-layers N --run-dir
DIR`.
"""

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_stapo import config as config_module
from megatron_stapo.config import Config, load_model_json
from megatron_stapo.data.packing import pack
from megatron_stapo.observability.verification import write_report
from megatron_stapo.parallel.groups import Groups, destroy_distributed, init_distributed
from megatron_stapo.parallel.watchdog import watch
from megatron_stapo.train import scatter_minibatches
from megatron_stapo.trainer.trainer import Trainer
from megatron_stapo.types import RolloutGroup
from megatron_stapo.verify.dense import compute_dense_step
from megatron_stapo.verify.problem import build_rollouts, perturb, write_reduced_model
from megatron_stapo.verify.report import RankResult, Row, compare
from megatron_stapo.verify.snapshot import gather_gradients, snapshot_tokens


def verify(config: Config, groups: Groups) -> tuple[list[Row], dict[str, Any]] | None:
    """Take one update and compare it.

    Args:
        config: from `reduce_config`; its model folder is written.

    Returns:
        On rank 0 the rows of the table and what was compared; None elsewhere.

    Communicates: as an update does; a gather to rank 0.
    """
    model_json = load_model_json(config.model.path)
    rollouts = build_rollouts(config, model_json["vocab_size"])
    trainer = Trainer(config, groups)
    phase = trainer.phases[0]
    [minibatch] = scatter_minibatches(_pack(config, rollouts, groups), groups)
    trainer.score([minibatch])
    if groups.is_last_stage:
        perturb(minibatch)
    trainer.assign_loss_masks(minibatch, phase)
    update = trainer.update(minibatch)
    result = RankResult(
        name=str(groups),
        tokens=snapshot_tokens(minibatch, groups),
        loss=update.loss,
        grad_norm=update.grad_norm,
        weight_digests=_digest_weights(trainer, groups),
    )
    results: list[Any] | None = [None] * groups.world_size if groups.rank == 0 else None
    dist.gather_object(result, results, dst=0)
    gradients = gather_gradients(trainer)
    if results is None:
        return None
    dense = compute_dense_step(config, rollouts, model_json, phase)
    details = {
        "num_ranks": groups.world_size,
        "num_layers": model_json["num_hidden_layers"],
        "num_sequences": minibatch.num_sequences,
        "num_microbatches": minibatch.num_microbatches,
        "num_tokens": len(dense.tokens.loss_mask_N),
        "num_candidates": dense.num_candidates,
        "num_masked": int((~dense.tokens.loss_mask_N).sum()),
    }
    return compare(results, gradients, dense, groups.tp_size), details


def _pack(config: Config, rollouts: Sequence[RolloutGroup], groups: Groups) -> Any:
    if groups.rank != 0:
        return None
    num_prompts = config.algorithm.num_prompts_per_minibatch
    return pack(
        rollouts,
        num_prompts,
        config.max_pack_tokens,
        config.parallel,
        token_multiple=config.precision.token_multiple,
    )


def _digest_weights(trainer: Trainer, groups: Groups) -> dict[str, str]:
    """Hash of the bytes of every parameter, keyed by its name and by the part that is held."""
    digests = {}
    for name, parameter, is_cut in trainer.weights.named_parameters():
        part = f"{name}, tensor-parallel part {groups.tp_rank}" if is_cut else name
        data = parameter.detach().float().cpu().numpy().tobytes()
        digests[part] = hashlib.sha256(data).hexdigest()
    return digests


def main() -> None:
    """Run one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--source", required=True, help="folder of the recipe's model")
    parser.add_argument("--num-layers", type=int, required=True, help="of it to keep")
    arguments = parser.parse_args()
    run_dir = arguments.run_dir
    config = config_module.from_dict(json.loads((run_dir / "config.json").read_text()))
    groups = init_distributed(config.parallel, config.seed)
    with watch(groups, config.parallel.timeout_s):
        if groups.rank == 0:
            write_reduced_model(arguments.source, Path(config.model.path), arguments.num_layers)
        dist.barrier()
        if outcome := verify(config, groups):
            rows, details = outcome
            values = [{**dataclasses.asdict(row), "passed": row.passed} for row in rows]
            write_report(run_dir, values, details)
    destroy_distributed()


if __name__ == "__main__":
    main()
