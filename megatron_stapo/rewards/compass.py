r"""Asks CompassVerifier, a model that compares answers, over an OpenAI-compatible server.

It repairs what a rule misses: words, units, other notations. `opencompass/CompassVerifier-3B`
(arXiv:2508.03686) runs as `vllm serve opencompass/CompassVerifier-3B`. Every request holds the
question, the ground truth and the response; a reply counts as correct only where it says so in a
form that the model is trained to give.
"""

import asyncio
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import aiohttp

ModelVerdict = Literal["correct", "incorrect", "invalid", "unparsable", "failed"]
"""invalid: the model finds the response cut off, repetitive or a refusal. unparsable: no
unambiguous verdict in the reply. failed: no reply; an error or a time-out of this request."""

MAX_RESPONSE_CHARS = 24_000
"""Of the response the model sees, from its end: the answer is there. Qwen's tokenizer makes at most
one token of an ASCII character, and template, reply and question need the rest of 32,768."""
MAX_REPLY_TOKENS = 2048

TEMPLATE_VERSION = "CV_PROMPT 2025-07"
"""Part of the cache's key: change it with the template, the budget or the reading of replies."""

# CV_PROMPT of github.com/open-compass/CompassVerifier c5d6700, src/prompts.py, as published: the
# model is trained on it, double braces, double blanks and missing line breaks included.
_TEMPLATE = """
Please as a grading expert, judge whether the final answers given by the candidates below are \
consistent with the standard answers, that is, whether the candidates answered correctly.\x20
Here are some evaluation criteria:
1. Please refer to the given standard answer. You don't need to re-generate the answer to the \
question because the standard answer has been given. You only need to judge whether the \
candidate's answer is consistent with the standard answer according to the form of the question. \
THE STANDARD ANSWER IS ALWAYS CORRECT AND THE QUESTION IS PERFECTLY VALID. NEVER QUESTION THEM.
2. ONLY compare the FINAL ANSWER - COMPLETELY IGNORE any potential errors in the REASONING \
PROCESSES.
3. Some answers may be expressed in different ways, such as some answers may be a mathematical \
expression, some answers may be a textual description, as long as the meaning expressed is the \
same. Before making a judgment, please understand the question and the standard answer first, and \
then judge whether the candidate's answer is correct.
4. Some answers may consist of multiple items, such as multiple-choice questions, multiple-select \
questions, fill-in-the-blank questions, etc. Regardless of the question type, the final answer \
will be considered correct as long as it matches the standard answer, regardless of whether the \
reasoning process is correct. For multiple-select questions and multi-blank fill-in-the-blank \
questions, all corresponding options or blanks must be answered correctly and match the standard \
answer exactly to be deemed correct.
5. If the prediction is given with \\boxed{{}}, please ignore the \\boxed{{}} and only judge \
whether the candidate's answer is consistent with the standard answer.
6. If the candidate's answer is invalid (e.g., incomplete (cut off mid-response), lots of \
unnormal repetitive content, or irrelevant to the question, saying it can't answer the question \
because some irresistible factors, like ethical issues, no enough information, etc.), select \
option C (INVALID).Please judge whether the following answers are consistent with the standard \
answer based on the above criteria. Grade the predicted answer of this new question as one of:
A: CORRECT\x20
B: INCORRECT
C: INVALID
Just return the letters "A", "B", or "C", with no text around it.
Here is your task. Simply reply with either CORRECT, INCORRECT, or INVALID. Don't apologize or \
correct yourself if there was a mistake; we are just trying to grade the answer.
<Original Question Begin>:
{question}
<Original Question End>
<Standard Answer Begin>:
{gold_answer}
<Standard Answer End>
<Candidate's Answer Begin>:\x20
{llm_response}
<Candidate's Answer End>
Judging the correctness of the candidate's answer:
"""

_VERDICTS: dict[str, ModelVerdict] = {"A": "correct", "B": "incorrect", "C": "invalid"}
_WORDS = {
    "CORRECT": "A",
    "INCORRECT": "B",
    "INVALID": "C",
    "INCOMPLETE": "C",
    "REPETITIVE": "C",
    "REFUSAL": "C",
}
# A, (A), A., **A**, \boxed{A}, A: CORRECT, \boxed{A} - CORRECT, CORRECT
_FINAL = re.compile(
    r"[\s*\"'$]*(?:\\?boxed\{\s*([ABC])\s*\}|\(?([ABC])\)?)?[\s*\"'$.:-]*"
    rf"({'|'.join(_WORDS)})?[\s*\"'$.]*"
)
_UNREACHABLE = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
_BOXED = re.compile(r"\\boxed\{([^{}]*)\}")
_FINAL_MARK = "Final Judgment:"
_THOUGHT_END = "</think>"


@dataclass(frozen=True, kw_only=True)
class JudgeRequest:
    """One comparison."""

    question: str
    gold: str
    """The ground truth."""
    response: str
    """The whole response, reasoning included; its last MAX_RESPONSE_CHARS characters are sent."""


class CompassVerifier:
    """A client that remembers every verdict."""

    def __init__(
        self,
        url: str,
        model: str,
        cache_path: Path | None,
        max_concurrency: int = 64,
        timeout_s: float = 300.0,
    ) -> None:
        """Read the cache; talk to nobody yet.

        Args:
            url: of the server, http://host:port, with or without /v1.
            model: the name under which the server knows the model.
            cache_path: JSON lines, appended to; None keeps nothing.
            max_concurrency: requests under way at once.
            timeout_s: seconds of wall clock for one request, queueing in the server included.

        Raises:
            ValueError: no concurrency, or no time.
        """
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency={max_concurrency} must be >= 1.")
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s} must be > 0 seconds.")
        base = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._url = f"{base}/chat/completions"
        self._models_url = f"{base}/models"
        self._model = model
        self._cache_path = cache_path
        self._max_concurrency = max_concurrency
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=min(timeout_s, 30.0))
        self._cache = _load_cache(cache_path) if cache_path else {}

    def check(self) -> None:
        """Ask the server for its models, so that a mistake shows before anything is sampled.

        Must not be called from a running event loop.

        Raises:
            RuntimeError: nobody answers at the address, or it serves other models.
        """
        names = asyncio.run(self._list_models())
        if self._model not in names:
            raise RuntimeError(
                f"reward.verifier_model={self._model}: {self._models_url} serves "
                f"{', '.join(names) or 'no model'}; name one of them."
            )

    def judge(self, requests: Sequence[JudgeRequest]) -> list[ModelVerdict]:
        """Compare each response with its ground truth.

        Must not be called from a running event loop.

        Args:
            requests: equal ones are sent once, known ones not at all.

        Returns:
            A verdict per request, in order. An HTTP error or a time-out costs that request alone:
            "failed", which the cache does not keep.

        Raises:
            ValueError: an empty question; the model cannot judge without it.
            RuntimeError: nobody answers at the address.
        """
        for i, request in enumerate(requests):
            if not request.question.strip():
                raise ValueError(
                    f"requests[{i}].question is empty; the verifier needs the question to judge."
                )
        keys = [self._compute_key(request) for request in requests]
        unknown = {
            key: request
            for key, request in zip(keys, requests, strict=True)
            if key not in self._cache
        }
        fresh = asyncio.run(self._ask_all(unknown)) if unknown else {}
        return [self._cache[key] if key in self._cache else fresh[key] for key in keys]

    def _compute_key(self, request: JudgeRequest) -> str:
        parts = (
            *(self._model, TEMPLATE_VERSION),
            *(request.question, request.gold, request.response),
        )
        # As JSON: no two lists of strings have the same text.
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    async def _ask_all(self, requests: dict[str, JudgeRequest]) -> dict[str, ModelVerdict]:
        places = asyncio.Semaphore(self._max_concurrency)
        verdicts: dict[str, ModelVerdict] = {}
        unreachable: BaseException | None = None
        connector = aiohttp.TCPConnector(limit=self._max_concurrency)
        async with aiohttp.ClientSession(timeout=self._timeout, connector=connector) as session:

            async def ask(key: str, request: JudgeRequest) -> None:
                async with places:
                    verdicts[key] = await self._ask(session, request)
                if verdicts[key] != "failed":
                    self._remember(key, verdicts[key])

            try:
                async with asyncio.TaskGroup() as group:
                    for key, request in requests.items():
                        group.create_task(ask(key, request))
            except* _UNREACHABLE as errors:
                unreachable = errors.exceptions[0]
        if unreachable is not None:
            raise self._build_unreachable(self._url, unreachable) from unreachable
        return verdicts

    async def _list_models(self) -> list[str]:
        try:
            async with (
                aiohttp.ClientSession(timeout=self._timeout) as session,
                session.get(self._models_url, raise_for_status=True) as reply,
            ):
                return [str(model["id"]) for model in (await reply.json())["data"]]
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError) as error:
            raise self._build_unreachable(self._models_url, error) from error

    def _build_unreachable(self, url: str, error: BaseException) -> RuntimeError:
        return RuntimeError(
            f"No verifier can be reached at {url}: {error!r}. Start one with "
            f"`vllm serve {self._model}`, or correct reward.verifier_url."
        )

    async def _ask(self, session: aiohttp.ClientSession, request: JudgeRequest) -> ModelVerdict:
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": build_prompt(request)}],
            "temperature": 0.0,
            "max_tokens": MAX_REPLY_TOKENS,
        }
        try:
            async with session.post(self._url, json=body) as reply:
                if reply.status != 200:
                    return "failed"
                answer = await reply.json()
                content = answer["choices"][0]["message"]["content"]
        except _UNREACHABLE:
            # Ends the other requests, too.
            raise
        except (aiohttp.ClientError, TimeoutError, ValueError, LookupError, TypeError):
            return "failed"
        return read_verdict(content) if isinstance(content, str) else "unparsable"

    def _remember(self, key: str, verdict: ModelVerdict) -> None:
        self._cache[key] = verdict
        if self._cache_path is not None:
            self._cache_path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._cache_path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"key": key, "verdict": verdict}) + "\n")


def build_prompt(request: JudgeRequest) -> str:
    """Fill the published template.

    Args:
        request: its response is cut to the last MAX_RESPONSE_CHARS characters.
    """
    return _TEMPLATE.format(
        question=_encode(request.question),
        gold_answer=_encode(request.gold),
        llm_response=_encode(request.response[-MAX_RESPONSE_CHARS:]),
    )


def _encode(text: str) -> str:
    # A lone surrogate has no UTF-8 form, and the server would refuse the whole request.
    return text.encode("utf-8", "replace").decode()


def read_verdict(reply: str) -> ModelVerdict:
    r"""Read the verdict of a reply.

    Args:
        reply: `A`, `B` or `C`, bare, in parentheses or in a box, with or without its word;
            reasoning may stand before it if `Final Judgment:` or a single boxed letter ends it.

    Returns:
        "unparsable" where the reply names no letter in these forms, or two that differ. The
        published parser takes the last capital A, B or C of any text; a word such as "Answer"
        would be a verdict.

    Source: open-compass/CompassVerifier README.md, `process_judgment`, and src/prompts.py.
    """
    final = reply.rpartition(_THOUGHT_END)[2].rpartition(_FINAL_MARK)[2].strip()
    match = _FINAL.fullmatch(final)
    if match:
        letters = {group for group in match.groups()[:2] if group}
        if match.group(3):
            letters.add(_WORDS[match.group(3)])
        return _VERDICTS[letters.pop()] if len(letters) == 1 else "unparsable"
    boxed = [content.strip() for content in _BOXED.findall(final)]
    if len(set(boxed)) == 1 and boxed[0] in _VERDICTS and len(boxed) == final.count(r"\boxed{"):
        return _VERDICTS[boxed[0]]
    return "unparsable"


def _load_cache(path: Path) -> dict[str, ModelVerdict]:
    """Read the verdicts kept; a line that a killed run left half written is skipped."""
    cache: dict[str, ModelVerdict] = {}
    if not path.exists():
        return cache
    text = path.read_bytes()
    if text and not text.endswith(b"\n"):
        # So that the next line does not continue the torn one.
        with open(path, "ab") as file:
            file.write(b"\n")
    for line in text.splitlines():
        try:
            entry = json.loads(line)
            key, verdict = entry["key"], entry["verdict"]
        except (ValueError, LookupError, TypeError):
            continue
        if isinstance(key, str) and verdict in (*_VERDICTS.values(), "unparsable"):
            cache[key] = verdict
    return cache
