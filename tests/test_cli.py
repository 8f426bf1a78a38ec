"""What can be refused is refused by one message and exit code 2, and nothing is started."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_stapo.cli import build_eval_config, main, parse
from megatron_stapo.evaluation.paper import SIX_BENCHMARKS

RECIPE = """
from megatron_stapo.config import *

def mine():
    return Config(
        name="mine",
        num_steps=1,
        model=ModelConfig(path="model"),
        parallel=ParallelConfig(device="cpu"),
        data=DataConfig(source="train.jsonl", max_prompt_tokens=100),
        rollout=RolloutConfig(num_prompts_per_step=2, max_response_tokens=100),
        algorithm=AlgorithmConfig(num_prompts_per_minibatch=2),
        evaluation=EvaluationConfig(benchmarks=("heldout.jsonl",)),
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
        "hidden_size": 48,
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(model_json))
    rows = [{"problem": f"What is {i} + 1?" + "." * 20, "answer": str(i + 1)} for i in range(3)]
    for name in ("train", "heldout"):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(text)
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "latin1.jsonl").write_bytes(b'{"problem": "caf\xe9", "answer": "1"}\n')
    text = "".join(json.dumps(row | {"answer": "1"}) + "\n" for row in rows)
    (tmp_path / "alike.jsonl").write_text(text)
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
        (["data.source=nowhere.jsonl"], "data source nowhere.jsonl: no file or folder"),
        (
            ["data.source=alike.jsonl"],
            "data.source=alike.jsonl: the ground truth of all 3 problems",
        ),
        (["data.source=empty.jsonl"], "data source empty.jsonl: it has no rows;"),
        (["data.source=train.jsonl?answer=gold"], "data source train.jsonl?answer=gold: "),
        (["rollout.num_prompts_per_step=4"], "data.source=train.jsonl: 3 of 3 problems have"),
        (["evaluation.benchmarks=nowhere.jsonl"], "data source nowhere.jsonl: no file or folder"),
        (["evaluation.benchmarks=aime_24"], "benchmark aime_24: unknown. Did you mean aime24"),
        (["reward.rule=exact"], "reward.rule=exact: must be one of math_verify, dapo, exact_box."),
        (["reward.wrong_reward=-2"], "reward.wrong_reward=-2.0: must be -1 or 0."),
        (["reward.verify_training=true"], "reward.verify_training=True: has no effect without"),
        (["data.max_prompt_tokens=50"], "data.source=train.jsonl: 0 of 3 problems have at most"),
        (["run_dir=model"], "run_dir=model: holds files that are not a run's;"),
        (["run_dir=mine.py"], "run_dir=mine.py: is not a folder."),
        (["run_dir=mine.py/x"], "run_dir=mine.py/x: cannot be written (Not a directory);"),
        (["data.source=latin1.jsonl"], "data source latin1.jsonl: latin1.jsonl is not UTF-8"),
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere"], "model.path=nowhere: has no config.json;"),
        (["model", "--benchmarks=aime_24"], "benchmark aime_24: unknown. Did you mean aime24"),
        (["model", "--benchmarks=empty.jsonl"], "data source empty.jsonl: it has no rows;"),
        (["model", "--benchmarks="], "evaluation.benchmarks: empty;"),
        (["model", "--n=0"], "evaluation.num_samples=0: must be >= 1, or None."),
        (["model", "--top-p=1.5"], "evaluation.top_p=1.5: must be in (0, 1]."),
        (["model", "--max-tokens=200"], "evaluation.max_response_tokens=200: with data.max_prompt"),
        (["model", "--preset=justrl"], "evaluation.max_response_tokens=20480: with data.max_prom"),
        (["model", "--seed=1", "seed=2"], "seed=2: seed is given twice; give it once."),
        (["model", "--out=mine.py"], "--out=mine.py: is not a folder."),
        (["model", "--out=mine.py/x"], "--out=mine.py/x: cannot be written (Not a directory);"),
        (["model", "--verifier-url=http://127.0.0.1:9"], "No verifier can be reached at http:"),
        (["model", "reward.verifier_prompt=no"], "reward.verifier_prompt=no: no such file."),
    ],
)
def test_bad_input_of_an_evaluation_is_one_message_and_exit_code_2(
    recipe: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list_files()
    assert main(["eval", *words, "--recipe", recipe, "data.prompt_suffix="]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"stapo: error: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert list_files() == before


def test_an_evaluation_takes_the_papers_settings_by_default() -> None:
    config = build_eval_config(parse(["eval", "runs/model"]))
    assert config.model.path == "runs/model" and config.run_dir == "runs/model_eval/run"
    evaluation = config.evaluation
    assert evaluation.benchmarks == SIX_BENCHMARKS
    assert (evaluation.temperature, evaluation.top_p) == (1.0, 1.0)
    assert (evaluation.num_samples, evaluation.max_response_tokens) == (None, 20480)
    config = build_eval_config(
        parse(["eval", "model", "--preset", "justrl", "--n", "2", "evaluation.top_p=0.8"])
    )
    evaluation = config.evaluation
    assert (evaluation.temperature, evaluation.top_p) == (0.7, 0.8)
    assert (evaluation.num_samples, evaluation.max_response_tokens) == (2, 20480)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "nowhere", "out"], "CHECKPOINT=nowhere: is neither a checkpoint, having no "),
        (["export", "model", "out"], "CHECKPOINT=model: is neither a checkpoint, having no "),
        (["import", "nowhere", "out"], "model.path=nowhere: has no config.json;"),
        (["import", "model", "out"], "model.path=model: has neither model.safetensors nor"),
        (["import", "model", "model"], "OUT=model: exists and is not empty; give a new or an"),
        (["import", "model", "mine.py"], "OUT=mine.py: exists and is not empty; give a new or an"),
    ],
)
def test_bad_input_of_a_conversion_is_one_message_and_exit_code_2(
    recipe: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list_files()
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"stapo: error: {message}")
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert list_files() == before


def test_a_conversion_takes_no_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("export", "import"):
        with pytest.raises(SystemExit) as ended:
            parse([verb, "a", "b", "num_steps=3"])
        assert ended.value.code == 2
        assert "unrecognized arguments: num_steps=3" in capsys.readouterr().err


def test_a_run_is_exported_from_its_newest_checkpoint(
    tiny_models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir, out = tmp_path / "run", tmp_path / "out"
    for step in ("step_000002", "step_000010"):
        assert main(["import", str(tiny_models["tied"]), f"{run_dir}/checkpoints/{step}"]) == 0
    capsys.readouterr()
    assert main(["export", str(run_dir), str(out)]) == 0
    assert f"exporting {run_dir}/checkpoints/step_000010\n" in capsys.readouterr().out
    assert (out / "model.safetensors").is_file()
    assert main(["export", str(run_dir), str(out)]) == 2
    assert f"OUT={out}: exists and is not empty" in capsys.readouterr().err


def test_a_resume_check_that_becomes_another_experiment_is_refused(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = list_files()
    assert main(["verify-resume", recipe, "--then", "optimizer.lr=1"]) == 2
    message = capsys.readouterr().err
    assert message.startswith("stapo: error: --then: optimizer.lr: 1e-06 -> 1.0 makes it another")
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
