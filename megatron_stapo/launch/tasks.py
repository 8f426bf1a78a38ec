"""What a run starts: the trainer's ranks, and the rollout engines beside them."""

import contextlib
import shlex
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_stapo.config import Config
from megatron_stapo.launch.placement import build_process_table, count_hosts
from megatron_stapo.rollout.engine_host import name_engine
from megatron_stapo.rollout.vllm_server import build_colocated_environment

LOGS_FOLDER = "logs"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One command of a run."""

    name: str
    argv: list[str]
    env: dict[str, str]
    """Set on top of the launcher's environment."""
    num_ranks: int = 0
    """Number of copies that torchrun starts; 0 runs the command once, without torchrun."""
    num_hosts: int = 1
    """Hosts whose torchruns form one world; the fields below count then."""
    host_rank: int = 0
    """Position among these hosts."""
    master: str = ""
    """ADDRESS:PORT at which the first of them makes the world."""
    ends_run: Literal["always", "on_failure", "never"] = "always"
    """Whether the other tasks of the host are stopped when this one has ended. Where they are not,
    the launcher hears of it and decides."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host of a run as the others see it."""

    address: str
    interface: str
    """The network interface that has the address."""
    ports: list[int]
    """Free ones, as many as it may need."""


def build_tasks(
    config: Config, trainer_module: str = "megatron_stapo.train", *trainer_arguments: str
) -> list[Task]:
    """The run's commands, in the order in which they start.

    They read the config from the run folder and paths from the launcher's working directory.

    Args:
        trainer_module: what every trainer rank runs, with trainer_arguments beside the run folder.
    """
    trainer_argv = [sys.executable, "-m", trainer_module, *trainer_arguments]
    tasks, engine_arguments = [], []
    if config.rollout.has_servers:
        tasks, engine_arguments = _build_engine_tasks(config)
    trainer_argv += ["--run-dir", config.run_dir, *engine_arguments]
    # Every rank is on this machine.
    env = build_trainer_environment(config, interface="lo")
    num_ranks = config.parallel.world_size
    return [*tasks, Task(name="trainer", argv=trainer_argv, env=env, num_ranks=num_ranks)]


def build_trainer_environment(config: Config, interface: str) -> dict[str, str]:
    """Variables to set for the trainer's ranks.

    Args:
        interface: the network interface that gloo uses. Left alone, it looks up the host's name,
            which may not resolve, or resolve to the loopback interface.
    """
    env = {
        # A rank is one thread of compute: several ranks share the cores of a CPU.
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": interface,
        # parallel/watchdog reads all of torch's flight recorder once a second, of which it needs
        # the collectives in flight: 1 ms for 128 of them, 30 ms for torch's 2000.
        "TORCH_FR_BUFFER_SIZE": "128",
    }
    if config.rollout.placement == "colocated":
        env |= build_colocated_environment(config)
    if config.parallel.device == "cuda":
        # Megatron's overlap of communication and compute relies on one hardware queue.
        env["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    return env


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
    for index, port in enumerate(find_free_ports(config.rollout.num_engines)):
        # The trainer's ranks take the first GPUs, a GPU each.
        first = config.parallel.world_size + index * config.rollout.num_engine_ranks
        gpus = range(first, first + config.rollout.num_engine_ranks)
        tasks.append(_build_engine_task(config, index, "127.0.0.1", port, gpus))
        engine_arguments += ["--engine-url", f"http://127.0.0.1:{port}"]
    return tasks, engine_arguments


def _build_engine_task(
    config: Config, index: int, address: str, port: int, gpus: Iterable[int]
) -> Task:
    argv = [sys.executable, "-m", "megatron_stapo.rollout.engine_host"]
    argv += ["--run-dir", config.run_dir, "--index", str(index)]
    argv += ["--host", address, "--port", str(port)]
    env = {}
    if config.parallel.device == "cuda":
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    name = name_engine(index, config.rollout.num_engines)
    # The trainer saves first what an engine's end leaves it with.
    return Task(name=name, argv=argv, env=env, ends_run="never")


def find_free_ports(num_ports: int, address: str = "127.0.0.1") -> list[int]:
    """TCP ports of this machine's address that nothing listens on now, each another one."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(num_ports)]
        for probe in probes:
            probe.bind((address, 0))
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


def build_host_tasks(
    config: Config,
    hosts: Sequence[Host],
    trainer_module: str = "megatron_stapo.train",
) -> list[list[Task]]:
    """The commands of every host of a run, by host, in the order in which they start.

    Args:
        hosts: in the process table's order.
        trainer_module: as for `build_tasks`.
    """
    table = build_process_table(config)
    tasks: list[list[Task]] = [[] for _ in hosts]
    free_ports = [iter(host.ports) for host in hosts]
    urls = []
    for index in range(config.rollout.num_engines if config.rollout.has_servers else 0):
        slots = [process for process in table if process.engine == index]
        host, port = slots[0].host, next(free_ports[slots[0].host])
        address = hosts[host].address
        urls += ["--engine-url", f"http://{address}:{port}"]
        task = _build_engine_task(config, index, address, port, [slot.gpu for slot in slots])
        task.env["GLOO_SOCKET_IFNAME"] = hosts[host].interface
        # vLLM asks for the host's address of its own, which need not be the one we know.
        task.env["VLLM_HOST_IP"] = address
        tasks[host].append(task)
    argv = [sys.executable, "-m", trainer_module, "--run-dir", config.run_dir, *urls]
    ranks = [process for process in table if process.engine is None]
    num_trainer_hosts = count_hosts(ranks)
    master = f"{hosts[0].address}:{next(free_ports[0])}"
    for host in range(num_trainer_hosts):
        tasks[host].append(
            Task(
                name="trainer",
                argv=argv,
                env=build_trainer_environment(config, hosts[host].interface),
                num_ranks=sum(process.host == host for process in ranks),
                num_hosts=num_trainer_hosts,
                host_rank=host,
                master=master,
                # The ranks of the first host may still need the engines of another.
                ends_run="always" if host == 0 else "on_failure",
            )
        )
    return tasks
