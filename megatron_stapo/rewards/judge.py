"""From a response to right or wrong: the rule decides, then a model about what it calls wrong.

A response is handed in as soon as it is sampled, and judged while others still are sampled.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_stapo.config import RewardConfig
from megatron_stapo.rewards import Verdict
from megatron_stapo.rewards.compass import (
    CompassVerifier,
    JudgeRequest,
    ModelVerdict,
    load_template,
)
from megatron_stapo.rewards.pool import VerifierPool

CACHE_FILE = "verifier_cache.jsonl"
DISAGREEMENTS_FILE = "verifier_disagreements.jsonl"


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A response that is being judged."""

    problem: str
    answer: str
    response: str
    rule: Future[Verdict]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A response as the rule judged it, for the model verifier."""

    problem: str
    answer: str
    response: str
    rule: Verdict


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What became of a response."""

    rule: Verdict
    model: ModelVerdict | None
    """None where the model verifier was not asked."""

    @property
    def is_correct(self) -> bool:
        """The model's word repairs what the rule missed, and never takes away what it found."""
        return self.rule.correct or self.model == "correct"


class Judge:
    """The rule's worker processes, and the client of the model verifier where there is one."""

    def __init__(self, config: RewardConfig, folder: Path) -> None:
        """Start the workers.

        Args:
            config: rule, limits and the verifier's address.
            folder: where the verifier's replies are cached and its disagreements are logged.

        Raises:
            RuntimeError: the model verifier's server does not answer, or has another model.
        """
        self._config = config
        self._folder = folder
        self._model = None
        if config.verifier_url:
            self._model = CompassVerifier(
                config.verifier_url,
                config.verifier_model,
                folder / CACHE_FILE,
                load_template(config.verifier_prompt),
            )
            self._model.check()
        self._pool = VerifierPool(config.rule, config.num_workers, config.timeout_s)

    def submit(self, problem: str, answer: str, response: str, is_truncated: bool) -> Pending:
        """Hand a response to the rule.

        Args:
            problem: the question, for the model verifier.
            answer: ground truth.
            response: decoded text.
            is_truncated: it was cut at its length limit; see reward.truncated.
        """
        rule: Future[Verdict]
        if is_truncated and self._config.truncated == "wrong":
            rule = Future()
            rule.set_result(Verdict(correct=False, outcome="truncated", extracted=None))
        else:
            rule = self._pool.submit(response, answer)
        return Pending(problem=problem, answer=answer, response=response, rule=rule)

    def settle(self, pending: Sequence[Pending]) -> list[Judgement]:
        """Wait for the rule; with reward.verify_training ask the model verifier about the rest.

        Args:
            pending: of `submit`, of training.

        Returns:
            A judgement per response, in order.

        Raises:
            RuntimeError: no worker starts, or the model verifier's server cannot be reached.
        """
        questions = [
            Question(problem=p.problem, answer=p.answer, response=p.response, rule=p.rule.result())
            for p in pending
        ]
        replies: list[ModelVerdict | None] = [None] * len(questions)
        if self._config.verify_training:
            replies = self.ask_model(questions)
        self._log_disagreements(questions, replies)
        return [
            Judgement(rule=q.rule, model=reply) for q, reply in zip(questions, replies, strict=True)
        ]

    def ask_model(self, questions: Sequence[Question]) -> list[ModelVerdict | None]:
        """Ask the model verifier about what the rule calls wrong.

        Returns:
            A reply per question; None where the rule found it right, where its length made it
            wrong, and everywhere without a verifier.

        Raises:
            RuntimeError: the server cannot be reached.
        """
        replies: list[ModelVerdict | None] = [None] * len(questions)
        if self._model is None:
            return replies
        # A response that counts as wrong for its length is not a question of equivalence.
        asked = [
            i
            for i, q in enumerate(questions)
            if not q.rule.correct and q.rule.outcome != "truncated"
        ]
        requests = [
            JudgeRequest(
                question=questions[i].problem,
                gold=questions[i].answer,
                response=questions[i].response,
            )
            for i in asked
        ]
        for i, reply in zip(asked, self._model.judge(requests), strict=True):
            replies[i] = reply
        return replies

    def close(self) -> None:
        """End the workers."""
        self._pool.close()

    def _log_disagreements(
        self, questions: Sequence[Question], replies: Sequence[ModelVerdict | None]
    ) -> None:
        """For people: every response that the model calls right and the rule wrong."""
        lines = [
            json.dumps(asdict(question)) + "\n"
            for question, reply in zip(questions, replies, strict=True)
            if reply == "correct"
        ]
        if lines:
            with open(self._folder / DISAGREEMENTS_FILE, "a", encoding="utf-8") as file:
                file.write("".join(lines))


def compute_judge_metrics(judgements: Sequence[Judgement]) -> dict[str, float]:
    """Counts of what went another way than a plain comparison; of the responses judged."""
    outcomes = [j.rule.outcome for j in judgements]
    replies = [j.model for j in judgements if j.model is not None]
    return {
        "num_no_answer": outcomes.count("no_answer"),
        "num_verifier_refusals": outcomes.count("refused"),
        "num_verifier_timeouts": outcomes.count("timeout"),
        "num_verifier_crashes": outcomes.count("crash"),
        "num_asked_model": len(replies),
        "num_model_disagreements": replies.count("correct"),
        "num_model_failures": replies.count("failed") + replies.count("unparsable"),
    }
