"""What a run starts: the trainer's ranks, and the rollout engines beside them."""

import contextlib
import shlex
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from megatron_stapo.config import Config
from megatron_stapo.rollout.engine_host import name_engine

LOGS_FOLDER = "logs"
OUTCOME_FILE = "nemo_run/outcome.json"
"""Task -> state and exit code, of the tasks that ended unasked."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One command of a run."""

    name: str
    argv: list[str]
    env: dict[str, str]
    """Set on top of the launcher's environment."""
    num_ranks: int = 0
    """Number of copies that torchrun starts; 0 runs the command once, without torchrun."""


def build_tasks(
    config: Config, trainer_module: str = "megatron_stapo.train", *trainer_arguments: str
) -> list[Task]:
    """The run's commands, in the order in which they start.

    They read the config from the run folder and paths from the launcher's working directory.

    Args:
        trainer_module: what every trainer rank runs, with trainer_arguments beside the run folder.
    """
    trainer_argv = [sys.executable, "-m", trainer_module, *trainer_arguments]
    tasks, engine_arguments = _build_engine_tasks(config)
    trainer_argv += ["--run-dir", config.run_dir, *engine_arguments]
    env = {
        # A rank is one thread of compute: several ranks share the cores of a CPU.
        "OMP_NUM_THREADS": "1",
        # Every rank is on this machine. Gloo would look up the host's name, which may not resolve.
        "GLOO_SOCKET_IFNAME": "lo",
        # parallel/watchdog reads all of torch's flight recorder once a second, of which it needs
        # the collectives in flight: 1 ms for 128 of them, 30 ms for torch's 2000.
        "TORCH_FR_BUFFER_SIZE": "128",
    }
    if config.parallel.device == "cuda":
        # Megatron's overlap of communication and compute relies on one hardware queue.
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    num_ranks = config.parallel.world_size
    return [*tasks, Task(name="trainer", argv=trainer_argv, env=env, num_ranks=num_ranks)]


def build_evaluation_tasks(config: Config) -> list[Task]:
    """The commands of an evaluation without a trainer; as `build_tasks`."""
    tasks, engine_arguments = _build_engine_tasks(config)
    argv = [sys.executable, "-m", "megatron_stapo.evaluation.run", "--run-dir", config.run_dir]
    argv += engine_arguments
    return [*tasks, Task(name="evaluation", argv=argv, env={"OMP_NUM_THREADS": "1"})]


def _build_engine_tasks(config: Config) -> tuple[list[Task], list[str]]:
    """The hosts of the vLLM servers, if there are any, and what their client is told."""
    tasks: list[Task] = []
    engine_arguments: list[str] = []
    if config.rollout.engine != "vllm":
        return tasks, engine_arguments
    num_engines = config.rollout.num_engines
    for index, port in enumerate(find_free_ports(num_engines)):
        host = "127.0.0.1"
        argv = [sys.executable, "-m", "megatron_stapo.rollout.engine_host"]
        argv += ["--run-dir", config.run_dir, "--index", str(index)]
        argv += ["--host", host, "--port", str(port)]
        env = {}
        if config.parallel.device == "cuda":
            # The trainer's ranks take the first GPUs, a GPU each.
            first = config.parallel.world_size + index * config.rollout.num_engine_ranks
            gpus = range(first, first + config.rollout.num_engine_ranks)
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        tasks.append(Task(name=name_engine(index, num_engines), argv=argv, env=env))
        engine_arguments += ["--engine-url", f"http://{host}:{port}"]
    return tasks, engine_arguments


def find_free_ports(num_ports: int) -> list[int]:
    """TCP ports of 127.0.0.1 that nothing listens on now, each another one."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def build_script(run_dir: Path, task: Task) -> str:
    """The shell script that becomes the task's command, both its streams in a log file of its own.

    The file is logs/NAME.log, or logs/NAME_rankN.log for each rank. The script is complete, so that
    a person can run it again by hand.
    """
    name = f"{task.name}_rank${{RANK}}" if task.num_ranks else task.name
    folder = shlex.quote(str(run_dir.absolute() / LOGS_FOLDER))
    lines = [f'exec >{folder}/"{name}.log" 2>&1']
    lines += [f"export {key}={shlex.quote(value)}" for key, value in task.env.items()]
    # exec keeps the process id, which is what torchrun and NeMo-Run signal.
    lines.append(f"exec {shlex.join(task.argv)}")
    return "\n".join(lines) + "\n"
