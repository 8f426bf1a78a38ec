"""From a config to its plan, and the plan as text."""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_stapo.config import Config, check_model_layout, find_model_json
from megatron_stapo.plan.accelerators import ACCELERATORS, GIB
from megatron_stapo.plan.estimate import Estimate, Problem
from megatron_stapo.plan.search import find_layouts
from megatron_stapo.plan.shape import build_shape
from megatron_stapo.plan.workload import build_evaluation_workload, build_workload

_SLACK = 0.7
"""Of a time limit that a phase may take in the mean: steps differ, and the formulas are rough."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a config needs and takes."""

    problem: Problem
    estimate: Estimate
    """On the accelerator of the config."""
    others: dict[str, Estimate | str]
    """The same layout on every accelerator, or what does not fit there."""
    layouts: list[Estimate]
    """Of as many GPUs, one per split that fits, fastest first."""
    evaluation: float
    """Seconds of sampling the benchmarks once; 0 without any, or where their size is not known."""

    @property
    def num_trainer_gpus(self) -> int:
        """Ranks of the trainer."""
        return self.estimate.trainer.parallel.world_size

    @property
    def num_engine_gpus(self) -> int:
        """Of the engines alone: 0 where they are on the trainer's."""
        if self.problem.is_colocated:
            return 0
        engines = self.estimate.engines
        return engines.num_engines * engines.rollout.num_engine_ranks

    @property
    def num_received_bytes(self) -> int:
        """Of a resync, over all engines: each holds the model once."""
        return self.problem.num_weight_bytes * self.estimate.engines.num_engines

    @property
    def bottleneck(self) -> str:
        """The longest phase, and what it waits for."""
        phases = self.estimate.bare_phases
        longest = max(phases, key=lambda phase: phases[phase])
        share = phases[longest] / self.estimate.total
        time = self.estimate.trainer.time
        waits = "its fixed cost and the network"
        if longest == "rollout":
            waits = self.estimate.engines.time.limit
        elif longest != "sync":
            lost = {
                "communication": time.communication,
                "the pipeline's bubble": time.bubble,
                "FLOPs": time.total - time.communication - time.bubble,
            }
            waits = max(lost, key=lambda name: lost[name])
        return f"{longest}, {share:.0%} of the step; it waits for {waits}"

    @property
    def run_days(self) -> float:
        """Of all steps and evaluations."""
        config = self.problem.config
        num_evaluations = 2
        if config.evaluation.interval_steps is not None:
            num_evaluations = 1 + -(-config.num_steps // config.evaluation.interval_steps)
        seconds = config.num_steps * self.estimate.total + num_evaluations * self.evaluation
        return seconds / 86400

    @property
    def warnings(self) -> list[str]:
        """Time limits of the config that its own phases may reach, and what is not counted."""
        config = self.problem.config
        rollout = self.estimate.phases["rollout"]
        longest = max(rollout, self.evaluation)
        what = "a rollout" if rollout >= self.evaluation else "an evaluation"
        notes = []
        if config.algorithm.dynamic_sampling:
            notes.append("algorithm.dynamic_sampling: one round of rollouts is counted, not more.")
        if self.problem.is_colocated:
            return notes  # its ranks meet many times in a rollout
        return notes + [
            f"{name}={limit:g}: {what} takes about {longest:.0f} s; use {longest / _SLACK:.0f}."
            for name, limit in (
                ("rollout.request_timeout_s", config.rollout.request_timeout_s),
                ("parallel.timeout_s", config.parallel.timeout_s),
            )
            if longest > _SLACK * limit
        ]


def build_plan(config: Config, mean_response_tokens: float | None = None) -> Plan:
    """Compute memory and time of a run, and look for better layouts of as many GPUs.

    Args:
        mean_response_tokens: of a step; None takes half of rollout.max_response_tokens.

    Raises:
        ValueError: the layout does not divide the model, or a part does not fit on
            cluster.accelerator; names the part, and a layout that fits.
    """
    if config.parallel.device != "cuda":
        raise ValueError("parallel.device=cpu: a plan is of GPUs; set it to cuda.")
    if config.rollout.engine != "vllm":
        raise ValueError(f"rollout.engine={config.rollout.engine}: a plan knows vllm alone.")
    model_json = find_model_json(config.model.path)
    check_model_layout(config, model_json)
    if mean_response_tokens is None:
        mean_response_tokens = config.rollout.max_response_tokens / 2
    problems = {
        name: Problem(
            config=config,
            shape=build_shape(model_json),
            workload=build_workload(config, mean_response_tokens),
            accelerator=accelerator,
        )
        for name, accelerator in ACCELERATORS.items()
    }
    estimates: dict[str, Estimate | str] = {}
    for name, problem in problems.items():
        trainer = problem.estimate_trainer(config.parallel, config.data.max_microbatch_tokens)
        engines = problem.estimate_engines(
            config.rollout, trainer if problem.is_colocated else None
        )
        estimate = problem.combine(trainer, engines)
        misfit = problem.describe_misfit(estimate.trainer.memory, estimate.engines.memory)
        estimates[name] = misfit or estimate
    problem = problems[config.cluster.accelerator]
    mine = estimates[config.cluster.accelerator]
    num_gpus = config.parallel.world_size
    if not problem.is_colocated:
        num_gpus += config.rollout.num_engines * config.rollout.num_engine_ranks
    layouts = find_layouts(problem, num_gpus)
    if isinstance(mine, str):
        raise ValueError(f"{mine}; {_suggest(problem, layouts, num_gpus)}")
    benchmarks = build_evaluation_workload(config, mean_response_tokens)
    evaluation = 0.0
    if benchmarks is not None:
        evaluation = problem.estimate_sampling(
            config.rollout, mine.engines.num_engines, mine.engines.memory, benchmarks
        ).total
    return Plan(
        problem=problem,
        estimate=mine,
        others=estimates,
        layouts=layouts,
        evaluation=evaluation,
    )


def _suggest(problem: Problem, layouts: Sequence[Estimate], num_gpus: int) -> str:
    """A layout that fits, on more GPUs where it takes more."""
    node = problem.config.cluster.num_gpus_per_node
    size = num_gpus
    while not layouts and size < 64 * node:
        size = max(2 * size, node)
        layouts = find_layouts(problem, size)
    if not layouts:
        return f"no layout of up to {size} GPUs fits."
    where = "use" if size == num_gpus else f"no layout of {num_gpus} GPUs fits; with {size} use"
    return f"{where} {' '.join(list_overrides(problem.config, layouts[0]))}."


def list_overrides(config: Config, estimate: Estimate) -> list[str]:
    """What changes a config into the layout, as words for the command line."""
    parallel, rollout = estimate.trainer.parallel, estimate.engines.rollout
    pairs: list[tuple[str, object, object]] = [
        (f"parallel.{name}", getattr(config.parallel, name), getattr(parallel, name))
        for name in vars(parallel)
    ]
    pairs.append(
        (
            "data.max_microbatch_tokens",
            config.data.max_microbatch_tokens,
            estimate.trainer.max_microbatch_tokens,
        )
    )
    pairs += [
        (f"rollout.{name}", getattr(config.rollout, name), getattr(rollout, name))
        for name in vars(rollout)
    ]
    return [f"{name}={new}" for name, old, new in pairs if old != new]


def format_plan(plan: Plan) -> str:
    """The plan as tables of text."""
    problem, estimate = plan.problem, plan.estimate
    config, shape, workload = problem.config, problem.shape, problem.workload
    accelerator, time = problem.accelerator, estimate.trainer.time
    num_gpus = plan.num_trainer_gpus + plan.num_engine_gpus
    lines = [
        f"{config.name}: {config.model.path}, {shape.num_params / 1e9:.2f} B parameters, on "
        f"{num_gpus} x {accelerator.name}",
        f"trainer  {plan.num_trainer_gpus} GPUs: {_format_trainer(estimate)}, "
        f"{time.num_microbatches} microbatches per update",
        f"engines  {_format_engine_gpus(plan)}: {_format_engines(estimate)}",
        "",
        f"GiB per GPU of {accelerator.memory_bytes / GIB:.0f}; the trainer's fullest stage is "
        f"{estimate.trainer.memory.stage + 1} of {config.parallel.pipeline_model_parallel_size}",
        *_format_memory(plan),
        "",
        f"seconds per step of {workload.num_sequences} responses, "
        f"{workload.mean_response_tokens:,.0f} tokens each in the mean"
        + ("; rollout beside score to update" if estimate.is_overlapped else ""),
        *_format_times(plan),
        "",
        f"bottleneck: {plan.bottleneck}",
        f"pipeline bubble: {time.bubble:.0f} s; collectives that nothing hides: "
        f"{time.communication:.0f} s",
        f"resync: {problem.num_weight_bytes / 1e9:.1f} GB per engine, "
        f"{plan.num_received_bytes / 1e9:.1f} GB in all, "
        f"{problem.num_weight_bytes / estimate.engines.rollout.num_engine_ranks / 1e9:.2f} GB per "
        "engine GPU",
        f"run: {config.num_steps} steps, {plan.run_days:.1f} days with an evaluation of "
        f"{plan.evaluation:.0f} s "
        + (
            f"every {config.evaluation.interval_steps} steps"
            if config.evaluation.interval_steps
            else "before and after"
        ),
        *(f"warning: {warning}" for warning in plan.warnings),
        "",
        f"layouts of {num_gpus} GPUs that fit, the fastest of every split; this one takes "
        f"{estimate.total:.0f} s",
        *_format_layouts(plan.layouts[:5]),
    ]
    if plan.layouts and plan.layouts[0].total < 0.97 * estimate.total:
        lines.append(f"to try the first: {' '.join(list_overrides(config, plan.layouts[0]))}")
    return "\n".join(lines)


def _format_trainer(estimate: Estimate) -> str:
    parallel = estimate.trainer.parallel
    sizes = [
        ("TP", parallel.tensor_model_parallel_size),
        ("PP", parallel.pipeline_model_parallel_size),
        ("VPP", parallel.virtual_pipeline_model_parallel_size),
        ("CP", parallel.context_parallel_size),
        ("DP", parallel.data_parallel_size),
        ("EP", parallel.expert_model_parallel_size),
    ]
    words = [f"{name}{size}" for name, size in sizes if size > 1] or ["DP1"]
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        words.append("no SP")
    words.append(f"recompute {parallel.recompute}")
    return f"{' '.join(words)}, {estimate.trainer.max_microbatch_tokens} tokens per microbatch"


def _format_engine_gpus(plan: Plan) -> str:
    if plan.problem.is_colocated:
        return "the trainer's GPUs, while it waits"
    return f"{plan.num_engine_gpus} GPUs"


def _format_engines(estimate: Estimate) -> str:
    rollout = estimate.engines.rollout
    stages = f" PP{rollout.pipeline_parallel_size}" if rollout.pipeline_parallel_size > 1 else ""
    return f"{estimate.engines.num_engines} x TP{rollout.tensor_parallel_size}{stages}"


def _format_memory(plan: Plan) -> list[str]:
    trainer, engine = plan.estimate.trainer.memory, plan.estimate.engines.memory
    rows = []
    for part in dict.fromkeys([*trainer.parts, *engine.parts]):
        sizes = [memory.get(part) for memory in (trainer.parts, engine.parts)]
        if any(sizes):
            cells = [f"{size / GIB:10.1f}" if size else f"{'':10}" for size in sizes]
            rows.append(f"  {part:14}{''.join(cells)}")
    total = sum(engine.parts.values())
    longest = plan.problem.config.max_sequence_tokens
    return [
        f"  {'':14}{'trainer':>10}{'engine':>10}",
        *rows,
        f"  {'total':14}{trainer.total / GIB:10.1f}{total / GIB:10.1f}",
        f"  an engine's KV cache holds {engine.kv_tokens / longest:.1f} sequences of "
        f"{longest} tokens; it decodes {plan.estimate.engines.time.num_at_a_time} at a time",
    ]


def _format_times(plan: Plan) -> list[str]:
    names = list(plan.others)
    rows = [f"  {'':14}{''.join(f'{name:>10}' for name in names)}"]
    misfits = [f"  {name}: {e}" for name, e in plan.others.items() if isinstance(e, str)]

    def row(label: str, values: list[float | None]) -> str:
        cells = [f"{'-':>10}" if value is None else f"{value:10.1f}" for value in values]
        return f"  {label:14}{''.join(cells)}"

    for phase in plan.estimate.phases:
        values = [None if isinstance(e, str) else e.phases[phase] for e in plan.others.values()]
        if any(values):
            rows.append(row(phase, values))
    totals = [None if isinstance(e, str) else e.total for e in plan.others.values()]
    return [*rows, row("total", totals), *misfits]


def _format_layouts(layouts: Sequence[Estimate]) -> list[str]:
    return [
        f"  {layout.total:7.0f} s  {layout.trainer.parallel.world_size} trainer: "
        f"{_format_trainer(layout)}; {_format_engines(layout)}"
        for layout in layouts
    ] or ["  none"]
