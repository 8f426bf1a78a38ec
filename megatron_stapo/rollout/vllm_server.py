"""How the vLLM server process is started: its arguments and its environment.

For `engine_host`, which starts it, so it imports neither torch nor vllm. `vllm_engine` is the
client, and `vllm_worker` what the server loads of ours.
"""

import json

from megatron_stapo.config import Config

WEIGHT_TRANSFER_BACKEND = "stapo"
"""Name under which `vllm_worker` registers itself with vLLM."""


def build_server_arguments(config: Config, host: str, port: int) -> list[str]:
    """Arguments for the Python interpreter that runs the server.

    Args:
        host: address to bind. The endpoints can replace the weights and ask for no password, so
            never one that strangers reach.
        port: TCP port; the engine is then at http://host:port.
    """
    rollout = config.rollout
    arguments = [
        # What `vllm serve` runs; the command itself does not start in vLLM's CPU build.
        *("-m", "vllm.entrypoints.launchers.api_server.entry"),
        *("--model", config.model.path),
        *("--host", host),
        *("--port", str(port)),
        *("--dtype", config.model.dtype),
        *("--max-model-len", str(config.max_engine_tokens)),
        *("--max-num-seqs", str(rollout.max_num_seqs)),
        *("--tensor-parallel-size", str(rollout.tensor_parallel_size)),
        *("--pipeline-parallel-size", str(rollout.pipeline_parallel_size)),
        # After temperature; the default is before it.
        *("--logprobs-mode", "processed_logprobs"),
        # Token ids in and out: no tokenizer is loaded.
        "--tokens-only",
        *("--weight-transfer-config", json.dumps({"backend": WEIGHT_TRANSFER_BACKEND})),
        *("--worker-extension-cls", "megatron_stapo.rollout.vllm_worker.Registration"),
        "--disable-uvicorn-access-log",
        "--disable-log-stats",
    ]
    if rollout.kv_cache_bytes is not None:
        arguments += ["--kv-cache-memory-bytes", str(rollout.kv_cache_bytes)]
    if config.parallel.device == "cpu":
        arguments += [
            "--enforce-eager",
            # Only whole blocks of a prompt are shared by its samples, and the default block of 128
            # tokens is longer than a short prompt. 32 is the least that the attention is fast with.
            *("--block-size", "32"),
            # A prompt cut in two rewinds its sampling seed by a call that CPU generators lack.
            "--no-enable-chunked-prefill",
        ]
        if rollout.num_engine_ranks == 1:
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
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }
    if config.parallel.device == "cpu":
        environment |= {
            # With one thread a response does not depend, to the last bit, on what is sampled beside
            # it. A second one gains nothing on a model of the size that a CPU trains, and costs a
            # factor of five where it shares its core with a trainer rank.
            "OMP_NUM_THREADS": "1",
            # Engine and trainer take turns on the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
    return environment
