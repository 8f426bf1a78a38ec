"""What can be refused is refused by one message and exit code 2, and nothing is started."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_stapo.cli import main

RECIPE = """
from megatron_stapo.config import Config, DataConfig, ModelConfig, ParallelConfig, RolloutConfig

def mine():
    return Config(
        name="mine",
        num_steps=1,
        model=ModelConfig(path="model"),
        parallel=ParallelConfig(device="cpu"),
        data=DataConfig(
            train_path="train.jsonl", heldout_path="heldout.jsonl", max_prompt_tokens=100
        ),
        rollout=RolloutConfig(max_response_tokens=100),
    )
"""
REPOSITORY = Path(__file__).parent.parent


@pytest.fixture
def recipe(tmp_path: Path, tokenizer_folder: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """A recipe whose model and data are in order, in the current folder."""
    shutil.copytree(tokenizer_folder, tmp_path / "model")
    model_json = {
        "model_type": "qwen3",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "vocab_size": 96,
        "intermediate_size": 80,
        "num_hidden_layers": 4,
        "max_position_embeddings": 256,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(model_json))
    row = json.dumps({"problem": "What is 1 + 1?" + "." * 20, "answer": "2"})
    for name in ("train", "heldout"):
        (tmp_path / f"{name}.jsonl").write_text(row + "\n")
    (tmp_path / "mine.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return "mine.py"


def list_files() -> list[Path]:
    """Of the current folder, but for what Python keeps of a recipe it has read."""
    return sorted(path for path in Path().rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.dtype=float16"], "model.dtype=float16: must be one of float32, bfloat16."),
        (["num_step=3"], "num_step=3: no field num_step. Did you mean num_steps?"),
        (["num_steps=0"], "num_steps=0: must be >= 1."),
        (["model.path=nowhere"], "model.path=nowhere: has no config.json;"),
        (
            ["parallel.tensor_model_parallel_size=3"],
            "parallel.tensor_model_parallel_size=3: does not divide the model's 8 attention heads",
        ),
        (["rollout.max_response_tokens=200"], "rollout.max_response_tokens=200: with"),
        (["data.train_path=nowhere.jsonl"], "data.train_path=nowhere.jsonl: no such file;"),
        (["data.heldout_path=nowhere.jsonl"], "data.heldout_path=nowhere.jsonl: no such file;"),
        (["data.max_prompt_tokens=50"], "data.max_prompt_tokens=50: the prompt in row 0 of"),
        (["run_dir=model"], "run_dir=model: holds files that are not a run's;"),
        (["run_dir=mine.py"], "run_dir=mine.py: is not a folder."),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(
    recipe: str, overrides: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list_files()
    assert main(["train", recipe, "data.prompt_suffix=", *overrides]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"stapo: error: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    # The run folder is made before the first process.
    assert list_files() == before


def test_an_unknown_recipe_is_refused_without_heavy_imports(tmp_path: Path) -> None:
    program = (
        "import sys; from megatron_stapo.cli import main; code = main(['train', 'tiny_stapoo']);"
        "heavy = {'torch', 'transformers', 'nemo_run', 'matplotlib', 'vllm'} & set(sys.modules);"
        "assert not heavy, heavy; sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr.startswith(
        "stapo: error: recipe tiny_stapoo: unknown. Did you mean tiny_stapo"
    )
    assert not list(tmp_path.iterdir())
