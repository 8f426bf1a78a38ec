"""Hugging Face folder to checkpoint and back, bit for bit and in bounded memory."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_stapo.checkpoint.convert import export_checkpoint, find_checkpoint, import_model
from megatron_stapo.checkpoint.folder import (
    HF_FOLDER,
    MANIFEST_FILE,
    STATE_FILE,
    TrainerState,
    digest_file,
    format_state,
    list_files,
    name_checkpoint,
    name_partial,
    publish,
    read_state,
)
from megatron_stapo.config import load_model_json
from megatron_stapo.model.hf_folder import copy_companions, find_tensor_files, write_tensors
from megatron_stapo.model.weights import build_weight_table, shard
from tests.workers import build_config, run_megatron_load, run_save_in_pieces

if TYPE_CHECKING:
    from tests.rank_pool import RankPool

MODELS = ["tied", "untied", "experts"]
FINAL_NORM = "weights.decoder.final_layernorm.weight"


@pytest.fixture
def model(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    tiny_models: dict[str, Path],
    tokenizer_folder: str,
) -> Path:
    """A tiny model with its tokenizer, the untied one in float32 if the test names none."""
    name, dtype = getattr(request, "param", ("untied", "float32"))
    folder = tmp_path / "model"
    shutil.copytree(tiny_models[name], folder)
    shutil.copytree(tokenizer_folder, folder, dirs_exist_ok=True)
    change_tensors(folder, lambda tensors: cast(tensors, dtype))
    model_json = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**model_json, "dtype": dtype}))
    return folder


@pytest.fixture
def checkpoint(model: Path, tmp_path: Path) -> Path:
    """The model, imported."""
    import_model(model, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def load_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Save what `change` returns, or what it makes of the tensors in place."""
    tensors = load_tensors(folder)
    save_file(change(tensors) or tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cast(tensors: dict[str, torch.Tensor], dtype: str) -> dict[str, torch.Tensor]:
    return {name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name


def merge_for_megatron(model: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint of a model, by key."""
    model_json = load_model_json(str(model))
    tensors = load_tensors(model)
    return {
        f"weights.{pair.name}": shard(
            [tensors[name] for name in pair.hf_names],
            pair.layout,
            0,
            1,
            model_json["num_key_value_heads"],
        )
        for pair in build_weight_table(model_json)
    }


def write_manifest(checkpoint: Path) -> None:
    """As if the folder had been published as it is now."""
    (checkpoint / MANIFEST_FILE).unlink(missing_ok=True)
    paths = [path for path in checkpoint.rglob("*") if path.is_file()]
    digests = {str(path.relative_to(checkpoint)): digest_file(path) for path in paths}
    publish(checkpoint.rename(name_partial(checkpoint)), checkpoint, digests)


@pytest.mark.parametrize(
    "model", [(m, d) for m in MODELS for d in ("float32", "bfloat16")], ids="-".join, indirect=True
)
def test_export_of_an_import_is_the_same_folder(model: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    import_model(model, checkpoint, max_file_bytes=100_000)
    assert len(list(checkpoint.glob("*.distcp"))) > 2
    assert read_state(checkpoint).num_steps_done == 0
    assert sorted(list_files(checkpoint)) == sorted(
        str(path.relative_to(checkpoint))
        for path in checkpoint.rglob("*")
        if path.is_file() and path.name != MANIFEST_FILE
    )
    copied = shutil.copytree(model, tmp_path / "copy")
    shutil.rmtree(model)  # the checkpoint holds what an export takes
    assert export_checkpoint(checkpoint, out, max_file_bytes=100_000) == 0

    assert_equal(load_tensors(out), load_tensors(copied))
    files = sorted(set(find_tensor_files(str(out)).values()))
    assert len(files) > 2
    os.umask(umask := os.umask(0o077))
    assert {(out / name).stat().st_mode & 0o777 for name in files} == {0o666 & ~umask}
    for path in copied.iterdir():
        if path.suffix != ".safetensors":
            assert (out / path.name).read_bytes() == path.read_bytes()
    ours, loading = AutoModelForCausalLM.from_pretrained(
        out, dtype="auto", output_loading_info=True
    )
    assert not any(loading.values()), loading
    theirs = AutoModelForCausalLM.from_pretrained(copied, dtype="auto")
    assert_equal(ours.state_dict(), theirs.state_dict())
    assert AutoTokenizer.from_pretrained(out).chat_template
    assert not list(tmp_path.glob("*.partial"))


def test_each_imported_tensor_keeps_its_dtype(model: Path, tmp_path: Path) -> None:
    def mix(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name: tensor if "norm" in name else tensor.bfloat16()
            for name, tensor in tensors.items()
        }

    change_tensors(model, mix)
    import_model(model, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    assert_equal(load_tensors(tmp_path / "out"), load_tensors(model))


@pytest.mark.parametrize("model", [("tied", "float32")], ids="-".join, indirect=True)
def test_a_stored_head_that_is_tied_is_not_kept_twice(model: Path, tmp_path: Path) -> None:
    change_tensors(model, lambda t: {**t, "lm_head.weight": t["model.embed_tokens.weight"].clone()})
    import_model(model, tmp_path / "checkpoint")
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    tensors = load_tensors(model)
    del tensors["lm_head.weight"]
    assert_equal(load_tensors(tmp_path / "out"), tensors)

    change_tensors(model, lambda t: {**t, "lm_head.weight": 2 * t["lm_head.weight"]})
    with pytest.raises(ValueError, match=r"has a tensor lm_head\.weight that its config"):
        import_model(model, tmp_path / "other")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight") is None, "has no tensor model.norm.weight, which"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(47)}),
            "tensor model.norm.weight has shape (47,), but config.json asks for (48,).",
        ),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(128)}),
            "has a tensor model.layers.0.self_attn.q_proj.bias that its config.json does not ask",
        ),
        (
            lambda t: t.update({(k := "model.layers.0.mlp.up_proj.weight"): t[k].bfloat16()}),
            "model.layers.0.mlp.gate_proj.weight, model.layers.0.mlp.up_proj.weight have the "
            "dtypes torch.bfloat16, torch.float32, but are stored as one tensor;",
        ),
    ],
)
def test_a_folder_that_cannot_be_kept_whole_is_refused(
    model: Path, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str
) -> None:
    change_tensors(model, lambda tensors: change(tensors) and None)
    with pytest.raises(ValueError) as refused:
        import_model(model, tmp_path / "out")
    assert message in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.distributed
@pytest.mark.parametrize("model", [(m, "bfloat16") for m in MODELS], ids="-".join, indirect=True)
def test_megatron_reads_an_import(rank_pool: "RankPool", model: Path, tmp_path: Path) -> None:
    import_model(model, tmp_path / "checkpoint", max_file_bytes=100_000)
    loaded = rank_pool.run(run_megatron_load, 1, build_config(model), tmp_path / "checkpoint")[0]
    assert_equal(loaded, merge_for_megatron(model))


@pytest.mark.distributed
@pytest.mark.parametrize("model", [(m, "float32") for m in MODELS], ids="-".join, indirect=True)
def test_pieces_of_several_ranks_are_put_together_and_cast(
    rank_pool: "RankPool", model: Path, tmp_path: Path
) -> None:
    checkpoint = name_checkpoint(tmp_path, 12)
    checkpoint.mkdir(parents=True)
    tensors = merge_for_megatron(model)
    tensors["exp_avg.decoder.final_layernorm.weight"] = torch.ones(48)
    config = build_config(model, parallel__data_parallel_size=2)
    rank_pool.run(run_save_in_pieces, 2, config, tensors, checkpoint)
    copy_companions(model, checkpoint / HF_FOLDER)
    write_state(checkpoint, dtype="bfloat16")
    write_manifest(checkpoint)

    for path in (checkpoint, checkpoint.parent, tmp_path):
        assert find_checkpoint(path) == checkpoint
    assert export_checkpoint(checkpoint, tmp_path / "out") == 12
    assert_equal(load_tensors(tmp_path / "out"), cast(load_tensors(model), "bfloat16"))
    model_json = json.loads((model / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        **model_json,
        "dtype": "bfloat16",
    }


def write_state(checkpoint: Path, dtype: str) -> None:
    state = TrainerState(
        num_steps_done=12,
        num_updates=24,
        num_skipped_in_a_row=0,
        optimizer_step=24,
        stream_position=96,
        prompts_digest="",
        dtype=dtype,
        world_size=2,
        versions={},
    )
    (checkpoint / STATE_FILE).write_bytes(format_state(state))


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name", ["__0_0.distcp", ".metadata", STATE_FILE, f"{HF_FOLDER}/config.json"]
)
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip_bit, "the checksum of {} is not the one it was written with"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "{} has "),
        (Path.unlink, "{} is missing."),
    ],
    ids=["flipped", "truncated", "missing"],
)
def test_a_damaged_file_is_named_and_nothing_is_written(
    checkpoint: Path, tmp_path: Path, name: str, damage: Callable[[Path], Any], message: str
) -> None:
    damage(checkpoint / name)
    with pytest.raises(ValueError) as refused:
        export_checkpoint(checkpoint, tmp_path / "out")
    assert message.format(name) in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model"]


def lose_tensor(metadata: Any) -> None:
    del metadata.state_dict_metadata[FINAL_NORM]


def lose_piece(metadata: Any) -> None:
    metadata.state_dict_metadata[FINAL_NORM].chunks[0].sizes = torch.Size([40])


def misshape(metadata: Any) -> None:
    metadata.state_dict_metadata[FINAL_NORM].size = torch.Size([50])


def add_tensor(metadata: Any) -> None:
    about = metadata.state_dict_metadata
    about["weights.decoder.layers.4.input_layernorm.weight"] = about[FINAL_NORM]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose_tensor, f"has no tensor {FINAL_NORM}, which "),
        (misshape, f"tensor {FINAL_NORM} has shape (50,), not (48,), which "),
        (lose_piece, f"tensor {FINAL_NORM} is stored with 40 of its 48 elements."),
        (add_tensor, "holds a tensor weights.decoder.layers.4.input_layernorm.weight, which no "),
    ],
)
def test_weights_that_are_not_the_models_are_refused(
    checkpoint: Path, tmp_path: Path, change: Callable[[Any], None], message: str
) -> None:
    metadata = pickle.loads((checkpoint / ".metadata").read_bytes())
    change(metadata)
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    write_manifest(checkpoint)
    with pytest.raises(ValueError) as refused:
        export_checkpoint(checkpoint, tmp_path / "out")
    assert message in str(refused.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model"]


def test_another_folder_may_give_what_is_no_tensor(
    model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    shutil.rmtree(checkpoint / HF_FOLDER)
    write_manifest(checkpoint)
    with pytest.raises(ValueError, match=r"has no folder hf/ .* with --model\.$"):
        export_checkpoint(checkpoint, tmp_path / "out")
    (model / "chat_template.jinja").write_text("another")
    export_checkpoint(checkpoint, tmp_path / "out", model)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "another"


def test_a_folder_that_holds_anything_is_left_alone(
    model: Path, checkpoint: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export_checkpoint(checkpoint, out)  # an empty one is taken
    before = load_tensors(out)
    for convert in (lambda: export_checkpoint(checkpoint, out), lambda: import_model(model, out)):
        with pytest.raises(ValueError, match=r"^OUT=.*out: exists and is not empty; give a new"):
            convert()
    assert_equal(load_tensors(out), before)


def test_an_interrupted_conversion_leaves_nothing(
    model: Path, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_off(*_: Any) -> None:
        raise KeyboardInterrupt

    def write_half(folder: Path, tensors: Any, max_file_bytes: int) -> None:
        write_tensors(folder, [next(iter(tensors))], max_file_bytes)
        break_off()

    out = tmp_path / "out"
    monkeypatch.setattr("megatron_stapo.checkpoint.convert.write_tensors", write_half)
    with pytest.raises(KeyboardInterrupt):
        export_checkpoint(checkpoint, out)
    monkeypatch.setattr("megatron_stapo.checkpoint.convert.publish", break_off)
    with pytest.raises(KeyboardInterrupt):
        import_model(model, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "model"]
    monkeypatch.undo()
    # A process that is killed cannot clean up; the next one does.
    left = tmp_path / ".out.stapo_partial"
    left.mkdir()
    (left / "model-00001-of-00009.safetensors").write_text("")
    somebodys = tmp_path / "out.partial"
    somebodys.mkdir()
    export_checkpoint(checkpoint, out)
    assert_equal(load_tensors(out), load_tensors(model))
    assert somebodys.exists() and not left.exists()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"model_type": "qwen3"}'])
def test_a_damaged_config_of_a_model_is_named(model: Path, tmp_path: Path, content: str) -> None:
    (model / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.path=.*(config\.json|model_type)"):
        import_model(model, tmp_path / "out")


def test_a_truncated_model_is_named(model: Path, tmp_path: Path) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"model\.safetensors: is damaged"):
        import_model(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


MEASURE = """
import sys
from pathlib import Path
from megatron_stapo.checkpoint.convert import export_checkpoint, import_model
globals()[sys.argv[1]](Path(sys.argv[2]), Path(sys.argv[3]))
status = Path("/proc/self/status").read_text()  # its peak is of this program alone
print(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))
"""


def measure_peak_gb(verb: str, source: Path, out: Path) -> float:
    """Most memory that a conversion in a process of its own held."""
    words = [sys.executable, "-c", MEASURE, verb, str(source), str(out)]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout) / 1e6


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Layers of Qwen3-30B-A3B's shape, 1.2 GB each beside 1.2 GB of embedding and head."""
    shape = dict(
        model_type="qwen3_moe",
        hidden_size=2048,
        num_experts=128,
        moe_intermediate_size=768,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
    )
    peaks = {}
    for num_layers in (2, 6):
        folders = [tmp_path / f"{name}_{num_layers}" for name in ("model", "checkpoint", "out")]
        model, checkpoint, out = folders
        model.mkdir()
        (model / "config.json").write_text(json.dumps({**shape, "num_hidden_layers": num_layers}))
        write_tensors(
            model,
            (
                (name, torch.empty(shape, dtype=torch.bfloat16).uniform_())
                for pair in build_weight_table(load_model_json(str(model)))
                for name, shape in zip(pair.hf_names, pair.hf_shapes, strict=True)
            ),
        )
        digests = {path.name: digest_file(path) for path in model.iterdir()}
        import_gb = measure_peak_gb("import_model", model, checkpoint)
        shutil.rmtree(model)
        export_gb = measure_peak_gb("export_checkpoint", checkpoint, out)
        assert digests == {path.name: digest_file(path) for path in out.iterdir()}
        peaks[num_layers] = (import_gb, export_gb)
        print(f"{num_layers} layers: import {import_gb:.2f} GB, export {export_gb:.2f} GB")
        for folder in (checkpoint, out):
            shutil.rmtree(folder)
    # A file of 2 GB, the head of 0.62 GB twice and the program's 0.6 GB: it depends on how full the
    # file is when the head comes. The model of 6 layers has 8.6 GB.
    assert max(peaks[2]) < 4 and max(peaks[6]) < 4
