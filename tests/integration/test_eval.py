"""`stapo eval` as a user runs it: the command, its processes, kills and the same command again."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow.parquet
import pytest

from tests.tiny_model import build_coin_base


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return build_coin_base(tmp_path_factory.mktemp("coin"))


def start(base, out, *words):
    """Start an evaluation of 256 samples, four at a time; its output goes to files beside out."""
    with open(f"{out}.stdout", "w") as stdout, open(f"{out}.stderr", "w") as stderr:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "megatron_stapo.cli", "eval", str(base)),
                *(f"--benchmarks=coin={base}/heldout.jsonl", "--n=16", "--device=cpu"),
                *("--max-tokens=16", f"--out={out}"),
                *("data.max_prompt_tokens=48", "data.prompt_suffix=", "model.dtype=float32"),
                *("rollout.max_response_tokens=16", "rollout.max_num_seqs=4"),
                *("rollout.engine=transformers", *words),
            ],
            stdout=stdout,
            stderr=stderr,
        )


def count_samples(out):
    journal = out / "samples.jsonl"
    return journal.read_bytes().count(b"\n") if journal.exists() else 0


def finish(launcher, out):
    assert launcher.wait(timeout=120) == 0, Path(f"{out}.stderr").read_text()
    results = json.loads((out / "results.json").read_text())
    [row] = [
        line for line in Path(f"{out}.stdout").read_text().splitlines() if line[:6] == "coin  "
    ]
    return results, pyarrow.parquet.read_table(out / "samples.parquet").to_pylist(), row


@pytest.mark.slow
def test_a_killed_evaluation_comes_to_the_identical_table(base, tmp_path):
    whole = finish(start(base, tmp_path / "whole"), tmp_path / "whole")
    out = tmp_path / "out"
    launcher = start(base, out)
    deadline = time.monotonic() + 60
    while count_samples(out) < 20:
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    processes = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    launcher.wait()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    assert 20 <= count_samples(out) < 256
    assert not (out / "results.json").exists()

    refused = start(base, out, "evaluation.temperature=0.5")
    assert refused.wait(timeout=60) == 2
    message = Path(f"{out}.stderr").read_text()
    assert message.startswith("stapo: error: evaluation.temperature=0.5: ")
    assert "holds samples of evaluation.temperature=1.0; give another --out" in message

    assert finish(start(base, out), out) == whole
