"""Procedural problems of reasoning-gym, in parts that never share a question."""

import difflib
import hashlib
import json
import re
import typing
import warnings
from dataclasses import fields
from typing import Any

NUM_BUCKETS = 16
GYM_PARTS = {"pretrain": range(0, 7), "train": range(7, 14), "heldout": range(14, 16)}
"""The values of a question's hash, modulo `NUM_BUCKETS`, that put it in a part."""

GYM_SEED_STRIDE = 1_000_000
"""reasoning-gym draws row i of seed s from s + i: the rows of seeds 0 and 1 are the same but for
one. Ours lie so many rows apart. Seed 0 is reasoning-gym's own."""

MAX_FRUITLESS_DRAWS = 20_000
"""Draws of a gym task without a new problem after which it counts as exhausted."""


def compute_part(question: str) -> str:
    """Return the part that a procedural question belongs to, by its text alone."""
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8]) % NUM_BUCKETS
    return next(part for part, buckets in GYM_PARTS.items() if bucket in buckets)


def draw_problems(source: str, task: str, options: dict[str, str]) -> tuple[list[Any], list[Any]]:
    """Draw distinct problems of one part of a task.

    Args:
        source: as the user wrote it, for messages.
        task: of reasoning-gym.
        options: size, seed, part and the task's parameters, as texts.

    Returns:
        The questions and their answers.

    Raises:
        ValueError: an unknown task, option or part, a value that the task refuses, or fewer
            distinct problems than asked for.
    """
    # Its dependencies compile with warnings.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise ValueError(
            f"data source {source}: reasoning-gym has no task {task!r}."
            f"{_suggest(task, list(DATASETS)) or f' It has {", ".join(sorted(DATASETS))}.'}"
        )
    dataset_class, config_class = DATASETS[task]
    hints = typing.get_type_hints(config_class)
    part = options.get("part", "train")
    if part not in GYM_PARTS:
        raise ValueError(f"data source {source}: part={part}: not one of {', '.join(GYM_PARTS)}.")
    size = _parse_count(source, "size", options.get("size", "500"), least=1)
    seed = _parse_count(source, "seed", options.get("seed", "0"), least=0)
    names = [f.name for f in fields(config_class) if f.name not in ("size", "seed")]
    parameters = {}
    for name, text in options.items():
        if name in ("size", "seed", "part"):
            continue
        if name not in names:
            raise ValueError(
                f"data source {source}: {task} has no parameter {name!r}."
                f"{_suggest(name, ['size', 'seed', 'part', *names])} It takes size, seed, part"
                f"{''.join(f', {n}' for n in names)}."
            )
        parameters[name] = _parse_parameter(source, name, text, hints[name])

    rows: dict[str, Any] = {}
    num_draws = last_fruitful = 0
    # In pieces, because some tasks prepare as many rows as their size says.
    piece_size = max(size, 64)
    while len(rows) < size:
        try:
            config = config_class(
                size=piece_size, seed=seed * GYM_SEED_STRIDE + num_draws, **parameters
            )
            dataset = dataset_class(config)
        except (AssertionError, ValueError, TypeError) as error:
            raise ValueError(
                f"data source {source}: reasoning-gym refuses the parameters of {task}: "
                f"{' '.join(str(error).split())}."
            ) from error
        for index in range(piece_size):
            entry = dataset[index]
            num_draws += 1
            question = entry["question"]
            if question not in rows and compute_part(question.strip()) == part:
                rows[question] = entry["answer"]
                last_fruitful = num_draws
            if len(rows) == size:
                break
            if num_draws - last_fruitful >= MAX_FRUITLESS_DRAWS:
                raise ValueError(
                    f"data source {source}: size={size}: {num_draws} draws gave {len(rows)} "
                    f"distinct problems in the part {part}, and the last {MAX_FRUITLESS_DRAWS} no "
                    "new one; ask for fewer, or widen the task's parameters."
                )
    return list(rows), list(rows.values())


def _suggest(name: str, names: list[str]) -> str:
    close = difflib.get_close_matches(name, names)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _parse_count(source: str, name: str, text: str, least: int) -> int:
    if not re.fullmatch(r"\d+", text) or int(text) < least:
        raise ValueError(
            f"data source {source}: {name}={text}: must be a whole number of at least {least}."
        )
    return int(text)


def _parse_parameter(source: str, name: str, text: str, hint: Any) -> Any:
    """Read a task's parameter as the type that its config declares."""
    declared = {t for t in typing.get_args(hint) if t is not type(None)} or {hint}
    if declared == {str}:
        return text
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
    except json.JSONDecodeError:
        value = text
    simple = {bool: "true or false", int: "a whole number", float: "a number"}
    for kind, meaning in simple.items():
        is_kind = type(value) is kind or (kind is float and type(value) is int)
        if declared == {kind} and not is_kind:
            raise ValueError(f"data source {source}: {name}={text}: must be {meaning}.")
    return value
