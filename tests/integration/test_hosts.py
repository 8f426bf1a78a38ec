"""A run over four hosts, network namespaces each with an address of its own.

Two trainer ranks and two vLLM engines, one per host. It is the run of one host, whatever happens.
"""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest

from tests.hosts import connected_hosts, needs_networks
from tests.integration.test_train import RECIPE, read_steps, wait_for_step
from tests.tiny_model import build_coin_base

pytestmark = [pytest.mark.slow, pytest.mark.vllm, needs_networks]

NUM_STEPS = 6
LAYOUT = [
    f"num_steps={NUM_STEPS}",
    "parallel.tensor_model_parallel_size=1",
    "parallel.data_parallel_size=2",
    "rollout.num_engines=2",
    "checkpoint.interval_steps=1",
]
# The head gives a silent host 30 s, then the processes of the others half a minute to end.
END_TIMEOUT_S = 120


def start(base, folder, *words):
    recipe = folder / "coin.py"
    recipe.write_text(RECIPE.format(base=base, run_dir=folder / "run"))
    with open(folder / "stdout", "w") as out, open(folder / "stderr", "w") as err:
        return subprocess.Popen(
            [sys.executable, "-m", "megatron_stapo.cli", *words[:1], str(recipe), *words[1:]],
            stdout=out,
            stderr=err,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )


def read_metrics(folder):
    steps = {record["step"]: record["metrics"] for record in read_steps(folder)}
    for metrics in steps.values():
        del metrics["tokens_per_s"]
    return steps


def read_events(folder):
    lines = [
        line
        for file in sorted((folder / "run").rglob("metrics.jsonl"))
        if "checkpoints" not in file.parts
        for line in file.read_text().splitlines()
    ]
    return [record["event"] for record in map(json.loads, lines) if "event" in record]


def test_four_hosts_are_one_through_a_killed_engine_and_a_cut_cable(tmp_path):
    """About four minutes on two cores."""
    base = build_coin_base(tmp_path / "coin")
    one, four = tmp_path / "one", tmp_path / "four"
    one.mkdir()
    four.mkdir()
    launcher = start(base, one, "train", *LAYOUT)
    assert launcher.wait(timeout=300) == 0, (one / "stderr").read_text()
    expected = read_metrics(one)
    assert sorted(expected) == [*range(1, NUM_STEPS + 1)]

    with connected_hosts(4) as hosts:
        options = [word for host in hosts for word in ("--host", host.option)]
        command = ["launch", *LAYOUT, "cluster.num_gpus_per_node=1", "--executor", "local"]
        command += options
        launcher = start(base, four, *command)
        wait_for_step(four, launcher, 1, timeout_s=300)
        processes = psutil.Process(launcher.pid).children(recursive=True)
        core = next(p for p in processes if "EngineCore" in p.name())
        core.kill()
        wait_for_step(four, launcher, 3, timeout_s=300)
        assert read_metrics(four)[1] == expected[1]

        processes = psutil.Process(launcher.pid).children(recursive=True)
        hosts[1].plug(is_in=False)
        began = time.monotonic()
        assert launcher.wait(timeout=END_TIMEOUT_S) == 1
        print(f"ended {time.monotonic() - began:.0f} s after the cut")
        _, alive = psutil.wait_procs(processes, timeout=END_TIMEOUT_S)
        assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
        assert f"host 1 ({hosts[1].address}) is lost" in (four / "stdout").read_text()

        hosts[1].plug(is_in=True)
        launcher = start(base, four, *command)
        assert launcher.wait(timeout=300) == 0, (four / "stderr").read_text()
    assert read_metrics(four) == expected
    assert "engine_died" in read_events(four)
