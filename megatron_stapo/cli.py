"""The `stapo` command.

Importing it is quick: whatever is heavy is imported by the verb that needs it, once it needs it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_stapo.config import Config, check_model_layout
from megatron_stapo.recipe import apply_overrides, load_recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        Exit code: 2, one message and nothing started for what the user can fix; else the verb's.
    """
    parser = argparse.ArgumentParser(
        prog="stapo", description="STAPO reinforcement learning on Megatron-Core."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for name, run, help_text in (
        ("train", _train, "train a model with a recipe on this machine"),
        ("verify", _verify, "compare one update in the recipe's layout with a dense one"),
    ):
        verb = verbs.add_parser(name, help=help_text)
        verb.add_argument("recipe", help="name of a module in recipes/, or path of a .py file")
        verb.add_argument(
            "overrides",
            nargs="*",
            metavar="group.field=value",
            help="for example optimizer.lr=2e-6",
        )
        verb.set_defaults(run=run)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments.recipe, arguments.overrides)
    except ValueError as error:
        print(f"stapo: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _train(recipe: str, overrides: Sequence[str]) -> int:
    config = apply_overrides(load_recipe(recipe), overrides)
    check_inputs(config)
    from megatron_stapo.launch import build_tasks, launch

    return launch(config, build_tasks(config))


def _verify(recipe: str, overrides: Sequence[str]) -> int:
    """Returns 0 where the layout computes the dense update, else 1."""
    config = apply_overrides(load_recipe(recipe), overrides)
    check_model_layout(config)
    from megatron_stapo.launch.verification import launch_verification

    return launch_verification(config)


def check_inputs(config: Config) -> None:
    """Refuse what would fail in the run: the model's layout, the data files, the prompts.

    Raises:
        ValueError: names the field, its value and the rule.
    """
    check_model_layout(config)
    paths = {"train_path": config.data.train_path, "heldout_path": config.data.heldout_path}
    for name, path in paths.items():
        if not Path(path).is_file():
            raise ValueError(
                f"data.{name}={path}: no such file; paths start at the current folder."
            )
    # Imported last: these take seconds, which a mistyped path need not wait for.
    from datasets import disable_progress_bars

    from megatron_stapo.data.prompts import load_prompts

    disable_progress_bars()  # stderr is for the one message
    for path in paths.values():
        load_prompts(config.data, path, config.model.path)


if __name__ == "__main__":
    sys.exit(main())
