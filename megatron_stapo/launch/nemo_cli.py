"""A run from NeMo-Run's own command line, with the executors that its users have there:
`nemorun stapo train recipe=NAME 'overrides=["seed=1"]' run.executor=FACTORY`.

`python -m megatron_stapo.launch.nemo_cli` takes the same words without `stapo train`.
"""

from megatron_stapo.launch.cluster import add_run, name_job
from megatron_stapo.launch.nemo import nemo_run
from megatron_stapo.recipe import apply_overrides, load_recipe


@nemo_run.cli.entrypoint(namespace="stapo", type="experiment")
def train(ctx: nemo_run.cli.RunContext, recipe: str, overrides: list[str] = []) -> None:  # noqa: B006
    """Train a model with a recipe of megatron_stapo.

    Args:
        ctx: NeMo-Run's: the executor, and what to do with the experiment.
        recipe: as `stapo train` takes it.
        overrides: `group.field=value` words, in a list.
    """
    config = apply_overrides(load_recipe(recipe), overrides)
    with nemo_run.Experiment(name_job(config)) as experiment:
        add_run(experiment, config, ctx.executor)
        ctx.launch(experiment)


if __name__ == "__main__":
    nemo_run.cli.main(train)
