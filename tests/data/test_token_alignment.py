"""What trains is what was sampled: prompt, response and mask line up token for token, whatever the
text that the tokens make."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from megatron_stapo.config import ParallelConfig
from megatron_stapo.data.packing import pack
from megatron_stapo.data.prompts import build_prompts, load_stop_token_ids
from megatron_stapo.data.sources import Problem
from megatron_stapo.types import Rollout, RolloutGroup
from tests.tiny_model import build_tokenizer

# Text, and how a sampler may have cut it: the pieces are tokenized each by itself.
RESPONSES = [
    (["\n", "\n", "Let x = 1.", "<|im_end|>"], "stop"),
    (["caf", "é", " naïve ", "≤", " 数学 ", "\\boxed{7}", "<|endoftext|>"], "stop"),
    (["the an", "swer", " is", " 12", "3", "<|im_end|>"], "stop"),
    (["<|im_end|>"], "stop"),
    (["a", "b", "\n", "\n\n", "c"], "length"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A byte-level BPE that has learned merges, two line ends among them."""
    folder = build_tokenizer(tmp_path_factory.mktemp("merging"))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        ["assistant\n\n\nLet x = 1.\n\nthe answer is 123\n\n naïve café 数学"] * 20,
        trainers.BpeTrainer(
            vocab_size=300,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = (folder / "chat_template.jinja").read_text()
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return PreTrainedTokenizerFast.from_pretrained(folder)


def encode(tokenizer, pieces):
    return [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False)]


def build_group(tokenizer, prompt):
    rollouts = []
    for pieces, finish_reason in RESPONSES:
        token_ids = encode(tokenizer, pieces)
        rollouts.append((token_ids, finish_reason))
    # Cut between the bytes of one character.
    cut = encode(tokenizer, ["so ", "𝛑"])[:-1]
    rollouts.append((cut, "length"))
    return RolloutGroup(
        prompt=prompt,
        rollouts=[
            Rollout(
                token_ids=token_ids,
                rollout_logprobs=[-0.01 * (i + 1) for i in range(len(token_ids))],
                finish_reason=finish_reason,
                policy_version=0,
                advantage=float(number + 1),
            )
            for number, (token_ids, finish_reason) in enumerate(rollouts)
        ],
    )


@pytest.mark.parametrize("problem", ["What is 6 + 1?", "Für 数学: 1 ≤ x?\n", ""])
@pytest.mark.parametrize("layout", [{}, {"data_parallel_size": 2}])
def test_a_packed_batch_decodes_to_its_rollouts(folder, tokenizer, problem, layout):
    problems = [Problem(row=row, problem=problem + "!" * row, answer="7") for row in range(2)]
    prompts = build_prompts(problems, "", str(folder))
    groups = [build_group(tokenizer, prompt) for prompt in prompts]
    per_rank = pack(groups, 2, 150, ParallelConfig(device="cpu", **layout))

    num_found = 0
    for [minibatch] in per_rank:
        for m in minibatch.microbatches:
            for start, end in zip(m.cu_seqlens[:-1].tolist(), m.cu_seqlens[1:].tolist()):
                numbers = set(m.sequence_ids_T[start:end].tolist()) - {-1}
                if not numbers:
                    continue
                (number,) = numbers
                group, sample = divmod(number, len(RESPONSES) + 1)
                rollout = groups[group].rollouts[sample]
                prompt_ids = prompts[group].token_ids
                num_tokens = len(prompt_ids) + len(rollout.token_ids)
                mask = m.response_mask_T[start:end]
                # The model reads the engine's tokens and no others.
                assert m.token_ids_T[start : start + num_tokens].tolist() == (
                    prompt_ids + rollout.token_ids
                )
                assert m.labels_T[start:end][mask].tolist() == rollout.token_ids
                # Its first prediction is made at the prompt's last token.
                assert mask.nonzero()[:, 0].tolist() == list(
                    range(len(prompt_ids) - 1, num_tokens - 1)
                )
                assert m.rollout_logprobs_T[start:end][mask].tolist() == pytest.approx(
                    rollout.rollout_logprobs
                )
                assert set(m.advantages_T[start:end][mask].tolist()) == {rollout.advantage}
                text = tokenizer.decode(m.token_ids_T[start : start + len(prompt_ids)])
                assert text == (
                    f"<|im_start|>user\n{problem}{'!' * group}<|im_end|>\n<|im_start|>assistant\n"
                )
                if sample < len(RESPONSES):
                    decoded = tokenizer.decode(m.labels_T[start:end][mask])
                    assert decoded == "".join(RESPONSES[sample][0])
                num_found += 1
    assert num_found == 2 * (len(RESPONSES) + 1)


def test_the_case_is_one_that_tokenizing_the_text_again_would_get_wrong(folder, tokenizer):
    [prompt] = build_prompts([Problem(row=0, problem="x", answer="7")], "", str(folder))
    [first, *_] = build_group(tokenizer, prompt).rollouts
    sampled = prompt.token_ids + first.token_ids
    again = tokenizer.encode(tokenizer.decode(sampled), add_special_tokens=False)
    # The prompt's last line end and the response's first ones become one token.
    assert again != sampled
    assert again[: len(prompt.token_ids)] != prompt.token_ids
    # A character of several bytes is several tokens, so that a limit may cut it.
    assert len(encode(tokenizer, ["𝛑"])) > 1


def test_both_ends_stop_whichever_the_files_name(folder):
    """The tokenizer says <|im_end|>, the generation config <|endoftext|>; config.json is absent."""
    assert load_stop_token_ids(str(folder)) == [0, 2]
    (folder / "generation_config.json").unlink()
    assert load_stop_token_ids(str(folder)) == [0, 2]
    (folder / "config.json").write_text('{"eos_token_id": 9}')
    assert load_stop_token_ids(str(folder)) == [0, 2, 9]
