"""A run of two hosts whose trainer is `all_reduce`; test_hosts.py starts it as a process.

Arguments: the run folder, what the trainer does, and the two hosts as ADDRESS[=PREFIX]; or, on a
host, what `launch_on_hosts` gives it.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_stapo.config import (
    ClusterConfig,
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RolloutConfig,
)
from megatron_stapo.launch import Task, hosts, launch
from megatron_stapo.launch.local_hosts import launch_on_hosts, parse_host
from megatron_stapo.launch.tasks import Host, build_host_tasks, find_free_ports

# It ends for good once somebody has seen it.
ENGINE = """
import sys, time
from pathlib import Path
while not Path(sys.argv[1], "lose").exists():
    time.sleep(0.05)
sys.exit("no memory")
"""

hosts.LOST_S = 5.0  # a cut is noticed sooner than on a real network


def main() -> int:
    if sys.argv[1] == "host":
        return run_host(*sys.argv[2:])
    run_dir, what, *words = sys.argv[1:]
    local_hosts = [parse_host(word) for word in words]
    head = f"{local_hosts[0].address}:{find_free_ports(1)[0]}"

    def build_command(index: int) -> list[str]:
        return [sys.executable, __file__, "host", run_dir, what, str(index), head]

    return launch_on_hosts(local_hosts, Path(f"{run_dir}.launch"), build_command)


def run_host(run_dir: str, what: str, index: str, head: str) -> int:
    address, _, port = head.rpartition(":")
    if index != "0":
        return hosts.run_member(int(index), (address, int(port)), run_dir)
    config = Config(
        name=what,
        num_steps=1,
        model=ModelConfig(path="unused"),
        parallel=ParallelConfig(device="cpu", data_parallel_size=2),
        data=DataConfig(source="unused"),
        cluster=ClusterConfig(num_gpus_per_node=1),
        rollout=RolloutConfig(engine="transformers"),
        run_dir=run_dir,
    )

    def build(found: Sequence[Host]) -> list[list[Task]]:
        tasks = build_host_tasks(config, found, trainer_module="tests.launch.all_reduce")
        if what == "lose_engine":
            argv = [sys.executable, "-c", ENGINE, run_dir]
            tasks[1].insert(0, Task(name="engine", argv=argv, env={}, ends_run="never"))
        return tasks

    return launch(
        config,
        (),
        lambda ending: json.dumps([ending.status]),
        stop_timeout_s=60.0,
        head=hosts.Head(2, int(port), run_dir, build),
    )


if __name__ == "__main__":
    sys.exit(main())
