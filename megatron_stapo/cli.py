"""The `stapo` command.

Importing it is quick: whatever is heavy is imported by the verb that needs it, once it needs it.
"""

import argparse
import dataclasses
import functools
import json
import sys
import typing
from collections.abc import Sequence
from pathlib import Path

from megatron_stapo.config import (
    ClusterConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    ParallelConfig,
    check_engine_layout,
    check_model_layout,
    find_model_json,
    from_dict,
    list_changes,
    to_dict,
)
from megatron_stapo.evaluation.paper import METHODS, PRESETS, SIX_BENCHMARKS
from megatron_stapo.published_models import PUBLISHED
from megatron_stapo.recipe import apply_overrides, load_recipe

EXECUTORS = ("local", "slurm", "kubernetes", "skypilot", "docker")

_RECIPE_HELP = "name of a module in recipes/, or path of a .py file"

# Options of `stapo eval` that stand for a field of the config.
_EVAL_OPTIONS = {
    "benchmarks": (
        "evaluation.benchmarks",
        "names, NAME=SOURCE or sources, separated by commas; default: the paper's six, or the "
        "recipe's",
    ),
    "n": ("evaluation.num_samples", "responses per problem; default: the paper's 32 or 4"),
    "temperature": ("evaluation.temperature", "of the sampling"),
    "top-p": ("evaluation.top_p", "of the sampling"),
    "max-tokens": ("evaluation.max_response_tokens", "longest response; default: the paper's"),
    "num-problems": ("evaluation.num_problems", "take so many from the head of each benchmark"),
    "verifier-url": ("reward.verifier_url", "server of a CompassVerifier, http://host:port"),
    "device": ("parallel.device", "cpu or cuda, the default"),
    "seed": ("seed", "of the samples"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit code: 2, one message and nothing started for what the user can fix; else the verb's.
    """
    arguments = parse(argv)
    try:
        return arguments.run(arguments)
    except ValueError as error:
        print(f"stapo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ends the process on words that it does not know."""
    parser = argparse.ArgumentParser(
        prog="stapo", description="STAPO reinforcement learning on Megatron-Core."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, run, help_text in (
        ("train", _train, "train a model with a recipe on this machine"),
        ("verify", _verify, "compare one update in the recipe's layout with a dense one"),
        ("verify-resume", _verify_resume, "compare a killed and resumed run with one in one go"),
    ):
        verb = verbs.add_parser(name, help=help_text)
        verb.add_argument("recipe", help=_RECIPE_HELP)
        _add_overrides(verb)
        verb.set_defaults(run=run)
        if name == "train":
            _add_train(verb)
        if name == "verify-resume":
            verb.add_argument(
                "--then",
                action="append",
                default=[],
                metavar="group.field=value",
                help="of the resumed half alone, for example parallel.data_parallel_size=2",
            )
    _add_launch(verbs.add_parser("launch", help="train a model with a recipe on a cluster"))
    _add_host(verbs.add_parser("host", help="run a host's part of a launched run"))
    _add_eval(verbs.add_parser("eval", help="measure a model's accuracy on benchmarks"))
    _add_export(verbs.add_parser("export", help="write a checkpoint as a Hugging Face folder"))
    _add_import(verbs.add_parser("import", help="write a Hugging Face folder as a checkpoint"))
    _add_plan(verbs.add_parser("plan", help="memory and step time of a recipe, before it runs"))
    replay = verbs.add_parser("replay", help="compute an update's masks and loss from its dump")
    replay.add_argument("dump", help="for example RUN_DIR/dumps/step_000012/update_1")
    replay.set_defaults(run=_replay)
    # argparse gives overrides that follow an option back as unknown.
    arguments, rest = parser.parse_known_args(argv)
    takes_overrides = "overrides" in arguments
    if unknown := [w for w in rest if w.startswith("-") or "=" not in w or not takes_overrides]:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if takes_overrides:
        arguments.overrides += rest
    return arguments


def _add_overrides(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "overrides",
        nargs="*",
        metavar="group.field=value",
        help="for example optimizer.lr=2e-6",
    )


def _add_train(verb: argparse.ArgumentParser) -> None:
    """The same command goes on with a run that has not come to its end, unless these say other."""
    verb.add_argument(
        "--fresh", action="store_true", help="begin anew; an unfinished run is set aside"
    )
    verb.add_argument(
        "--changed",
        action="store_true",
        help="go on with an unfinished run though settings differ from those it began with",
    )


def _add_launch(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("recipe", help=_RECIPE_HELP)
    _add_overrides(verb)
    verb.add_argument("--executor", choices=EXECUTORS, required=True, help="of NeMo-Run")
    verb.add_argument(
        "--executor-file",
        help="TOML with fields of NeMo-Run's executor, or Python with a function of the "
        "executor's name; executor.field=value changes single ones",
    )
    verb.add_argument(
        "--host",
        action="append",
        default=[],
        metavar="ADDRESS[=COMMAND]",
        help="with --executor local: a host and the command that runs others on it, for example "
        "'10.0.0.1=ip netns exec host1'; once for each host",
    )
    verb.add_argument("--workdir", help="folder that the nodes share; default: this one")
    verb.add_argument("--python", help="the nodes' interpreter; default: python3 of the image")
    verb.add_argument("--port", type=int, help="where the nodes join the first; default: 29450")
    verb.add_argument(
        "--dry-run", action="store_true", help="write what would be submitted, and the plan"
    )
    verb.add_argument("--out", help="folder for that; default: RUN_DIR.launch, RUN_DIR.hosts")
    _add_train(verb)
    verb.set_defaults(run=_launch)


def _add_host(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--config", required=True, help="the run's config as JSON")
    verb.add_argument("--index", type=int, required=True, help="of this host, from 0")
    verb.add_argument("--head", required=True, help="HOST:PORT of host 0")
    _add_train(verb)
    verb.set_defaults(run=_host)


def _add_eval(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("model", help="folder in Hugging Face format")
    _add_overrides(verb)
    for option, (field, help_text) in _EVAL_OPTIONS.items():
        verb.add_argument(f"--{option}", dest=field, metavar=option.upper(), help=help_text)
    verb.add_argument(
        "--preset",
        choices=PRESETS,
        help="the paper's settings: training, temperature 1.0 with top-p 1.0, or justrl, 0.7 with "
        "0.9; at most 20,480 tokens",
    )
    verb.add_argument("--recipe", help=f"whose settings to start from; {_RECIPE_HELP}")
    verb.add_argument("--out", help="folder of samples and results; default: MODEL_eval")
    verb.add_argument(
        "--paper-method",
        choices=METHODS,
        default="STAPO",
        help="whose numbers stand beside ours; default: STAPO",
    )
    verb.set_defaults(run=_eval)


def _add_export(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("checkpoint", help="its folder, or a run folder, whose newest one is taken")
    verb.add_argument("out", help="folder to write, new or empty")
    verb.add_argument(
        "--model",
        help="folder whose config.json and tokenizer are taken; default: those of the checkpoint",
    )
    verb.set_defaults(run=_export)


def _add_import(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("model", help="folder in Hugging Face format")
    verb.add_argument("out", help="folder to write, new or empty")
    verb.set_defaults(run=_import)


def _add_plan(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("recipe", help=_RECIPE_HELP)
    _add_overrides(verb)
    verb.add_argument(
        "--accelerator",
        choices=typing.get_args(typing.get_type_hints(ClusterConfig)["accelerator"]),
        help="default: cluster.accelerator",
    )
    verb.add_argument(
        "--mean-response-tokens",
        type=float,
        help="of a step, for its time; default: half of rollout.max_response_tokens",
    )
    verb.set_defaults(run=_plan)


def _train(arguments: argparse.Namespace) -> int:
    config = apply_overrides(load_recipe(arguments.recipe), arguments.overrides)
    notes = check_inputs(config)
    from megatron_stapo.launch.training import launch_training

    return launch_training(config, notes, fresh=arguments.fresh, changed=arguments.changed)


def _launch(arguments: argparse.Namespace) -> int:
    words = [w for w in arguments.overrides if w.startswith("executor.")]
    overrides = [w for w in arguments.overrides if w not in words]
    config = apply_overrides(load_recipe(arguments.recipe), overrides)
    from megatron_stapo.launch.placement import build_process_table

    table = build_process_table(config)
    if Path(config.model.path).exists() or Path(config.model.path).name in PUBLISHED:
        # Else its folder may be on the nodes alone.
        check_model_layout(config, find_model_json(config.model.path))
    folder = Path(arguments.out or f"{config.run_dir.rstrip('/')}.launch")
    if arguments.executor == "local":
        return _launch_here(arguments, config, words, folder)
    for option in ("fresh", "host"):
        if getattr(arguments, option):
            why = (
                "a requeued job would begin anew every time"
                if option == "fresh"
                else "the cluster chooses the hosts"
            )
            raise ValueError(f"--{option}: not with --executor {arguments.executor}: {why}.")
    from megatron_stapo.launch.cluster import HEAD_PORT, Node, submit, write_dry_run
    from megatron_stapo.launch.executors import build_executor

    executor = build_executor(
        arguments.executor,
        arguments.executor_file,
        [word.removeprefix("executor.") for word in words],
        offline=arguments.dry_run,
    )
    node = Node(
        workdir=arguments.workdir or str(Path.cwd()),
        python=arguments.python or "",
        port=arguments.port or HEAD_PORT,
        changed=arguments.changed,
    )
    if not arguments.dry_run:
        return submit(config, executor, node)
    files = write_dry_run(config, executor, node, folder)
    print(f"{len(table)} processes; wrote {', '.join(map(str, files))}")
    return _write_plan(config, folder)


def _launch_here(
    arguments: argparse.Namespace, config: Config, words: Sequence[str], folder: Path
) -> int:
    """`stapo launch --executor local`: everything on this machine, which may play several hosts."""
    if words or arguments.executor_file:
        raise ValueError(
            f"{words[0] if words else '--executor-file'}: --executor local has no settings."
        )
    from megatron_stapo.launch.local_hosts import launch_on_hosts, parse_host
    from megatron_stapo.launch.placement import (
        build_process_table,
        count_hosts,
        format_process_table,
    )
    from megatron_stapo.launch.tasks import find_free_ports

    hosts = [parse_host(text) for text in arguments.host]
    table = build_process_table(config)
    if hosts and len(hosts) != count_hosts(table):
        raise ValueError(
            f"--host: given {len(hosts)} times, and the layout takes {count_hosts(table)} hosts of "
            f"cluster.num_gpus_per_node={config.cluster.num_gpus_per_node}; give one for each."
        )
    if arguments.dry_run:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "process_table.txt").write_text(format_process_table(table))
        print(f"{len(table)} processes; wrote {folder / 'process_table.txt'}")
        return _write_plan(config, folder)
    if not hosts:
        return _train(arguments)
    check_inputs(config)
    head = f"{hosts[0].address}:{arguments.port or find_free_ports(1)[0]}"
    command = [sys.executable, "-m", "megatron_stapo.cli", "host", "--head", head]
    command += ["--config", json.dumps(to_dict(config))]
    command += [f"--{name}" for name in ("fresh", "changed") if getattr(arguments, name)]
    folder = Path(arguments.out or f"{config.run_dir.rstrip('/')}.hosts")
    return launch_on_hosts(hosts, folder, lambda index: [*command, "--index", str(index)])


def _write_plan(config: Config, folder: Path) -> int:
    """What `stapo plan` says of a run on GPUs, beside what a dry run has written."""
    if config.parallel.device == "cuda":
        from megatron_stapo.plan import build_plan, format_plan

        (folder / "plan.txt").write_text(format_plan(build_plan(config)) + "\n")
    return 0


def _host(arguments: argparse.Namespace) -> int:
    config = from_dict(json.loads(arguments.config))
    address, _, port = arguments.head.rpartition(":")
    from megatron_stapo.launch.hosts import Head, run_member

    if arguments.index:
        return run_member(arguments.index, (address, int(port)), config.run_dir)
    from megatron_stapo.launch.placement import build_process_table, count_hosts
    from megatron_stapo.launch.tasks import build_host_tasks
    from megatron_stapo.launch.training import launch_training

    notes = check_inputs(config)
    head = Head(
        count_hosts(build_process_table(config)),
        int(port),
        config.run_dir,
        functools.partial(build_host_tasks, config),
    )
    return launch_training(
        config, notes, fresh=arguments.fresh, changed=arguments.changed, head=head
    )


def _verify(arguments: argparse.Namespace) -> int:
    """Returns 0 where the layout computes the dense update, else 1."""
    config = apply_overrides(load_recipe(arguments.recipe), arguments.overrides)
    check_model_layout(config)
    from megatron_stapo.launch.verification import launch_verification

    return launch_verification(config)


def _verify_resume(arguments: argparse.Namespace) -> int:
    """Returns 0 where the resumed run is the undisturbed one, else 1."""
    config = apply_overrides(load_recipe(arguments.recipe), arguments.overrides)
    resumed = apply_overrides(config, arguments.then)
    if changes := list_changes(config, resumed):
        raise ValueError(
            f"--then: {'; '.join(changes)} makes it another experiment, of which the first half "
            "knows nothing; give the layout alone (parallel.*), or change both halves."
        )
    check_inputs(config)
    check_model_layout(resumed)
    from megatron_stapo.launch.resumption import launch_resume_check

    return launch_resume_check(config, resumed)


def _plan(arguments: argparse.Namespace) -> int:
    overrides = arguments.overrides
    if arguments.accelerator:
        overrides = [*overrides, f"cluster.accelerator={arguments.accelerator}"]
    config = apply_overrides(load_recipe(arguments.recipe), overrides)
    from megatron_stapo.plan import build_plan, format_plan

    print(format_plan(build_plan(config, arguments.mean_response_tokens)))
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    """Returns 0 where the dump gives the recorded numbers, else 1."""
    from megatron_stapo.checkpoint.dump import load_dump

    dump = load_dump(Path(arguments.dump))
    # Megatron takes seconds, and warns of what a CPU lacks.
    from megatron_stapo.verify.replay import format_replay, replay

    result = replay(*dump)
    print(format_replay(result))
    return 0 if result.passed else 1


def _eval(arguments: argparse.Namespace) -> int:
    config = build_eval_config(arguments)
    check_engine_layout(config)
    _check_verifier(config)
    from megatron_stapo.evaluation.evaluate import load_benchmarks
    from megatron_stapo.launch.evaluation import launch_evaluation

    return launch_evaluation(config, load_benchmarks(config), arguments.paper_method)


def _export(arguments: argparse.Namespace) -> int:
    from megatron_stapo.checkpoint.convert import export_checkpoint, find_checkpoint

    checkpoint = find_checkpoint(Path(arguments.checkpoint))
    print(f"exporting {checkpoint}")
    model = arguments.model and Path(arguments.model)
    num_steps_done = export_checkpoint(checkpoint, Path(arguments.out), model)
    print(f"the model after {num_steps_done} steps is in {arguments.out}")
    return 0


def _import(arguments: argparse.Namespace) -> int:
    from megatron_stapo.checkpoint.convert import import_model

    import_model(Path(arguments.model), Path(arguments.out))
    print(f"the weights of {arguments.model} are in {arguments.out}")
    return 0


def build_eval_config(arguments: argparse.Namespace) -> Config:
    """The config of an evaluation: of a recipe or the paper's, then preset, options, overrides.

    Raises:
        ValueError: as `apply_overrides`; or no benchmark is named.
    """
    if arguments.recipe:
        config = load_recipe(arguments.recipe)
    else:
        config = Config(
            name="eval",
            num_steps=1,
            model=ModelConfig(path=arguments.model),
            parallel=ParallelConfig(),
            data=DataConfig(source=""),
            evaluation=EvaluationConfig(
                benchmarks=SIX_BENCHMARKS,
                max_response_tokens=PRESETS["training"].max_response_tokens,
            ),
        )
    config = dataclasses.replace(
        config, evaluation=dataclasses.replace(config.evaluation, interval_steps=None)
    )
    if arguments.preset:
        preset = dataclasses.asdict(PRESETS[arguments.preset])
        config = dataclasses.replace(
            config, evaluation=dataclasses.replace(config.evaluation, **preset)
        )
    options = [
        f"{field}={value}"
        for field, _ in _EVAL_OPTIONS.values()
        if (value := getattr(arguments, field)) is not None
    ]
    folder = arguments.out or f"{arguments.model.rstrip('/')}_eval"
    config = apply_overrides(
        config,
        [
            f"model.path={arguments.model}",
            f"run_dir={Path(folder) / 'run'}",
            *options,
            *arguments.overrides,
        ],
    )
    if not config.evaluation.benchmarks:
        raise ValueError("evaluation.benchmarks: empty; name some with --benchmarks.")
    # Nothing trains, so the engine need not hold what would.
    longest = min(config.rollout.max_response_tokens, config.max_evaluation_response_tokens)
    return dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, max_response_tokens=longest)
    )


def check_inputs(config: Config) -> list[str]:
    """Refuse what would fail in the run: the model's layout, the problems, the benchmarks.

    Returns:
        What was read and what was left out, a line per source.

    Raises:
        ValueError: names the field, its value and the rule.
    """
    check_model_layout(config)
    _check_verifier(config)
    from megatron_stapo.data.prompts import load_training_prompts
    from megatron_stapo.evaluation.evaluate import load_benchmarks

    _, report, num_overlong = load_training_prompts(
        config.data, config.reward.rule, config.rollout.num_prompts_per_step, config.model.path
    )
    notes = [report.format()]
    if num_overlong:
        notes.append(
            f"left out {num_overlong} prompts over data.max_prompt_tokens="
            f"{config.data.max_prompt_tokens}"
        )
    for benchmark in load_benchmarks(config):
        notes += [f"{benchmark.name}: {note}" for note in benchmark.notes]
    return notes


def _check_verifier(config: Config) -> None:
    """Raises ValueError where the model verifier has no prompt, or does not answer."""
    from megatron_stapo.rewards.compass import CompassVerifier, load_template

    reward = config.reward
    template = load_template(reward.verifier_prompt)
    if reward.verifier_url:
        verifier = CompassVerifier(reward.verifier_url, reward.verifier_model, None, template)
        try:
            verifier.check()
        except RuntimeError as error:
            raise ValueError(str(error)) from error


if __name__ == "__main__":
    sys.exit(main())
