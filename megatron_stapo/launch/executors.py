"""NeMo-Run executors from a settings file and `executor.field=value` words.

The fields are those of NeMo-Run's own classes, by their own names. What the run's layout decides,
such as the number of nodes, is not the user's to set.
"""

import dataclasses
import datetime
import difflib
import tomllib
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_stapo.launch.nemo import Executor, import_executor, nemo_run

KINDS: dict[str, type[Executor]] = {
    "slurm": nemo_run.SlurmExecutor,
    "kubernetes": nemo_run.KubeflowExecutor,
    "skypilot": nemo_run.SkypilotExecutor,
    "docker": nemo_run.DockerExecutor,
}

# Decided by the layout, or by what a run is: one process per node, which starts the others.
_OF_THE_LAYOUT = (
    *("nodes", "num_nodes", "ntasks_per_node", "nprocs_per_node", "torchrun_nproc_per_node"),
    *("gpus_per_task", "heterogeneous", "het_group_indices", "array", "launcher"),
    *("experiment_id", "job_dir"),
)

_PLAIN = (str, int, float, bool, list, dict, types.NoneType)


class _OfflineKubeflowExecutor(nemo_run.KubeflowExecutor):
    """Knows its manifest; without a kubeconfig it cannot submit it."""

    def __post_init__(self) -> None:
        pass


class _OfflineSkypilotExecutor(nemo_run.SkypilotExecutor):
    """Knows its fields, without the package that would submit them."""

    def __post_init__(self) -> None:
        pass


_OFFLINE: dict[str, type[Executor]] = {
    "kubernetes": _OfflineKubeflowExecutor,
    "skypilot": _OfflineSkypilotExecutor,
}


def build_executor(
    kind: str, file: str | None, words: Sequence[str], *, offline: bool = False
) -> Executor:
    """Build a NeMo-Run executor.

    Args:
        kind: of `KINDS`.
        file: TOML with fields of the executor; or Python with a function named after the kind, or
            an executor of that name, as NeMo-Run's `import_executor` takes it.
        words: `field=value`, which change what the file says; values as in TOML, strings bare.
        offline: the executor is to describe the job, not to submit it.

    Raises:
        ValueError: an unknown field or one that the layout decides, a value of another type, a
            missing field, or a missing package.
    """
    cls = KINDS[kind]
    if file and not Path(file).is_file():
        raise ValueError(f"--executor-file={file}: no such file.")
    fields = _list_fields(cls)
    values: dict[str, Any] = {}
    if file and not file.endswith(".py"):
        try:
            values = tomllib.loads(Path(file).read_text())
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"--executor-file={file}: is not TOML ({error}).") from error
    for word in words:
        name, separator, text = word.partition("=")
        if not separator:
            raise ValueError(f"executor.{word}: an override is executor.field=value.")
        values[name] = _parse(text, fields.get(name, ()))
    for name, value in values.items():
        _check_field(kind, name, value, fields)
    if file and file.endswith(".py"):
        try:
            executor = import_executor(kind, file)
        except AttributeError:
            raise ValueError(f"--executor-file={file}: has no function {kind}().") from None
        if not isinstance(executor, cls):
            raise ValueError(
                f"--executor-file={file}: {kind}() returned {type(executor).__name__}, not a "
                f"{cls.__name__}."
            )
        return typing.cast(Executor, dataclasses.replace(executor, **values))
    if kind != "skypilot":  # which takes no other
        values["packager"] = nemo_run.Packager()  # the image, or a shared folder, has the package
    try:
        return (_OFFLINE.get(kind, cls) if offline else cls)(**values)
    except TypeError:
        missing = [
            field.name
            for field in dataclasses.fields(cls)
            if field.init
            and field.name not in values
            and field.default is field.default_factory is dataclasses.MISSING
        ]
        raise ValueError(
            f"executor.{missing[0]}: is needed; give executor.{missing[0]}=... or an "
            "--executor-file."
        ) from None
    except (ImportError, AssertionError) as error:
        raise ValueError(f"--executor={kind}: {error}") from error
    except Exception as error:
        if kind != "kubernetes":
            raise
        # The kubernetes package has its own class for it, and may not be there.
        raise ValueError(f"--executor=kubernetes: no cluster to submit to ({error}).") from error


def _list_fields(cls: type[Executor]) -> dict[str, tuple[type, ...]]:
    """The types of every field that a plain value can set."""
    hints = typing.get_type_hints(cls)
    fields = {}
    for field in dataclasses.fields(cls):
        kinds = _flatten(hints[field.name])
        if field.init and field.name not in _OF_THE_LAYOUT and all(k in _PLAIN for k in kinds):
            fields[field.name] = kinds
    return fields


def _flatten(hint: Any) -> tuple[type, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(kind for option in typing.get_args(hint) for kind in _flatten(option))
    origin = typing.get_origin(hint) or hint
    return (list,) if origin is tuple else (origin,)


def _parse(text: str, kinds: Sequence[type]) -> Any:
    """Read a word's value; what is no value of TOML, or is to be a string, is one."""
    if str in kinds and not text.startswith(("[", "{")):
        return text
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    is_time = isinstance(value, datetime.date | datetime.time)
    return text if is_time else value


def _check_field(kind: str, name: str, value: Any, fields: dict[str, tuple[type, ...]]) -> None:
    if name in _OF_THE_LAYOUT:
        raise ValueError(
            f"executor.{name}={value}: follows from the recipe's layout; set parallel.*, rollout.* "
            "and cluster.num_gpus_per_node."
        )
    if name not in fields:
        close = difflib.get_close_matches(name, fields)
        hint = f"Did you mean {' or '.join(close)}?" if close else f"Fields: {', '.join(fields)}."
        raise ValueError(f"executor.{name}: no such field of {KINDS[kind].__name__}. {hint}")
    if type(value) not in fields[name]:
        expected = " or ".join(k.__name__ for k in fields[name] if k is not types.NoneType)
        raise ValueError(f"executor.{name}={value}: must be {expected}.")
