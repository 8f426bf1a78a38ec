"""The pool with servers that answer, die and come back; the real ones: tests/integration."""

import json
import threading
import time
from collections import Counter
from contextlib import ExitStack
from itertools import pairwise

import pytest

from megatron_stapo.published_models import PUBLISHED
from megatron_stapo.rollout import EngineDiedError, compute_request_seed
from megatron_stapo.rollout.pool import EnginePool
from megatron_stapo.rollout.vllm_engine import VllmEngine
from megatron_stapo.types import Prompt, Sampling
from tests.rollout.fake_server import (
    GENERATE,
    STOP,
    FakeServer,
    build_choice,
    build_update,
    serve,
)
from tests.workers import build_config

SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_response_tokens=3)
PROMPTS = [Prompt(prompt_id=i, problem="", answer="", token_ids=[5, 6]) for i in range(8)]
NUM_SAMPLES = 2


class Server(FakeServer):
    """Samples tokens that are a function of the seed alone, with the weights that it was given."""

    def __init__(self, port=0):
        super().__init__(port)
        self.version = "default"
        self.seeds = []
        self.gate = threading.Event()
        self.gate.set()
        self.answers[GENERATE] = self.sample
        self.answers["/weight_info"] = lambda request: (
            200,
            json.dumps({"weight_version": self.version}).encode(),
        )
        self.answers["/finish_weight_update"] = self.finish

    def sample(self, request):
        version = self.version
        seed = request["sampling_params"]["seed"]
        self.seeds.append(seed)
        while not self.gate.wait(0.02):
            if self.closing.is_set():
                return None, b""
        choices = [
            build_choice(i, (2 + (seed + i) % 8, STOP), version=version)
            for i in range(request["sampling_params"]["n"])
        ]
        return 200, json.dumps({"choices": choices}).encode()

    def finish(self, request):
        self.version = request["weight_version"]
        return 200, b"{}"


class Servers:
    """Real HTTP servers on ports that a server keeps over its deaths."""

    def __init__(self, stack):
        self._stack = stack
        self._lives = []
        self.running = []

    def start(self):
        self.running.append(None)
        self.restart(len(self.running) - 1)

    def restart(self, index):
        port = self._lives[index][0] if index < len(self._lives) else 0
        life = ExitStack()
        server = life.enter_context(serve(Server(port)))
        self._stack.callback(life.close)
        self._lives[index : index + 1] = [(server.server_address[1], life)]
        self.running[index] = server

    def kill(self, index):
        self._lives[index][1].close()


@pytest.fixture
def build_pool(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["Qwen3-0.6B"], "vocab_size": 10}))
    with ExitStack() as stack:

        def build(num_engines, **changes):
            servers = Servers(stack)
            for _ in range(num_engines):
                servers.start()
            config = build_config(
                tmp_path,
                **{
                    "rollout__num_engines": num_engines,
                    "rollout__request_timeout_s": 30,
                    "rollout__start_timeout_s": 30,
                    "rollout__health_timeout_s": 2,
                    **changes,
                },
            )
            engines = [VllmEngine(config, server.url, [STOP]) for server in servers.running]
            events = []
            pool = EnginePool(
                config, engines, log_event=lambda name, **values: events.append((name, values))
            )
            stack.callback(pool.close)
            return pool, servers, events

        yield build


def expect(policy_version=0):
    """What every prompt's samples are, on whichever server."""
    seeds = [compute_request_seed(0, policy_version, p.prompt_id) for p in PROMPTS]
    return [[[2 + (seed + i) % 8, STOP] for i in range(NUM_SAMPLES)] for seed in seeds]


def list_tokens(groups):
    return [[rollout.token_ids for rollout in group.rollouts] for group in groups]


class Call(threading.Thread):
    """generate in a thread, as the driver calls it."""

    def __init__(self, pool):
        super().__init__()
        self._pool = pool
        self.told = Counter()
        self.groups = self.error = None
        self.start()

    def run(self):
        try:
            self.groups = self._pool.generate(
                PROMPTS, NUM_SAMPLES, SAMPLING, lambda index, group: self.told.update([index])
            )
        except Exception as error:
            self.error = error

    def finish(self):
        self.join(timeout=30)
        assert not self.is_alive()
        if self.error:
            raise self.error
        return self.groups


def wait_until(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_requests_go_to_the_least_loaded_and_results_do_not_tell_where(build_pool):
    pool, servers, events = build_pool(3)
    servers.running[1].gate.clear()
    call = Call(pool)
    # At first all are free, so that each gets its share; then the slow one gets nothing new.
    wait_until(lambda: sum(call.told.values()) == 5)
    assert [len(server.seeds) for server in servers.running] == [3, 3, 2]
    servers.running[1].gate.set()
    groups = call.finish()
    assert list_tokens(groups) == expect()
    assert [group.prompt for group in groups] == PROMPTS
    assert call.told == dict.fromkeys(range(8), 1)
    assert events == []


def test_what_does_not_fit_waits_for_the_engine_that_is_done_first(build_pool):
    # A server holds two requests of two samples at a time; the slow one keeps its two.
    pool, servers, _ = build_pool(2, rollout__group_size=2, rollout__max_num_seqs=2)
    servers.running[0].gate.clear()
    call = Call(pool)
    wait_until(lambda: sum(call.told.values()) == 6)
    assert [len(server.seeds) for server in servers.running] == [2, 6]
    servers.running[0].gate.set()
    assert list_tokens(call.finish()) == expect()


def test_a_dead_engines_requests_are_sent_again_and_none_is_lost_or_counted_twice(build_pool):
    pool, servers, events = build_pool(2)
    for server in servers.running:
        server.gate.clear()
    call = Call(pool)
    wait_until(lambda: all(len(server.seeds) == 4 for server in servers.running))
    servers.kill(0)
    wait_until(lambda: events)
    servers.running[1].gate.set()
    groups = call.finish()
    assert list_tokens(groups) == expect()
    assert call.told == dict.fromkeys(range(8), 1)
    assert Counter(servers.running[1].seeds) == Counter(
        compute_request_seed(0, 0, p.prompt_id) for p in PROMPTS
    )
    [(name, values)] = events
    assert (name, values["index"], values["num_requests_resent"]) == ("engine_died", 0, 4)


def test_the_last_engines_restart_is_waited_for(build_pool):
    pool, servers, events = build_pool(1)
    servers.running[0].gate.clear()
    call = Call(pool)
    wait_until(lambda: servers.running[0].seeds)
    servers.kill(0)
    wait_until(lambda: events)
    assert not pool.is_serving
    servers.restart(0)
    assert list_tokens(call.finish()) == expect()
    assert [name for name, _ in events] == ["engine_died", "engine_restarted"]


def test_an_engine_that_never_comes_back_is_an_error_that_says_of_what_it_died(build_pool):
    pool, servers, _ = build_pool(1, rollout__start_timeout_s=0.5)
    servers.kill(0)
    with pytest.raises(RuntimeError, match=r"start_timeout_s=0.5 .*stopped answering during gen"):
        Call(pool).finish()


def test_a_restarted_engine_gets_no_request_before_the_weights(build_pool, monkeypatch):
    pool, servers, events = build_pool(2)
    monkeypatch.setattr(VllmEngine, "_open_link", lambda engine, update: (None, None))
    for index in range(2):
        pool.update_weights(build_update(3), index)
    assert list_tokens(pool.generate(PROMPTS, NUM_SAMPLES, SAMPLING)) == expect(3)
    servers.kill(0)
    wait_until(lambda: events)
    servers.restart(0)
    wait_until(lambda: pool.list_stale(3) == [0])
    assert events[-1] == ("engine_restarted", {"index": 0, "policy_version": 0})
    groups = pool.generate(PROMPTS, NUM_SAMPLES, SAMPLING)
    assert list_tokens(groups) == expect(3) and servers.running[0].seeds == []
    # While the other is busy, the new one gets the weights, and then its share.
    servers.running[1].gate.clear()
    call = Call(pool)
    pool.update_weights(build_update(3), 0)
    servers.running[1].gate.set()
    call.finish()
    assert pool.list_stale(3) == []
    assert list_tokens(pool.generate(PROMPTS, NUM_SAMPLES, SAMPLING)) == expect(3)
    assert servers.running[0].seeds
    assert {r.policy_version for g in call.groups for r in g.rollouts} == {3}


def test_a_restart_that_nobody_saw_is_noticed_by_the_weights_version(build_pool, monkeypatch):
    pool, servers, events = build_pool(2)
    monkeypatch.setattr(VllmEngine, "_open_link", lambda engine, update: (None, None))
    for index in range(2):
        pool.update_weights(build_update(1), index)
    # The same process answers again: it has its weights, and serves on without an update.
    servers.running[0].answers["/health"] = lambda request: (503, b"")
    wait_until(lambda: events)
    servers.running[0].answers["/health"] = lambda request: (200, b"")
    wait_until(lambda: len(events) == 2)
    assert [name for name, _ in events] == ["engine_died", "engine_back"]
    assert pool.list_stale(1) == []
    events.clear()
    servers.running[0].version = "default"
    assert list_tokens(pool.generate(PROMPTS, NUM_SAMPLES, SAMPLING)) == expect(1)
    assert events[0][0] == "engine_died" and "was started again" in events[0][1]["value"]
    wait_until(lambda: pool.list_stale(1) == [0])


def test_an_engine_that_dies_in_an_update_is_told_from_one_that_refuses(build_pool, monkeypatch):
    pool, servers, events = build_pool(2)
    monkeypatch.setattr(VllmEngine, "_open_link", lambda engine, update: (None, None))
    servers.running[1].answers["/start_weight_update"] = lambda request: (500, b"no such tensor")
    with pytest.raises(RuntimeError, match="no such tensor") as refused:
        pool.update_weights(build_update(1), 1)
    assert not isinstance(refused.value, EngineDiedError)
    servers.running[0].answers["/health"] = lambda request: (503, b"EngineDeadError")
    servers.running[0].answers["/start_weight_update"] = lambda request: (500, b"EngineDeadError")
    with pytest.raises(EngineDiedError, match="EngineDeadError"):
        pool.update_weights(build_update(1), 0)
    assert [(name, values["index"]) for name, values in events] == [("engine_died", 0)]


def test_a_hanging_engine_counts_as_dead(build_pool):
    pool, servers, events = build_pool(2, rollout__health_timeout_s=0.5)
    servers.running[0].gate.clear()
    servers.running[0].answers["/health"] = lambda request: (
        200 if servers.running[0].closing.wait(20) else None,
        b"",
    )
    assert list_tokens(Call(pool).finish()) == expect()
    assert [(n, v["index"], v["num_requests_resent"]) for n, v in events] == [("engine_died", 0, 4)]


def test_a_request_that_engines_die_of_ends_the_run(build_pool):
    pool, servers, _ = build_pool(1)
    servers.running[0].answers[GENERATE] = lambda request: (None, b"")
    with pytest.raises(RuntimeError, match=r"prompt \d was sent 5 times, and no engine lived"):
        Call(pool).finish()


def test_who_may_abandon_the_call_is_told_whether_it_can_end(build_pool):
    pool, servers, _ = build_pool(1)
    servers.running[0].gate.clear()
    told = []
    pool._on_wait = told.append
    call = Call(pool)
    wait_until(lambda: servers.running[0].seeds)
    servers.kill(0)
    wait_until(lambda: told[-1] is False)
    servers.restart(0)
    assert list_tokens(call.finish()) == expect()
    assert told[0] is True and told[-1] is True


def test_giving_up_closes_the_requests(build_pool, tmp_path):
    pool, servers, _ = build_pool(1)
    servers.running[0].gate.clear()
    calls = []

    def stop(can_end):
        assert can_end
        calls.append(time.monotonic())
        if servers.running[0].seeds:
            raise InterruptedError

    pool._on_wait = stop
    with pytest.raises(InterruptedError):
        pool.generate(PROMPTS, NUM_SAMPLES, SAMPLING)
    pool._on_wait = lambda can_end: None
    servers.running[0].gate.set()
    assert list_tokens(pool.generate(PROMPTS, NUM_SAMPLES, SAMPLING)) == expect()
    assert all(later - earlier < 1 for earlier, later in pairwise(calls))
