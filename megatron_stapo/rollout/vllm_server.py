"""What vLLM is started with: options and environment, as a server and in the trainer's ranks.

For `engine_host`, which starts the server, and `launch`, so it imports neither torch nor vllm.
`vllm_engine` is the server's client, and `vllm_worker` what it loads of ours; `vllm_rank` is the
engine in the trainer's ranks.
"""

import json
from typing import Any

from megatron_stapo.config import Config

WEIGHT_TRANSFER_BACKEND = "stapo"
"""Name under which `vllm_worker` registers itself with vLLM."""

FP8_QUANTIZATION = "fp8_per_block"
"""vLLM's name of what rollout.quantization=fp8 is."""


def build_engine_options(config: Config) -> dict[str, Any]:
    """What a vLLM engine is made with in any placement, by the names of vLLM's `EngineArgs`."""
    rollout = config.rollout
    options: dict[str, Any] = {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "max_model_len": config.max_engine_tokens,
        "max_num_seqs": rollout.max_num_seqs,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "pipeline_parallel_size": rollout.pipeline_parallel_size,
        # After temperature; the default is before it.
        "logprobs_mode": "processed_logprobs",
        "disable_log_stats": True,
    }
    if rollout.quantization == "fp8":
        options["quantization"] = FP8_QUANTIZATION
        # A mixture of experts' router is one more linear layer to vLLM.
        options["quantization_config"] = {"ignore": ["*.mlp.gate"]}
    if rollout.kv_cache_bytes is not None:
        options["kv_cache_memory_bytes"] = rollout.kv_cache_bytes
    if config.parallel.device == "cpu":
        options |= {
            "enforce_eager": True,
            # Only whole blocks of a prompt are shared by its samples, and the default block of 128
            # tokens is longer than a short prompt. 32 is the least that the attention is fast with.
            "block_size": 32,
            # A prompt cut in two rewinds its sampling seed by a call that CPU generators lack.
            "enable_chunked_prefill": False,
        }
    return options


def build_server_arguments(config: Config, host: str, port: int) -> list[str]:
    """Arguments for the Python interpreter that runs the server.

    Args:
        host: address to bind. The endpoints can replace the weights and ask for no password, so
            never one that strangers reach.
        port: TCP port; the engine is then at http://host:port.
    """
    arguments = [
        # What `vllm serve` runs; the command itself does not start in vLLM's CPU build.
        *("-m", "vllm.entrypoints.launchers.api_server.entry"),
        *("--host", host),
        *("--port", str(port)),
        # Token ids in and out: no tokenizer is loaded.
        "--tokens-only",
        *("--weight-transfer-config", json.dumps({"backend": WEIGHT_TRANSFER_BACKEND})),
        *("--worker-extension-cls", "megatron_stapo.rollout.vllm_worker.Registration"),
        "--disable-uvicorn-access-log",
    ]
    for name, value in build_engine_options(config).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{option}" if value else f"--no-{option}")
        else:
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            arguments += [f"--{option}", text]
    if config.parallel.device == "cpu" and config.rollout.num_engine_ranks == 1:
        # The model runs in the engine's process, not in one more beside it.
        arguments += [
            "--distributed-executor-backend",
            "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        ]
    return arguments


def build_server_environment(config: Config) -> dict[str, str]:
    """Variables to set for the server process."""
    environment = {
        # Opens the weight-update endpoints.
        "VLLM_SERVER_DEV_MODE": "1",
        **_build_common_environment(config),
    }
    if config.parallel.device == "cpu":
        # With one thread a response does not depend, to the last bit, on what is sampled beside it.
        # A second one gains nothing on a model of the size that a CPU trains, and costs a factor of
        # five where it shares its core with a trainer rank.
        environment["OMP_NUM_THREADS"] = "1"
    return environment


def build_colocated_environment(config: Config) -> dict[str, str]:
    """Variables to set for trainer ranks that hold engines, beside the trainer's own."""
    return {
        # The engine runs in the rank's process, not in one beside it.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        **_build_common_environment(config),
    }


def _build_common_environment(config: Config) -> dict[str, str]:
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if config.parallel.device == "cpu":
        # Engine and trainer take turns on the same cores.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return environment
