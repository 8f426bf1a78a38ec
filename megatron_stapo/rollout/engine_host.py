"""Keeps one vLLM server running: `python -m megatron_stapo.rollout.engine_host --run-dir DIR
--index I --host H --port P`.

A server that dies, or does not answer for rollout.health_timeout_s, is started again, with the
weights of model.path: the trainer brings it up to date before it samples.

Two processes share the work, so that SIGKILL of either leaves nothing behind: a parent that adopts
what loses its own parent, and its child, which starts and watches the server.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

from megatron_stapo import config as config_module
from megatron_stapo.config import Config
from megatron_stapo.rollout.processes import adopt_orphans, kill_descendants
from megatron_stapo.rollout.vllm_server import build_server_arguments, build_server_environment

START_MARK = "engine_host: start"
"""How the log's line begins that tells one life of the server from the next."""

END_MARK = "engine_host: end: "
"""How the line begins that says why the host gives the server up, and what to do."""

_RESTARTS_FOLDER = "engines"
_POLL_S = 0.2
_HEALTH_INTERVAL_S = 2.0
_STOP_TIMEOUT_S = 5.0
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def name_engine(index: int, num_engines: int) -> str:
    """The name of an engine's task and log file."""
    return "engine" if num_engines == 1 else f"engine_{index}"


def is_engine(name: str) -> bool:
    """Whether a task or a log file has a name of `name_engine`."""
    return name.startswith("engine")


def request_restart(run_dir: Path, index: int) -> None:
    """Ask the host of an engine that answers, but cannot be used any more, to start it again.

    A file reaches every node that shares the folder.
    """
    (run_dir / _RESTARTS_FOLDER).mkdir(exist_ok=True)
    name_restart_request(run_dir, index).touch()


def name_restart_request(run_dir: Path, index: int) -> Path:
    """The file that asks for it."""
    return run_dir / _RESTARTS_FOLDER / f"restart_{index}"


def main() -> None:
    """Run a server until SIGTERM, or until it has died too often.

    Exit code: 1 after the last death; 128 + 15 after SIGTERM.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--index", type=int, required=True, help="of the engine, from 0")
    parser.add_argument("--host", required=True, help="address to bind")
    parser.add_argument("--port", type=int, required=True)
    arguments = parser.parse_args()
    run_dir = arguments.run_dir.absolute()
    config = config_module.from_dict(json.loads((run_dir / "config.json").read_text()))
    _redirect_output(run_dir, arguments.index, config.rollout.num_engines)
    parent_pid = os.getppid()
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    adopt_orphans()
    _die_with_parent(parent_pid)
    child_pid = os.fork()
    try:
        if child_pid == 0:
            adopt_orphans()
            _die_with_parent(os.getppid())
            exit_code = _serve(config, run_dir, arguments.index, arguments.host, arguments.port)
        else:
            # The child ends the server in order, which takes it _STOP_TIMEOUT_S at most.
            signal.signal(signal.SIGTERM, lambda signum, frame: os.kill(child_pid, signum))
            _, status = os.waitpid(child_pid, 0)
            exit_code = abs(os.waitstatus_to_exitcode(status))
    finally:
        kill_descendants()
    sys.exit(exit_code)


def _redirect_output(run_dir: Path, index: int, num_engines: int) -> None:
    """Append both streams of this process and its children to the engine's log."""
    folder = run_dir / "logs"
    folder.mkdir(exist_ok=True)
    log = os.open(
        folder / f"{name_engine(index, num_engines)}.log",
        os.O_WRONLY | os.O_CREAT | os.O_APPEND,
        0o644,
    )
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


def _die_with_parent(parent_pid: int) -> None:
    """Get SIGTERM when the parent ends, however it does."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:  # it ended before the call
        sys.exit(128 + signal.SIGTERM)


def _serve(config: Config, run_dir: Path, index: int, host: str, port: int) -> int:
    """Start the server, again and again; returns the exit code."""
    rollout = config.rollout
    for num_restarts in range(rollout.max_engine_restarts + 1):
        print(f"{START_MARK} {num_restarts} of engine {index} at {host}:{port}", flush=True)
        name_restart_request(run_dir, index).unlink(missing_ok=True)
        server = subprocess.Popen(
            [sys.executable, *build_server_arguments(config, host, port)],
            env={**os.environ, **build_server_environment(config)},
        )
        try:
            death, has_served = _watch(server, config, run_dir, index, f"http://{host}:{port}")
        finally:
            server.terminate()
            try:
                server.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                server.kill()
            kill_descendants()
        print(f"engine_host: engine {index} {death}", flush=True)
        if num_restarts == 0 and not has_served:
            print(
                f"{END_MARK}engine {index} has never served and is not started again; find the "
                "cause in its log.",
                flush=True,
            )
            return 1
    print(
        f"{END_MARK}rollout.max_engine_restarts={rollout.max_engine_restarts}: engine {index} is "
        "not started again; find the cause in its log, or allow more restarts.",
        flush=True,
    )
    return 1


def _watch(
    server: "subprocess.Popen[bytes]", config: Config, run_dir: Path, index: int, url: str
) -> tuple[str, bool]:
    """Wait until the server is dead; returns of what, and whether it has ever answered."""
    rollout = config.rollout
    has_served = False
    last_answer_s = last_look_s = time.monotonic()
    while True:
        time.sleep(_POLL_S)
        if server.poll() is not None:
            return f"ended with exit code {server.returncode}", has_served
        if name_restart_request(run_dir, index).exists():
            return "cannot be used any more, says the trainer", has_served
        now_s = time.monotonic()
        if has_served and now_s - last_look_s < _HEALTH_INTERVAL_S:
            continue
        last_look_s = now_s
        limit_s = rollout.health_timeout_s if has_served else rollout.start_timeout_s
        if _is_healthy(url, timeout_s=min(limit_s, _HEALTH_INTERVAL_S)):
            if not has_served:
                print(f"engine_host: engine {index} serves", flush=True)
            has_served = True
            last_answer_s = time.monotonic()
        elif time.monotonic() - last_answer_s > limit_s:
            return f"has not answered for {limit_s:g} s", has_served


def _is_healthy(url: str, timeout_s: float) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=timeout_s) as answer:
            return bool(answer.status == 200)
    except OSError:  # refused, timed out, or an error status
        return False


if __name__ == "__main__":
    main()
