"""What the client refuses. That it works is shown against a real server, in tests/integration."""

import copy
import json
import threading
import time

import pytest

from megatron_stapo.published_models import PUBLISHED
from megatron_stapo.rollout import compute_request_seed
from megatron_stapo.rollout.pool import EnginePool
from megatron_stapo.rollout.vllm_engine import VllmEngine, parse_choices
from megatron_stapo.types import Prompt, Sampling
from tests.rollout.fake_server import (
    GENERATE,
    STOP,
    FakeServer,
    answer_well,
    build_choice,
    build_update,
    serve,
)
from tests.workers import build_config

MAX_TOKENS = 3
SAMPLING = Sampling(temperature=1.0, top_p=1.0, max_response_tokens=MAX_TOKENS)
PROMPTS = [Prompt(prompt_id=i, problem="", answer="", token_ids=[5, 6]) for i in (7, 8)]


def parse(choices):
    return parse_choices(
        choices,
        num_samples=2,
        max_response_tokens=MAX_TOKENS,
        vocab_size=10,
        stop_token_ids=[STOP, 2],
        server_version="default",
        policy_version=4,
    )


def test_good_choices_become_rollouts():
    ended, cut = parse([build_choice(), build_choice(1, [4, 9, 8], "length")])
    assert ended.token_ids == [4, 9, STOP]
    assert ended.rollout_logprobs == [-0.5] * 3
    assert [ended.finish_reason, cut.finish_reason] == ["stop", "length"]
    assert ended.policy_version == cut.policy_version == 4


def drop_last_logprob(choice):
    choice["logprobs"]["content"].pop()


def swap_logprobs(choice):
    choice["logprobs"]["content"].reverse()


def set_logprob(value):
    def change(choice):
        choice["logprobs"]["content"][1]["logprob"] = value

    return change


def set_token(value):
    def change(choice):
        choice["token_ids"][1] = choice["logprobs"]["content"][1]["token_id"] = value

    return change


def set_field(field, value):
    def change(choice):
        choice[field] = value

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_last_logprob, "sample 1: logprobs: 2 entries do not belong to the 3 tokens"),
        (swap_logprobs, "sample 1: logprobs: 3 entries do not belong"),
        (set_logprob(-9999.0), "sample 1: logprobs: a value that is no log-probability"),
        (set_logprob(float("nan")), "no log-probability"),
        (set_logprob(0.1), "no log-probability"),
        (set_token(10), "sample 1: token_ids: an id outside the vocabulary of 10"),
        (set_token(-1), "outside the vocabulary"),
        (set_token(4.0), "outside the vocabulary"),
        (set_field("index", 0), "sample 1: index: 0"),
        (set_field("finish_reason", "abort"), "sample 1: finish_reason: 'abort'"),
        (set_field("finish_reason", "length"), "sample 1: token_ids: finish_reason is length"),
        (set_field("weight_versions", [{"version": "3"}]), "weight_versions: sampled by weights"),
        (set_field("weight_versions", []), "weight_versions"),
    ],
)
def test_a_malformed_sample_is_refused(change, message):
    choices = [build_choice(0), build_choice(1)]
    change(choices[1])
    with pytest.raises(ValueError, match=message):
        parse(choices)


@pytest.mark.parametrize(
    ("token_ids", "finish_reason", "message"),
    [
        ([4, 9], "stop", "not after a stop token"),
        ([], "stop", "not after a stop token"),
        ([4, 9], "length", "length after 2 of 3 tokens"),
        ([4, 9, 9, 9], "length", "length after 4 of 3 tokens"),
        ([4, 9, STOP], "length", "length after 3 of 3 tokens"),
    ],
)
def test_a_response_must_end_as_it_says(token_ids, finish_reason, message):
    with pytest.raises(ValueError, match=message):
        parse([build_choice(0, token_ids, finish_reason), build_choice(1)])


@pytest.mark.parametrize("field", ["token_ids", "logprobs", "finish_reason", "weight_versions"])
def test_a_missing_field_is_named(field):
    choices = [build_choice(0), build_choice(1)]
    del choices[0][field]
    with pytest.raises(KeyError, match=field):
        parse(choices)


def test_missing_samples_are_refused():
    with pytest.raises(ValueError, match="choices: 1 samples, 2 were asked for"):
        parse([build_choice()])


@pytest.fixture
def server():
    with serve(FakeServer()) as server:
        server.answers["/weight_info"] = lambda request: (200, b'{"weight_version": "default"}')
        yield server


def build_engine(tmp_path, url, **changes):
    (tmp_path / "config.json").write_text(json.dumps({**PUBLISHED["Qwen3-0.6B"], "vocab_size": 10}))
    config = build_config(
        tmp_path, **{"rollout__request_timeout_s": 1, "rollout__start_timeout_s": 1, **changes}
    )
    return EnginePool(config, [VllmEngine(config, url, [STOP, 2])])


@pytest.fixture
def engine(server, tmp_path):
    engine = build_engine(tmp_path, server.url)
    yield engine
    engine.close()


def generate(engine):
    return engine.generate(PROMPTS, 2, SAMPLING)


def test_groups_come_in_the_order_of_the_prompts_each_with_its_own_seed(server, engine):
    requests = []

    def answer(request):
        requests.append(copy.deepcopy(request))
        return answer_well(request)

    server.answers[GENERATE] = answer
    groups = generate(engine)
    assert [group.prompt for group in groups] == PROMPTS
    assert all(len(group.rollouts) == 2 for group in groups)
    assert len({request["sampling_params"]["seed"] for request in requests}) == 2


def test_a_group_is_told_while_others_are_sampled(server, engine):
    first_is_told = threading.Event()
    told = []

    def answer(request):
        if request["sampling_params"]["seed"] == seed:
            assert first_is_told.wait(timeout=10)
        return answer_well(request)

    def tell(index, group):
        told.append((index, group))
        first_is_told.set()

    # The first prompt's answer is held back until the second's has been told.
    seed = compute_request_seed(0, 0, PROMPTS[0].prompt_id)
    server.answers[GENERATE] = answer
    groups = engine.generate(PROMPTS, 2, SAMPLING, tell)
    assert [index for index, _ in told] == [1, 0]
    assert all(group is groups[index] for index, group in told)


def test_the_sampling_is_passed_on(server, engine):
    requests = []

    def answer(request):
        requests.append(request["sampling_params"])
        return answer_well(request)

    server.answers[GENERATE] = answer
    engine.generate(PROMPTS, 2, Sampling(temperature=0.7, top_p=0.9, max_response_tokens=3))
    for request in requests:
        assert (request["temperature"], request["top_p"], request["max_tokens"]) == (0.7, 0.9, 3)


def test_a_server_that_never_starts_is_an_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"did not answer within rollout.start_timeout_s=0.3"):
        # Nothing listens on the discard port.
        build_engine(tmp_path, "http://127.0.0.1:9", rollout__start_timeout_s=0.3)


def test_a_loading_server_is_waited_for(server, tmp_path):
    calls = []

    def answer(request):
        calls.append(time.monotonic())
        return (200 if len(calls) > 2 else 503), b""

    server.answers["/health"] = answer
    build_engine(tmp_path, server.url)
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((500, b"EngineDeadError"), "refused .* during generate: HTTP 500, EngineDeadError"),
        ((None, b""), "stopped answering during generate: .*see its log"),
        ((200, b"<html>"), "stopped answering during generate: .*no JSON"),
        ((200, b"[]"), "malformed answer during generate: prompt [78]"),
        ((200, b"{}"), "malformed answer during generate: prompt [78]: KeyError"),
        ((200, b'{"choices": []}'), "malformed answer during generate: prompt [78]: .*0 samples"),
    ],
)
def test_generate_fails_loudly(server, engine, answer, message):
    server.answers[GENERATE] = lambda request: answer
    with pytest.raises(RuntimeError, match=message):
        generate(engine)


def test_a_hanging_server_is_an_error_after_the_time_out(server, engine):
    server.answers[GENERATE] = lambda request: (200 if server.closing.wait(20) else None, b"")
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="stopped answering during generate: TimeoutError"):
        generate(engine)
    assert time.monotonic() - start < 10


def test_a_server_that_lost_its_model_is_an_error_though_it_leaves_calls_open(server, tmp_path):
    engine = build_engine(tmp_path, server.url, rollout__request_timeout_s=60)
    server.answers[GENERATE] = lambda request: (200 if server.closing.wait(20) else None, b"")
    server.answers["/health"] = lambda request: (503, b"EngineDeadError")
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="does not answer that it is well"):
        generate(engine)
    assert time.monotonic() - start < 10


def test_no_prompts_are_no_groups(engine):
    assert engine.generate([], 2, SAMPLING) == []


def test_a_server_that_is_gone_is_an_error(server, engine):
    server.shutdown()
    server.server_close()
    with pytest.raises(RuntimeError, match="stopped answering during generate"):
        generate(engine)


@pytest.mark.parametrize(
    "path",
    [
        "/pause",
        "/init_weight_transfer_engine",
        "/start_weight_update",
        "/update_weights",
        "/finish_weight_update",
    ],
)
def test_a_refused_update_is_an_error_at_once(server, engine, path):
    server.answers[path] = lambda request: (500, b"no such tensor")
    start = time.monotonic()
    with pytest.raises(RuntimeError, match=f"refused {path} during .*no such tensor"):
        engine.update_weights(build_update(1))
    assert time.monotonic() - start < 5


def test_what_the_server_says_comes_before_what_broke(server, engine):
    def send(connect_info, store):
        raise RuntimeError("connection closed by peer")

    with pytest.raises(RuntimeError, match="connection closed by peer"):
        engine.update_weights(build_update(1, send))
    server.answers["/update_weights"] = lambda request: (500, b"no such tensor")
    with pytest.raises(RuntimeError, match="no such tensor"):
        engine.update_weights(build_update(1, send))


def test_the_ranks_connect_once(server, engine):
    stores = []
    update = build_update(1, lambda connect_info, store: stores.append(store))
    for _ in range(2):
        engine.update_weights(update)
    assert stores[0] is not None and stores[1] is None
    assert stores[0].get("schedule/0") == b"[]"
