"""Client of a vLLM server: token ids in, token ids and log-probabilities out, new weights in.

Runs in the trainer's rank 0 and never imports vllm. `vllm_server` says how the process is started.

Invariant: during a call the trainer waits for HTTP answers and for nothing else, and looks at the
server's health meanwhile. So a dead server is an error within seconds, where a collective would sit
out its time-out.
"""

import asyncio
import json
import math
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import torch
import torch.distributed as dist

from megatron_stapo.config import Config, load_model_json
from megatron_stapo.rollout import compute_request_seed
from megatron_stapo.rollout.weight_transfer import (
    TIMEOUT_S,
    ConnectInfo,
    TransferGroup,
    broadcast,
    connect,
    iter_buckets,
)
from megatron_stapo.types import Prompt, Rollout, RolloutGroup, Sampling

_NO_LOGPROB = -9999.0
"""What vLLM 0.32 sends for a log-probability that is -inf, NaN or absent."""

_CHECKPOINT_VERSION = "default"
"""vLLM's label for the weights that it loaded at its start."""

_MIN_CONNECTIONS = 256
"""Calls under way at once that a small engine is given, too."""

_HEALTH_INTERVAL_S = 2.0
"""Between two looks at the server's health during a call."""

_WAIT_S = 0.5
"""Longest time between two calls of on_wait."""


class VllmEngine:
    """One vLLM server, of any tensor parallel size."""

    def __init__(
        self,
        config: Config,
        url: str,
        stop_token_ids: Sequence[int],
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait until the server answers.

        Args:
            config: the one that the server's arguments were built from.
            url: the server's address, http://host:port.
            stop_token_ids: tokens that end a response.
            on_wait: see `Engine`.

        Raises:
            RuntimeError: no answer within rollout.start_timeout_s.
        """
        self._config = config
        self._on_wait = on_wait
        self._url = url.rstrip("/")
        self._stop_token_ids = list(stop_token_ids)
        self._vocab_size = load_model_json(config.model.path)["vocab_size"]
        self._policy_version = 0
        self._server_version = _CHECKPOINT_VERSION
        self._group: TransferGroup | None = None
        self._store: dist.TCPStore | None = None
        self._wait_until_healthy()

    def generate(
        self,
        prompts: Sequence[Prompt],
        num_samples: int,
        sampling: Sampling,
        on_group: Callable[[int, RolloutGroup], None] | None = None,
    ) -> list[RolloutGroup]:
        """See `Engine`. One request per prompt; vLLM seeds sample i with seed + i."""

        def take(index: int, answer: Any) -> RolloutGroup:
            try:
                rollouts = parse_choices(
                    answer["choices"],
                    num_samples=num_samples,
                    max_response_tokens=sampling.max_response_tokens,
                    vocab_size=self._vocab_size,
                    stop_token_ids=self._stop_token_ids,
                    server_version=self._server_version,
                    policy_version=self._policy_version,
                )
            except (KeyError, TypeError, ValueError) as error:
                raise RuntimeError(
                    f"vLLM engine at {self._url} sent a malformed answer during generate: prompt "
                    f"{prompts[index].prompt_id}: {error!r}."
                ) from error
            group = RolloutGroup(prompt=prompts[index], rollouts=rollouts)
            if on_group is not None:
                on_group(index, group)
            return group

        return self._post_all(
            "generate",
            "inference/v1/generate",
            [
                {
                    "token_ids": prompt.token_ids,
                    "sampling_params": {
                        "n": num_samples,
                        "seed": compute_request_seed(
                            self._config.seed, self._policy_version, prompt.prompt_id
                        ),
                        "temperature": sampling.temperature,
                        "top_p": sampling.top_p,
                        "top_k": 0,
                        "max_tokens": sampling.max_response_tokens,
                        "stop_token_ids": self._stop_token_ids,
                        # The model folder may name end-of-text tokens of its own.
                        "ignore_eos": True,
                        # Of the sampled token and of no other.
                        "logprobs": 0,
                        "detokenize": False,
                    },
                }
                for prompt in prompts
            ],
            take,
            self._on_wait,
        )

    def update_weights(
        self, named_tensors: Iterable[tuple[str, torch.Tensor]], policy_version: int
    ) -> None:
        """See `Engine`.

        Communicates: per bucket one HTTP call and, beside it, one broadcast to the engine's
            workers.
        """
        doing = "update_weights"
        try:
            if self._group is None:
                self._group = self._open_group()
            # Empties the prefix cache, which holds what the old weights made of the prompts.
            self._post(doing, "pause")
            self._post(doing, "start_weight_update")
            for info, flat in iter_buckets(named_tensors):
                work = broadcast(self._group, flat)
                self._post(doing, "update_weights", {"update_info": asdict(info)})
                work.wait()
            self._server_version = str(policy_version)
            self._post(doing, "finish_weight_update", {"weight_version": self._server_version})
            self._post(doing, "resume")
        except BaseException:
            if self._group is not None:
                # Takes a broadcast that nobody receives off the GPU. Over gloo it stays until its
                # time-out, and the group with it.
                self._group.abort()
            raise
        self._policy_version = policy_version

    def close(self) -> None:
        """Leave the group. The server runs on: who started it ends it."""
        if self._group is not None:
            self._group.abort()
        self._group = self._store = None

    def _wait_until_healthy(self) -> None:
        start_timeout_s = self._config.rollout.start_timeout_s
        deadline = time.monotonic() + start_timeout_s
        while True:
            try:
                asyncio.run(self._check_health(timeout_s=5))
                return
            except (aiohttp.ClientError, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"vLLM engine at {self._url} did not answer within "
                        f"rollout.start_timeout_s={start_timeout_s} seconds: {error!r}. It died or "
                        "is still loading; see its log."
                    ) from error
            time.sleep(0.2)

    def _open_group(self) -> TransferGroup:
        """Connect to the engine's workers: they answer while this end waits in a thread."""
        address = urlsplit(self._url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Sends nothing; it asks the routing table for our address as the engine sees it.
            probe.connect((address.hostname, address.port))
            host = probe.getsockname()[0]
        self._store = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S)
        )
        info = ConnectInfo(
            host=host,
            port=self._store.port,
            world_size=1 + self._config.rollout.tensor_parallel_size,
        )
        # With its index: a new thread has its own idea of the current GPU.
        device = torch.empty(0, device=self._config.parallel.device).device
        opened: Future[TransferGroup] = Future()

        def wait_for_workers() -> None:
            try:
                opened.set_result(connect(self._store, 0, info.world_size, device))
            except Exception as error:
                opened.set_exception(error)

        # A daemon, so that the trainer can end while it waits for workers that never come.
        threading.Thread(target=wait_for_workers, daemon=True).start()
        self._post("update_weights", "init_weight_transfer_engine", {"init_info": asdict(info)})
        return opened.result()

    def _post(self, doing: str, path: str, payload: Any = None) -> Any:
        return self._post_all(doing, path, [payload])[0]

    def _post_all(
        self,
        doing: str,
        path: str,
        payloads: Sequence[Any],
        take: Callable[[int, Any], Any] = lambda index, answer: answer,
        on_wait: Callable[[], None] = lambda: None,
    ) -> list[Any]:
        """POST the payloads side by side and return what take makes of the answers, in their order.

        Args:
            take: called with a payload's index and its answer as soon as that is there.
            on_wait: called while answers are waited for. What it raises gives the calls up: the
                server notices the closed connections and ends what it was sampling.

        Raises:
            RuntimeError: no answer, or an error; says what the trainer was doing.
        """
        try:
            return asyncio.run(self._send_all(path, payloads, take, on_wait))
        except aiohttp.ClientResponseError as error:
            raise RuntimeError(
                f"vLLM engine at {self._url} refused {error.request_info.url.path} during {doing}: "
                f"HTTP {error.status}, {error.message}. See its log."
            ) from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RuntimeError(
                f"vLLM engine at {self._url} stopped answering during {doing}: {error!r} from "
                f"{path}. It died or hangs; see its log."
            ) from error

    async def _send_all(
        self,
        path: str,
        payloads: Sequence[Any],
        take: Callable[[int, Any], Any],
        on_wait: Callable[[], None],
    ) -> list[Any]:
        timeout_s = self._config.rollout.request_timeout_s
        # Enough to keep the engine full. A connection more is a file more, on both ends.
        places = asyncio.Semaphore(max(2 * self._config.rollout.max_num_seqs, _MIN_CONNECTIONS))
        async with self._open_session(timeout_s) as session:

            async def ask(index: int, payload: Any) -> Any:
                async with places:
                    answer = await self._send(session, "POST", path, payload)
                return take(index, answer)

            answers = asyncio.gather(*(ask(*item) for item in enumerate(payloads)))
            # The server leaves calls unanswered when the process that holds the model dies.
            health = asyncio.create_task(self._watch_health(timeout_s))
            while not (answers.done() or health.done()):
                await asyncio.wait(
                    [answers, health], timeout=_WAIT_S, return_when=asyncio.FIRST_COMPLETED
                )
                on_wait()
            if not answers.done():
                answers.cancel()
                await health
            health.cancel()
            return await answers

    async def _watch_health(self, timeout_s: float) -> None:
        """Never return; raise when the server says that it is ill, or is gone.

        It may be silent for as long as any other call, since it is busy with large answers.
        """
        while True:
            await asyncio.sleep(_HEALTH_INTERVAL_S)
            await self._check_health(timeout_s)

    async def _check_health(self, timeout_s: float) -> None:
        async with self._open_session(timeout_s) as session:
            await self._send(session, "GET", "health")

    def _open_session(self, timeout_s: float) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            # No connection is kept: the server closes idle ones, perhaps just as we write to one.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        )

    async def _send(
        self, session: aiohttp.ClientSession, method: str, path: str, payload: Any = None
    ) -> Any:
        async with session.request(method, f"{self._url}/{path}", json=payload) as response:
            body = await response.read()
            if response.status != 200:
                raise aiohttp.ClientResponseError(
                    response.request_info,
                    response.history,
                    status=response.status,
                    message=body[:1000].decode(errors="replace"),
                )
            try:
                return json.loads(body) if body else None
            except ValueError as error:
                raise aiohttp.ClientPayloadError(f"no JSON: {error}") from error


def parse_choices(
    choices: Any,
    *,
    num_samples: int,
    max_response_tokens: int,
    vocab_size: int,
    stop_token_ids: Collection[int],
    server_version: str,
    policy_version: int,
) -> list[Rollout]:
    """Check one prompt's samples to the last token, and turn them into rollouts.

    Args:
        choices: of the answer of /inference/v1/generate.
        server_version: the label that the weights must have had at every token.
        policy_version: what the rollouts are stamped with.

    Raises:
        ValueError: names the sample, the field and what is wrong with it.
        KeyError, TypeError: a field is missing or of another type.
    """
    if len(choices) != num_samples:
        raise ValueError(f"choices: {len(choices)} samples, {num_samples} were asked for")
    rollouts = []
    for sample, choice in enumerate(choices):

        def require(holds: bool, field: str, what: str, sample: int = sample) -> None:
            if not holds:
                raise ValueError(f"sample {sample}: {field}: {what}")

        token_ids = choice["token_ids"]
        content = choice["logprobs"]["content"]
        logprobs = [entry["logprob"] for entry in content]
        finish_reason = choice["finish_reason"]
        require(choice["index"] == sample, "index", f"{choice['index']}")
        require(
            all(isinstance(t, int) and 0 <= t < vocab_size for t in token_ids),
            "token_ids",
            f"an id outside the vocabulary of {vocab_size}",
        )
        require(
            [entry["token_id"] for entry in content] == token_ids,
            "logprobs",
            f"{len(content)} entries do not belong to the {len(token_ids)} tokens",
        )
        require(
            all(math.isfinite(x) and _NO_LOGPROB < x <= 0 for x in logprobs),
            "logprobs",
            "a value that is no log-probability",
        )
        ends_in_stop = bool(token_ids) and token_ids[-1] in stop_token_ids
        if finish_reason == "stop":
            require(ends_in_stop, "token_ids", "finish_reason is stop, but not after a stop token")
        else:
            require(finish_reason == "length", "finish_reason", f"{finish_reason!r}")
            require(
                len(token_ids) == max_response_tokens and not ends_in_stop,
                "token_ids",
                f"finish_reason is length after {len(token_ids)} of {max_response_tokens} tokens",
            )
        versions = {span["version"] for span in choice["weight_versions"]}
        require(
            versions == {server_version},
            "weight_versions",
            f"sampled by weights {sorted(versions)}, expected {server_version!r}",
        )
        rollouts.append(
            Rollout(
                token_ids=token_ids,
                rollout_logprobs=logprobs,
                finish_reason=finish_reason,
                policy_version=policy_version,
            )
        )
    return rollouts
