"""What makes a folder a checkpoint, and which of them are kept."""

import dataclasses
import json

import pytest

from megatron_stapo.checkpoint.folder import (
    TrainerState,
    digest_file,
    find_fault,
    format_state,
    list_checkpoints,
    list_files,
    name_checkpoint,
    name_partial,
    parse_step,
    prune,
    publish,
    read_state,
    remove_partial,
    set_broken_aside,
)

STATE = TrainerState(
    num_steps_done=3,
    num_updates=6,
    num_skipped_in_a_row=1,
    optimizer_step=6,
    stream_position=48,
    prompts_digest="ab",
    dtype="bfloat16",
    world_size=4,
    versions={"torch": "2.13.0"},
)


def write(run_dir, step):
    checkpoint = name_checkpoint(run_dir, step)
    partial = name_partial(checkpoint)
    partial.mkdir(parents=True)
    state = dataclasses.replace(STATE, num_steps_done=step)
    (partial / "state.json").write_bytes(format_state(state))
    (partial / "data").write_bytes(b"x" * step)
    names = ("state.json", "data")
    publish(partial, checkpoint, {name: digest_file(partial / name) for name in names})
    return checkpoint


def test_only_a_published_folder_is_a_checkpoint(tmp_path):
    assert list_checkpoints(tmp_path) == []
    written = [write(tmp_path, step) for step in (2, 10, 1_000_000)]
    name_partial(name_checkpoint(tmp_path, 11)).mkdir()
    set_broken_aside(write(tmp_path, 12))
    set_broken_aside(write(tmp_path, 12))  # and a second one
    (tmp_path / "checkpoints" / "step_000013").write_text("a file")
    assert list_checkpoints(tmp_path) == written
    assert [parse_step(path) for path in written] == [2, 10, 1_000_000]
    remove_partial(tmp_path)
    assert not list(tmp_path.rglob("*.partial"))
    assert read_state(written[0]) == dataclasses.replace(STATE, num_steps_done=2)


def test_every_byte_is_checked(tmp_path):
    checkpoint = write(tmp_path, 3)
    assert set(list_files(checkpoint)) == {"state.json", "data"}
    assert find_fault(checkpoint, ["state.json", "data"]) is None
    (checkpoint / "data").write_bytes(b"xxy")
    assert "checksum of data" in find_fault(checkpoint, ["data"])
    (checkpoint / "data").write_bytes(b"xx")
    assert "data has 2 bytes, and was written with 3" in find_fault(checkpoint, ["data"])
    (checkpoint / "data").unlink()
    assert "data is missing" in find_fault(checkpoint, ["data"])
    for content in ("{", "[]", json.dumps({"num_steps_done": 1})):
        (checkpoint / "state.json").write_text(content)
        with pytest.raises(ValueError, match=r"state\.json is missing or damaged"):
            read_state(checkpoint)


def test_every_flipped_bit_of_a_manifest_is_a_fault(tmp_path):
    checkpoint = write(tmp_path, 3)
    file, names = checkpoint / "manifest.json", ["state.json", "data"]
    content = file.read_bytes()
    for place in range(len(content)):
        for bit in range(8):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            file.write_bytes(flipped)
            try:
                listed = list_files(checkpoint)
            except ValueError:
                continue
            # White space, and the name of a file that is not there.
            assert listed == json.loads(content)["files"] or find_fault(checkpoint, list(listed))
    file.write_text('{"files": {}}')
    assert "manifest.json is missing or damaged" in find_fault(checkpoint, names)


@pytest.mark.parametrize(
    ("keep_last", "keep_best", "kept"),
    [(1, 0, [5]), (2, 1, [2, 4, 5]), (1, 2, [2, 3, 5]), (9, 0, [1, 2, 3, 4, 5])],
)
def test_the_newest_and_the_best_are_kept(tmp_path, keep_last, keep_best, kept):
    for step in range(1, 6):
        write(tmp_path, step)
    accuracies = {0: 0.9, 2: 0.7, 3: 0.6, 4: 0.5}
    removed = prune(tmp_path, keep_last, keep_best, accuracies)
    assert [parse_step(path) for path in list_checkpoints(tmp_path)] == kept
    assert len(removed) == 5 - len(kept)
    assert not list(tmp_path.rglob("*.partial"))


def test_of_equally_good_ones_the_later_is_kept(tmp_path):
    for step in range(1, 4):
        write(tmp_path, step)
    prune(tmp_path, 1, 1, {1: 0.5, 2: 0.5})
    assert [parse_step(path) for path in list_checkpoints(tmp_path)] == [2, 3]
