"""What the ranks of the distributed tests run. Importable, so that a spawned process finds it."""

import contextlib
import dataclasses
import errno
import os
import signal
import time
import warnings
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_stapo.config import (
    AlgorithmConfig,
    CheckpointConfig,
    ClusterConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    ReshardConfig,
    RolloutConfig,
)
from megatron_stapo.types import Minibatch, Prompt, Rollout, RolloutGroup


def build_config(model_path: Path, **changes: Any) -> Config:
    """A config for tests; a dotted key such as parallel__tensor_model_parallel_size changes a
    field."""
    groups: dict[str, dict[str, Any]] = {
        "model": {"path": str(model_path), "dtype": "float32"},
        "parallel": {"device": "cpu", "timeout_s": 120},
        "data": {
            "source": "",
            "max_prompt_tokens": 20,
            "max_microbatch_tokens": 90,
        },
        "rollout": {"num_prompts_per_step": 4, "group_size": 4, "max_response_tokens": 40},
        "algorithm": {"num_prompts_per_minibatch": 2, "prob_threshold": 0.02},
        "optimizer": {"lr": 1e-3, "num_warmup_steps": 0, "max_grad_norm": 1e9},
        "evaluation": {},
        "checkpoint": {},
        "precision": {},
        "cluster": {},
        "reshard": {},
    }
    for key, value in changes.items():
        group, field = key.split("__")
        groups[group][field] = value
    return Config(
        name="test",
        num_steps=1,
        model=ModelConfig(**groups["model"]),
        parallel=ParallelConfig(**groups["parallel"]),
        data=DataConfig(**groups["data"]),
        rollout=RolloutConfig(**groups["rollout"]),
        algorithm=AlgorithmConfig(**groups["algorithm"]),
        optimizer=OptimizerConfig(**groups["optimizer"]),
        evaluation=EvaluationConfig(**groups["evaluation"]),
        checkpoint=CheckpointConfig(**groups["checkpoint"]),
        precision=PrecisionConfig(**groups["precision"]),
        cluster=ClusterConfig(**groups["cluster"]),
        reshard=ReshardConfig(**groups["reshard"]),
    )


def build_groups(config: Config, vocab_size: int, seed: int = 0) -> list[RolloutGroup]:
    """Random rollouts of unlike lengths, one of them of a single token."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    groups = []
    for prompt_id in range(config.rollout.num_prompts_per_step):
        rollouts = []
        for sample in range(config.rollout.group_size):
            length = 1 if prompt_id == sample == 1 else draw(2, config.rollout.max_response_tokens)
            rollouts.append(
                Rollout(
                    token_ids=[draw(0, vocab_size) for _ in range(length)],
                    rollout_logprobs=[-2.0] * length,
                    finish_reason="stop",
                    policy_version=0,
                    advantage=[1.5, -0.5, 0.25, -1.25][sample],
                )
            )
        token_ids = [draw(0, vocab_size) for _ in range(draw(1, config.data.max_prompt_tokens))]
        prompt = Prompt(prompt_id=prompt_id, problem="", answer="", token_ids=token_ids)
        groups.append(RolloutGroup(prompt=prompt, rollouts=rollouts))
    return groups


@contextlib.contextmanager
def joined_world(config: Config) -> Iterator[Any]:
    """The groups of this rank, for one test; leaves the world at the end."""
    # Megatron warns at import and use about what only a GPU has.
    warnings.simplefilter("ignore")
    from megatron_stapo.parallel.groups import destroy_distributed, init_distributed

    groups = init_distributed(config.parallel, seed=0)
    try:
        yield groups
    finally:
        destroy_distributed()


def build_minibatches(
    config: Config, groups: Any, rollout_groups: list[RolloutGroup]
) -> list[Minibatch]:
    """This rank's part of what the driver packs of the rollouts."""
    from megatron_stapo.data.packing import pack
    from megatron_stapo.train import scatter_minibatches

    packed = None
    if groups.rank == 0:
        packed = pack(
            rollout_groups,
            config.algorithm.num_prompts_per_minibatch,
            config.max_pack_tokens,
            config.parallel,
            config.algorithm.filter_truncated,
        )
    minibatches = scatter_minibatches(packed, groups)
    assert isinstance(minibatches, list)
    return minibatches


def run_logits(config: Config, sequences: list[list[int]]) -> list[torch.Tensor] | None:
    """Full logits of packed sequences; on the last stage's tensor-parallel rank 0, else None."""
    with joined_world(config) as groups:
        import torch.distributed as dist
        from megatron.core.packed_seq_params import PackedSeqParams
        from megatron.core.pipeline_parallel import get_forward_backward_func

        from megatron_stapo.trainer.trainer import Trainer

        trainer = Trainer(config, groups)
        lengths = [len(s) for s in sequences]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_kv=cu_seqlens,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )

        def forward_step(_: Any, model: torch.nn.Module) -> Any:
            output = model(
                input_ids=torch.tensor([[t for s in sequences for t in s]]),
                position_ids=torch.cat([torch.arange(n) for n in lengths])[None],
                attention_mask=None,
                packed_seq_params=packed,
            )
            return output, lambda logits, **_: logits

        with torch.no_grad():
            outputs = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=None,
                model=trainer.ddp,
                num_microbatches=1,
                seq_length=1,
                micro_batch_size=1,
                forward_only=True,
                collect_non_loss_data=True,
            )
        if not groups.is_last_stage:
            return None
        shards = [torch.empty_like(outputs[0]) for _ in range(groups.tp_size)]
        dist.all_gather(shards, outputs[0].contiguous(), group=groups.tp_group)
        logits = torch.cat(shards, dim=-1)[0]
        return list(logits.split(lengths)) if groups.tp_rank == 0 else None


def run_round_trip(config: Config) -> dict[str, torch.Tensor]:
    """Load a folder into the layout and stream it back; rank 0 has the tensors."""
    with joined_world(config) as groups:
        from megatron_stapo.trainer.trainer import Trainer

        return {n: t.clone() for n, t in Trainer(config, groups).weights.stream()}


def compute_noise(sequence_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Nats by which the sampling policy differed, up to 0.4, so that ratios are clipped."""
    return 0.4 * (1.3 * sequence_ids + position_ids).sin()


def run_step(
    config: Config,
    rollout_groups: list[RolloutGroup],
    num_updates: int,
    reverse: bool = False,
    off_policy: bool = False,
) -> dict[str, Any]:
    """Score the rollouts, then mask and update mini-batch by mini-batch.

    Args:
        reverse: take the microbatches of every mini-batch in reverse order.
        off_policy: add `compute_noise` to the old log-probabilities.

    Returns:
        updates: what `Trainer.update` returned. metrics: of the step. gradients: by Hugging Face
            name on rank 0, of the last update, after clipping. weights: likewise. tokens: on the
            last stage a `TokenSnapshot` per mini-batch, taken at its masking.
    """
    with joined_world(config) as groups:
        from megatron_stapo.trainer.trainer import Trainer
        from megatron_stapo.verify.snapshot import gather_gradients, snapshot_tokens

        trainer = Trainer(config, groups)
        minibatches = build_minibatches(config, groups, rollout_groups)
        for minibatch in minibatches:
            if reverse:
                minibatch.microbatches.reverse()
        trainer.score(minibatches)
        if off_policy and groups.is_last_stage:
            for m in (m for minibatch in minibatches for m in minibatch.microbatches):
                noise = compute_noise(m.sequence_ids_T, m.position_ids_T)
                m.old_logprobs_T = m.old_logprobs_T + noise
        updates, tokens = [], []
        for minibatch in minibatches[:num_updates]:
            for phase in trainer.phases:
                trainer.assign_loss_masks(minibatch, phase)
                snapshot = snapshot_tokens(minibatch, groups)
                # Plain, so that the test's process need not import Megatron to read it.
                tokens.append(snapshot and SimpleNamespace(**vars(snapshot)))
                updates.append(dataclasses.asdict(trainer.update(minibatch)))
        return {
            "updates": updates,
            "metrics": trainer.pop_metrics(),
            "gradients": gather_gradients(trainer),
            "weights": {n: t.clone() for n, t in trainer.weights.stream()},
            "tokens": tokens,
            "num_microbatches": minibatches[0].num_microbatches,
        }


def run_precision(config: Config, rollout_groups: list[RolloutGroup]) -> dict[str, Any]:
    """Sum the gradients of a mini-batch in bfloat16 training, and look at what they are kept in.

    Returns:
        Names of the dtypes of the parameters, of the buffers in which gradients are summed over
        microbatches and ranks, and of the optimizer's main weights; the share of the summed
        gradients that bfloat16 does not hold.
    """
    with joined_world(config) as groups:
        from megatron_stapo.trainer.trainer import Trainer

        trainer = Trainer(config, groups)
        minibatches = build_minibatches(config, groups, rollout_groups)
        assert len(minibatches[0].microbatches) > 1
        trainer.score(minibatches)
        trainer.assign_loss_masks(minibatches[0])
        trainer.update(minibatches[0])
        buffers = [b for d in trainer.ddp for b in [*d.buffers, *d.expert_parallel_buffers]]
        grads = torch.cat([b.grad_data[b.grad_data != 0] for b in buffers])
        main = [p for group in trainer.optimizer.param_groups for p in group["params"]]
        return {
            "param_dtypes": {str(p.dtype) for d in trainer.ddp for p in d.parameters()},
            "grad_dtypes": {str(b.grad_dtype) for b in buffers},
            "main_dtypes": {str(p.dtype) for p in main},
            "beyond_bf16_frac": (grads != grads.bfloat16()).double().mean().item(),
        }


def run_fp8_fallback(
    config: Config, rollout_groups: list[RolloutGroup], run_dir: Path
) -> dict[str, Any]:
    """Train a step as if in FP8, find a gap over the limit, save, and read into a new trainer.

    Transformer Engine is not there, so Megatron opens no FP8 context; its configs are set as on a
    GPU. Returns what the guards said, and which modules' configs were in FP8 before and after.
    """
    with joined_world(config) as groups:
        from megatron.core.transformer import TransformerConfig

        from megatron_stapo.checkpoint.folder import DriverState, name_checkpoint
        from megatron_stapo.checkpoint.resume import load_checkpoint
        from megatron_stapo.checkpoint.save import Checkpointer
        from megatron_stapo.trainer.trainer import Trainer

        def list_configs(trainer: Trainer) -> list[TransformerConfig]:
            found = (getattr(m, "config", None) for d in trainer.ddp for m in d.modules())
            return [c for c in found if isinstance(c, TransformerConfig)]

        def switch_on(trainer: Trainer) -> None:
            for c in list_configs(trainer):
                c.fp8, c.fp8_recipe = "e4m3", "blockwise"

        def save(trainer: Trainer, num_steps_done: int) -> None:
            state = DriverState(stream_position=0, prompts_digest="", metrics=b"", accuracies={})
            first = groups.rank == 0
            saver = Checkpointer(
                dataclasses.replace(config, run_dir=str(run_dir)),
                trainer,
                0,
                (lambda: state) if first else None,
                (lambda *args, **values: None) if first else None,
            )
            assert saver.finish(num_steps_done) is None

        trainer = Trainer(config, groups)
        switch_on(trainer)
        limit = config.precision.max_logprob_gap
        guard = trainer.precision_guard
        said = [guard.check(1, limit)]
        save(trainer, 1)
        before = {c.fp8 for c in list_configs(trainer)}
        said.append(guard.check(2, 2 * limit))
        after = {c.fp8 for c in list_configs(trainer)}
        save(trainer, 2)
        said += [guard.check(3, 2 * limit), guard.check(4, 2 * limit)]
        resumed = {}
        for step in (1, 2):
            again = Trainer(config, groups)
            switch_on(again)
            load_checkpoint(name_checkpoint(run_dir, step), again)
            fp8 = {c.fp8 for c in list_configs(again)}
            resumed[step] = (fp8, again.precision_guard.fp8_left_after)
        return {"said": said, "before": before, "after": after, "resumed": resumed}


def run_reference(
    config: Config, rollout_groups: list[RolloutGroup]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Score, update, score again: the log-probabilities of the first mini-batch before, those of
    the reference after, and those after; None before the last stage."""
    with joined_world(config) as groups:
        from megatron_stapo.data.packing import pack
        from megatron_stapo.trainer.trainer import Trainer

        trainer = Trainer(config, groups)
        size = config.algorithm.num_prompts_per_minibatch
        [minibatches] = pack(rollout_groups, size, config.max_pack_tokens, config.parallel)
        trainer.score(minibatches)
        microbatches = minibatches[0].microbatches

        def collect(name: str) -> torch.Tensor | None:
            if not groups.is_last_stage:
                return None
            return torch.cat([getattr(m, name) for m in microbatches])

        first = collect("old_logprobs_T")
        trainer.assign_loss_masks(minibatches[0])
        trainer.update(minibatches[0])
        trainer.score(minibatches)
        if first is None:
            return None
        return first, collect("ref_logprobs_T"), collect("old_logprobs_T")


def run_step_error(config: Config, rollout_groups: list[RolloutGroup]) -> str:
    """What this rank raises in a step."""
    try:
        run_step(config, rollout_groups, 1)
    except RuntimeError as error:
        return str(error)
    return "nothing"


BREAKAGES = (
    "factor of cp_size",
    "mean instead of sum",
    "quantile of each rank",
    "unshifted positions",
    "every replica has every token",
    "one replica moved",
    "NaN on one rank",
)


def run_verify(
    config: Config, algorithm: AlgorithmConfig | None, run_dir: Path, breakage: str = ""
) -> tuple[dict[str, tuple[float, bool]], dict[str, Any]] | None:
    """`stapo verify` on a config, optionally with the trainer broken.

    Returns:
        On rank 0 every row's difference and verdict, and what was compared.
    """
    config = dataclasses.replace(
        config,
        run_dir=str(run_dir / "run"),
        algorithm=algorithm or config.algorithm,
        rollout=dataclasses.replace(config.rollout, max_response_tokens=40),
    )
    with joined_world(config) as groups, pytest.MonkeyPatch.context() as patch:
        import torch.distributed as dist

        from megatron_stapo.verify import problem, ranks
        from megatron_stapo.verify.reduce import reduce_config

        reduced, num_layers = reduce_config(config)
        if groups.rank == 0:
            problem.write_reduced_model(config.model.path, Path(reduced.model.path), num_layers)
        dist.barrier()
        _break_trainer(breakage, groups, patch)
        outcome = ranks.verify(reduced, groups)
        if outcome is None:
            return None
        rows, details = outcome
        return {row.quantity: (row.difference, row.passed) for row in rows}, details


def _break_trainer(breakage: str, groups: Any, patch: pytest.MonkeyPatch) -> None:
    from megatron_stapo.ops.quantile import compute_quantile
    from megatron_stapo.trainer import masks, trainer
    from megatron_stapo.trainer.loss import compute_loss
    from megatron_stapo.verify import ranks

    def scale_loss(scale: Any) -> Any:
        def broken(*args: Any) -> Any:
            loss_sum, num_tokens, report = compute_loss(*args)
            factor = scale(num_tokens)
            return loss_sum * factor, num_tokens, report * torch.tensor([factor, 1.0])

        return broken

    update = trainer.Trainer.update

    def move_replica(self: Any, minibatch: Any) -> Any:
        metrics = update(self, minibatch)
        if groups.rank == 1:
            next(self.ddp[0].parameters()).data[0, 0] += 1e-3
        return metrics

    def lose_number(self: Any, minibatch: Any) -> Any:
        metrics = update(self, minibatch)
        return dataclasses.replace(metrics, loss=float("nan")) if groups.rank == 2 else metrics

    pack = ranks.pack

    def pack_unshifted(*args: Any, **options: Any) -> Any:
        packed = pack(*args, **options)
        for m in packed[-1][0].microbatches:
            m.token_ids_T = m.token_ids_T.roll(1)
        return packed

    def pack_everything(
        rollouts: Any, size: int, budget: int, parallel: Any, **options: Any
    ) -> Any:
        alone = dataclasses.replace(parallel, data_parallel_size=1)
        [whole] = pack(rollouts, size, budget, alone, **options)
        return [whole] * groups.dp_size

    if breakage == "factor of cp_size":
        patch.setattr(trainer, "compute_loss", scale_loss(lambda n: groups.cp_size))
    elif breakage == "mean instead of sum":
        patch.setattr(trainer, "compute_loss", scale_loss(lambda n: 1 / max(int(n), 1)))
    elif breakage == "quantile of each rank":
        patch.setattr(masks, "compute_quantile", lambda v, q, group: compute_quantile(v, q, None))
    elif breakage == "unshifted positions":
        patch.setattr(ranks, "pack", pack_unshifted)
    elif breakage == "every replica has every token":
        patch.setattr(ranks, "pack", pack_everything)
    elif breakage == "one replica moved":
        patch.setattr(trainer.Trainer, "update", move_replica)
    elif breakage == "NaN on one rank":
        patch.setattr(trainer.Trainer, "update", lose_number)
    else:
        assert not breakage


def run_sharded_logprobs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    upstream: torch.Tensor,
    temperature: float,
) -> dict[str, Any]:
    """One shard's results, gradients and number of collectives; chunks of 16 tokens."""
    import torch.distributed as dist

    from megatron_stapo.ops.logprobs import compute_logprobs_and_entropy

    dist.init_process_group("gloo")
    calls = 0
    all_reduce = dist.all_reduce

    def count(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return all_reduce(*args, **kwargs)

    try:
        dist.all_reduce = count
        group = dist.group.WORLD
        shard = weight.chunk(group.size())[group.rank()].clone().requires_grad_()
        hidden = hidden.clone().requires_grad_()
        logprobs, entropy = compute_logprobs_and_entropy(
            hidden, shard, labels, temperature, group, chunk_tokens=16
        )
        forward_collectives = calls
        (logprobs * upstream).sum().backward()
        return {
            "logprobs": logprobs.detach(),
            "entropy": entropy,
            "grad_hidden": hidden.grad,
            "grad_weight": shard.grad,
            "forward_collectives": forward_collectives,
            "backward_collectives": calls - forward_collectives,
        }
    finally:
        dist.all_reduce = all_reduce
        dist.destroy_process_group()


def run_megatron_load(config: Config, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, as Megatron reads it."""
    with joined_world(config):
        from megatron.core.dist_checkpointing.serialization import load_plain_tensors

        return {
            key: value
            for key, value in load_plain_tensors(str(checkpoint)).items()
            if isinstance(value, torch.Tensor)
        }


def run_save_in_pieces(config: Config, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Save whole tensors with two ranks, as Megatron's pieces: the first holds the head of the
    first row and some rows below, the other one the rest."""
    with joined_world(config) as groups:
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.dist_checkpointing.strategies.torch import (
            MCoreSavePlanner,
            mcore_to_pyt_state_dict,
        )
        from torch.distributed import checkpoint

        state = {}
        for key, tensor in tensors.items():
            num_rows, width = len(tensor), tensor.shape[-1]
            half, third = (1 + num_rows) // 2, width // 3
            places = [(slice(0, third),), (slice(third, width),)]
            if tensor.dim() == 2:
                places = [
                    *((slice(0, 1), *columns) for columns in places),
                    (slice(1, half), slice(0, width)),
                    (slice(half, num_rows), slice(0, width)),
                ]
            state[key] = [
                ShardedTensor(
                    key=key,
                    data=tensor[place].contiguous(),
                    dtype=tensor.dtype,
                    local_shape=tuple(tensor[place].shape),
                    global_shape=tuple(tensor.shape),
                    global_offset=tuple(s.start for s in place),
                    axis_fragmentations=None,
                    replica_id=0,
                )
                for place in places[groups.rank :: 2]
            ]
        # `dist_checkpointing.save` would start a process, which a rank of the pool cannot.
        checkpoint.save(
            mcore_to_pyt_state_dict(state),
            checkpoint_id=folder,
            planner=MCoreSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
        )


def run_save(config: Config, out: Path) -> None:
    """Write the model that a config names as a Hugging Face folder."""
    with joined_world(config) as groups:
        from megatron_stapo.trainer.trainer import Trainer

        Trainer(config, groups).weights.save(out)


def run_hang(config: Config, kind: str, timeout_s: float) -> str | None:
    """Hang, as the kind says, after three collectives.

    Args:
        timeout_s: of the collectives. The ranks, which import Megatron first, join by the
            config's.

    Returns:
        What this rank raised; None where it noticed nothing.
    """
    with joined_world(config) as groups:
        import torch.distributed as dist

        from megatron_stapo.parallel.watchdog import watch

        pids: list[Any] = [None] * groups.world_size
        dist.all_gather_object(pids, os.getpid())
        first, second = (
            dist.new_group(timeout=timedelta(seconds=timeout_s), group_desc=name)
            for name in ("first", "second")
        )
        number = torch.zeros(1)
        try:
            with watch(groups, timeout_s):
                for _ in range(3):
                    dist.all_reduce(number, group=first)
                if kind == "stopped" and groups.rank == 1:
                    time.sleep(timeout_s / 5)  # two reports
                    os.kill(os.getpid(), signal.SIGSTOP)
                elif kind == "absent" and groups.rank == 1:
                    time.sleep(1.5 * timeout_s)
                elif kind == "failed" and groups.rank == 1:
                    raise RuntimeError("a bug")
                elif kind == "mismatch" and groups.rank == 1:
                    dist.all_reduce(number, group=second)
                elif kind == "pipeline" and groups.rank == 0:
                    time.sleep(1.5 * timeout_s)
                elif kind == "pipeline":
                    dist.recv(number, src=groups.rank - 1, group=first)
                else:
                    dist.all_reduce(number, group=first)
        except RuntimeError as error:
            return str(error)
        finally:
            if kind == "stopped" and groups.rank == 0:
                os.kill(pids[1], signal.SIGCONT)
    return None


def run_checkpoint(
    config: Config,
    rollout_groups: list[RolloutGroup],
    load_from: Path | None,
    num_updates: int,
    save_to: Path,
) -> dict[str, Any]:
    """Load a run's newest checkpoint, update, save as one step more.

    Args:
        config: its layout may be another one than that of the checkpoint.
        load_from: run folder; None starts from the model folder.
        num_updates: 0 saves what was loaded.
        save_to: run folder of the new checkpoint.

    Returns:
        updates: what `Trainer.update` returned. weights: of the model, by Hugging Face name, on
            rank 0. faults: of the checkpoints that could not be used.
    """
    config = dataclasses.replace(config, run_dir=str(save_to))
    with joined_world(config) as groups:
        from megatron_stapo.checkpoint.folder import DriverState
        from megatron_stapo.checkpoint.resume import choose_checkpoint, load_checkpoint
        from megatron_stapo.checkpoint.save import Checkpointer
        from megatron_stapo.trainer.trainer import Trainer

        step, faults = 0, []
        checkpoint = None
        if load_from is not None:
            checkpoint, faults = choose_checkpoint(load_from, groups)
        trainer = Trainer(config, groups)
        if checkpoint is not None:
            step = load_checkpoint(checkpoint, trainer).num_steps_done
        minibatches = build_minibatches(config, groups, rollout_groups)
        trainer.score(minibatches)
        updates = []
        for minibatch in minibatches[:num_updates]:
            trainer.assign_loss_masks(minibatch)
            updates.append(dataclasses.asdict(trainer.update(minibatch)))
        is_driver = groups.rank == 0
        checkpointer = Checkpointer(
            config,
            trainer,
            0,
            (lambda: DriverState(stream_position=7, prompts_digest="", metrics=b"", accuracies={}))
            if is_driver
            else None,
            (lambda name, **values: None) if is_driver else None,
        )
        assert checkpointer.finish(step + 1) is None
        return {
            "updates": updates,
            "weights": {n: t.clone() for n, t in trainer.weights.stream()},
            "faults": faults,
        }


def run_dumped_step(
    config: Config, rollout_groups: list[RolloutGroup], run_dir: Path, poisoned_rank: int | None
) -> dict[str, Any]:
    """Take a step with a dump of every update.

    Args:
        poisoned_rank: one token of its second mini-batch gets an advantage of NaN.

    Returns:
        updates: what `Trainer.update` returned. unchanged: of every update, whether it left the
            weights and the moments of this rank as they were. num_updates: after the step.
    """
    changes = {"run_dir": str(run_dir)}
    changes["checkpoint"] = dataclasses.replace(config.checkpoint, dump_interval_steps=1)
    config = dataclasses.replace(config, **changes)
    with joined_world(config) as groups:
        from megatron_stapo.checkpoint.dump import StepDump
        from megatron_stapo.checkpoint.state import build_optimizer_state
        from megatron_stapo.trainer.trainer import Trainer

        trainer = Trainer(config, groups)

        def copy_state() -> dict[str, torch.Tensor]:
            return {k: p.data.clone() for k, p in build_optimizer_state(trainer).items()}

        dump = StepDump(config, groups)
        minibatches = build_minibatches(config, groups, rollout_groups)
        trainer.score(minibatches)
        updates, unchanged = [], []
        for number, minibatch in enumerate(minibatches):
            for phase in trainer.phases:
                trainer.assign_loss_masks(minibatch, phase)
                if number == 1 and groups.rank == poisoned_rank:
                    m = next(m for m in minibatch.microbatches if m.loss_mask_T.any())
                    m.advantages_T[m.loss_mask_T.nonzero()[0]] = float("nan")
                before, num_updates = copy_state(), trainer.num_updates
                update = trainer.update(minibatch)
                updates.append(dataclasses.asdict(update))
                dump.after_update(1, len(updates), minibatch, phase, update, num_updates)
                after = copy_state()
                unchanged.append(all(torch.equal(after[k], before[k]) for k in before))
        return {"updates": updates, "unchanged": unchanged, "num_updates": trainer.num_updates}


def run_command(*argv: str) -> tuple[int, str, str]:
    """The command, in a process that may import Megatron: exit code, stdout, stderr."""
    import io

    warnings.simplefilter("ignore")
    from megatron_stapo import cli

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(argv)
    return code, out.getvalue(), err.getvalue()


def run_failing_saves(config: Config, run_dir: Path, full: str) -> dict[str, Any]:
    """Save six times; in the second save, and from the fourth, the disk is full for one file.

    Args:
        full: name of the file; empty: none.

    Returns:
        events: what rank 0 logged. published: names of the checkpoints after every save was waited
            for. error: what this rank raised in the end. finish: what it says then.
    """
    config = dataclasses.replace(config, run_dir=str(run_dir))
    with joined_world(config) as groups, pytest.MonkeyPatch.context() as patch:
        import torch.distributed as dist

        from megatron_stapo.checkpoint import save
        from megatron_stapo.checkpoint.folder import DriverState, list_checkpoints
        from megatron_stapo.trainer.trainer import Trainer

        step, write = 0, save._write

        def write_to_full_disk(writer: Any, partial: Path, *rest: Any) -> None:
            if full and groups.rank == 0 and (step == 2 or step >= 4):
                (partial / full).symlink_to("/dev/full")
            write(writer, partial, *rest)

        def read_companions(self: Any, *args: Any) -> dict[str, bytes]:
            if full == "tokenizer.json" and (step == 2 or step >= 4):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), full)
            return build_files(self, *args)

        build_files = save.Checkpointer._build_files
        patch.setattr(save.Checkpointer, "_build_files", read_companions)

        if full.startswith("__1"):
            # The other rank's file has to be there before that rank opens it.
            def write_in_turn(*args: Any) -> None:
                time.sleep(0.3 * groups.rank)
                write_to_full_disk(*args)

            patch.setattr(save, "_write", write_in_turn)
        else:
            patch.setattr(save, "_write", write_to_full_disk)
        events: list[dict[str, Any]] = []
        is_driver = groups.rank == 0
        checkpointer = save.Checkpointer(
            config,
            Trainer(config, groups),
            0,
            (
                lambda: DriverState(
                    stream_position=0, prompts_digest="", metrics=b"{}", accuracies={}
                )
            )
            if is_driver
            else None,
            (lambda name, **values: events.append({"name": name, **values})) if is_driver else None,
        )
        published, error = [], ""
        for step in range(1, 7):
            try:
                checkpointer.save(step)
                checkpointer._publish_if_written(wait=True)
            except RuntimeError as refused:
                error = str(refused)
            dist.barrier()
            published.append([path.name for path in list_checkpoints(run_dir)])
            if error:
                break
        return {
            "events": list(events),
            "published": published,
            "error": error,
            "finish": checkpointer.finish(7),
        }


def report_coordinates(config: Config) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """(tp, cp, ep, dp, pp) of this rank, and `Groups.cells`."""
    with joined_world(config) as groups:
        coordinates = (
            groups.tp_rank,
            groups.cp_rank,
            groups.ep_rank,
            groups.dp_rank,
            groups.pp_rank,
        )
        return coordinates, groups.cells


def reshard_to_engines(
    config: Config, engines: list[tuple[int, int]], bucket_bytes: int
) -> list[dict[str, Any]]:
    """Move this layout's weights to the ranks of engines of (tp, pp) that are ranks of this world.

    Returns:
        Of every engine: the names of this rank's tensors that are not the file's bit for bit, or
        with an engine in FP8 not what it keeps of the file's; its parts' number, bytes received
        from others, the least possible, and the most memory that was alive beside the model, with
        the plan's own figure for both.
    """
    with joined_world(config) as groups, pytest.MonkeyPatch.context() as patch:
        from safetensors.torch import load_file

        from megatron_stapo.config import load_model_json
        from megatron_stapo.reshard import weight_sync
        from megatron_stapo.reshard.plan import build_plan, list_rank_holdings
        from megatron_stapo.rollout.engine_parts import list_engine_parts
        from megatron_stapo.rollout.weight_transfer import hash_part
        from megatron_stapo.trainer.trainer import Trainer

        element_bytes = getattr(torch, config.model.dtype).itemsize
        model_json = load_model_json(config.model.path)
        files = load_file(Path(config.model.path) / "model.safetensors")
        weights = Trainer(config, groups).weights
        sync = weight_sync.WeightSync(config, weights, None, groups)
        received_bytes = 0

        def count(group: Any, sends: Any, receives: Any) -> None:
            nonlocal received_bytes
            received_bytes += sum(tensor.nbytes for _, tensor in receives)
            exchange(group, sends, receives)

        exchange = weight_sync.exchange
        patch.setattr(weight_sync, "exchange", count)
        # So that both kinds of message are among those of a tiny model.
        patch.setattr("megatron_stapo.reshard.plan._DIRECT_BYTES", 8192)
        holdings = list_rank_holdings(weights, groups.tp_size, model_json["num_key_value_heads"])
        results = []
        for tp_size, pp_size in engines:
            rollout = dataclasses.replace(
                config.rollout, tensor_parallel_size=tp_size, pipeline_parallel_size=pp_size
            )
            parts = list_engine_parts(model_json, rollout)
            # From the last rank down: the first ones hold what the first parts are.
            receivers = [groups.world_size - 1 - rank for rank in range(len(parts))]
            plan = build_plan(
                holdings, parts, receivers, element_bytes=element_bytes, bucket_bytes=bucket_bytes
            )
            received_bytes, wrong, num_parts, peak_bytes = 0, [], 0, 0
            for number in range(len(plan.sends)):
                with _LiveBytes() as live:
                    received = sync.exchange_locally(plan, number)
                peak_bytes = max(peak_bytes, live.peak_bytes)
                for part, tensor in received:
                    num_parts += 1
                    full = files[part.name].to(tensor.dtype)
                    region = part.region
                    mine = full[region.first_row : region.end_row]
                    if full.dim() > 1:
                        mine = mine[:, region.first_column : region.end_column]
                    kept = part.is_fp8 and hash_part(part, tensor) == hash_part(part, mine)
                    if not (kept or torch.equal(tensor, mine)):
                        wrong.append(part.name)
                received = tensor = None  # before the next bucket
            mine = parts[receivers.index(groups.rank)] if groups.rank in receivers else []
            own = {(h.name, h.region) for h in holdings[groups.rank]}
            results.append(
                {
                    "wrong": wrong,
                    "num_parts": num_parts,
                    "num_expected": sum(map(len, mine)),
                    "received_bytes": received_bytes,
                    "least_bytes": element_bytes
                    * sum(
                        p.region.num_elements
                        - sum(
                            p.region.intersect(region).num_elements
                            for name, region in own
                            if name == p.name
                        )
                        for module in mine
                        for p in module
                    ),
                    "planned_bytes": plan.count_received_bytes(groups.rank),
                    "peak_bytes": peak_bytes,
                    "planned_peak_bytes": plan.find_peak_bytes(groups.rank),
                }
            )
        return results


class _LiveBytes(TorchDispatchMode):
    """Counts the memory of tensors that are made while it is entered, and still there."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self._bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor):
            addresses = {
                tensor.untyped_storage().data_ptr()
                for tensor in pytree.tree_leaves((args, kwargs))
                if isinstance(tensor, torch.Tensor)
            }
            if made.untyped_storage().data_ptr() not in addresses:
                size = made.untyped_storage().nbytes()
                self._bytes += size
                self.peak_bytes = max(self.peak_bytes, self._bytes)
                weakref.finalize(made, self._free, size)
        return made

    def _free(self, size: int) -> None:
        self._bytes -= size


def list_threads() -> list[str]:
    """Names of this process's threads, those of torch's libraries among them."""
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]


def sync_changes(config: Config, share: float) -> list[dict[str, Any]] | None:
    """Three updates of an engine of two ranks, which are threads of rank 0: all weights, what
    changed, and after the engine has lost its connection all of them again; then what changed.

    Args:
        share: of the elements, changed before each update.

    Returns:
        On rank 0 of every update: the version that it refers to, the bytes that the engine's ranks
        received, those of all its parts, and the names of tensors that are not the trainer's bit
        for bit.
    """
    with joined_world(config) as groups, pytest.MonkeyPatch.context() as patch:
        import torch.distributed as dist

        from megatron_stapo.reshard.weight_sync import WeightSync
        from megatron_stapo.rollout import weight_transfer
        from megatron_stapo.rollout.background import run_in_thread
        from megatron_stapo.rollout.weight_transfer import ConnectInfo, Receiver, parse_buckets
        from megatron_stapo.trainer.trainer import Trainer

        weights = Trainer(config, groups).weights
        dtype = getattr(torch, config.model.dtype)
        device = torch.device("cpu")
        received: list[torch.Tensor] = []
        exchange = weight_transfer.exchange

        class Engine:
            """Its two ranks."""

            def __init__(self) -> None:
                self.link: Any = None
                self.parts: list[dict[str, Any]] = []
                self.base_version: int | None = None

            def update_weights(self, update: Any, index: int) -> None:
                is_new = self.link is None
                if is_new:
                    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
                    info = ConnectInfo(
                        host="127.0.0.1",
                        port=store.port,
                        num_trainer_ranks=groups.world_size,
                        num_engine_ranks=2,
                    )
                    self.link = (info, store)
                    self.receivers: list[Any] = [None, None]
                    self.buckets = [parse_buckets(text) for text in update.format_schedules()]
                info, store = self.link
                self.base_version = None if is_new else update.base_version

                def receive(rank: int) -> dict[str, Any]:
                    if self.receivers[rank] is None:
                        group = info.connect(info.open_store(), groups.world_size + rank, device)
                        self.receivers[rank] = Receiver(group, self.buckets[rank], dtype, device)
                    return {
                        part.name: (part, tensor)
                        for parts in self.receivers[rank].receive(self.base_version)
                        for part, tensor in parts
                    }

                futures = [run_in_thread(lambda rank=rank: receive(rank)) for rank in (0, 1)]
                update.send(info, store if is_new else None)
                self.parts = [future.result() for future in futures]
                if update.is_probe:
                    update.hashes = [
                        {n: weight_transfer.hash_part(p, t) for n, (p, t) in of_rank.items()}
                        for of_rank in self.parts
                    ]

        def count(group: Any, sends: Any, receives: Any) -> None:
            received.extend(tensor for _, tensor in receives)
            exchange(group, sends, receives)

        patch.setattr(weight_transfer, "exchange", count)
        engine = Engine() if groups.rank == 0 else None
        sync = WeightSync(config, weights, engine, groups)  # type: ignore[arg-type]
        results = []
        names = sorted({h.parameter for h in sync._holdings[groups.rank]})
        for version in range(4):
            generator = torch.Generator().manual_seed(version)
            for name in names:
                parameter = weights.find_parameter(name).detach()
                changed = torch.rand(parameter.shape, generator=generator) < share
                parameter[changed] += 1
            if version == 2 and engine is not None:
                engine.link = None
            received.clear()
            error = sync.execute(version)
            assert error is None, error
            full = dict(weights.stream())
            if engine is None:
                continue
            wrong, num_bytes = [], 0
            for of_rank in engine.parts:
                for name, (part, tensor) in of_rank.items():
                    matrix = full[name] if full[name].dim() > 1 else full[name][:, None]
                    whole = weight_transfer.Region.whole(part.shape)
                    expected = whole.cut(matrix, part.region)
                    num_bytes += tensor.nbytes
                    if not torch.equal(tensor.reshape(expected.shape), expected):
                        wrong.append(name)
            results.append(
                {
                    "base_version": engine.base_version,
                    "received_bytes": sum(tensor.nbytes for tensor in received),
                    "all_bytes": num_bytes,
                    "wrong": wrong,
                }
            )
        return results if groups.rank == 0 else None
