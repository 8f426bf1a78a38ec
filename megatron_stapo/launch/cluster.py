"""A run as a job of NeMo-Run: the same command on every node, and what a dry run writes of it.

Every node runs `stapo host`: the first supervises, the others join it (`hosts`). One job has
trainer and engine nodes alike and divides them itself, because nothing else works on every
executor: Slurm's heterogeneous jobs need nodes of both kinds at once from the backfill scheduler
alone, and NeMo-Run's template for them does not find the components' hosts; a TrainJob and a
SkyPilot task have nodes of one kind.
"""

import dataclasses
import json
import os
import shlex
import shutil
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

import yaml

from megatron_stapo.checkpoint.stop import STOP_FILE
from megatron_stapo.config import Config, to_dict
from megatron_stapo.launch.nemo import DockerContainer, Executor, nemo_run
from megatron_stapo.launch.placement import (
    build_process_table,
    count_hosts,
    format_process_table,
)

HEAD_PORT = 29450
"""Where members join the head, unless another port is given."""

_WARNING_SLACK_S = 60
"""Seconds between the end of checkpoint.stop_timeout_s and the time limit."""

# The node's number, and the address of the first node, in the shell of a node.
_NODE_VARIABLES = {
    nemo_run.SlurmExecutor: ("$SLURM_NODEID", "$STAPO_HEAD"),
    nemo_run.KubeflowExecutor: ("$PET_NODE_RANK", "$PET_MASTER_ADDR"),
    nemo_run.SkypilotExecutor: ("$SKYPILOT_NODE_RANK", "${SKYPILOT_NODE_IPS%%$'\\n'*}"),
    nemo_run.DockerExecutor: ("0", "127.0.0.1"),
}


@dataclass(frozen=True, kw_only=True)
class Node:
    """What every node needs to know beside the executor."""

    workdir: str = field(default_factory=os.getcwd)
    """Folder on every node from which relative paths of the recipe count; shared by the nodes."""
    python: str = ""
    """Interpreter that has the package; empty: this one, or a container's python3."""
    port: int = HEAD_PORT
    """TCP port of the first node."""
    changed: bool = False
    """As `stapo train --changed`."""


def add_run(
    experiment: nemo_run.Experiment, config: Config, executor: Executor, node: Node | None = None
) -> str:
    """Add a run to an experiment of NeMo-Run, as its `add` does.

    Args:
        experiment: entered.
        config: of a recipe, with overrides.
        executor: account, image, mounts and the like; nodes, GPUs and environment are filled in
            where they are not set. The caller's is not changed.

    Returns:
        The job's id in the experiment.

    Raises:
        ValueError: the layout does not fit hosts, or the executor not the layout.
    """
    node = node or Node()
    script = build_node_script(config, executor, node)
    arranged = arrange_executor(config, executor, node)
    name = name_job(config)
    if isinstance(executor, nemo_run.SlurmExecutor):
        # Only for a group does NeMo-Run's batch script start srun in the background, so that the
        # shell is free to hear Slurm's warning.
        return str(experiment.add([script], executor=arranged, name=name))
    return str(experiment.add(script, executor=arranged, name=name))


def name_job(config: Config) -> str:
    """The recipe's name, as far as every cluster takes it."""
    letters = (c if c.isascii() and c.isalnum() else "-" for c in config.name.lower())
    return "".join(letters).strip("-") or "stapo"


def build_node_script(config: Config, executor: Executor, node: Node) -> nemo_run.Script:
    """What every node runs."""
    index, head = next(v for kind, v in _NODE_VARIABLES.items() if isinstance(executor, kind))
    image = getattr(executor, "container_image", None) or getattr(executor, "image", None)
    python = node.python or ("python3" if image else sys.executable)
    # NeMo-Run and Kubernetes replace what follows a dollar sign; JSON can do without it.
    values = json.dumps(to_dict(config)).replace("$", "\\u0024")
    text = "\n".join(
        [
            f"cd {shlex.quote(node.workdir)} || exit",
            f"exec {shlex.quote(python)} -m megatron_stapo.cli host \\",
            f'  --index "{index}" --head "{head}:{node.port}" \\',
            *(["  --changed \\"] if node.changed else []),
            f"  --config {shlex.quote(values)}",
        ]
    )
    if isinstance(executor, nemo_run.KubeflowExecutor) and not executor.workdir_pvc:
        # No file of NeMo-Run's reaches the pods.
        return nemo_run.Script(path="-c", args=[text])
    return nemo_run.Script(inline=text + "\n")


def arrange_executor(config: Config, executor: Executor, node: Node) -> Executor:
    """A copy of the executor for the run's layout.

    Raises:
        ValueError: as `add_run`.
    """
    num_hosts = count_hosts(build_process_table(config))
    num_gpus = config.cluster.num_gpus_per_node if config.parallel.device == "cuda" else None
    if executor.launcher:
        raise ValueError(
            f"executor.launcher={executor.launcher}: every node starts its own; set it to None."
        )
    changes: dict[str, Any] = {
        # Nodes look nothing up on the network, and NCCL tells what is wrong and no more.
        "env_vars": {"HF_HUB_OFFLINE": "1", "NCCL_DEBUG": "WARN"} | executor.env_vars
    }
    run_dir = str(PurePosixPath(node.workdir) / config.run_dir)
    if isinstance(executor, nemo_run.SlurmExecutor):
        changes |= _arrange_slurm(config, executor, node, run_dir)
        changes |= {"nodes": num_hosts, "ntasks_per_node": 1}
        if num_gpus and not executor.gpus_per_node and not executor.gres:
            changes["gpus_per_node"] = num_gpus
    elif isinstance(executor, nemo_run.KubeflowExecutor):
        if not executor.image:
            raise ValueError("executor.image: is needed; give executor.image=... .")
        mounts = [mount["mountPath"] for mount in executor.volume_mounts]
        _require_covered(run_dir, mounts, "executor.volume_mounts")
        changes |= {"num_nodes": num_hosts, "nprocs_per_node": 1, "gpus_per_node": num_gpus}
    elif isinstance(executor, nemo_run.SkypilotExecutor):
        mounts = [*(executor.storage_mounts or ()), *(executor.file_mounts or ())]
        _require_covered(run_dir, mounts, "executor.storage_mounts")
        changes["num_nodes"] = num_hosts
        if num_gpus:
            gpus = executor.gpus or config.cluster.accelerator.partition("_")[0].upper()
            changes |= {"gpus": gpus, "gpus_per_node": num_gpus}
    else:
        assert isinstance(executor, nemo_run.DockerExecutor)
        if num_hosts > 1:
            raise ValueError(
                f"--executor=docker: runs on one machine, and the layout takes {num_hosts} of "
                f"cluster.num_gpus_per_node={config.cluster.num_gpus_per_node}; use a smaller "
                "layout, or another executor."
            )
        volumes = executor.volumes
        if not _is_covered(run_dir, [volume.split(":")[1] for volume in volumes]):
            volumes = [*volumes, f"{node.workdir}:{node.workdir}"]
        changes |= {"volumes": volumes, "network": "host", "ntasks_per_node": 1}
        if not (executor.shm_size or executor.ipc_mode):
            changes["ipc_mode"] = "host"  # the ranks of NCCL and vLLM share memory
        if num_gpus and executor.num_gpus is None:
            changes["num_gpus"] = -1
    return cast(Executor, dataclasses.replace(executor, **changes))


def _arrange_slurm(
    config: Config, executor: nemo_run.SlurmExecutor, node: Node, run_dir: str
) -> dict[str, Any]:
    """The batch script's part: Slurm warns its shell, which asks the run to save, waits for it and
    puts the job back into the queue."""
    mounts = list(executor.container_mounts)
    if executor.container_image:
        for path in (node.workdir, str(PurePosixPath(run_dir).parent)):
            if not _is_covered(path, [mount.split(":")[1] for mount in mounts]):
                mounts.append(f"{path}:{path}")
    lead_s = int(config.checkpoint.stop_timeout_s) + _WARNING_SLACK_S
    warning = executor.signal or f"B:USR1@{lead_s}"
    name = warning.partition("@")[0].removeprefix("B:")
    if not warning.startswith("B:"):
        raise ValueError(
            f"executor.signal={warning}: would end every rank unsaved; give B:{warning}, which "
            "warns the batch script, or none."
        )
    stop_file = f"{_locate_on_host(run_dir, mounts)}/{STOP_FILE}"
    setup = f"""
export STAPO_HEAD=$head_node
stapo_save() {{
    echo "the time limit" > {shlex.quote(stop_file)}
    wait "${{pids[0]}}"
    exitcode=$?
    # 143: saved before its last step. The same job goes on with it.
    if [ $exitcode -eq 143 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
    exit $exitcode
}}
trap stapo_save {name}
"""
    return {
        "container_mounts": mounts,
        "signal": warning,
        # After the first node to end; the head of the run ends last, and draws the curves.
        "srun_args": [*(executor.srun_args or []), "--wait=300"],
        "setup_lines": (executor.setup_lines or "") + setup,
        # How soon the batch script hears the warning, and the end of the run.
        "monitor_group_job_wait_time": 5,
    }


def _locate_on_host(path: str, mounts: list[str]) -> str:
    """Where a path of the container lies outside it."""
    for mount in mounts:
        source, target = mount.split(":")[:2]
        if _is_covered(path, [target]):
            return str(PurePosixPath(source) / PurePosixPath(path).relative_to(target))
    return path


def _is_covered(path: str, folders: list[str]) -> bool:
    return any(PurePosixPath(path).is_relative_to(folder) for folder in folders)


def _require_covered(run_dir: str, folders: list[str], name: str) -> None:
    if not _is_covered(run_dir, folders):
        raise ValueError(
            f"{name}={folders}: none holds run_dir={run_dir}, which the nodes and the next attempt "
            "share; mount a shared volume there, or give --workdir or run_dir=."
        )


def submit(config: Config, executor: Executor, node: Node) -> int:
    """Hand the job to the cluster; return at once where NeMo-Run can leave it alone.

    Returns:
        Exit code: 0 submitted, or succeeded; else 1.

    Raises:
        ValueError: as `add_run`; or there is no sbatch.
    """
    is_slurm = isinstance(executor, nemo_run.SlurmExecutor)
    if (
        is_slurm
        and isinstance(executor.tunnel, nemo_run.LocalTunnel)
        and not shutil.which("sbatch")
    ):
        raise ValueError(
            "--executor=slurm: there is no sbatch here; run this on a login node, or give a tunnel "
            "in a Python --executor-file."
        )
    with nemo_run.Experiment(name_job(config)) as experiment:
        add_run(experiment, config, executor, node)
        experiment.run(detach=True)
        states = experiment.status(return_dict=True) or {}
    failed = [
        s for s in states.values() if str(s["status"]).split(".")[-1] in ("FAILED", "UNKNOWN")
    ]
    return 1 if failed else 0


def write_dry_run(config: Config, executor: Executor, node: Node, folder: Path) -> list[Path]:
    """Write what `submit` would hand to the cluster, and the process table.

    Args:
        folder: new or overwritten.

    Returns:
        The files: process_table.txt, and sbatch.sh, trainjob.yaml, task.yaml or docker.yaml.

    Raises:
        ValueError: as `add_run`.
    """
    table = folder / "process_table.txt"
    arranged = arrange_executor(config, executor, node)
    folder.mkdir(parents=True, exist_ok=True)
    table.write_text(format_process_table(build_process_table(config)))
    script = build_node_script(config, arranged, node)
    name = name_job(config)
    if isinstance(arranged, nemo_run.SlurmExecutor):
        job = folder / "sbatch.sh"
        job.write_text(_write_sbatch(config, executor, node, folder))
        return [table, job]
    arranged.assign(name, str(folder), name, "job")
    script_file = str(Path(arranged.job_dir) / "scripts" / f"{name}.sh")
    command = [script.entrypoint, *script.to_command(filename=script_file)]
    if isinstance(arranged, nemo_run.KubeflowExecutor):
        job, body = folder / "trainjob.yaml", arranged.get_job_body(name, command)
    elif isinstance(arranged, nemo_run.SkypilotExecutor):
        with _recorded_skypilot():
            task = arranged.to_task(name=name, cmd=command)
        job, body = folder / "task.yaml", task.values
    else:
        assert isinstance(arranged, nemo_run.DockerExecutor)
        arranged.volumes = [*arranged.volumes, f"{arranged.job_dir}:/nemo_run"]
        container = DockerContainer(name=name, command=command, executor=arranged, extra_env={})
        job, body = folder / "docker.yaml", _record_docker(container)
    job.write_text(yaml.dump(body, Dumper=_BlockDumper, sort_keys=False))
    return [table, job]


class _BlockDumper(yaml.SafeDumper):
    """Writes text of several lines as such."""


_BlockDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def _write_sbatch(
    config: Config, executor: nemo_run.SlurmExecutor, node: Node, folder: Path
) -> str:
    """NeMo-Run's own batch script, whose files stay in the folder."""
    home = (folder / "nemo_run").absolute()
    if isinstance(executor.tunnel, nemo_run.LocalTunnel):
        tunnel = nemo_run.LocalTunnel(job_dir=str(home / "experiments"))
        executor = dataclasses.replace(executor, tunnel=tunnel)
    with nemo_run.Experiment(
        name_job(config),
        base_dir=str(home),
        clean_mode=True,
        enable_goodbye_message=False,
        skip_status_at_exit=True,
    ) as experiment:
        add_run(experiment, config, executor, node)
        experiment.dryrun(log=False, delete_exp_dir=False)
        (script,) = Path(experiment._exp_dir).glob("*_sbatch.sh")
    return script.read_text()


def _record_docker(container: DockerContainer) -> dict[str, Any]:
    """What NeMo-Run would ask the Docker daemon to run."""
    recorded: dict[str, Any] = {}

    def run(image: str, command: str, **options: Any) -> None:
        recorded.update(image=image, command=command, **options)

    client = types.SimpleNamespace(containers=types.SimpleNamespace(run=run))
    container.run(client, id=container.name)
    given = {k: v for k, v in recorded.items() if v not in (None, {}, [], False)}
    return cast(dict[str, Any], json.loads(json.dumps(given, default=dict)))


class _RecordedTask:
    """Stands for SkyPilot's Task where the package is not installed."""

    def __init__(self, **values: Any) -> None:
        self.values = {k: v for k, v in values.items() if v}

    def set_file_mounts(self, mounts: dict[str, str]) -> None:
        self.values["file_mounts"] = mounts

    def set_storage_mounts(self, mounts: dict[str, Any]) -> None:
        self.values["file_mounts"] = self.values.get("file_mounts", {}) | mounts

    def set_resources(self, resources: dict[str, Any]) -> None:
        self.values["resources"] = {k: v for k, v in resources.items() if v}


@contextmanager
def _recorded_skypilot() -> Iterator[None]:
    """NeMo-Run makes SkyPilot's objects to submit them; a dry run needs what they are made of."""
    modules: dict[str, dict[str, Any]] = {
        "sky": {},
        "sky.task": {"Task": _RecordedTask},
        "sky.resources": {"Resources": types.SimpleNamespace(from_yaml_config=dict)},
        "sky.data": {"Storage": types.SimpleNamespace(from_yaml_config=dict)},
    }
    before = {name: sys.modules.get(name) for name in modules}
    for name, contents in modules.items():
        module = types.ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module
    try:
        yield
    finally:
        for name, module_before in before.items():
            if module_before is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module_before
