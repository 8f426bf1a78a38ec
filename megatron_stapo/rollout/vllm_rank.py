"""A vLLM engine inside the trainer's ranks, each of which holds one of its workers.

vLLM's external launcher makes no process: it takes the world that torchrun has made, and cuts it
into engines of consecutive ranks, which schedule the same requests in the same order.

Invariant: vLLM is a guest. Random states, the default dtype and precision, the environment, and on
a CPU the streams of `torch.cuda` are after every call what they were before.
"""

import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from vllm import EngineArgs, SamplingParams, TokensPrompt
from vllm.config import set_current_vllm_config
from vllm.distributed.device_communicators import cpu_communicator
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.llm_engine import LLMEngine

from megatron_stapo.config import Config, load_model_json
from megatron_stapo.rollout import SamplingRequest, SleepMemory, compute_request_seed
from megatron_stapo.rollout.vllm_engine import CHECKPOINT_VERSION, parse_choices
from megatron_stapo.rollout.vllm_server import build_engine_options
from megatron_stapo.rollout.vllm_worker import WeightReload
from megatron_stapo.rollout.weight_transfer import Part
from megatron_stapo.types import Prompt, Rollout

_STREAMS = ("Event", "Stream", "set_stream", "current_stream", "stream")
"""Names of `torch.cuda`."""


class VllmRank:
    """See `RankEngine`."""

    def __init__(self, config: Config, stop_token_ids: Sequence[int]) -> None:
        """Load this rank's part of model.path. Every rank calls it, after torch.distributed is up.

        Communicates: vLLM makes its groups, over all ranks.

        Raises:
            Exception: of vLLM's, where it cannot start.
        """
        self._config = config
        self._stop_token_ids = list(stop_token_ids)
        self._vocab_size = load_model_json(config.model.path)["vocab_size"]
        self._is_cuda = config.parallel.device == "cuda"
        self._policy_version = 0
        self._is_asleep = False
        self._open: dict[str, tuple[int, SamplingRequest]] = {}
        """By vLLM's name of the request: the prompt's index, and what is asked for it."""
        self._num_requests = 0
        free_bytes = self._read_free_bytes()
        with self._as_guest():
            if not self._is_cuda:
                _avoid_shared_memory()
            self._engine = LLMEngine.from_engine_args(
                EngineArgs(
                    **build_engine_options(config),
                    distributed_executor_backend="external_launcher",
                    # A rank that fails leaves the others of its engine waiting; they have to give
                    # up before the ranks that wait for the round do.
                    distributed_timeout_seconds=max(1, int(config.parallel.timeout_s / 2)),
                    skip_tokenizer_init=True,
                    enable_sleep_mode=self._is_cuda,
                ),
                UsageContext.LLM_CLASS,
            )
        # When the engine is collected, vLLM destroys every group of the process, the trainer's too.
        self._engine.engine_core._finalizer.detach()
        self._taken_bytes = free_bytes - self._read_free_bytes()

    def add(self, index: int, prompt: Prompt, request: SamplingRequest) -> None:
        """See `RankEngine`. vLLM seeds sample i with seed + i."""
        seed = compute_request_seed(self._config.seed, self._policy_version, prompt.prompt_id)
        params = SamplingParams(
            n=request.num_samples,
            seed=seed,
            temperature=request.sampling.temperature,
            top_p=request.sampling.top_p,
            top_k=0,
            max_tokens=request.sampling.max_response_tokens,
            stop_token_ids=self._stop_token_ids,
            # The model folder may name end-of-text tokens of its own.
            ignore_eos=True,
            # Of the sampled token and of no other.
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._num_requests += 1
        name = f"{self._num_requests}"
        with self._as_guest():
            self._engine.add_request(name, TokensPrompt(prompt_token_ids=prompt.token_ids), params)
        self._open[name] = (index, request)

    def step(self, max_steps: int) -> list[tuple[int, list[Rollout]]]:
        """See `RankEngine`.

        Raises:
            ValueError: vLLM has returned something malformed.
        """
        done = []
        with self._as_guest():
            for _ in range(max_steps):
                if not self._engine.has_unfinished_requests():
                    break
                for output in self._engine.step():
                    index, request = self._open.pop(output.request_id)
                    done.append((index, self._parse(output, request)))
        return done

    def abort(self) -> None:
        """See `RankEngine`."""
        if self._open:
            with self._as_guest():
                self._engine.abort_request(list(self._open))
            self._open.clear()

    def load(self, parts: Iterable[tuple[Part, torch.Tensor]], policy_version: int) -> None:
        """See `RankEngine`.

        Raises:
            RuntimeError: a tensor is missing, unknown, repeated or misshapen.
        """
        worker = self._engine.model_executor.driver_worker.worker
        with self._as_guest():
            if self._is_asleep:
                # What the trainer's update has left in its caches is room for the weights.
                torch.cuda.empty_cache()
                self._engine.wake_up(["weights"])
            with set_current_vllm_config(worker.vllm_config):
                reload = WeightReload(worker.get_model(), worker.model_config)
                reload.load(parts)
                reload.finish()
            if self._is_asleep:
                torch.cuda.empty_cache()
                self._engine.wake_up(["kv_cache"])
            # It holds what the old weights made of the prompts.
            self._engine.reset_prefix_cache()
            self._engine.set_weight_version(str(policy_version))
        self._is_asleep = False
        self._policy_version = policy_version

    def sleep(self) -> SleepMemory:
        """See `RankEngine`. vLLM's CPU build cannot: there the engine keeps its memory."""
        if not self._is_cuda:
            return SleepMemory(freed_bytes=None, held_bytes=None)
        before = self._read_free_bytes()
        with self._as_guest():
            # Level 2 drops the weights, which the next `load` replaces.
            self._engine.sleep(level=2)
        self._is_asleep = True
        freed_bytes = self._read_free_bytes() - before
        return SleepMemory(freed_bytes=freed_bytes, held_bytes=self._taken_bytes - freed_bytes)

    def close(self) -> None:
        """See `RankEngine`."""

    def _parse(self, output: Any, request: SamplingRequest) -> list[Rollout]:
        """Check the samples as those of a server are checked."""
        choices = [
            {
                "index": sample.index,
                "token_ids": list(sample.token_ids),
                "logprobs": {
                    "content": [
                        {"token_id": token_id, "logprob": entry[token_id].logprob}
                        for token_id, entry in zip(sample.token_ids, sample.logprobs, strict=True)
                    ]
                },
                "finish_reason": sample.finish_reason,
                "weight_versions": [{"version": s.version} for s in sample.weight_versions],
            }
            for sample in output.outputs
        ]
        version = self._policy_version
        return parse_choices(
            choices,
            num_samples=request.num_samples,
            max_response_tokens=request.sampling.max_response_tokens,
            vocab_size=self._vocab_size,
            stop_token_ids=self._stop_token_ids,
            server_version=str(version) if version else CHECKPOINT_VERSION,
            policy_version=version,
        )

    def _read_free_bytes(self) -> int:
        """Of the device, without what torch keeps for later."""
        if not self._is_cuda:
            return 0
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info()[0])

    @contextmanager
    def _as_guest(self) -> Iterator[None]:
        """Give vLLM the process as it expects it, and the trainer as it was."""
        environment = dict(os.environ)
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        cuda_state = torch.cuda.get_rng_state() if self._is_cuda else None
        dtype, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
        set_num_threads = torch.set_num_threads
        # vLLM's CPU build puts others in their place, whose events Megatron's experts cannot await.
        streams = {} if self._is_cuda else {name: getattr(torch.cuda, name) for name in _STREAMS}
        with ExitStack() as stack:
            if not self._is_cuda:
                from megatron_stapo.parallel import cpu_device

                stack.enter_context(cpu_device.suspended())
            try:
                yield
            finally:
                # Name by name: a thread that starts a process meanwhile needs the others.
                for name in os.environ.keys() - environment.keys():
                    del os.environ[name]
                for name, value in environment.items():
                    if os.environ.get(name) != value:
                        os.environ[name] = value
                random.setstate(states[0])
                np.random.set_state(states[1])
                torch.set_rng_state(states[2])
                if cuda_state is not None:
                    torch.cuda.set_rng_state(cuda_state)
                torch.set_default_dtype(dtype)
                torch.set_float32_matmul_precision(precision)
                torch.set_num_threads = set_num_threads
                for name, stream in streams.items():
                    setattr(torch.cuda, name, stream)


def _avoid_shared_memory() -> None:
    """Let the ranks of an engine talk over gloo.

    In vLLM 0.32's CPU build they talk through shared memory, waiting without a time-out, under a
    name that any two runs of a machine have in common here. Where the ranks of a group do not agree
    on the name, vLLM itself takes gloo.
    """
    own = f"{os.getpid()}"
    cpu_communicator._CPUSHMDistributed.make_group_name = staticmethod(lambda communicator: own)
