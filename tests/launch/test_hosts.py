"""Two hosts, each with its own network where this machine allows it: one outcome, nothing left.

Everything is real but the trainer, a single all-reduce over gloo: NeMo-Run starts the hosts, they
find each other over TCP, and NeMo-Run starts a torchrun on each.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.hosts import Host, can_make_networks, connected_hosts, needs_networks
from tests.launch.test_launch import ENVIRONMENT, START_TIMEOUT_S, is_running, wait_until

pytestmark = pytest.mark.slow

STAND_IN_HOSTS = Path(__file__).with_name("stand_in_hosts.py")
# A cut network is noticed after 5 s, and torchrun and its rank have ten each to end.
END_TIMEOUT_S = 60
LOOPBACK = ["127.0.0.1", "127.0.0.1"]


@pytest.fixture(scope="module")
def networks() -> Iterator[list[Host]]:
    """Two hosts, each with its own network."""
    with connected_hosts(2) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest):
    """The runs, all started together; each test ends one of them."""
    hosts = {"succeed": LOOPBACK, "signalled": LOOPBACK, "lose_engine": LOOPBACK}
    if can_make_networks():
        networks = request.getfixturevalue("networks")
        options = [host.option for host in networks]
        hosts |= {"raise": options, "cut": options}
    folder = tmp_path_factory.mktemp("hosts")
    runs = {name: start(folder / name, name, hosts) for name, hosts in hosts.items()}
    yield runs
    for run in runs.values():
        run.launcher.kill()
        run.launcher.communicate()


@dataclass
class Run:
    run_dir: Path
    launcher: subprocess.Popen[str]

    def wait_until_ready(self) -> list[dict]:
        """What the ranks have seen."""
        files = [self.run_dir / f"ready_{rank}" for rank in range(2)]
        wait_until(lambda: all(f.exists() for f in files), START_TIMEOUT_S, f"{self.run_dir} is up")
        return [json.loads(file.read_text()) for file in files]

    def wait_until_ended(self) -> tuple[int, str]:
        """Exit code and output, once no process of any host is left."""
        processes = psutil.Process(self.launcher.pid).children(recursive=True)
        stdout, stderr = self.launcher.communicate(timeout=END_TIMEOUT_S)
        wait_until(lambda: not any(map(is_running, processes)), END_TIMEOUT_S, "no process is left")
        return self.launcher.returncode, stdout + stderr


def start(run_dir: Path, what: str, hosts: list[str]) -> Run:
    launcher = subprocess.Popen(
        [sys.executable, str(STAND_IN_HOSTS), str(run_dir), what, *hosts],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As on the second node of a Slurm job, where NeMo-Run would write no experiment.
        env=ENVIRONMENT | {"SLURM_PROCID": "1"},
        start_new_session=True,
    )
    return Run(run_dir, launcher)


def test_ranks_of_two_hosts_form_one_world_and_end_in_success(runs: dict[str, Run]) -> None:
    run = runs["succeed"]
    seen = run.wait_until_ready()
    exit_code, output = run.wait_until_ended()
    assert (exit_code, [s["sum"] for s in seen], [s["host"] for s in seen]) == (0, [11, 11], [0, 1])
    assert "hosts: 127.0.0.1, 127.0.0.1\nstarting trainer (ranks: 1)" in output
    assert '["finished"]' in output


@needs_networks
def test_a_rank_that_raises_on_another_host_is_named(
    runs: dict[str, Run], networks: list[Host]
) -> None:
    run = runs["raise"]
    # Gloo goes over the cable, not over a loopback interface that each network has of its own.
    addresses = [seen["addresses"][0] for seen in run.wait_until_ready()]
    assert addresses == [host.address for host in networks]
    exit_code, output = run.wait_until_ended()
    error = "trainer rank 1 ended with exit code 1: ArithmeticError: the stand-in fails\n"
    assert exit_code == 1 and output.count("stapo: error:") == 1
    assert f"stapo: error: {error}" in output and '["failed"]' in output


def test_a_signal_ends_every_host_in_order(runs: dict[str, Run]) -> None:
    run = runs["signalled"]
    run.wait_until_ready()
    run.launcher.send_signal(signal.SIGTERM)
    exit_code, output = run.wait_until_ended()
    assert exit_code == 128 + signal.SIGTERM
    assert "stapo: stopped by SIGTERM." in output and '["interrupted"]' in output


def test_the_trainer_of_every_host_saves_when_one_loses_an_engine(runs: dict[str, Run]) -> None:
    run = runs["lose_engine"]
    run.wait_until_ready()
    (run.run_dir / "lose").touch()
    exit_code, output = run.wait_until_ended()
    assert (run.run_dir / "saved_0").exists() and (run.run_dir / "saved_1").exists()
    assert "engine has ended: saving, for at most 60 s" in output and '["failed"]' in output
    assert exit_code == 1 and output.count("stapo: error: ") == 1
    assert "stapo: error: the rollout engine ended with exit code 1.\n" in output
    assert "no memory" in output


# The last one: the cable is the other run's, too.
@needs_networks
def test_a_host_that_is_cut_off_is_named_and_every_rank_ends(
    runs: dict[str, Run], networks: list[Host]
) -> None:
    run = runs["cut"]
    run.wait_until_ready()
    networks[1].plug(is_in=False)
    start_s = time.monotonic()
    exit_code, output = run.wait_until_ended()
    assert exit_code == 1 and time.monotonic() - start_s < END_TIMEOUT_S
    assert f"stapo: error: host 1 ({networks[1].address}) is lost" in output
    assert output.count("stapo: error: ") == 1
