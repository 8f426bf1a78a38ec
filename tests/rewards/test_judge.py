"""Rule first, model verifier second, over real worker processes and real HTTP."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megatron_stapo.config import RewardConfig
from megatron_stapo.rewards import Verdict
from megatron_stapo.rewards.judge import (
    DISAGREEMENTS_FILE,
    Judge,
    Judgement,
    Question,
    compute_judge_metrics,
)


@pytest.fixture
def verifier():
    """A server that calls right whatever answers seven in words; keeps the prompts it is sent."""
    prompts = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer({"data": [{"id": RewardConfig().verifier_model}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            prompt = body["messages"][0]["content"]
            prompts.append(prompt)
            reply = "A" if "seven" in prompt else "B"
            self.answer({"choices": [{"message": {"content": reply}}]})

        def answer(self, content):
            answer = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", prompts
    server.shutdown()
    thread.join()
    server.server_close()


RESPONSES = [r"\boxed{7}", r"\boxed{six}", r"\boxed{\text{seven}}", "seven", r"\boxed{8}"]


def judge_all(config, folder, responses=RESPONSES, truncated=()):
    judge = Judge(config, folder)
    pending = [
        judge.submit(f"Problem {i}", "7", response, i in truncated)
        for i, response in enumerate(responses)
    ]
    judgements = judge.settle(pending)
    judge.close()
    return judgements


def test_the_rule_alone_decides_by_default(tmp_path, verifier):
    judgements = judge_all(RewardConfig(verifier_url=verifier[0]), tmp_path)
    assert [j.is_correct for j in judgements] == [True, False, False, False, False]
    assert verifier[1] == []


def test_the_model_is_asked_with_the_question_about_what_the_rule_calls_wrong(tmp_path, verifier):
    config = RewardConfig(verifier_url=verifier[0], verify_training=True)
    judgements = judge_all(config, tmp_path)
    assert [j.is_correct for j in judgements] == [True, False, True, True, False]
    assert [j.model for j in judgements] == [
        None,
        "incorrect",
        "correct",
        "correct",
        "incorrect",
    ]
    prompts = sorted(verifier[1])
    assert len(prompts) == 4
    assert [f"Problem {i}" in prompt for i, prompt in zip((1, 2, 3, 4), prompts)] == [True] * 4
    lines = (tmp_path / DISAGREEMENTS_FILE).read_text().splitlines()
    assert [json.loads(line)["problem"] for line in lines] == ["Problem 2", "Problem 3"]
    # The replies are remembered.
    judge_all(config, tmp_path)
    assert len(verifier[1]) == 4


def test_a_truncated_response_counts_as_the_recipe_says(tmp_path, verifier):
    judgements = judge_all(RewardConfig(), tmp_path, truncated={0})
    assert judgements[0].is_correct
    config = RewardConfig(truncated="wrong", verifier_url=verifier[0], verify_training=True)
    judgements = judge_all(config, tmp_path, truncated={0, 2})
    assert [j.is_correct for j in judgements] == [False, False, False, True, False]
    assert [j.model for j in judgements][:3] == [None, "incorrect", None]
    assert judgements[0].rule.outcome == "truncated"


def test_the_rules_word_is_never_taken_away(tmp_path, verifier):
    judge = Judge(RewardConfig(verifier_url=verifier[0]), tmp_path)
    verdict = Verdict(correct=True, outcome="judged", extracted="8")
    question = Question(problem="p", answer="7", response="8", rule=verdict)
    assert judge.ask_model([question]) == [None]
    judge.close()


def test_a_verifier_that_is_not_there_is_named_before_anything_is_judged(tmp_path, verifier):
    with pytest.raises(RuntimeError, match=r"http://127.0.0.1:9/v1/models.*reward.verifier_url"):
        Judge(RewardConfig(verifier_url="http://127.0.0.1:9"), tmp_path)
    config = RewardConfig(verifier_url=verifier[0], verifier_model="other")
    with pytest.raises(RuntimeError, match=r"verifier_model=other: .* serves opencompass/Compass"):
        Judge(config, tmp_path)


def test_the_metrics_count_what_went_another_way():
    def build(outcome, model=None):
        return Judgement(rule=Verdict(correct=False, outcome=outcome, extracted=None), model=model)

    metrics = compute_judge_metrics(
        [
            build("judged", "correct"),
            build("judged", "incorrect"),
            build("no_answer", "failed"),
            build("timeout", "unparsable"),
            build("timeout"),
            build("crash"),
            build("refused"),
            build("truncated"),
        ]
    )
    assert metrics == {
        "num_no_answer": 1,
        "num_verifier_refusals": 1,
        "num_verifier_timeouts": 2,
        "num_verifier_crashes": 1,
        "num_asked_model": 4,
        "num_model_disagreements": 1,
        "num_model_failures": 2,
    }
