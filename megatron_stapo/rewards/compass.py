r"""Asks CompassVerifier, a model that compares answers, over an OpenAI-compatible server.

It repairs what a rule misses: words, units, other notations. `opencompass/CompassVerifier-3B`
(arXiv:2508.03686) runs behind vLLM. Every request holds the question, the ground truth and the
response; a reply counts as correct only where it says so in a form that the model is trained to
give.
"""

import asyncio
import hashlib
import json
import re
import string
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

# The published prompt is its authors'; this one asks for the same in other words, between the marks
# that the model is trained on.
TEMPLATE = r"""You grade answers. A question, its reference answer and a candidate's response
follow. Decide whether the candidate's final answer agrees with the reference answer.
- The question is valid and the reference answer is right. Do not solve the question again.
- Look at the final answer alone. Mistakes on the way to it do not count.
- Notations of the same value, and wordings of the same meaning, agree. \boxed{{}} around an answer
is notation.
- Where the question has several parts, or several right choices, all of them must agree.
- A response is invalid if it breaks off before its answer, repeats itself without end, refuses, or
is about something else.
Reply with one letter and nothing else:
A: CORRECT, the final answer agrees
B: INCORRECT, it does not
C: INVALID, the response is invalid
<Original Question Begin>:
{question}
<Original Question End>
<Standard Answer Begin>:
{gold_answer}
<Standard Answer End>
<Candidate's Answer Begin>:
{llm_response}
<Candidate's Answer End>
Judging the correctness of the candidate's answer:
"""
"""For str.format. reward.verifier_prompt takes a file with another, such as the published one."""

_FIELDS = {"question", "gold_answer", "llm_response"}

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
        template: str = TEMPLATE,
        max_concurrency: int = 64,
        timeout_s: float = 300.0,
    ) -> None:
        """Read the cache; talk to nobody yet.

        Args:
            url: of the server, http://host:port, with or without /v1.
            model: the name under which the server knows the model.
            cache_path: JSON lines, appended to; None keeps nothing.
            template: of `load_template`.
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
        self._template = template
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
            *(self._model, self._template, str(MAX_RESPONSE_CHARS)),
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
            "messages": [{"role": "user", "content": build_prompt(self._template, request)}],
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


def load_template(path: str | None) -> str:
    """Read a template of str.format with the fields question, gold_answer and llm_response.

    Args:
        path: reward.verifier_prompt; None takes TEMPLATE.

    Raises:
        ValueError: no such file, or not exactly these fields in braces.
    """
    if path is None:
        return TEMPLATE
    if not Path(path).is_file():
        raise ValueError(f"reward.verifier_prompt={path}: no such file.")
    template = Path(path).read_text(encoding="utf-8")
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError as error:
        raise ValueError(
            f"reward.verifier_prompt={path}: {error}; write a brace that is no field twice."
        ) from error
    if names != _FIELDS:
        raise ValueError(
            f"reward.verifier_prompt={path}: has the fields {sorted(names)}; it must have "
            f"{sorted(_FIELDS)}, and a brace that is no field is written twice."
        )
    return template


def build_prompt(template: str, request: JudgeRequest) -> str:
    """Fill a template.

    Args:
        template: of `load_template`.
        request: its response is cut to the last MAX_RESPONSE_CHARS characters.
    """
    return template.format(
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
