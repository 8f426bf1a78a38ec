"""A random Qwen3 that four ranks can share: large weights, so that every path moves the numbers."""

from pathlib import Path

import torch

VOCAB_SIZE = 96


def build_tiny_model(
    folder: Path, tied: bool, num_experts: int = 0, sizes: dict[str, int] | None = None
) -> Path:
    """Write a Hugging Face folder without tokenizer; head_dim differs from hidden / heads."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    shape = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        tie_word_embeddings=tied,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    sizes = sizes or {}
    if num_experts:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **shape
                | dict(
                    num_experts=num_experts,
                    num_experts_per_tok=2,
                    moe_intermediate_size=24,
                    norm_topk_prob=True,
                )
                | sizes
            )
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape | sizes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.2 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder


def build_tokenizer(folder: Path) -> Path:
    """Write a tokenizer of the 256 bytes and three special tokens, and a generation config."""
    import json

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(special + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    fast.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    return folder


def build_coin_base(folder: Path, num_experts: int = 0) -> Path:
    r"""Write a model that answers \boxed{0} to \boxed{3} alike, with problems whose answer is 1.

    A quarter of its answers is right and the rule is easy, so that a handful of RL steps shows.
    """
    import json

    from transformers import (
        AutoTokenizer,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    build_tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    # vLLM's experts take a hidden size that is a multiple of 32 on a CPU.
    shape = dict(
        vocab_size=260,
        hidden_size=96,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    if num_experts:
        model = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **shape,
                num_experts=num_experts,
                num_experts_per_tok=2,
                moe_intermediate_size=96,
                norm_topk_prob=True,
            )
        )
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**shape))
    for split, problems in (("train", range(64)), ("heldout", range(100, 116))):
        # One other answer: a source whose answers are all alike is refused.
        rows = ({"problem": f"Toss {i}", "answer": "2" if i == 63 else "1"} for i in problems)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [
        [
            {"role": "user", "content": f"Toss {100 + i}"},
            {"role": "assistant", "content": rf"\boxed{{{i % 4}}}"},
        ]
        for i in range(32)
    ]
    token_ids = torch.tensor(tokenizer.apply_chat_template(chats, return_dict=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        # Which digit follows which number is shuffled, so that there is nothing to learn of it.
        order = torch.randperm(len(token_ids))
        mixed = token_ids.clone()
        mixed[:, -18:] = token_ids[order, -18:]
        loss = model(input_ids=mixed, labels=mixed).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder
