"""What rank 0 does before the trainer: drawing, judging, filtering, with known responses."""

import dataclasses
import json
import shutil
import threading
import time

import pytest
from transformers import AutoTokenizer

from megatron_stapo.checkpoint.folder import AHEAD_FILE, TrainerState
from megatron_stapo.checkpoint.rollouts import restore_ahead
from megatron_stapo.config import RewardConfig
from megatron_stapo.driver import Driver, Timer
from megatron_stapo.observability import RunLog
from megatron_stapo.types import Rollout, RolloutGroup
from tests.workers import build_config

MAX_TOKENS = 30


class ScriptedEngine:
    """Odd problems: every response is right, of unlike lengths. Even ones: one of four is right."""

    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.drawn = []
        self.policy_version = 0
        self.is_serving = True
        self.gate = threading.Event()
        self.gate.set()

    def list_stale(self, policy_version):
        return [] if policy_version == self.policy_version else [0]

    def take_request(self):
        return None

    def generate(self, prompts, num_samples, sampling, on_group=None):
        assert sampling.max_response_tokens == MAX_TOKENS and sampling.top_p == 1.0
        groups = []
        for prompt in prompts:
            assert self.gate.wait(timeout=20)
            self.drawn.append(prompt.prompt_id)
            rollouts = []
            for number in range(num_samples):
                is_right = prompt.prompt_id % 2 == 1 or number == 0
                answer = prompt.answer if is_right else "0"
                text = "." * (4 * number) + rf"\boxed{{{answer}}}"
                token_ids = [*self._tokenizer.encode(text), 2]
                rollouts.append(
                    Rollout(
                        token_ids=token_ids,
                        rollout_logprobs=[-0.5] * len(token_ids),
                        finish_reason="stop",
                        policy_version=self.policy_version,
                    )
                )
            groups.append(RolloutGroup(prompt=prompt, rollouts=rollouts))
        # In another order than asked, as an engine that batches does.
        for index in reversed(range(len(groups))):
            on_group(index, groups[index])
        return groups

    def close(self):
        pass


@pytest.fixture
def build_driver(tmp_path, tokenizer_folder):
    source = tmp_path / "train.jsonl"
    rows = [{"problem": f"P{i}", "answer": str(i + 1)} for i in range(8)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    open_things = []

    def build(num_prompts, state=None, **changes):
        config = build_config(
            tokenizer_folder,
            data__source=str(source),
            data__prompt_suffix="",
            data__max_prompt_tokens=60,
            rollout__num_prompts_per_step=num_prompts,
            algorithm__num_prompts_per_minibatch=num_prompts,
            rollout__max_response_tokens=MAX_TOKENS,
            **changes,
        )
        config = dataclasses.replace(
            config,
            num_steps=4,
            run_dir=str(tmp_path),
            reward=RewardConfig(num_workers=1, wrong_reward=0.0),
        )
        run_log = RunLog(tmp_path)
        engine = ScriptedEngine(AutoTokenizer.from_pretrained(tokenizer_folder))
        driver = Driver(config, engine, run_log, state, config.data)
        open_things.extend([driver, run_log])
        return driver, engine

    yield build
    for thing in open_things:
        thing.close()


def collect(driver, step):
    """As the loop does: the engine gets the weights that it is said to lack."""
    while request := driver.request_sync(step - 1, Timer()):
        assert request.engine_indices == [0]
        driver._engine.policy_version = request.policy_version
    return driver.collect(step, Timer())


def build_state(driver):
    """Of a checkpoint after the first step."""
    state = driver.read_state()
    return TrainerState(
        num_steps_done=1,
        num_updates=1,
        num_skipped_in_a_row=0,
        optimizer_step=1,
        stream_position=state.stream_position,
        prompts_digest=state.prompts_digest,
        dtype="float32",
        world_size=1,
        versions={},
    )


def test_a_run_goes_on_with_the_problems_that_its_position_counts(build_driver):
    driver, _ = build_driver(4)
    collect(driver, 1)
    state = build_state(driver)
    resumed, _ = build_driver(4, state)
    assert resumed.read_state().stream_position == state.stream_position == 4
    with pytest.raises(ValueError, match=r"data\.source=.*holds other problems than when"):
        build_driver(4, dataclasses.replace(state, prompts_digest="of others"))


def list_advantages(minibatches):
    """Of every sequence of a step, in the order of prompt and sample."""
    by_sequence = {}
    for [minibatch] in minibatches:
        for m in minibatch.microbatches:
            for number in set(m.sequence_ids_T.tolist()) - {-1}:
                mask = (m.sequence_ids_T == number) & m.response_mask_T
                (by_sequence[number],) = set(m.advantages_T[mask].tolist())
    return [by_sequence[number] for number in sorted(by_sequence)]


def test_a_length_penalty_changes_advantages_and_no_filter(build_driver):
    driver, engine = build_driver(
        4,
        algorithm__dynamic_sampling=True,
        algorithm__overlong_buffer_tokens=20,
        algorithm__max_sampling_rounds=4,
    )
    advantages = list_advantages(collect(driver, 1))
    # Only even problems inform, whatever the penalty makes of the odd ones' rewards.
    # All four are needed, and no problem is drawn twice.
    assert sorted(engine.drawn) == list(range(8))
    metrics = driver._rollout_metrics
    assert metrics["accuracy"] == 0.25
    assert metrics["reward_mean"] == 0.25  # 0 or 1, before the penalty
    assert len(advantages) == 16
    # The right one leads; of the wrong ones the longer loses more.
    for group in (advantages[i : i + 4] for i in range(0, 16, 4)):
        assert group[0] > 0 > group[3] and group[1] >= group[2] > group[3]


def test_every_response_gets_its_own_verdict_and_the_odd_ones_are_counted(build_driver):
    driver, engine = build_driver(2)
    seen = []
    for step in range(1, 5):
        advantages = list_advantages(collect(driver, step))
        for place, problem in enumerate(engine.drawn[-2:]):
            group = advantages[4 * place : 4 * place + 4]
            if problem % 2:
                assert group == [0.0] * 4
            else:
                # One of four is right: (1 - 1/4) / std with n - 1 = 3.
                assert group == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)
            seen.append(problem)
        assert driver._rollout_metrics["num_verifier_timeouts"] == 0
    assert sorted(seen) == list(range(8))


def test_a_step_that_is_given_up_has_drawn_nothing(build_driver):
    driver, engine = build_driver(2)
    collect(driver, 1)
    before = driver.read_state().stream_position
    sample, engine.generate = engine.generate, lambda *args: 1 / 0
    assert collect(driver, 2) is None
    assert driver.describe_failure() == "division by zero"
    assert driver.read_state().stream_position == before == 2
    engine.generate = sample
    expected = list(engine.drawn)
    assert collect(driver, 2) is not None
    assert len(set(engine.drawn) - set(expected)) == 2


def test_kept_rollouts_take_the_place_of_sampling(build_driver, tmp_path):
    driver, _ = build_driver(2)
    first = list_advantages(collect(driver, 1))
    metrics = dict(driver._rollout_metrics)
    again, other_engine = build_driver(2)
    assert list_advantages(collect(again, 1)) == first
    assert other_engine.drawn == [] and again._rollout_metrics == metrics
    assert again.read_state().stream_position == driver.read_state().stream_position
    # Of another experiment they are not its own; a damaged file is none.
    other, other_engine = build_driver(2, rollout__temperature=0.5)
    collect(other, 1)
    assert len(other_engine.drawn) == 2
    [file] = (tmp_path / "rollouts").iterdir()
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    last, last_engine = build_driver(2, rollout__temperature=0.5)
    collect(last, 1)
    assert len(last_engine.drawn) == 2


def test_a_step_is_sampled_ahead_by_the_weights_before_and_a_checkpoint_holds_it(
    build_driver, tmp_path
):
    driver, engine = build_driver(2, rollout__max_lag_steps=1)
    collect(driver, 1)
    assert driver._rollout_metrics["lag_mean"] == 0
    # The second step is sampled without being asked for, and before weights are.
    assert driver.request_sync(1, Timer()) is not None
    assert len(engine.drawn) == 4 and engine.policy_version == 0
    state, trainer_state = driver.read_state(), build_state(driver)
    assert state.stream_position == 2  # of the first step: the second may be lost
    straight = list_advantages(collect(driver, 2))
    assert driver._rollout_metrics["lag_mean"] == 1
    driver.request_sync(2, Timer())
    # A run that goes on from there takes them up, although nothing else is kept.
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / AHEAD_FILE).write_bytes(state.rollouts_ahead)
    shutil.rmtree(tmp_path / "rollouts")
    restore_ahead(tmp_path, checkpoint, 1)
    resumed, other_engine = build_driver(2, trainer_state, rollout__max_lag_steps=1)
    assert list_advantages(collect(resumed, 2)) == straight
    assert resumed._rollout_metrics["lag_mean"] == 1
    resumed.request_sync(2, Timer())
    assert other_engine.drawn == engine.drawn[4:6]  # the third step's, ahead
    assert resumed.read_state().stream_position == driver.read_state().stream_position == 4


def test_a_sync_waits_for_what_is_sampled_ahead_unless_no_engine_is_left(build_driver):
    driver, engine = build_driver(2, rollout__max_lag_steps=1)
    collect(driver, 1)
    assert driver.request_sync(1, Timer()) is not None  # step 2 is there
    engine.gate.clear()
    assert collect(driver, 2) is not None
    # Step 3 hangs half-way, while step 2 has trained; its engine still serves.
    asked = []
    thread = threading.Thread(target=lambda: asked.append(driver.request_sync(2, Timer())))
    thread.start()
    time.sleep(0.5)
    assert asked == []
    engine.is_serving = False
    thread.join(timeout=20)
    [request] = asked
    assert (request.policy_version, request.engine_indices) == (2, [0])
    engine.policy_version, engine.is_serving = 2, True
    engine.gate.set()
    assert driver.request_sync(2, Timer()) is None
    collect(driver, 3)
    assert driver._rollout_metrics["lag_mean"] == 0  # sampled by the newer weights


def test_responses_older_than_the_lag_allows_end_the_run(build_driver):
    driver, engine = build_driver(2)
    engine.list_stale = lambda policy_version: []
    assert driver.collect(2, Timer()) is None
    assert "rollout.max_lag_steps=0: a response for step 2 was sampled by the weights after 0" in (
        driver.describe_failure()
    )
