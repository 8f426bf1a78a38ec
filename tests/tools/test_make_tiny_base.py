"""The demo's problems, tokenizers and base models."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import make_tiny_base  # noqa: E402
import sum_problems  # noqa: E402
import word_problems  # noqa: E402

from megatron_stapo.data.sources import load_problems  # noqa: E402

GENERATORS = pytest.mark.parametrize("generator", [word_problems, sum_problems])

MICRO = (
    "--max-steps=2",
    "--target-accuracy=0",
    "--vocab-size=300",
    "--num-train-problems=8",
    "--num-heldout-problems=4",
)


def run_tool(out, *arguments):
    return subprocess.run(
        [sys.executable, str(TOOLS / "make_tiny_base.py"), f"--out={out}", *MICRO, *arguments],
        capture_output=True,
        text=True,
    )


def read_steps(solution):
    """The equations of a solution as (left side's value, stated result)."""
    for a, symbol, b, result in re.findall(r"(-?\d+)([-+*])(\d+)=(-?\d+)", solution):
        value = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[symbol]
        yield value, int(result)


@GENERATORS
def test_solutions_are_right_and_end_in_the_answer(generator):
    for problem in generator.build_problems("train", 500, seed=3):
        steps = list(read_steps(problem.solution))
        assert len(steps) == problem.num_steps
        assert all(value == result for value, result in steps)
        assert steps[-1][1] == problem.answer
        assert problem.solution.endswith(f"\\boxed{{{problem.answer}}}.")


@GENERATORS
def test_unboxed_solutions_are_as_frequent_as_asked(generator):
    problems = generator.build_problems("pretrain", 2000, seed=0, unboxed_prob=0.4)
    boxed = sum(p.solution.endswith(f"\\boxed{{{p.answer}}}.") for p in problems)
    assert 0.57 < boxed / len(problems) < 0.63
    assert all(p.solution.endswith((f" {p.answer}.", f"{{{p.answer}}}.")) for p in problems)


@GENERATORS
def test_splits_are_disjoint_and_seeded(generator):
    build_problems = generator.build_problems
    splits = {
        split: {p.question for p in build_problems(split, 1000, seed=0)}
        for split in ("pretrain", "train", "heldout")
    }
    assert all(len(questions) == 1000 for questions in splits.values())
    assert not splits["pretrain"] & splits["train"]
    assert not splits["pretrain"] & splits["heldout"]
    assert not splits["train"] & splits["heldout"]
    assert build_problems("train", 10, seed=1) == build_problems("train", 10, seed=1)
    assert build_problems("train", 10, seed=1) != build_problems("train", 10, seed=2)


def test_a_recipe_can_name_the_sums_as_a_source(micro_sums):
    for part, size in (("train", 8), ("heldout", 4)):
        by_file, _ = load_problems(str(micro_sums / f"{part}.jsonl"))
        by_source, _ = load_problems(f"{sum_problems.SOURCE}&part={part}&size={size}")
        assert by_file == by_source


def build_micro(tmp_path_factory, *arguments):
    out = tmp_path_factory.mktemp("base") / "tiny"
    finished = run_tool(out, *arguments)
    assert finished.returncode == 0, finished.stderr
    return out


@pytest.fixture(scope="module")
def micro_base(tmp_path_factory):
    return build_micro(tmp_path_factory)


@pytest.fixture(scope="module")
def micro_sums(tmp_path_factory):
    return build_micro(tmp_path_factory, "--problems=sums")


@pytest.mark.parametrize("base", ["micro_base", "micro_sums"])
def test_the_folder_is_a_whole_model(base, request):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = request.getfixturevalue(base)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.config.model_type == "qwen3"
    assert model.config.head_dim != model.config.hidden_size // model.config.num_attention_heads
    assert len(tokenizer) == model.config.vocab_size == 300
    stop = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(stop) == ["<|im_end|>", "<|endoftext|>"]
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and rows[0].keys() == {"problem", "answer"}
    text = "naïve 🙂 12+3=15 \\boxed{15}"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize(
    ("base", "generator"), [("micro_base", word_problems), ("micro_sums", sum_problems)]
)
def test_prompt_and_response_are_the_pretrained_document(base, generator, request):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(request.getfixturevalue(base))
    [problem] = generator.build_problems("train", 1, seed=0)
    [prompt], [response] = make_tiny_base.tokenize(tokenizer, [problem])
    chat = [
        {"role": "user", "content": problem.question},
        {"role": "assistant", "content": problem.solution},
    ]
    document = tokenizer.apply_chat_template(chat, return_dict=False)
    assert prompt + response == document[: len(prompt) + len(response)]
    assert tokenizer.decode(prompt).endswith("<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_a_complete_folder_is_left_alone_and_another_setting_builds_anew(micro_base):
    before = (micro_base / "model.safetensors").read_bytes()
    assert "nothing to do" in run_tool(micro_base).stdout
    assert (micro_base / "model.safetensors").read_bytes() == before
    assert "building again" in run_tool(micro_base, "--seed=1", "--problems=word").stdout
    assert (micro_base / "model.safetensors").read_bytes() != before


def test_a_folder_of_somebody_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    refused = run_tool(tmp_path)
    assert refused.returncode == 1
    assert f"--out={tmp_path}: holds files but no base.json" in refused.stderr
    assert (tmp_path / "thesis.txt").exists()


@pytest.mark.slow
def test_a_target_out_of_reach_is_an_error_and_leaves_no_folder(tmp_path):
    missed = run_tool(tmp_path / "base", "--target-accuracy=0.99")
    assert missed.returncode == 1
    assert "--target-accuracy=0.99 not reached" in missed.stderr
    assert not (tmp_path / "base").exists()


def test_the_hash_depends_on_the_problems_and_on_their_code(tmp_path, monkeypatch):
    word, sums = (make_tiny_base.SETTINGS[p] for p in ("word", "sums"))
    before = word.compute_hash(), sums.compute_hash()
    assert before[0] != before[1]
    copy = tmp_path / "sum_problems.py"
    copy.write_text(Path(sum_problems.__file__).read_text() + "\n")
    monkeypatch.setattr(sum_problems, "__file__", str(copy))
    assert word.compute_hash() == before[0]
    assert sums.compute_hash() != before[1]
    monkeypatch.setattr(sum_problems, "__file__", str(Path(word_problems.__file__)))
    same_code = sums.compute_hash()
    monkeypatch.setattr(sum_problems, "SOURCE", "gym:chain_sum?max_terms=5&max_digits=1")
    assert sums.compute_hash() != same_code


def test_unknown_problems_are_refused(tmp_path):
    refused = run_tool(tmp_path / "base", "--problems=puzzles")
    assert refused.returncode == 2
    assert "invalid choice: 'puzzles'" in refused.stderr
