"""From a recipe's name and `group.field=value` words to a checked Config.

Every value goes through the dataclasses' own constructors, so that a Config that leaves this file
has passed every check. Whatever a user can mistype raises a ValueError that names what is close.
"""

import dataclasses
import difflib
import importlib
import importlib.util
import math
import pkgutil
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_stapo.algorithms import ALGORITHMS
from megatron_stapo.config import AlgorithmConfig, Config


def list_recipes() -> list[str]:
    """Names of the modules in the `recipes` package."""
    import recipes

    return sorted(module.name for module in pkgutil.iter_modules(recipes.__path__))


def load_recipe(recipe: str) -> Config:
    """Call the recipe's function.

    Args:
        recipe: name of a module in `recipes`, or path of a .py file. The function has the name of
            the module or the file.

    Raises:
        ValueError: no such recipe, or not a function that returns a Config.
    """
    if recipe.endswith(".py"):
        path = Path(recipe)
        if not path.is_file():
            raise ValueError(f"recipe {recipe}: no such file.")
        name = path.stem
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        name = recipe
        names = list_recipes()
        if name not in names:
            raise ValueError(
                f"recipe {name}: unknown.{_suggest(name, names)} Recipes: "
                f"{', '.join(names) or 'none'}; or give the path of a .py file."
            )
        module = importlib.import_module(f"recipes.{name}")
    function = getattr(module, name, None)
    if not callable(function):
        raise ValueError(f"recipe {recipe}: has no function {name}() that returns a Config.")
    config = function()
    if not isinstance(config, Config):
        raise ValueError(
            f"recipe {recipe}: {name}() returned {type(config).__name__}, not a Config."
        )
    return config


def apply_overrides(config: Config, overrides: Sequence[str]) -> Config:
    """Replace fields of a config; checks see all new values together, so their order is free.

    Args:
        config: of the recipe.
        overrides: `field=value` or `group.field=value`. none stands for None, true and false for
            booleans; a comma separates the items of a list. `algorithm=NAME` takes the settings of
            a named algorithm, all but the recipe's num_prompts_per_minibatch;
            `algorithm.field=value` then changes single ones.

    Raises:
        ValueError: unknown field, a value of another type, a field given twice, or a value that a
            check of the config refuses.
    """
    fields = _list_fields()
    values: dict[str, Any] = {}
    algorithm = config.algorithm
    for override in overrides:
        name, separator, text = override.partition("=")
        if not separator:
            raise ValueError(f"{override}: an override is group.field=value.")
        if name == "algorithm":
            if algorithm is not config.algorithm:
                raise ValueError(f"{override}: algorithm is given twice; give it once.")
            algorithm = _build_algorithm(text, config)
            continue
        if name not in fields:
            raise ValueError(f"{override}: no field {name}.{_suggest_field(name, fields)}")
        if name in values:
            raise ValueError(f"{override}: {name} is given twice; give it once.")
        values[name] = _parse_value(name, text, fields[name])
    if "name" in values and "run_dir" not in values and config.run_dir == f"runs/{config.name}":
        # The folder of the recipe's name was derived, so the new name derives a new one.
        values["run_dir"] = ""

    changes: dict[str, Any] = {} if algorithm is config.algorithm else {"algorithm": {}}
    groups = {"algorithm": algorithm}
    for name, value in values.items():
        group, separator, field = name.partition(".")
        if separator:
            changes.setdefault(group, {})[field] = value
        else:
            changes[name] = value
    return dataclasses.replace(
        config,
        **{
            name: dataclasses.replace(groups.get(name, getattr(config, name)), **change)
            if isinstance(change, dict)
            else change
            for name, change in changes.items()
        },
    )


def _build_algorithm(name: str, config: Config) -> AlgorithmConfig:
    if name not in ALGORITHMS:
        raise ValueError(
            f"algorithm={name}: unknown.{_suggest(name, list(ALGORITHMS))} Algorithms: "
            f"{', '.join(ALGORITHMS)}."
        )
    size = config.algorithm.num_prompts_per_minibatch
    return ALGORITHMS[name](num_prompts_per_minibatch=size)


def _list_fields() -> dict[str, Any]:
    """Every name that an override may set, with its type."""
    fields: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind):
            hints = typing.get_type_hints(kind)
            fields |= {f"{name}.{field}": hint for field, hint in hints.items()}
        else:
            fields[name] = kind
    return fields


def _parse_value(name: str, text: str, kind: Any, or_none: str = "") -> Any:
    """Read text as the field's type, or say which values the field takes."""
    options = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        if text.lower() == "none":
            return None
        (inner,) = (option for option in options if option is not types.NoneType)
        return _parse_value(name, text, inner, or_none=", or none")
    if typing.get_origin(kind) is typing.Literal:
        if text in options:
            return text
        raise ValueError(f"{name}={text}: must be one of {', '.join(options)}.")
    if kind is str:
        return text
    if kind == tuple[str, ...]:
        return tuple(part for part in text.split(",") if part)
    if kind is bool:
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
        raise ValueError(f"{name}={text}: must be true or false.")
    try:
        value = kind(text)
    except ValueError:
        what = "an integer" if kind is int else "a number"
        raise ValueError(f"{name}={text}: must be {what}{or_none}.") from None
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{name}={text}: must be finite.")
    return value


def _suggest(word: str, words: Sequence[str]) -> str:
    close = difflib.get_close_matches(word, words)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _suggest_field(name: str, fields: dict[str, Any]) -> str:
    """Name the closest fields, or what the group holds, or the groups."""
    field = name.rpartition(".")[2]
    # A field under the wrong group, or without one, is the likeliest slip.
    moved = [full for full in fields if full.rpartition(".")[2] == field]
    if moved:
        return f" Did you mean {' or '.join(moved)}?"
    group = name.partition(".")[0]
    members = [full for full in fields if full.startswith(f"{group}.")]
    suggestion = _suggest(name, members) or _suggest(name, list(fields))
    if suggestion:
        return suggestion
    if members:
        return f" {group} has {', '.join(full.partition('.')[2] for full in members)}."
    groups = sorted({full.partition(".")[0] for full in fields})
    return f" Fields and groups: {', '.join(groups)}."
