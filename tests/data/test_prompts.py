import json
from dataclasses import replace

import pytest

from megatron_stapo.config import DataConfig
from megatron_stapo.data.prompts import PromptStream, load_prompts, load_stop_token_ids
from megatron_stapo.types import Prompt


@pytest.fixture
def data_config(tmp_path):
    path = tmp_path / "train.jsonl"
    rows = [{"problem": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(3)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(train_path=str(path), heldout_path=str(path), prompt_suffix="")


def test_prompts_are_the_chat_template_with_the_generation_prompt(data_config, tokenizer_folder):
    prompts = load_prompts(data_config, data_config.train_path, tokenizer_folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert [p.prompt_id for p in prompts] == [0, 1, 2]
    assert [p.answer for p in prompts] == ["1", "2", "3"]
    assert (
        tokenizer.decode(prompts[1].token_ids)
        == "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_suffix_follows_the_problem(data_config, tokenizer_folder):
    config = replace(data_config, prompt_suffix=" Think.")
    [prompt, *_] = load_prompts(config, config.train_path, tokenizer_folder)
    from transformers import AutoTokenizer

    text = AutoTokenizer.from_pretrained(tokenizer_folder).decode(prompt.token_ids)
    assert "What is 0 + 1? Think.<|im_end|>" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_path": "nowhere.jsonl"}, "no file nowhere.jsonl"),
        ({"answer_column": "gold"}, "data.answer_column='gold'"),
        ({"max_prompt_tokens": 5}, "data.max_prompt_tokens=5: the prompt in row 0"),
    ],
)
def test_bad_data_is_refused_by_field_value_and_row(
    data_config, tokenizer_folder, changes, message
):
    config = replace(data_config, **changes)
    with pytest.raises(ValueError, match=message):
        load_prompts(config, config.train_path, tokenizer_folder)


def test_an_empty_answer_is_refused(data_config, tokenizer_folder, tmp_path):
    (tmp_path / "train.jsonl").write_text('{"problem": "a", "answer": " "}\n')
    with pytest.raises(ValueError, match=r"row 0 of .* has an empty 'answer'"):
        load_prompts(data_config, data_config.train_path, tokenizer_folder)


def test_either_end_of_text_stops_a_response(tokenizer_folder):
    # The tokenizer's own is <|im_end|>; the generation config of a base model says <|endoftext|>.
    assert load_stop_token_ids(tokenizer_folder) == [0, 2]


def build_prompts(count):
    return [Prompt(prompt_id=i, problem="", answer="", token_ids=[i]) for i in range(count)]


def test_each_epoch_is_every_prompt_once_in_a_new_order():
    stream = PromptStream(build_prompts(7), seed=1)
    epochs = [[p.prompt_id for p in stream.next(7)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_the_order_depends_on_the_position_alone():
    whole = [p.prompt_id for p in PromptStream(build_prompts(7), seed=1).next(20)]
    stream = PromptStream(build_prompts(7), seed=1)
    pieces = [p.prompt_id for n in (3, 4, 1, 12) for p in stream.next(n)]
    assert pieces == whole
    assert whole != [p.prompt_id for p in PromptStream(build_prompts(7), seed=2).next(20)]
