"""The rooms import one way, and each library in its own room."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "megatron_stapo"

# A room may import those of the levels before its own.
LEVELS = [
    {"published_models"},
    {"config", "types"},
    {"algo", "ops", "rewards", "algorithms"},
    {"parallel"},
    {"data", "rollout", "observability"},
    {"model", "evaluation", "plan"},
    {"trainer", "reshard"},
    {"checkpoint"},
    {"driver"},
    {"train"},
    {"verify"},
    {"recipe"},
    {"launch"},
    {"cli"},
]
LIBRARIES = {
    "megatron": {"parallel", "model", "trainer", "reshard", "checkpoint"},
    "vllm": {"rollout"},
    "math_verify": {"rewards"},
    "datasets": {"data"},
    "reasoning_gym": {"data"},
    "nemo_run": {"launch"},
    "matplotlib": {"observability"},
}


def read_imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module
            if node.module == "megatron_stapo":
                yield from (f"megatron_stapo.{alias.name}" for alias in node.names)


def find_room(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_a_room_imports_only_what_lies_before_it(path):
    room = find_room(path)
    if room == "__init__":
        assert not list(read_imports(path))
        return
    level = next(i for i, rooms in enumerate(LEVELS) if room in rooms)
    before = set().union(*LEVELS[:level]) | {room}
    for name in read_imports(path):
        top, *rest = name.split(".")
        if top == "megatron_stapo" and rest:
            assert rest[0] in before, f"{room} imports {name}"
        if top in LIBRARIES:
            assert room in LIBRARIES[top], f"{room} imports {name}"
