"""Writes checkpoints beside training: stage, write in a thread, publish once every rank is done.

A save stops training only while each rank copies what it owns, 12 bytes for each of its parameters.
A thread writes the copy, waits for the disk and takes the checksums; the ranks look at the end of
every step whether all are done, and then rank 0 publishes. Writing is Megatron's distributed
checkpointing. Its own last part would hang the other ranks where rank 0's disk is full, so the
ranks agree on every outcome here.
"""

import io
import json
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

from megatron_stapo.checkpoint.folder import (
    AHEAD_FILE,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    HF_FOLDER,
    METRICS_FILE,
    STATE_FILE,
    DriverState,
    TrainerState,
    digest_file,
    format_state,
    list_checkpoints,
    name_checkpoint,
    name_partial,
    parse_step,
    prune,
    publish,
    read_versions,
    remove_partial,
    write_durably,
)
from megatron_stapo.checkpoint.rollouts import remove_rollouts
from megatron_stapo.checkpoint.state import (
    build_optimizer_state,
    build_random_states,
    read_optimizer_step,
)
from megatron_stapo.config import Config, to_dict
from megatron_stapo.model.hf_folder import list_companions
from megatron_stapo.parallel.groups import agree
from megatron_stapo.trainer.trainer import Trainer

_MAX_FAILURES = 3


@dataclass(kw_only=True)
class _Part:
    """What became of one rank's part of a checkpoint."""

    results: list[Any] = field(default_factory=list)
    """Megatron's, of where each tensor lies."""
    digests: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of the rank's files."""
    error: str | None = None


@dataclass(kw_only=True)
class _Save:
    """A checkpoint that is being written."""

    checkpoint: Path
    num_steps_done: int
    writer: Any
    """Megatron's, with this rank's plan."""
    global_metadata: Any
    """Rank 0's."""
    thread: threading.Thread
    part: _Part
    """The thread fills it."""
    stall_s: float
    start_s: float


class Checkpointer:
    """The checkpoints of one run. Every rank calls every method, at the same points."""

    def __init__(
        self,
        config: Config,
        trainer: Trainer,
        num_steps_done: int,
        read_driver: Callable[[], DriverState] | None,
        log_event: Callable[..., None] | None,
    ) -> None:
        """Remove what an earlier save has left unfinished.

        Args:
            num_steps_done: of the checkpoint that the run starts from; 0 without one.
            read_driver: rank 0's; None elsewhere.
            log_event: rank 0's `RunLog.log_event`; None elsewhere.
        """
        self._config = config
        self._trainer = trainer
        self._groups = trainer.groups
        self._run_dir = Path(config.run_dir)
        self._save: _Save | None = None
        self._num_steps_saved = num_steps_done
        self._num_failures = 0
        self._last_failure = ""
        self._read_driver = read_driver
        self._log_event = log_event
        if read_driver is not None:
            remove_partial(self._run_dir)

    def poll(self) -> None:
        """Publish what is written on every rank.

        Communicates and Raises: as `after_step`.
        """
        self._publish_if_written(wait=False)

    def after_step(self, num_steps_done: int) -> None:
        """Publish what is written, and begin the next checkpoint if it is due.

        Communicates: an all-reduce of an integer, and what a save or a publication takes.

        Raises:
            RuntimeError: the third save in a row has failed; on every rank.
        """
        self.poll()
        is_due = num_steps_done % self._config.checkpoint.interval_steps == 0
        if is_due or num_steps_done == self._config.num_steps or self._num_failures:
            self.save(num_steps_done)

    def save(self, num_steps_done: int) -> None:
        """Begin to write a checkpoint, after the one before it is published.

        Raises: as `after_step`.
        """
        self._publish_if_written(wait=True)
        if num_steps_done == self._num_steps_saved:
            return
        start_s = time.perf_counter()
        checkpoint = name_checkpoint(self._run_dir, num_steps_done)
        partial = name_partial(checkpoint)
        error = None
        if self._read_driver is not None:
            try:
                if partial.exists():
                    shutil.rmtree(partial)
                partial.mkdir(parents=True)
            except OSError as refused:
                error = f"{partial} cannot be made ({refused.strerror})"
        if error := agree(error, self._groups):
            self._take_failure(num_steps_done, error)
            return
        state: ShardedStateDict = {
            **build_optimizer_state(self._trainer),
            **build_random_states(self._groups, with_data=True),
        }
        for piece in state.values():
            if isinstance(piece.data, torch.Tensor):
                # Training goes on while the copy is written.
                piece.data = piece.data.detach().to("cpu", copy=True)
        # Megatron would start a server process for what its own writer process reports.
        filesystem_async._results_queue = queue.Queue()
        strategy = _PlanOnly()
        dist_checkpointing.save(
            state,
            str(partial),
            strategy,
            # It would gather every rank's keys, to check what an irregular grid leaves unchecked.
            validate_access_integrity=False,
            async_sharded_save=True,
            async_strategy="mcore",
        )
        part = _Part()
        files: dict[str, bytes] = {}
        if self._read_driver is not None:
            try:
                files = self._build_files(num_steps_done, self._read_driver())
            except OSError as refused:
                # The other ranks learn of it with the outcome of the writing.
                part.error = _explain(refused)
        thread = threading.Thread(target=_write, args=(strategy.writer, partial, files, part))
        thread.start()
        self._save = _Save(
            checkpoint=checkpoint,
            num_steps_done=num_steps_done,
            writer=strategy.writer,
            global_metadata=strategy.global_metadata,
            thread=thread,
            part=part,
            stall_s=time.perf_counter() - start_s,
            start_s=start_s,
        )

    def finish(self, num_steps_done: int = 0) -> str | None:
        """Wait until the last checkpoint is published.

        Args:
            num_steps_done: steps after which there should be one, which is written if it is not
                there; 0 leaves it at what has begun.

        Returns:
            Why it is not; on every rank.
        """
        try:
            if num_steps_done:
                self.save(num_steps_done)
            self._publish_if_written(wait=True)
        except RuntimeError as error:
            return str(error)
        if self._num_failures:
            return f"the last checkpoint was not written: {self._last_failure}"
        return None

    def _build_files(self, num_steps_done: int, driver: DriverState) -> dict[str, bytes]:
        """What rank 0 writes beside tensors, by file name."""
        trainer = self._trainer
        state = TrainerState(
            num_steps_done=num_steps_done,
            num_updates=trainer.num_updates,
            num_skipped_in_a_row=trainer.num_skipped_in_a_row,
            optimizer_step=read_optimizer_step(trainer),
            stream_position=driver.stream_position,
            dtype=self._config.model.dtype,
            world_size=self._groups.world_size,
            versions=read_versions(),
        )
        # So that an export needs nothing else.
        companions = list_companions(Path(self._config.model.path))
        ahead = {} if driver.rollouts_ahead is None else {AHEAD_FILE: driver.rollouts_ahead}
        return {
            **ahead,
            STATE_FILE: format_state(state),
            CONFIG_FILE: (json.dumps(to_dict(self._config), indent=2) + "\n").encode(),
            METRICS_FILE: driver.metrics,
            **{f"{HF_FOLDER}/{file.name}": file.read_bytes() for file in companions},
        }

    def _publish_if_written(self, *, wait: bool) -> None:
        save = self._save
        if save is None:
            return
        if not wait:
            is_writing = torch.tensor(int(save.thread.is_alive()), device=self._groups.device)
            dist.all_reduce(is_writing)
            if is_writing.item():
                return
        save.thread.join()
        self._save = None
        error = self._publish(save)
        if error:
            if self._groups.rank == 0:
                shutil.rmtree(name_partial(save.checkpoint), ignore_errors=True)
            self._take_failure(save.num_steps_done, error)
            return
        self._num_failures = 0
        self._num_steps_saved = save.num_steps_done
        if self._log_event is not None and self._read_driver is not None:
            self._remove_old(self._read_driver().accuracies)
            self._log_event(
                "checkpoint",
                after_steps=save.num_steps_done,
                stall_s=save.stall_s,
                seconds=time.perf_counter() - save.start_s,
            )

    def _remove_old(self, accuracies: dict[int, float]) -> None:
        """Args: accuracies as of now: the evaluation of this step may have ended since."""
        checkpoint = self._config.checkpoint
        try:
            prune(self._run_dir, checkpoint.keep_last, checkpoint.keep_best, accuracies)
            # The older ones that are kept may be gone on from, should the newest be damaged.
            oldest = list_checkpoints(self._run_dir)[-checkpoint.keep_last :][0]
            remove_rollouts(self._run_dir, parse_step(oldest) or 0)
        except OSError as error:
            assert self._log_event is not None
            self._log_event("not_removed", value=f"{error.filename}: {error.strerror}")

    def _publish(self, save: _Save) -> str | None:
        """Returns what failed, on any rank; None once the checkpoint is published."""
        parts: list[Any] = [None] * self._groups.world_size
        dist.all_gather_object(parts, save.part)
        for rank, part in enumerate(parts):
            if part.error:
                return f"rank {rank}: {part.error}"
        error = None
        if self._groups.rank == 0:
            partial = name_partial(save.checkpoint)
            try:
                save.writer.finish(save.global_metadata, [part.results for part in parts])
                save_config(CheckpointingConfig("torch_dist", 1), str(partial))
                digests = {name: d for part in parts for name, d in part.digests.items()}
                for name in (".metadata", "metadata.json"):
                    digests[name] = digest_file(partial / name)
                publish(partial, save.checkpoint, digests)
            except OSError as refused:
                error = f"{partial}: {refused.strerror}"
        return agree(error, self._groups)

    def _take_failure(self, num_steps_done: int, error: str) -> None:
        """Go on without this checkpoint: the next step tries again, and the last ones are there."""
        self._num_failures += 1
        self._last_failure = error
        if self._log_event is not None:
            self._log_event("checkpoint_failed", value=error, after_steps=num_steps_done)
        if self._num_failures == _MAX_FAILURES:
            raise RuntimeError(
                f"{_MAX_FAILURES} checkpoints in a row were not written, the last one because of "
                f"{error}. {self._run_dir / CHECKPOINTS_FOLDER} keeps the earlier ones; make room "
                "or repair the disk, and give the same command to go on from the newest."
            )


class _PlanOnly(TorchDistSaveShardedStrategy):
    """Megatron's plan of who writes what; writing and the end are ours."""

    writer: Any
    global_metadata: Any

    def _get_save_and_finalize_callbacks(
        self, writer: Any, save_state_dict_ret: Any, async_strategy: str
    ) -> AsyncRequest:
        self.writer = writer
        self.global_metadata = save_state_dict_ret[1]
        return AsyncRequest(None, (), [])


class _PlainBytes(io.BytesIO):
    """CPython 3.12's garbage collector crashes on a BytesIO's buffer that a failed write, here for
    want of room, leaves in the cycle of its traceback. The bytes themselves do as well."""

    def getbuffer(self) -> Any:
        """The content; not a view of it."""
        return self.getvalue()


def _write(writer: Any, partial: Path, files: dict[str, bytes], part: _Part) -> None:
    """Write this rank's part, wait for the disk, take the checksums. Runs in a thread."""
    if part.error:
        return
    try:
        transforms = [writer.transforms] if hasattr(writer, "transforms") else []
        for bucket in writer.write_buckets or ():
            _, _, (objects, _) = bucket
            objects[:] = [(item, _PlainBytes(data.getvalue())) for item, data in objects]
            _, outcome = writer.write_preloaded_data(
                transforms, 0, bucket, results_queue=None, count_queue=None, use_fsync=True
            )
            if isinstance(outcome, Exception):
                raise outcome
            part.results += outcome
        for name, content in files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            write_durably(partial / name, content)
        for name in [*(name for _, name, _ in writer.write_buckets or ()), *files]:
            part.digests[name] = digest_file(partial / name)
    except Exception as error:
        part.error = _explain(error)


def _explain(error: BaseException) -> str:
    """What the system said, if it is behind the error: torch's writer of archives raises one of its
    own about a position in the file where the disk is full."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return f"{cause.filename}: {cause.strerror}" if cause.filename else cause.strerror
        cause = cause.__cause__ or cause.__context__
    return repr(error)
