"""Hugging Face folders: files of bounded size, and never a mixture of two models."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_stapo.model.hf_folder import (
    copy_companions,
    find_tensor_files,
    read_tensor,
    set_dtype,
    write_tensors,
)

TENSORS = {f"t{i}": torch.full((i + 1, 10), float(i)) for i in range(6)}  # 40 bytes to 240


@pytest.mark.parametrize(
    ("max_file_bytes", "sizes"),
    [
        (840, [840]),
        (839, [600, 240]),
        (240, [240, 160, 200, 240]),
        (1, [40 * i for i in range(1, 7)]),
    ],
)
def test_a_file_is_closed_before_it_exceeds_the_limit(
    tmp_path: Path, max_file_bytes: int, sizes: list[int]
) -> None:
    write_tensors(tmp_path, TENSORS.items(), max_file_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [sum(t.nbytes for t in load_file(file).values()) for file in files] == sizes
    names = [f"model-{i + 1:05d}-of-{len(sizes):05d}.safetensors" for i in range(len(sizes))]
    assert [file.name for file in files] == (names if len(sizes) > 1 else ["model.safetensors"])
    found = find_tensor_files(str(tmp_path))
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert torch.equal(read_tensor(found, str(tmp_path), name, tuple(tensor.shape)), tensor)
    index = tmp_path / "model.safetensors.index.json"
    assert len(list(tmp_path.iterdir())) == len(files) + index.exists()
    if len(sizes) > 1:
        assert json.loads(index.read_text())["metadata"]["total_size"] == 840


@pytest.mark.parametrize(("before", "after"), [(1, 840), (840, 1), (200, 400)])
def test_nothing_of_an_earlier_model_stays(tmp_path: Path, before: int, after: int) -> None:
    write_tensors(tmp_path, {f"old{n}": t for n, t in TENSORS.items()}.items(), before)
    write_tensors(tmp_path, TENSORS.items(), after)
    assert find_tensor_files(str(tmp_path)).keys() == TENSORS.keys()
    held = [name for file in tmp_path.glob("*.safetensors") for name in load_file(file)]
    assert sorted(held) == sorted(TENSORS)


def test_a_folder_that_was_cut_short_is_no_model(tmp_path: Path) -> None:
    def break_off():
        yield from TENSORS.items()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_tensors(tmp_path, break_off(), 100)
    assert not list(tmp_path.glob("*.safetensors"))
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor"):
        find_tensor_files(str(tmp_path))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"dtype": "bfloat16"}),
        ({"dtype": "float32"}, {"dtype": "bfloat16"}),
        ({"torch_dtype": "float32"}, {"torch_dtype": "bfloat16"}),
    ],
)
def test_the_dtype_is_named_as_the_folder_names_it(
    tmp_path: Path, before: dict[str, str], after: dict[str, str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 4, **before}))
    set_dtype(tmp_path, "bfloat16")
    assert json.loads((tmp_path / "config.json").read_text()) == {"hidden_size": 4, **after}


def test_companions_are_what_is_no_tensor(tmp_path: Path, tokenizer_folder: str) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    copied = copy_companions(Path(tokenizer_folder), source)
    write_tensors(source, TENSORS.items())
    (source / "train.jsonl").write_text("")
    assert copy_companions(source, target) == [target / file.name for file in copied]
    assert {"tokenizer.json", "generation_config.json"} <= {file.name for file in copied}
    assert sorted(file.name for file in target.iterdir()) == sorted(file.name for file in copied)
