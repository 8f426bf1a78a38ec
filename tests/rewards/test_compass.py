"""The client against real servers: aiohttp's in this process, and vLLM's with a trained model."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from aiohttp import web

from megatron_stapo.rewards.compass import (
    MAX_REPLY_TOKENS,
    MAX_RESPONSE_CHARS,
    TEMPLATE,
    CompassVerifier,
    JudgeRequest,
    build_prompt,
    load_template,
    read_verdict,
)


class Server:
    """Replies to each response as `replies` says; keeps the requests."""

    def __init__(self):
        self.replies = {}
        self.bodies = []
        self.num_active = self.max_active = 0
        self.delay_s = 0.0
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(ready)))
        self._thread.start()
        assert ready.wait(10)

    async def _serve(self, ready):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=1 << 24)
        app.router.add_post("/v1/chat/completions", self._reply)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _reply(self, request):
        body = await request.json()
        self.bodies.append(body)
        self.num_active += 1
        self.max_active = max(self.max_active, self.num_active)
        await asyncio.sleep(self.delay_s)
        self.num_active -= 1
        prompt = body["messages"][0]["content"]
        reply = next(reply for text, reply in self.replies.items() if f"\n{text}\n<Cand" in prompt)
        if reply == "hang":
            await self._stop.wait()
        if isinstance(reply, web.Response):
            # A response object serves once.
            return web.Response(status=reply.status, text=reply.text)
        return web.json_response({"choices": [{"message": {"content": reply}}]})

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


@pytest.fixture
def server():
    server = Server()
    yield server
    server.close()


def build_request(response, question="What is 1 + 1?", gold="2"):
    return JudgeRequest(question=question, gold=gold, response=response)


def test_a_request_holds_question_truth_and_response_and_is_greedy(server):
    server.replies = {"two {}": "A"}
    verifier = CompassVerifier(server.url, "some/model", None)
    assert verifier.judge([build_request("two {}", gold="\\frac{4}{2}")]) == ["correct"]
    (body,) = server.bodies
    assert (body["model"], body["temperature"]) == ("some/model", 0)
    assert body["max_tokens"] == MAX_REPLY_TOKENS
    (message,) = body["messages"]
    assert message["role"] == "user"
    for part in ("Begin>:\nWhat is 1 + 1?\n<", "Begin>:\n\\frac{4}{2}\n<", ":\ntwo {}\n<"):
        assert part in message["content"]
    assert "agree. \\boxed{} around an answer" in message["content"]


def test_verdicts_are_in_order_and_equal_requests_are_sent_once(server):
    server.replies = {"one": "B", "two": "A", "cut": "C", "odd": "I think A or B"}
    words = ["one", "two", "cut", "two", "odd", "one", "two"]
    verdicts = CompassVerifier(server.url + "/v1/", "m", None).judge(
        [build_request(word) for word in words]
    )
    names = {"one": "incorrect", "two": "correct", "cut": "invalid", "odd": "unparsable"}
    assert verdicts == [names[word] for word in words]
    assert len(server.bodies) == 4


def test_requests_run_together_up_to_the_limit(server):
    server.replies = {str(i): "A" for i in range(12)}
    server.delay_s = 0.05
    CompassVerifier(server.url, "m", None, max_concurrency=5).judge(
        [build_request(str(i)) for i in range(12)]
    )
    assert server.max_active == 5


def test_verdicts_outlive_the_client_and_failures_do_not(server, tmp_path):
    path = tmp_path / "new" / "cache.jsonl"
    server.replies = {"two": "A", "bad": web.Response(status=500, text="no"), "odd": "?"}
    requests = [build_request(word) for word in ("two", "bad", "odd")]
    assert CompassVerifier(server.url, "m", path).judge(requests) == [
        "correct",
        "failed",
        "unparsable",
    ]
    server.replies = {"bad": "B"}
    assert CompassVerifier(server.url, "m", path).judge(requests) == [
        "correct",
        "incorrect",
        "unparsable",
    ]
    assert len(server.bodies) == 4
    # Another model, question or truth is another request.
    server.replies = {"two": "B"}
    assert CompassVerifier(server.url, "n", path).judge(requests[:1]) == ["incorrect"]
    others = [build_request("two", question="1 + 2?"), build_request("two", gold="3")]
    assert CompassVerifier(server.url, "m", path).judge(others) == ["incorrect", "incorrect"]
    assert CompassVerifier(server.url, "m", path).judge(requests[:1]) == ["correct"]


def test_a_torn_line_of_the_cache_costs_that_line_alone(server, tmp_path):
    path = tmp_path / "cache.jsonl"
    server.replies = {"one": "B", "two": "A"}
    requests = [build_request("one"), build_request("two")]
    CompassVerifier(server.url, "m", path, max_concurrency=1).judge(requests)
    path.write_bytes(path.read_bytes()[:-20] + b"\xff")
    for num_sent in (3, 3):
        verifier = CompassVerifier(server.url, "m", path)
        assert verifier.judge(requests) == ["incorrect", "correct"]
        assert len(server.bodies) == num_sent
    path.write_text('[]\n{"key": 1}\n{"key": "k", "verdict": "failed"}\nnull\n')
    assert verifier.judge(requests) == ["incorrect", "correct"]


@pytest.mark.parametrize(
    "reply",
    [
        web.Response(status=500, text="no"),
        web.Response(status=400, text='{"error": "too long"}'),
        web.Response(status=200, text="not json"),
        web.Response(status=200, text='{"choices": []}'),
        "hang",
    ],
    ids=["500", "400", "text", "empty", "hang"],
)
def test_an_error_of_one_request_costs_that_request(server, reply):
    server.replies = {"bad": reply, "two": "A"}
    verifier = CompassVerifier(server.url, "m", None, timeout_s=0.5)
    assert verifier.judge([build_request("bad"), build_request("two")]) == ["failed", "correct"]


def test_a_server_that_cannot_be_reached_is_an_error():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    verifier = CompassVerifier(url, "some/model", None)
    with pytest.raises(RuntimeError, match=rf"{url}.*vllm serve some/model.*verifier_url"):
        verifier.judge([build_request(str(i)) for i in range(100)])
    assert verifier.judge([]) == []


def test_a_request_without_its_question_is_refused():
    verifier = CompassVerifier("http://127.0.0.1:9", "m", None)
    with pytest.raises(ValueError, match=r"requests\[1\].question is empty"):
        verifier.judge([build_request("two"), build_request("two", question=" \n")])


@pytest.mark.parametrize(("max_concurrency", "timeout_s"), [(0, 1.0), (1, 0.0)])
def test_a_client_without_requests_or_time_is_refused(max_concurrency, timeout_s):
    with pytest.raises(ValueError, match=r"must be >"):
        CompassVerifier("http://x", "m", None, max_concurrency=max_concurrency, timeout_s=timeout_s)


def test_a_prompt_of_ones_own_is_read_and_checked(tmp_path):
    path = tmp_path / "prompt.txt"
    assert load_template(None) == TEMPLATE
    path.write_text(r"{question}, {gold_answer}, {llm_response}: \boxed{{}}?")
    prompt = build_prompt(load_template(str(path)), build_request("r", question="q"))
    assert prompt.startswith("q, ") and prompt.endswith(r"r: \boxed{}?")
    for text, message in (
        (
            "{question} {llm_response}",
            r"it must have \['gold_answer', 'llm_resp",
        ),
        (r"{question} {gold_answer} {llm_response} \boxed{}", r"has the fields \['', "),
        ("{question", "a brace that is no field twice"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_template(str(path))
    with pytest.raises(ValueError, match=r"reward.verifier_prompt=nowhere: no such file"):
        load_template("nowhere")


def test_the_end_of_a_long_response_is_sent():
    prompt = build_prompt(TEMPLATE, build_request("start " + "x" * MAX_RESPONSE_CHARS + "end"))
    assert "start" not in prompt
    assert "xend\n<Candidate's Answer End>" in prompt
    assert len(prompt) < MAX_RESPONSE_CHARS + 3000
    build_prompt(TEMPLATE, build_request("lone \ud800")).encode()


@pytest.mark.parametrize(
    ("reply", "verdict"),
    [
        ("A", "correct"),
        ("B", "incorrect"),
        ("C", "invalid"),
        (" A\n", "correct"),
        ("(A)", "correct"),
        ("**A**", "correct"),
        ("A.", "correct"),
        (r"\boxed{A}", "correct"),
        ("A: CORRECT", "correct"),
        ("CORRECT", "correct"),
        ("INCORRECT", "incorrect"),
        ("INVALID", "invalid"),
        (r"\boxed{C} - REPETITIVE", "invalid"),
        ("Analysis step by step: A is not B.\nFinal Judgment: \\boxed{A} - CORRECT", "correct"),
        ("Final Judgment: \\boxed{B} - INCORRECT", "incorrect"),
        ("Final Judgment: (A)", "correct"),
        ("They agree, so \\boxed{A}.", "correct"),
        ("<think>A? B?</think>\nA", "correct"),
        ("", "unparsable"),
        ("D", "unparsable"),
        ("a", "unparsable"),
        ("AB", "unparsable"),
        ("A B", "unparsable"),
        ("A or B", "unparsable"),
        ("A: INCORRECT", "unparsable"),
        ("CORRECT INCORRECT", "unparsable"),
        ("Answer", "unparsable"),
        ("Apparently it is wrong", "unparsable"),
        ("The answer is A", "unparsable"),
        ("not A", "unparsable"),
        (r"\boxed{A} or \boxed{B}", "unparsable"),
        (r"The candidate's \boxed{5} is wrong, \boxed{A}", "unparsable"),
        (r"\boxed{A/B/C}", "unparsable"),
        (r"It says \boxed{\frac{1}{2}}, \boxed{A}", "unparsable"),
        ("Final Judgment: ", "unparsable"),
        ("Final Judgment: \\boxed{A} - INCORRECT", "unparsable"),
        ("A" * 100_000, "unparsable"),
        (r"\boxed{" * 50_000, "unparsable"),
    ],
)
def test_only_an_unambiguous_reply_is_a_verdict(reply, verdict):
    assert read_verdict(reply) == verdict


def build_verifier_model(folder):
    """Train a model that replies A to a response of ones and B to one of twos."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from tests.tiny_model import build_tokenizer

    build_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=260,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=32,
            tie_word_embeddings=True,
            max_position_embeddings=8192,
        )
    )
    chats = [
        tokenizer.apply_chat_template(
            [
                {"role": "user", "content": build_prompt(TEMPLATE, build_request(last * 400))},
                {"role": "assistant", "content": letter},
            ],
            return_dict=False,
        )
        for last, letter in (("1", "A"), ("2", "B"))
    ]
    token_ids = torch.tensor(chats)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        # The reply's letter and its end; the prompt is not to be learnt.
        logits = model(input_ids=token_ids, logits_to_keep=5).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), token_ids[:, -4:].flatten()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.01:
            break
    assert loss < 0.01
    model.save_pretrained(folder)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_vllm_server_judges_through_its_chat_endpoint(tmp_path):
    build_verifier_model(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with (
        open(tmp_path / "server.log", "w") as log,
        subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(tmp_path), "--served-model-name", "tiny/verifier"),
                *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
                *("--max-model-len", "6144", "--max-num-seqs", "4", "--enforce-eager"),
                *("--kv-cache-memory-bytes", str(256 << 20), "--disable-log-stats"),
            ],
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "DO_NOT_TRACK": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            },
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            wait_for_server(url, process, tmp_path / "server.log")
            verifier = CompassVerifier(url, "tiny/verifier", tmp_path / "cache.jsonl")
            requests = [build_request(last * 400) for last in "1212"]
            expected = ["correct", "incorrect", "correct", "incorrect"]
            assert verifier.judge(requests) == expected
            # More than the server's context: refused, not an error of the batch.
            long = build_request("7" * MAX_RESPONSE_CHARS)
            assert verifier.judge([long, requests[0]]) == ["failed", "correct"]
            unknown = CompassVerifier(url, "another/model", None)
            assert unknown.judge(requests[:1]) == ["failed"]
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (
        CompassVerifier(url, "tiny/verifier", tmp_path / "cache.jsonl").judge(requests) == expected
    )


def wait_for_server(url, process, log):
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health") as reply:
            if reply.status == 200:
                return
        time.sleep(0.5)
    raise AssertionError(json.dumps(log.read_text()[-3000:]))
