"""Client of a vLLM server: token ids in, token ids and log-probabilities out, new weights in.

Runs in the trainer's rank 0 and never imports vllm. `vllm_server` says how the process is started,
and `pool` shares the requests among the servers.

Invariant: during an HTTP call the trainer looks at the server's health. So a dead server is an
error within seconds.
"""

import asyncio
import contextlib
import json
import math
import socket
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import torch.distributed as dist

from megatron_stapo.config import Config, load_model_json
from megatron_stapo.rollout import compute_request_seed
from megatron_stapo.rollout.background import run_in_thread
from megatron_stapo.rollout.weight_transfer import (
    TIMEOUT_S,
    ConnectInfo,
    WeightUpdate,
    name_hashes,
    name_schedule,
)
from megatron_stapo.types import Prompt, Rollout, RolloutGroup, Sampling

_NO_LOGPROB = -9999.0
"""What vLLM 0.32 sends for a log-probability that is -inf, NaN or absent."""

CHECKPOINT_VERSION = "default"
"""vLLM's label for the weights that it loaded at its start."""

HEALTH_INTERVAL_S = 2.0
"""Between two looks at a server's health."""


class ServerDiedError(Exception):
    """The server does not answer, or says itself that it cannot go on."""


class VllmEngine:
    """One vLLM server, of any tensor and pipeline parallel size."""

    def __init__(self, config: Config, url: str, stop_token_ids: Sequence[int]) -> None:
        """Wait until the server answers.

        Args:
            config: the one that the server's arguments were built from.
            url: the server's address, http://host:port.
            stop_token_ids: tokens that end a response.

        Raises:
            RuntimeError: no answer within rollout.start_timeout_s.
        """
        self._config = config
        self.url = url.rstrip("/")
        self._stop_token_ids = list(stop_token_ids)
        self._vocab_size = load_model_json(config.model.path)["vocab_size"]
        self.policy_version = 0
        """Number of completed steps of its weights."""
        self._server_version = CHECKPOINT_VERSION
        self._link: tuple[ConnectInfo, dist.TCPStore] | None = None
        self._wait_until_healthy()

    async def sample(self, prompt: Prompt, num_samples: int, sampling: Sampling) -> RolloutGroup:
        """Sample one prompt's responses, in one request; vLLM seeds sample i with seed + i.

        Raises:
            ServerDiedError: the server is gone, or hangs.
            RuntimeError: it refused the request, or its answer is malformed.
        """
        path = "inference/v1/generate"
        request = {
            "token_ids": prompt.token_ids,
            "sampling_params": {
                "n": num_samples,
                "seed": compute_request_seed(
                    self._config.seed, self.policy_version, prompt.prompt_id
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
        try:
            async with self._open_session(self._config.rollout.request_timeout_s) as session:
                answer = await self._send(session, "POST", path, request)
        except (aiohttp.ClientError, TimeoutError) as error:
            reason = self._describe(error, "generate", path)
            # A server that refuses is alive, unless it refuses because its model's process died.
            if isinstance(error, aiohttp.ClientResponseError) and await self.stays_healthy():
                raise RuntimeError(reason) from error
            raise ServerDiedError(reason) from error
        try:
            rollouts = parse_choices(
                answer["choices"],
                num_samples=num_samples,
                max_response_tokens=sampling.max_response_tokens,
                vocab_size=self._vocab_size,
                stop_token_ids=self._stop_token_ids,
                server_version=self._server_version,
                policy_version=self.policy_version,
            )
        except (KeyError, TypeError, ValueError) as error:
            if not await self.has_own_weights():
                raise ServerDiedError(f"the server at {self.url} was started again") from error
            raise RuntimeError(
                f"vLLM engine at {self.url} sent a malformed answer during generate: prompt "
                f"{prompt.prompt_id}: {error!r}."
            ) from error
        return RolloutGroup(prompt=prompt, rollouts=rollouts)

    async def is_healthy(self) -> bool:
        """Whether the server answers within rollout.health_timeout_s that it is well."""
        try:
            await self._check_health(self._config.rollout.health_timeout_s)
        except (aiohttp.ClientError, TimeoutError):
            return False
        return True

    async def stays_healthy(self) -> bool:
        """Likewise, now and a little later: a server may fail a call before it knows why."""
        if not await self.is_healthy():
            return False
        await asyncio.sleep(HEALTH_INTERVAL_S)
        return await self.is_healthy()

    async def has_own_weights(self) -> bool:
        """Whether the server has the weights that it last got from here; a new one has not.

        Raises:
            ServerDiedError: the process that holds the model does not answer.
        """
        timeout_s = self._config.rollout.health_timeout_s
        try:
            async with self._open_session(timeout_s) as session:
                answer = await self._send(session, "GET", "weight_info")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ServerDiedError(self._describe(error, "a look at it", "weight_info")) from error
        return bool(answer["weight_version"] == self._server_version)

    def forget(self) -> None:
        """Take the server for a new one, with the weights that it loads at its start."""
        self.close()
        self.policy_version = 0
        self._server_version = CHECKPOINT_VERSION

    def update_weights(self, update: WeightUpdate) -> None:
        """Replace all weights; see `Engine`.

        Communicates: HTTP calls, and beside the longest of them as `WeightUpdate.send`.

        Raises:
            RuntimeError: a tensor is missing, unknown, repeated or misshapen, or the server died or
                timed out. It cannot be used afterwards.
        """
        doing = "update_weights"
        try:
            # Empties the prefix cache, which holds what the old weights made of the prompts.
            self._post(doing, "pause")
            is_new = self._link is None
            connect_info, store = self._link = self._link or self._open_link(update)
            self._post(doing, "start_weight_update")
            info = {
                "policy_version": update.policy_version,
                "is_probe": update.is_probe,
                "base_version": None if is_new else update.base_version,
            }
            receiving = run_in_thread(
                lambda: self._post(doing, "update_weights", {"update_info": info})
            )
            try:
                update.send(connect_info, store if is_new else None)
            except Exception:
                # The server's own word says more than a broken connection.
                with contextlib.suppress(TimeoutError):
                    receiving.result(TIMEOUT_S)
                raise
            receiving.result()
            self._server_version = str(update.policy_version)
            self._post(doing, "finish_weight_update", {"weight_version": self._server_version})
            self._post(doing, "resume")
            if update.is_probe:
                update.hashes = [
                    json.loads(store.get(name_hashes(update.policy_version, rank)))
                    for rank in range(connect_info.num_engine_ranks)
                ]
        except BaseException:
            self._link = None
            raise
        self.policy_version = update.policy_version

    def close(self) -> None:
        """Forget the server's connections. It runs on: who started it ends it."""
        self._link = None

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
                        f"vLLM engine at {self.url} did not answer within "
                        f"rollout.start_timeout_s={start_timeout_s} seconds: {error!r}. It died or "
                        "is still loading; see its log."
                    ) from error
            time.sleep(0.2)

    def _open_link(self, update: WeightUpdate) -> tuple[ConnectInfo, dist.TCPStore]:
        """Tell the engine's ranks where to find the trainer's, and what they will receive."""
        address = urlsplit(self.url)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Sends nothing; it asks the routing table for our address as the engine sees it.
            probe.connect((address.hostname, address.port))
            host = probe.getsockname()[0]
        store = dist.TCPStore(
            host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=TIMEOUT_S)
        )
        schedules = update.format_schedules()
        for rank, schedule in enumerate(schedules):
            store.set(name_schedule(rank), schedule)
        info = ConnectInfo(
            host=host,
            port=store.port,
            num_trainer_ranks=self._config.parallel.world_size,
            num_engine_ranks=len(schedules),
        )
        # Each rank compares it with its own model, before anything is sent.
        self._post("update_weights", "init_weight_transfer_engine", {"init_info": asdict(info)})
        return info, store

    def _post(self, doing: str, path: str, payload: Any = None) -> Any:
        """POST, and look at the server's health until the answer is there.

        Raises:
            RuntimeError: no answer, or an error; says what the trainer was doing.
        """
        try:
            return asyncio.run(self._send_watched(path, payload))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise RuntimeError(self._describe(error, doing, path)) from error

    def _describe(self, error: Exception, doing: str, path: str) -> str:
        if isinstance(error, aiohttp.ClientResponseError):
            return (
                f"vLLM engine at {self.url} refused {error.request_info.url.path} during {doing}: "
                f"HTTP {error.status}, {error.message}. See its log."
            )
        return (
            f"vLLM engine at {self.url} stopped answering during {doing}: {error!r} from "
            f"{path}. It died or hangs; see its log."
        )

    async def _send_watched(self, path: str, payload: Any) -> Any:
        timeout_s = self._config.rollout.request_timeout_s
        async with self._open_session(timeout_s) as session:
            answer = asyncio.create_task(self._send(session, "POST", path, payload))
            # The server leaves calls unanswered when the process that holds the model dies.
            health = asyncio.create_task(self._watch_health(timeout_s))
            await asyncio.wait([answer, health], return_when=asyncio.FIRST_COMPLETED)
            if not answer.done():
                answer.cancel()
                await health
            health.cancel()
            return await answer

    async def _watch_health(self, timeout_s: float) -> None:
        """Never return; raise when the server says that it is ill, or is gone.

        It may be silent for as long as any other call, since it is busy with large answers.
        """
        while True:
            await asyncio.sleep(HEALTH_INTERVAL_S)
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
        async with session.request(method, f"{self.url}/{path}", json=payload) as response:
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
