import json
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from megatron_stapo.rollout.vllm_server import build_server_arguments, build_server_environment
from tests.workers import build_config


def parse(arguments):
    """Options with their values; True for flags."""
    options = {}
    for word in arguments[2:]:
        if word.startswith("--"):
            name = word
            options[name] = True
        else:
            options[name] = word
    return options


def build_options(**changes):
    return parse(build_server_arguments(build_config(Path("M"), **changes), "127.0.0.1", 8000))


def test_the_config_reaches_the_server():
    options = build_options(
        model__dtype="bfloat16",
        data__max_prompt_tokens=24,
        rollout__max_response_tokens=40,
        rollout__max_num_seqs=32,
        rollout__tensor_parallel_size=2,
        rollout__pipeline_parallel_size=3,
        rollout__kv_cache_bytes=1 << 20,
    )
    assert options["--model"] == "M"
    assert (options["--host"], options["--port"]) == ("127.0.0.1", "8000")
    assert options["--dtype"] == "bfloat16"
    assert options["--max-model-len"] == "64"
    assert options["--max-num-seqs"] == "32"
    assert options["--tensor-parallel-size"] == "2"
    assert options["--pipeline-parallel-size"] == "3"
    assert options["--kv-cache-memory-bytes"] == str(1 << 20)
    assert options["--logprobs-mode"] == "processed_logprobs"
    assert "--quantization" not in options


def test_fp8_leaves_the_router_of_a_mixture_as_it_is():
    options = build_options(model__dtype="bfloat16", rollout__quantization="fp8")
    assert options["--quantization"] == "fp8_per_block"
    ignored = json.loads(options["--quantization-config"])["ignore"]
    names = ["model.layers.3.mlp.gate", "model.layers.3.mlp.gate_up_proj", "model.layers.3.mlp"]
    assert [any(fnmatch(name, i) for i in ignored) for name in names] == [True, False, False]


def test_a_gpu_decides_its_own_cache_and_compiles():
    options = build_options(parallel__device="cuda")
    cpu_only = {
        "--kv-cache-memory-bytes",
        "--enforce-eager",
        "--no-enable-chunked-prefill",
        "--block-size",
        "--distributed-executor-backend",
    }
    assert not options.keys() & cpu_only
    config = build_config(Path("M"), parallel__device="cuda")
    assert "OMP_NUM_THREADS" not in build_server_environment(config)


@pytest.mark.parametrize(
    ("tp_size", "pp_size", "in_process"), [(1, 1, True), (2, 1, False), (1, 2, False)]
)
def test_one_rank_runs_inside_the_engine_process(tp_size, pp_size, in_process):
    options = build_options(
        rollout__tensor_parallel_size=tp_size, rollout__pipeline_parallel_size=pp_size
    )
    assert ("--distributed-executor-backend" in options) == in_process


def test_the_launcher_needs_neither_torch_nor_vllm():
    script = (
        "import sys, megatron_stapo.rollout.vllm_server;"
        "sys.exit(bool({'torch', 'vllm', 'aiohttp'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_client_does_not_need_vllm():
    script = "import sys, megatron_stapo.rollout.vllm_engine;sys.exit('vllm' in sys.modules.keys())"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
