"""What rank 0 does beside training: it draws prompts, talks to the engines, judges, packs, logs.

Sampling and evaluating go on in a thread, since an engine that comes back while they do needs the
weights of all ranks. With rollout.max_lag_steps a step's sampling begins once the rollouts of the
step before are taken, so that it overlaps with their training.
"""

import concurrent.futures
import dataclasses
import hashlib
import math
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from megatron_stapo.algo.advantage import compute_group_advantages
from megatron_stapo.algo.overlong import compute_overlong_penalty
from megatron_stapo.checkpoint.folder import DriverState, TrainerState
from megatron_stapo.checkpoint.rollouts import (
    StepRollouts,
    format_rollouts,
    load_rollouts,
    name_rollouts,
    save_rollouts,
)
from megatron_stapo.checkpoint.stop import STOP_FILE, StopRequested, check_stop
from megatron_stapo.config import Config, DataConfig, from_dict, list_changes, to_dict
from megatron_stapo.data.packing import pack
from megatron_stapo.data.prompts import PromptStream, load_tokenizer, load_training_prompts
from megatron_stapo.evaluation.evaluate import evaluate_into, load_benchmarks
from megatron_stapo.evaluation.statistics import compute_average, compute_average_error
from megatron_stapo.observability import RunLog
from megatron_stapo.rewards.judge import Judge, Judgement, Pending, compute_judge_metrics
from megatron_stapo.rollout import Engine, SamplingRequest, SleepMemory
from megatron_stapo.types import Minibatch, Prompt, RolloutGroup, Sampling, Update

_POLL_S = 0.05
"""Between two looks for engines that have come back, or that sample when all ranks call them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncRequest:
    """Rank 0's wish that all ranks send their weights to engines."""

    policy_version: int
    """Number of completed steps of the weights."""
    engine_indices: list[int]


type Wish = SyncRequest | SamplingRequest
"""What rank 0 wants of all ranks while they wait for its answer."""


class Timer:
    """Where the wall-clock time of a step goes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        """By phase."""
        self.spans: list[tuple[str, float, float]] = []
        """Phase, begin and end, in seconds of the wall clock."""

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the block's time to the phase."""
        begin_s, start = time.time(), time.perf_counter()
        yield
        seconds = time.perf_counter() - start
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
        self.spans.append((phase, begin_s, begin_s + seconds))


class Driver:
    """What rank 0 does beside training: prompts to rewarded rollouts, and the log."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        run_log: RunLog,
        state: TrainerState | None = None,
        data: DataConfig | None = None,
    ) -> None:
        """Load the problems and the benchmarks.

        Args:
            state: of the checkpoint that the run goes on from.
            data: of the run that wrote it.

        Raises:
            ValueError: the problems cannot be used, or they are not those that the checkpoint's
                position counts.
        """
        self._config = config
        self._run_dir = Path(config.run_dir)
        self._engine = engine
        self._run_log = run_log
        self._tokenizer = load_tokenizer(config.model.path)
        self._sampling = Sampling(
            temperature=config.rollout.temperature,
            top_p=1.0,
            max_response_tokens=config.rollout.max_response_tokens,
        )
        prompts, report, num_overlong = load_training_prompts(
            config.data, config.reward.rule, config.rollout.num_prompts_per_step, config.model.path
        )
        run_log.log_event("training_problems", value=report.format(), num_overlong=num_overlong)
        self._stream = PromptStream(prompts, config.seed)
        self._prompts_digest = _digest(prompts)
        if state:
            self._stream.position = state.stream_position
            # Another source was asked for, with --changed; the same name promises the same prompts.
            if data == config.data and state.prompts_digest != self._prompts_digest:
                raise ValueError(
                    f"data.source={config.data.source}: holds other problems than when the run's "
                    f"last checkpoint was written, or the tokenizer of model.path="
                    f"{config.model.path} has changed. Restore them, or give the new problems "
                    "under another name, with --changed."
                )
        # Of the steps that were taken; the stream itself may be a step ahead.
        self._stream_position = self._stream.position
        self._rollouts: Future[tuple[StepRollouts, Timer]] | None = None
        self._evaluation: Future[None] | None = None
        self._rollouts_ahead: bytes | None = None
        self._sampling_timer = Timer()
        self._benchmarks = load_benchmarks(config)
        self._judge = Judge(config.reward, self._run_dir)
        self._rollout_metrics: dict[str, float] = {}
        self._sleep_metrics: dict[str, float | None] | None = None
        self._accuracies: dict[int, float] = {
            record["after_steps"]: record["value"]
            for record in run_log.read()
            if record.get("event") == "accuracy"
        }
        self._failure: Exception | None = None
        # Evaluations of weights that are not the run's any more: it goes on from earlier ones.
        for folder in self._run_dir.glob("evaluations/step_*"):
            if int(folder.name.removeprefix("step_")) > (state.num_steps_done if state else 0):
                shutil.rmtree(folder)

    def collect(self, step: int, timer: Timer) -> Wish | list[list[Minibatch]] | None:
        """Evaluate if it is due, then take the step's rollouts, which are sampled unless they were
        ahead.

        Args:
            step: counted from 1.

        Returns:
            Its mini-batches for every data-parallel rank; None where the run has to end. Or a wish,
            after which it is called again.
        """
        config = self._config
        try:
            if not self._is_busy():
                check_stop(self._run_dir)
            if request := self.evaluate(step - 1):
                return request
            if self._rollouts is None:
                self._rollouts = run_in_thread(lambda: self._sample_step(step))
            # Without a lag this thread's waiting is the other one's work, which that one measures.
            with timer("rollout") if config.rollout.max_lag_steps else nullcontext():
                if request := self._wait(self._rollouts, step - 1):
                    return request
            work, self._rollouts, self._rollouts_ahead = self._rollouts, None, None
            rollouts, self._sampling_timer = work.result()
            self._rollout_metrics = rollouts.metrics | self._measure_lag(rollouts.groups, step - 1)
        except Exception as error:
            # Not raised here: the other ranks wait for this one, and what they hold is saved first.
            self._failure = error
            return None
        self._stream_position = rollouts.stream_position
        if not config.rollout.max_lag_steps:
            timer.seconds |= self._sampling_timer.seconds
        elif step < config.num_steps:
            self._rollouts = run_in_thread(lambda: self._sample_step(step + 1))
        return pack(
            rollouts.groups,
            config.algorithm.num_prompts_per_minibatch,
            config.max_pack_tokens,
            config.parallel,
            config.algorithm.filter_truncated,
            config.precision.token_multiple,
        )

    def request_sync(self, num_steps_done: int, timer: Timer) -> Wish | None:
        """Ask for the weights' way to the engines that have others, after a step.

        What is sampled ahead comes to its end first: a step's responses have one policy version.

        Returns:
            A wish, after which it is called again; None once engines have the weights, or where
            none comes back, of which `collect` tells.
        """
        if self._rollouts is not None:
            with timer("rollout"):
                if request := self._wait(self._rollouts, num_steps_done):
                    return request
        deadline_s = time.monotonic() + self._config.rollout.start_timeout_s
        engine = self._engine
        with timer("sync"):
            while not (stale := engine.list_stale(num_steps_done)):
                is_served = engine.is_serving and engine.policy_version == num_steps_done
                if is_served or time.monotonic() > deadline_s:
                    return None
                if (self._run_dir / STOP_FILE).exists():
                    return None
                time.sleep(_POLL_S)
        return SyncRequest(policy_version=num_steps_done, engine_indices=stale)

    def _is_busy(self) -> bool:
        return any(work and not work.done() for work in (self._rollouts, self._evaluation))

    def _wait(self, work: "Future[Any]", num_steps_done: int) -> Wish | None:
        """Wait until the work is done; before, ask for what it needs of all ranks, be it the
        weights of an engine that is back, or that they sample.

        The trainer may have other weights than those that the work samples from. Then they are sent
        only where no engine is left that has those.
        """
        engine = self._engine
        while not work.done():
            if wish := engine.take_request():
                return wish
            others_serve = engine.is_serving and engine.policy_version != num_steps_done
            if not others_serve and (stale := engine.list_stale(num_steps_done)):
                return SyncRequest(policy_version=num_steps_done, engine_indices=stale)
            concurrent.futures.wait([work], timeout=_POLL_S)
        return None

    def _measure_lag(self, groups: Sequence[RolloutGroup], num_steps_done: int) -> dict[str, float]:
        """Steps from the weights that sampled a response to those that train on it: the mean over
        the responses, where there may be any.

        Raises:
            RuntimeError: a response is older than rollout.max_lag_steps allows.
        """
        lags = [num_steps_done - r.policy_version for group in groups for r in group.rollouts]
        limit = self._config.rollout.max_lag_steps
        if max(lags) > limit:
            raise RuntimeError(
                f"rollout.max_lag_steps={limit}: a response for step {num_steps_done + 1} was "
                f"sampled by the weights after {num_steps_done - max(lags)} steps."
            )
        return {"lag_mean": sum(lags) / len(lags)} if limit else {}

    def _load_rollouts(self, step: int) -> StepRollouts | None:
        """The step's rollouts of an attempt that ended before a checkpoint contained them."""
        try:
            rollouts = load_rollouts(name_rollouts(self._run_dir, step))
        except FileNotFoundError:
            return None
        except ValueError as error:
            self._run_log.log_event("rollouts_dropped", value=str(error))
            return None
        if changes := list_changes(from_dict(rollouts.config), self._config):
            self._run_log.log_event("rollouts_dropped", value="; ".join(changes), for_step=step)
            return None
        self._run_log.log_event("rollouts_taken_up", for_step=step)
        return rollouts

    def _sample_step(self, step: int) -> tuple[StepRollouts, Timer]:
        """The step's rollouts, of the disk or sampled now, and the time that it took."""
        timer = Timer()
        position = self._stream.position
        try:
            rollouts = self._load_rollouts(step) or self._sample_anew(step, timer)
        except BaseException:
            self._stream.position = position  # a step that is given up has drawn nothing
            raise
        self._stream.position = rollouts.stream_position
        return rollouts, timer

    def _sample_anew(self, step: int, timer: Timer) -> StepRollouts:
        """Draw prompts, sample and judge until the step is full; keep the result on disk."""
        config = self._config
        num_prompts = config.rollout.num_prompts_per_step
        num_rounds, kept = 0, []
        drawn: set[int] = set()
        judgements: list[Judgement] = []
        while len(kept) < num_prompts:
            if num_rounds == config.algorithm.max_sampling_rounds:
                raise RuntimeError(
                    f"algorithm.max_sampling_rounds={num_rounds}: the responses of only "
                    f"{len(kept)} of {num_prompts} groups are partly right; choose problems that "
                    "the model solves at times, or switch algorithm.dynamic_sampling off."
                )
            num_rounds += 1
            prompts = self._stream.next(num_prompts, drawn)
            drawn |= {prompt.prompt_id for prompt in prompts}
            groups, round_judgements = self._sample_and_judge(prompts, timer)
            judgements += round_judgements
            if config.algorithm.dynamic_sampling:
                # By correctness: a length penalty would make every group look informative.
                groups = [g for g in groups if len({r.is_correct for r in g.rollouts}) > 1]
            kept += groups
        del kept[num_prompts:]
        self._assign_advantages(kept)
        metrics = compute_rollout_metrics(kept) | compute_judge_metrics(judgements)
        if config.algorithm.dynamic_sampling:
            metrics["sampling_rounds"] = num_rounds
        rollouts = StepRollouts(
            groups=kept,
            metrics=metrics,
            stream_position=self._stream.position,
            config=to_dict(config),
        )
        with timer("reward"):
            try:
                save_rollouts(name_rollouts(self._run_dir, step), rollouts)
            except OSError as error:
                self._run_log.log_event("rollouts_not_kept", value=error.strerror)
        return rollouts

    def evaluate(self, num_steps_done: int) -> Wish | None:
        """Evaluate before the first step, after the last, and every interval_steps between.

        Returns:
            A wish, after which it is called again; None once it is done, or not due.
        """
        if self._evaluation is None:
            if not self._is_evaluation_due(num_steps_done):
                return None
            self._evaluation = run_in_thread(lambda: self._evaluate(num_steps_done))
        if request := self._wait(self._evaluation, num_steps_done):
            return request
        evaluation, self._evaluation = self._evaluation, None
        evaluation.result()
        return None

    def _is_evaluation_due(self, num_steps_done: int) -> bool:
        interval = self._config.evaluation.interval_steps
        if num_steps_done in self._accuracies or not self._benchmarks:
            return False
        return num_steps_done in (0, self._config.num_steps) or (
            interval is not None and num_steps_done % interval == 0
        )

    def _evaluate(self, num_steps_done: int) -> None:
        config = self._config
        self._run_log.log_event("evaluating", after_steps=num_steps_done)
        start = time.perf_counter()
        folder = self._run_dir / "evaluations" / f"step_{num_steps_done:06d}"
        folder.mkdir(parents=True, exist_ok=True)
        results = evaluate_into(
            folder,
            config,
            self._benchmarks,
            engine=self._engine,
            judge=self._judge,
            tokenizer=self._tokenizer,
        )
        self._accuracies[num_steps_done] = compute_average(results)
        self._run_log.log_event(
            "accuracy",
            value=self._accuracies[num_steps_done],
            standard_error=compute_average_error(results),
            after_steps=num_steps_done,
            benchmarks={r.benchmark: r.accuracy for r in results},
            seconds=time.perf_counter() - start,
        )

    def finish(self) -> Wish | None:
        """Evaluate after the last step. Returns: as `evaluate`."""
        try:
            if not self._is_busy():
                check_stop(self._run_dir)
            return self.evaluate(self._config.num_steps)
        except Exception as error:
            self._failure = error
            return None

    def note_sleep(self, memory: SleepMemory) -> None:
        """Log what the engines give to the trainer: with every step, and once as an event."""
        if self._sleep_metrics is None:
            if memory.freed_bytes is None:
                self._run_log.log_event(
                    "engine_stays_awake", value="vLLM does not sleep on a CPU; no memory is freed"
                )
            else:
                self._run_log.log_event("engine_asleep", **dataclasses.asdict(memory))
        self._sleep_metrics = {
            "engine_freed_bytes": memory.freed_bytes,
            "engine_held_bytes": memory.held_bytes,
        }

    def read_state(self) -> DriverState:
        """What a checkpoint holds of rank 0."""
        work = self._rollouts
        if work and work.done() and not work.exception() and self._rollouts_ahead is None:
            self._rollouts_ahead = format_rollouts(work.result()[0])
        return DriverState(
            stream_position=self._stream_position,
            prompts_digest=self._prompts_digest,
            metrics=self._run_log.read_bytes(),
            accuracies=dict(self._accuracies),
            rollouts_ahead=self._rollouts_ahead,
        )

    def describe_failure(self) -> str | None:
        """Why `collect` or `finish` gave up, with its traceback in the log; None where nothing has
        failed, or somebody has asked the run to stop."""
        if self._failure is None or isinstance(self._failure, StopRequested):
            return None
        traceback.print_exception(self._failure)
        return f"{self._failure}"

    def close(self) -> None:
        """End the verifiers."""
        self._judge.close()

    def log_step(
        self, step: int, metrics: dict[str, float], updates: Sequence[Update], timer: Timer
    ) -> None:
        """Write one step's line: loss and gradient norm are means over the updates that were taken,
        NaN where none was."""
        taken = [update for update in updates if not update.is_skipped]

        def mean(values: Iterable[float]) -> float:
            return sum(values) / len(taken) if taken else math.nan

        tokens_per_s = metrics["num_response_tokens"] / sum(timer.seconds.values())
        self._run_log.log_step(
            step,
            {
                **self._rollout_metrics,
                **(self._sleep_metrics or {}),
                **metrics,
                "loss": mean(update.loss for update in taken),
                "grad_norm": mean(update.grad_norm for update in taken),
                "lr": updates[-1].lr,
                "num_skipped_updates": len(updates) - len(taken),
                "tokens_per_s": tokens_per_s,
            },
            timer.seconds,
            {"engines": self._sampling_timer.spans, "trainer": timer.spans},
        )

    def _sample_and_judge(
        self, prompts: Sequence[Prompt], timer: Timer
    ) -> tuple[list[RolloutGroup], list[Judgement]]:
        """Sample a group per prompt, and set is_correct and reward of every rollout.

        A group is judged while others are still being sampled.
        """
        pending: dict[int, list[Pending]] = {}

        def submit(index: int, group: RolloutGroup) -> None:
            pending[index] = [
                self._judge.submit(
                    group.prompt.problem,
                    group.prompt.answer,
                    self._tokenizer.decode(rollout.token_ids, skip_special_tokens=True),
                    rollout.finish_reason == "length",
                )
                for rollout in group.rollouts
            ]

        with timer("rollout"):
            groups = self._engine.generate(
                prompts, self._config.rollout.group_size, self._sampling, submit
            )
        with timer("reward"):
            judgements = self._judge.settle(
                [p for index in range(len(groups)) for p in pending[index]]
            )
            rollouts = [rollout for group in groups for rollout in group.rollouts]
            for rollout, judgement in zip(rollouts, judgements, strict=True):
                rollout.is_correct = judgement.is_correct
                rollout.reward = 1.0 if judgement.is_correct else self._config.reward.wrong_reward
        return groups, judgements

    def _assign_advantages(self, groups: Sequence[RolloutGroup]) -> None:
        """Set every rollout's advantage from its group's rewards, after the length penalty."""
        algorithm, max_tokens = self._config.algorithm, self._config.rollout.max_response_tokens
        for group in groups:
            shaped = [
                r.reward
                + compute_overlong_penalty(
                    len(r.token_ids), max_tokens, algorithm.overlong_buffer_tokens
                )
                for r in group.rollouts
            ]
            advantages = compute_group_advantages(
                torch.tensor(shaped), divide_by_std=algorithm.advantage == "group_std"
            )
            for rollout, advantage in zip(group.rollouts, advantages.tolist(), strict=True):
                rollout.advantage = advantage


def _digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of prompts and answers, in their order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(repr((prompt.token_ids, prompt.answer)).encode())
    return digest.hexdigest()


def run_in_thread[T](work: Callable[[], T]) -> "Future[T]":
    """Start the work in a thread that does not keep the process from ending."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True, name="sampling").start()
    return future


def compute_rollout_metrics(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Means over the rollouts; zero_advantage_frac is the share of rollouts that cannot train."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]

    def mean(values: Iterator[float]) -> float:
        return sum(values) / len(rollouts)

    return {
        "reward_mean": mean(r.reward for r in rollouts),
        "accuracy": mean(bool(r.is_correct) for r in rollouts),
        "response_tokens_mean": mean(len(r.token_ids) for r in rollouts),
        "truncated_frac": mean(r.finish_reason == "length" for r in rollouts),
        "zero_advantage_frac": mean(r.advantage == 0 for r in rollouts),
    }
