"""The host of a server: restarts, hangs, what is left after a kill. The server is a stand-in."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron_stapo.config import to_dict
from megatron_stapo.rollout.engine_host import END_MARK, START_MARK, request_restart
from tests.workers import build_config

# As vLLM does, the server has a child that ignores SIGTERM and is in a session of its own. Asked
# for /die or /hang, it does.
SERVER = """
import os, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
core = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", core], start_new_session=True)
if sys.argv[2] == "never":
    sys.exit("no model")
hang = threading.Event()
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/die":
            os._exit(7)
        if self.path == "/hang":
            hang.set()
        elif hang.is_set():
            time.sleep(600)
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

HOST = """
import sys
from megatron_stapo.rollout import engine_host
how, server = sys.argv.pop(), sys.argv.pop()
engine_host.build_server_arguments = lambda config, host, port: ["-c", server, str(port), how]
engine_host.main()
"""


class Host:
    def __init__(self, run_dir, port, how="serve", **changes):
        self.url = f"http://127.0.0.1:{port}"
        self.run_dir = run_dir
        config = build_config(Path("unused"), **changes)
        (run_dir / "config.json").write_text(json.dumps(to_dict(config)))
        arguments = ["--run-dir", run_dir, "--index", "0", "--host", "127.0.0.1", "--port", port]
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOST, *map(str, arguments), SERVER, how],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )

    def ask(self, path):
        import urllib.request

        try:
            with urllib.request.urlopen(f"{self.url}/{path}", timeout=1) as answer:
                return answer.status == 200
        except OSError:
            return False

    def wait_until_it_serves(self, life=0):
        wait_until(lambda: self.read_log().count("engine 0 serves") == life + 1)

    def read_log(self):
        log = self.run_dir / "logs" / "engine.log"
        return log.read_text() if log.exists() else ""

    def find_processes(self):
        return psutil.Process(self.process.pid).children(recursive=True)


def wait_until(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def are_gone(processes):
    return not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes)


@pytest.fixture
def start(tmp_path):
    hosts = []

    def start(how="serve", **changes):
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        hosts.append(Host(tmp_path, port, how, **changes))
        return hosts[-1]

    yield start
    for host in hosts:
        host.process.terminate()
        host.process.wait(timeout=20)


def test_a_dead_or_hanging_or_unusable_server_is_started_again_and_not_for_ever(start, tmp_path):
    host = start(rollout__max_engine_restarts=3, rollout__health_timeout_s=0.5)
    host.wait_until_it_serves()
    first = host.find_processes()
    host.ask("die")
    host.wait_until_it_serves(1)
    # All of it but the child that watches.
    assert are_gone(first[1:])
    host.ask("hang")
    host.wait_until_it_serves(2)
    request_restart(tmp_path, 0)
    host.wait_until_it_serves(3)
    processes = host.find_processes()
    host.ask("die")
    assert host.process.wait(timeout=20) == 1
    assert are_gone(processes)
    log = host.read_log()
    for reason in (
        "engine 0 ended with exit code 7",
        "engine 0 has not answered for 0.5 s",
        "engine 0 cannot be used any more, says the trainer",
        f"{END_MARK}rollout.max_engine_restarts=3: engine 0 is not started again",
    ):
        assert reason in log


def test_a_server_that_has_never_served_is_not_started_again(start):
    host = start("never")
    assert host.process.wait(timeout=20) == 1
    assert host.read_log().count(START_MARK) == 1
    assert f"{END_MARK}engine 0 has never served" in host.read_log()


@pytest.mark.parametrize(
    ("victim", "signum"), [(0, signal.SIGTERM), (0, signal.SIGKILL), (1, signal.SIGKILL)]
)
def test_nothing_outlives_the_host(start, victim, signum):
    host = start()
    host.wait_until_it_serves()
    processes = [psutil.Process(host.process.pid), *host.find_processes()]
    assert len(processes) == 4
    processes[victim].send_signal(signum)
    host.process.wait(timeout=20)
    wait_until(lambda: are_gone(processes))
