"""A checkpoint holds the same numbers in whatever layout it is written and read."""

import json
import shutil

import pytest
import torch

from megatron_stapo.checkpoint.folder import (
    digest_file,
    list_checkpoints,
    name_checkpoint,
    read_state,
)
from megatron_stapo.checkpoint.tensors import StoredTensors
from tests.layouts import Layout
from tests.tiny_model import VOCAB_SIZE
from tests.workers import build_config, build_groups, run_checkpoint

pytestmark = pytest.mark.distributed

# From the first into the second, and into the third with another number of ranks.
CHAINS = [
    (Layout(tp=2, dp=2), Layout(pp=2, vpp=2, dp=2), Layout(dp=3)),
    (Layout(model="untied", pp=2), Layout(model="untied", tp=4, sp=True), Layout(model="untied")),
    (Layout(cp=2, dp=2), Layout(tp=2, pp=2), Layout(first=1, pp=2, cp=2)),
    (
        Layout(model="experts", ep=2, dp=2),
        Layout(model="experts", tp=2, sp=True, ep=4, dp=2),
        Layout(model="experts", pp=2, ep=1),
    ),
]


def read_tensors(run_dir, step):
    stored = StoredTensors(name_checkpoint(run_dir, step))
    return {key: stored.read(key) for key in stored.tensors}


def build(layout, tiny_models, **changes):
    return layout.build_config(tiny_models[layout.model], **changes)


def count_ranks(config):
    return config.parallel.world_size


@pytest.mark.parametrize(
    ("chain", "dtype"),
    [*((chain, "float32") for chain in CHAINS), *((chain, "bfloat16") for chain in CHAINS[::3])],
    ids=lambda value: value if isinstance(value, str) else " > ".join(map(str, value)),
)
def test_a_change_of_layout_changes_no_bit(rank_pool, tiny_models, tmp_path, chain, dtype):
    groups = build_groups(build_config(tiny_models[chain[0].model]), VOCAB_SIZE)
    config = build(chain[0], tiny_models, model__dtype=dtype)
    [first, *_] = rank_pool.run(
        run_checkpoint, count_ranks(config), config, groups, None, 2, tmp_path / "0"
    )
    expected = read_tensors(tmp_path / "0", 1)
    weights = {k: t for k, t in expected.items() if k.startswith("weights.")}
    assert len(expected) == 3 * len(weights)
    for key, tensor in expected.items():
        assert tensor.dtype == torch.float32 and tensor.abs().sum() > 0, key
    for number, layout in enumerate(chain[1:], start=1):
        config = build(layout, tiny_models, model__dtype=dtype)
        [there, *_] = rank_pool.run(
            run_checkpoint,
            count_ranks(config),
            *(config, groups, tmp_path / str(number - 1), 0, tmp_path / str(number)),
        )
        found = read_tensors(tmp_path / str(number), number + 1)
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key
        # And the model that samples, cast or not.
        assert there["weights"].keys() == first["weights"].keys()
        for name, tensor in first["weights"].items():
            assert torch.equal(there["weights"][name], tensor), name
        state = read_state(name_checkpoint(tmp_path / str(number), number + 1))
        assert (state.num_updates, state.optimizer_step) == (2, 2)


def test_training_goes_on_in_another_layout_as_it_would_have_in_its_own(
    rank_pool, tiny_models, tmp_path
):
    """The bound is that of the layouts themselves: sums in another order, carried on by Adam."""
    groups = build_groups(build_config(tiny_models["tied"]), VOCAB_SIZE)
    home = build(Layout(tp=2), tiny_models)
    rank_pool.run(run_checkpoint, 2, home, groups, None, 2, tmp_path / "start")
    results = {}
    for name, layout in (("home", Layout(tp=2)), ("away", Layout(pp=2, dp=2))):
        config = build(layout, tiny_models)
        [results[name], *_] = rank_pool.run(
            run_checkpoint,
            count_ranks(config),
            *(config, groups, tmp_path / "start", 2, tmp_path / name),
        )
    for ours, theirs in zip(results["away"]["updates"], results["home"]["updates"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["lr"] == theirs["lr"]
    lr = home.optimizer.lr
    for name, weight in results["home"]["weights"].items():
        difference = (results["away"]["weights"][name] - weight).abs()
        assert difference.max() <= 0.3 * lr and difference.mean() <= 1e-3 * lr, name


def copy(checkpoint, target, num_steps_done):
    """As if the run had written it after so many steps."""
    shutil.copytree(checkpoint, target, dirs_exist_ok=True)
    state = target / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"num_steps_done": num_steps_done}))
    manifest = target / "manifest.json"
    files = json.loads(manifest.read_text())["files"] | {"state.json": digest_file(state)}
    manifest.write_text(json.dumps({"files": files}))


def test_the_newest_whole_checkpoint_is_taken(rank_pool, tiny_models, tmp_path):
    config = build(Layout(dp=2), tiny_models)
    groups = build_groups(config, VOCAB_SIZE)
    run_dir = tmp_path / "run"
    rank_pool.run(run_checkpoint, 2, config, groups, None, 1, run_dir)
    whole = name_checkpoint(run_dir, 1)
    newer = name_checkpoint(run_dir, 2)
    copy(whole, newer, 2)
    half_written = name_checkpoint(run_dir, 3).with_name("step_000003.partial")
    shutil.copytree(whole, half_written)
    name = sorted(path.name for path in newer.glob("*.distcp"))[-1]

    def flip():
        content = bytearray((newer / name).read_bytes())
        content[len(content) // 2] ^= 1
        (newer / name).write_bytes(content)

    faults = {
        "renamed": (lambda: copy(whole, newer, 3), "holds the state after 3 steps"),
        "flipped": (flip, "checksum"),
        "truncated": (lambda: (newer / name).write_bytes(b"short"), "truncated"),
        "missing": (lambda: (newer / name).unlink(), f"{name} is missing"),
        "no manifest": (lambda: (newer / "manifest.json").unlink(), "manifest.json is missing"),
        "manifest": (lambda: (newer / "manifest.json").write_text("{"), "manifest.json is missing"),
    }
    for number, (what, (damage, message)) in enumerate(faults.items()):
        if not newer.exists():
            copy(whole, newer, 2)
        damage()
        [result, *_] = rank_pool.run(
            run_checkpoint, 2, config, groups, run_dir, 0, tmp_path / f"out_{number}"
        )
        [fault] = result["faults"]
        assert message in fault and "step_000002" in fault and ".broken" in fault, what
        assert list_checkpoints(run_dir) == [whole]
        # What was read is the older one.
        assert name_checkpoint(tmp_path / f"out_{number}", 2).exists()


def test_without_a_whole_checkpoint_the_run_refuses(rank_pool, tiny_models, tmp_path):
    config = build(Layout(), tiny_models)
    groups = build_groups(config, VOCAB_SIZE)
    rank_pool.run(run_checkpoint, 1, config, groups, None, 1, tmp_path)
    state = name_checkpoint(tmp_path, 1) / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"num_updates": 5}))
    for _ in range(2):  # the second time it is no new run either
        with pytest.raises(
            AssertionError, match=r"no checkpoint can be used.*state\.json.*--fresh"
        ):
            rank_pool.run(run_checkpoint, 1, config, groups, tmp_path, 0, tmp_path / "out")
        assert list_checkpoints(tmp_path) == [name_checkpoint(tmp_path, 1)]
