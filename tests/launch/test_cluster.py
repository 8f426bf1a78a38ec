"""Dry runs of every recipe: the structure of what a cluster would get, and what it would do."""

import dataclasses
import gc
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from megatron_stapo import cli
from megatron_stapo.config import Config, from_dict
from megatron_stapo.launch.cluster import Node, add_run, write_dry_run
from megatron_stapo.launch.executors import build_executor
from megatron_stapo.launch.nemo import nemo_run
from megatron_stapo.launch.placement import build_process_table, count_hosts
from megatron_stapo.recipe import apply_overrides, list_recipes, load_recipe
from tests.launch.test_launch import ENVIRONMENT

# Invoke, by which NeMo-Run makes folders, leaves its pipes to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

WORDS = {
    "slurm": ["account=team", "partition=h20", "time=08:00:00", "container_image=/images/s.sqsh"],
    "kubernetes": [
        "image=registry/stapo:1",
        'volumes=[{name="work", persistentVolumeClaim={claimName="work"}}]',
        'volume_mounts=[{name="work", mountPath="/work"}]',
    ],
    "skypilot": ["container_image=docker:stapo:1", 'storage_mounts={"/work"={name="w"}}'],
    "docker": ["container_image=stapo:1"],
}
NODE = Node(workdir="/work/project", python="/opt/python")


@pytest.fixture(autouse=True, scope="module")
def invoke() -> Iterator[None]:
    """It reads the standard input, and its pipes are collected while warnings are ignored."""
    with open(os.devnull) as nothing, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("sys.stdin", nothing)
        yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


@pytest.fixture(params=list_recipes())
def recipe(request: pytest.FixtureRequest) -> Config:
    """Every recipe."""
    return load_recipe(request.param)


@pytest.fixture
def spread() -> Config:
    """12 trainer ranks and 3 engines of 4 ranks on nodes of 8: one engine beside the trainer."""
    words = ["parallel.device=cuda", "parallel.data_parallel_size=6", "model.dtype=bfloat16"]
    words += ["rollout.num_engines=3", "rollout.tensor_parallel_size=4"]
    return apply_overrides(load_recipe("tiny_stapo"), words)


def dry_run(kind: str, config: Config, folder: Path, *words: str, node: Node = NODE) -> Path:
    executor = build_executor(kind, None, [*WORDS[kind], *words], offline=True)
    table, job = write_dry_run(config, executor, node, folder)
    assert len(table.read_text().splitlines()) == 1 + len(build_process_table(config))
    return job


def read_directives(script: str) -> dict[str, str]:
    lines = [line for line in script.splitlines() if line.startswith("#SBATCH")]
    words = [shlex.split(line.removeprefix("#SBATCH --"))[0] for line in lines]
    return dict(word.partition("=")[::2] for word in words)


def read_command(text: str) -> list[str]:
    """The words of a node's command, after `cd WORKDIR || exit` and exec."""
    lines = text.removeprefix("#!/usr/bin/bash\n").split("\n", 1)
    assert lines[0] == "cd /work/project || exit"
    words = shlex.split(lines[1].replace("\\\n", ""))
    assert words[:5] == ["exec", "/opt/python", "-m", "megatron_stapo.cli", "host"]
    return words


def check_command(words: list[str], config: Config, index: str, head: str) -> None:
    options = dict(zip(words[5::2], words[6::2], strict=True))
    assert (options["--index"], options["--head"]) == (index, head)
    assert from_dict(json.loads(options["--config"])) == config


def test_slurm_gets_one_job_whose_nodes_run_the_same_command(recipe, tmp_path):
    script = dry_run("slurm", recipe, tmp_path)
    assert subprocess.run(["bash", "-n", str(script)], capture_output=True).stderr == b""
    directives = read_directives(script.read_text())
    num_hosts = count_hosts(build_process_table(recipe))
    assert directives["nodes"] == str(num_hosts) and directives["ntasks-per-node"] == "1"
    has_gpus = recipe.parallel.device == "cuda"
    num_gpus = str(recipe.cluster.num_gpus_per_node) if has_gpus else None
    assert directives.get("gpus-per-node") == num_gpus
    assert directives["partition"] == "h20" and directives["time"] == "08:00:00"
    lead_s = recipe.checkpoint.stop_timeout_s + 60
    assert directives["signal"] == f"B:USR1@{lead_s:.0f}"
    (srun,) = [line for line in script.read_text().splitlines() if line.startswith("srun ")]
    words = shlex.split(srun)
    assert words[words.index("--container-image") + 1] == "/images/s.sqsh"
    assert "/work/project:/work/project" in words[words.index("--container-mounts") + 1]
    (text,) = [file.read_text() for file in tmp_path.rglob("scripts/*.sh")]
    check_command(read_command(text), recipe, "$SLURM_NODEID", "$STAPO_HEAD:29450")
    assert "export STAPO_HEAD=$head_node\n" in script.read_text()
    assert "export HF_HUB_OFFLINE=1\n" in script.read_text()


def test_kubernetes_gets_one_trainjob_whose_pods_run_the_same_command(recipe, tmp_path):
    manifest = yaml.safe_load(dry_run("kubernetes", recipe, tmp_path).read_text())
    assert manifest["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert manifest["kind"] == "TrainJob" and manifest["metadata"]["namespace"] == "default"
    assert manifest["spec"]["runtimeRef"] == {"name": "torch-distributed"}
    trainer = manifest["spec"]["trainer"]
    assert trainer["image"] == "registry/stapo:1" and trainer["numProcPerNode"] == 1
    assert trainer["numNodes"] == count_hosts(build_process_table(recipe))
    if recipe.parallel.device == "cuda":
        gpus = {"nvidia.com/gpu": str(recipe.cluster.num_gpus_per_node)}
        assert trainer["resourcesPerNode"] == {"limits": gpus, "requests": gpus}
    else:
        assert "resourcesPerNode" not in trainer
    assert {"name": "HF_HUB_OFFLINE", "value": "1"} in trainer["env"]
    assert trainer["command"][:2] == ["bash", "-c"] and len(trainer["command"]) == 3
    check_command(
        read_command(trainer["command"][2]), recipe, "$PET_NODE_RANK", "$PET_MASTER_ADDR:29450"
    )
    (override,) = manifest["spec"]["podTemplateOverrides"]
    (container,) = override["spec"]["containers"]
    assert container["volumeMounts"] == [{"name": "work", "mountPath": "/work"}]


def test_a_layout_of_three_nodes_asks_for_their_gpus(spread, tmp_path):
    directives = read_directives(dry_run("slurm", spread, tmp_path / "slurm").read_text())
    assert (directives["nodes"], directives["gpus-per-node"]) == ("3", "8")
    words = ["gres=gpu:h20:8"]  # a cluster that counts GPUs in its own way
    directives = read_directives(dry_run("slurm", spread, tmp_path / "gres", *words).read_text())
    assert directives["gres"] == "gpu:h20:8" and "gpus-per-node" not in directives
    task = yaml.safe_load(dry_run("skypilot", spread, tmp_path / "sky").read_text())
    assert task["num_nodes"] == 3 and task["resources"]["accelerators"] == {"H20": 8}
    assert task["file_mounts"]["/work"] == {"name": "w"}
    assert "bash /nemo_run/scripts/tiny-stapo.sh" in task["run"]
    (text,) = [file.read_text() for file in (tmp_path / "sky").rglob("scripts/*.sh")]
    head = "${SKYPILOT_NODE_IPS%%$'\\n'*}"
    check_command(read_command(text), spread, "$SKYPILOT_NODE_RANK", f"{head}:29450")
    shell = ["bash", "-c", f'echo "{head}"']
    first = subprocess.run(
        shell, env={"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.5"}, capture_output=True
    )
    assert first.stdout == b"10.0.0.4\n"


def test_docker_runs_one_machine_and_refuses_more(spread, tmp_path):
    with pytest.raises(ValueError, match="docker: runs on one machine, and the layout takes 3"):
        dry_run("docker", spread, tmp_path)
    config = apply_overrides(spread, ["parallel.data_parallel_size=2", "rollout.num_engines=1"])
    request = yaml.safe_load(dry_run("docker", config, tmp_path).read_text())
    assert request["image"] == "stapo:1" and request["network"] == request["ipc_mode"] == "host"
    assert "/work/project:/work/project" in request["volumes"]
    assert request["device_requests"][0]["Count"] == -1
    (text,) = [file.read_text() for file in tmp_path.rglob("scripts/*.sh")]
    check_command(read_command(text), config, "0", "127.0.0.1:29450")


def test_text_that_a_shell_would_read_arrives_as_it_is(spread, tmp_path):
    suffix = """ $HOME $$ ${head_node_ip_var} `id` "a" 'b' \\ \n end"""
    data = dataclasses.replace(spread.data, prompt_suffix=suffix)
    config = dataclasses.replace(spread, data=data)
    for kind in ("slurm", "kubernetes", "skypilot"):
        job = dry_run(kind, config, tmp_path / kind)
        if kind == "kubernetes":
            text = yaml.safe_load(job.read_text())["spec"]["trainer"]["command"][2]
        else:
            (text,) = [file.read_text() for file in (tmp_path / kind).rglob("scripts/*.sh")]
        (line,) = [line for line in text.splitlines() if "--config" in line]
        shown = subprocess.run(
            ["bash", "-c", f"printf %s {line.strip().removeprefix('--config ')}"],
            capture_output=True,
            text=True,
        )
        assert from_dict(json.loads(shown.stdout)) == config


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        (
            "slurm",
            ["acount=me"],
            "executor.acount: no such field of SlurmExecutor. Did you mean acc",
        ),
        ("slurm", ["nodes=4"], "executor.nodes=4: follows from the recipe's layout"),
        ("slurm", ["container_mounts=7"], "executor.container_mounts=7: must be list"),
        ("slurm", ["signal=TERM@90"], "executor.signal=TERM@90: would end every rank unsaved"),
        ("kubernetes", ["image="], "executor.image: is needed"),
        ("kubernetes", ["volume_mounts=[]"], r"executor.volume_mounts=\[\]: none holds run_dir=/w"),
    ],
)
def test_what_an_executor_does_not_take_is_refused_by_name(spread, tmp_path, kind, words, message):
    with pytest.raises(ValueError, match=message):
        dry_run(kind, spread, tmp_path, *words)


def test_settings_come_from_a_file_of_toml_or_python(spread, tmp_path):
    toml = tmp_path / "slurm.toml"
    toml.write_text(
        'account = "a"\ncontainer_mounts = ["/d:/d"]\n[env_vars]\nNCCL_IB_HCA = "mlx5"\n'
    )
    executor = build_executor("slurm", str(toml), ["account=b", "time=00:30:00", "mem=0"])
    assert (executor.account, executor.time, executor.mem) == ("b", "00:30:00", "0")
    assert executor.container_mounts == ["/d:/d"] and executor.env_vars == {"NCCL_IB_HCA": "mlx5"}
    _, job = write_dry_run(spread, executor, NODE, tmp_path / "out")
    assert "export NCCL_IB_HCA=mlx5\n" in job.read_text()
    python = tmp_path / "executors.py"
    python.write_text(
        "import nemo_run as run\n"
        "def slurm():\n"
        "    return run.SlurmExecutor(account='c', tunnel=run.LocalTunnel(job_dir='/jobs'))\n"
    )
    executor = build_executor("slurm", str(python), ["retries=2"])
    assert (executor.account, executor.retries) == ("c", 2)
    assert executor.tunnel.job_dir == "/jobs"
    with pytest.raises(ValueError, match=r"executors.py: has no function docker\(\)"):
        build_executor("docker", str(python), [])
    with pytest.raises(ValueError, match=r"executor.account: is needed"):
        build_executor("slurm", None, [])


def test_a_run_can_be_added_to_an_experiment_of_a_users_own_script(spread, tmp_path):
    executor = nemo_run.SlurmExecutor(account="team", packager=nemo_run.Packager())
    with nemo_run.Experiment(
        "mine", base_dir=str(tmp_path), clean_mode=True, skip_status_at_exit=True
    ) as experiment:
        job = add_run(experiment, spread, executor)
        assert job == "tiny-stapo"
        assert experiment.jobs[0].executor.nodes == 3
    assert executor.nodes == 1  # the caller's is as it was


def test_nemo_runs_own_command_line_takes_recipes(tmp_path):
    (tmp_path / "workspace.py").write_text(
        "import nemo_run as run\n"
        "@run.cli.factory\n"
        "@run.autoconvert\n"
        "def team() -> run.SlurmExecutor:\n"
        "    return run.SlurmExecutor(account='team', packager=run.Packager())\n"
    )
    layout = '"parallel.tensor_model_parallel_size=1", "cluster.num_gpus_per_node=1"'
    words = ["recipe=tiny_stapo", f"overrides=[{layout}]"]
    words += ["run.executor=team", "run.executor.time=01:00:00", "--yes", "--dryrun"]
    result = subprocess.run(
        [sys.executable, "-m", "megatron_stapo.launch.nemo_cli", *words],
        cwd=tmp_path,
        env=ENVIRONMENT | {"NEMORUN_HOME": str(tmp_path / "home"), "COLUMNS": "500"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    directives = read_directives("\n".join(map(str.strip, result.stdout.splitlines())))
    assert (directives["nodes"], directives["time"]) == ("2", "01:00:00")
    assert directives["account"] == "team" and "stapo_save" in result.stdout


SHIM = """#!/usr/bin/env bash
# Slurm on one machine: two nodes, each a process.
case "$(basename "$0") $*" in
    "scontrol show hostnames"*) printf 'node1\\nnode2\\n' ;;
    "scontrol requeue"*) echo "$*" >> {folder}/requeued ;;
    "srun"*hostname*) echo 10.0.0.1 ;;
    "srun"*)
        while [ "$1" != bash ]; do shift; done
        SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@"
        exitcode=$?
        wait
        exit $exitcode ;;
esac
"""

NODE_STAND_IN = """#!/usr/bin/env bash
echo "$5 $7" >> {folder}/nodes
while [ "$5" = 0 ] && [ ! -e {stop} ]; do sleep 0.1; done
[ "$5" = 1 ] || exit {exit_code}
"""


@pytest.mark.parametrize(("exit_code", "is_requeued"), [(143, True), (0, False)])
def test_slurms_warning_lets_the_run_save_and_puts_the_job_back(
    spread, tmp_path, exit_code, is_requeued
):
    """The batch script itself, with stand-ins for Slurm's commands and for the nodes' Python."""
    (tmp_path / "bin").mkdir()
    for name in ("scontrol", "srun"):
        (tmp_path / "bin" / name).write_text(SHIM.format(folder=tmp_path))
    stop = tmp_path / "runs" / "demo" / "stop"
    stop.parent.mkdir(parents=True)
    python = tmp_path / "bin" / "python"
    python.write_text(NODE_STAND_IN.format(folder=tmp_path, stop=stop, exit_code=exit_code))
    for file in (tmp_path / "bin").iterdir():
        file.chmod(0o755)
    executor = build_executor("slurm", None, ["account=team"])
    node = Node(workdir=str(tmp_path), python=str(python))
    _, script = write_dry_run(spread, executor, node, tmp_path / "out")
    environment = os.environ | {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]"}
    environment["PATH"] = f"{tmp_path / 'bin'}:{environment['PATH']}"
    batch = subprocess.Popen(
        ["bash", str(script)],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        nodes = tmp_path / "nodes"
        deadline_s = time.monotonic() + 20
        while not (nodes.exists() and len(nodes.read_text().splitlines()) == 2):
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert sorted(nodes.read_text().splitlines()) == ["0 node1:29450", "1 node1:29450"]
        batch.send_signal(signal.SIGUSR1)
        assert batch.wait(timeout=20) == exit_code
    finally:
        if batch.poll() is None:
            os.killpg(batch.pid, signal.SIGKILL)
            batch.wait()
    assert stop.read_text() == "the time limit\n"
    requeued = tmp_path / "requeued"
    assert (requeued.read_text() if requeued.exists() else "") == "requeue 7\n" * is_requeued


def test_the_command_line_writes_a_dry_run_without_model_or_data(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["launch", "tiny_stapo", "--executor", "slurm", "--dry-run", "executor.account=me"]
    assert cli.main([*arguments, "seed=3"]) == 0
    files = ["runs/demo.launch/process_table.txt", "runs/demo.launch/sbatch.sh"]
    assert capsys.readouterr().out == f"3 processes; wrote {', '.join(files)}\n"
    (text,) = [file.read_text() for file in tmp_path.rglob("scripts/*.sh")]
    assert f"cd {tmp_path} || exit" in text and '"seed": 3' in text
    assert cli.main(["launch", "tiny_stapo", "--executor", "local", "--dry-run"]) == 0
    for words, message in (
        (["--executor", "slurm", "--fresh"], "--fresh: not with --executor slurm"),
        (["--executor", "local", "executor.account=me"], "--executor local has no settings"),
        (["--executor", "local", "--host", "10.0.0.1"] * 2, "--host: given 2 times, and the lay"),
        (["--executor", "local", "--host", "node1"], "--host=node1: must be ADDRESS"),
        (["--executor", "slurm", "executor.account=me"], "there is no sbatch here"),
    ):
        assert cli.main(["launch", "tiny_stapo", *words]) == 2
        assert message in capsys.readouterr().err
