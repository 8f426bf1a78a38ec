import json
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from megatron_stapo.config import DataConfig
from megatron_stapo.data.prompts import PromptStream, load_training_prompts
from megatron_stapo.types import Prompt


@pytest.fixture
def write(tmp_path, tokenizer_folder):
    """Write rows of (problem, answer) and return a loader of them."""
    path = tmp_path / "train.jsonl"

    def write(rows, **changes):
        text = "".join(json.dumps({"problem": p, "answer": a}) + "\n" for p, a in rows)
        path.write_text(text)
        rule = changes.pop("rule", "math_verify")
        config = replace(DataConfig(source=str(path), prompt_suffix=""), **changes)
        return load_training_prompts(config, rule, 2, tokenizer_folder)

    return write


ROWS = [(f"What is {i} + 1?", str(i + 1)) for i in range(3)]


def test_prompts_are_the_chat_template_with_the_generation_prompt(write, tokenizer_folder):
    prompts, report, num_overlong = write(ROWS)
    assert [p.prompt_id for p in prompts] == [0, 1, 2]
    assert [p.answer for p in prompts] == ["1", "2", "3"]
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert (
        tokenizer.decode(prompts[1].token_ids)
        == "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (report.num_rows, num_overlong) == (3, 0)


def test_the_papers_suffix_follows_the_problem_by_default(write, tokenizer_folder):
    [prompt, *_], _, _ = write(ROWS, prompt_suffix=DataConfig(source="").prompt_suffix)
    text = AutoTokenizer.from_pretrained(tokenizer_folder).decode(prompt.token_ids)
    assert (
        "What is 0 + 1?\n\nPlease reason step by step, and put your final answer within \\boxed{}."
        "<|im_end|>"
    ) in text


def test_duplicates_are_left_out_and_told_unless_asked_for(write):
    rows = [*ROWS, ROWS[1], (" What is 0  + 1?", "5")]
    prompts, report, _ = write(rows)
    assert [p.prompt_id for p in prompts] == [0, 1, 2]
    assert (report.num_duplicates, report.num_conflicting) == (2, 1)
    prompts, _, _ = write(rows, keep_duplicates=True)
    assert [p.prompt_id for p in prompts] == [0, 1, 2, 3, 4]


def test_chinese_prompts_are_kept_unless_dropped(write):
    rows = [*ROWS, ("\u8ba1\u7b97 1 + 1", "2")]
    assert len(write(rows)[0]) == 4
    prompts, report, _ = write(rows, drop_chinese=True)
    assert (len(prompts), report.num_chinese) == (3, 1)


def test_prompts_over_the_limit_are_left_out_and_counted(write):
    rows = [*ROWS, ("x" * 100, "2")]
    prompts, _, num_overlong = write(rows, max_prompt_tokens=70)
    assert ([p.prompt_id for p in prompts], num_overlong) == ([0, 1, 2], 1)


@pytest.mark.parametrize(
    ("rows", "changes", "message"),
    [
        (ROWS, {"source": "nowhere.jsonl"}, "nowhere.jsonl"),
        (ROWS, {"max_prompt_tokens": 5}, r"0 of 3 problems have at most data.max_prompt_tokens=5"),
        (ROWS[:1] + [ROWS[0]] * 5, {}, r"the ground truth of all 1 problems is '1'"),
        ([("a", "1"), ("b", "1"), ("c", " 1")], {}, r"the ground truth of all 3 problems is '1'"),
        ([("a", "1"), ("b", "2"), ("c", " ")], {}, r"row 2"),
        (
            [("a", "1"), ("b", "2"), ("c", "\\frac{1}{")],
            {},
            r"row 2 has the ground truth '\\\\frac\{1\}\{'.*reward.rule=exact_box",
        ),
    ],
)
def test_what_no_run_could_learn_from_is_refused(write, rows, changes, message):
    with pytest.raises(ValueError, match=message):
        write(rows, **changes)


def test_another_rule_takes_a_ground_truth_that_is_no_formula(write):
    prompts, _, _ = write([("a", "1"), ("c", "\\frac{1}{")], rule="exact_box")
    assert len(prompts) == 2


def build_prompts(count):
    return [Prompt(prompt_id=i, problem="", answer="", token_ids=[i]) for i in range(count)]


def test_each_epoch_is_every_prompt_once_in_a_new_order():
    stream = PromptStream(build_prompts(7), seed=1)
    epochs = [[p.prompt_id for p in stream.next(7)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_the_position_alone():
    whole = [p.prompt_id for p in PromptStream(build_prompts(7), seed=1).next(7)]
    stream = PromptStream(build_prompts(7), seed=1)
    pieces = [p.prompt_id for n in (3, 1, 1, 2) for p in stream.next(n)]
    assert pieces == whole
    assert whole != [p.prompt_id for p in PromptStream(build_prompts(7), seed=2).next(7)]


def test_no_draw_holds_a_prompt_twice_where_two_epochs_meet():
    for seed in range(50):
        stream = PromptStream(build_prompts(7), seed=seed)
        for _ in range(10):
            ids = [p.prompt_id for p in stream.next(5)]
            assert len(set(ids)) == 5


def test_what_a_step_has_drawn_is_not_drawn_again():
    stream = PromptStream(build_prompts(7), seed=1)
    first = {p.prompt_id for p in stream.next(4)}
    second = {p.prompt_id for p in stream.next(3, first)}
    assert not first & second
    with pytest.raises(ValueError, match="a step needs 3 problems beside the 5 it has drawn"):
        stream.next(3, range(5))


def test_a_stream_goes_on_from_a_position():
    stream = PromptStream(build_prompts(7), seed=1)
    for _ in range(4):
        stream.next(5)
    resumed = PromptStream(build_prompts(7), seed=1)
    resumed.position = stream.position
    assert [resumed.next(5) for _ in range(5)] == [stream.next(5) for _ in range(5)]
