"""Builds a base model for the demo: a small Qwen3 that solves about a third of its problems, which
are word problems or the sums of reasoning-gym.

The folder is in Hugging Face format and complete in itself: weights, a byte-level BPE tokenizer
with Qwen3's special tokens and chat template, and the problems that RL trains and is judged on,
which pre-training has not seen. It is built beside its place and renamed into it, so that an
interrupted build is never taken for a model.
"""

import argparse
import hashlib
import json
import math
import random
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sum_problems
import word_problems
from word_problems import WordProblem

if TYPE_CHECKING:
    import torch

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

GENERATORS = {"word": word_problems, "sums": sum_problems}
"""Modules with a function `build_problems`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the result depends on."""

    problems: str = "word"
    """A key of `GENERATORS`."""
    seed: int = 0
    vocab_size: int = 480
    max_steps: int = 800
    """Pre-training steps at most; the learning rate falls to 0 over them."""
    first_evaluation: int = 400
    """Step from which on the accuracy is measured, each 50."""
    batch_size: int = 16
    unboxed_prob: float = 0.4
    """Share of the pre-training documents that state their answer without a box. The base then
    knows more than its rewards show, as a base model does that is asked for a format."""
    target_accuracy: float = 0.3
    """Pre-training stops at this share of sampled answers that are right, so that RL has both
    something to reward and something to gain."""
    num_train_problems: int = 8192
    num_heldout_problems: int = 512

    def compute_hash(self) -> str:
        """Of the settings and of the code that they steer."""
        files = [__file__, word_problems.__file__]
        parts = [json.dumps(asdict(self)).encode()]
        if self.problems == "sums":
            files.append(sum_problems.__file__)
            # Of the code that draws them, which is not all ours, what comes out.
            parts += [
                problem.question.encode()
                for split in ("pretrain", "train", "heldout")
                for problem in sum_problems.build_problems(split, 32, self.seed)
            ]
        parts += [Path(file).read_bytes() for file in files]
        return hashlib.sha256(b"".join(parts)).hexdigest()


SETTINGS = {
    "word": Settings(),
    # The sums have fewer words to make tokens of, and are learned sooner.
    "sums": Settings(problems="sums", vocab_size=352, first_evaluation=250),
}
OUT = {"word": Path("runs/tiny_base"), "sums": Path("runs/sums_base")}


def main() -> None:
    """Parse the command line and build, unless the folder is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", choices=GENERATORS, default="word")
    parser.add_argument("--out", type=Path, help=" or ".join(map(str, OUT.values())))
    parser.add_argument("--force", action="store_true", help="build even if the folder is there")
    for name, value in asdict(Settings()).items():
        if name != "problems":
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value))
    arguments = {k: v for k, v in vars(parser.parse_args()).items() if v is not None}
    problems, force = arguments.pop("problems"), arguments.pop("force")
    out = arguments.pop("out", OUT[problems])
    settings = replace(SETTINGS[problems], **arguments)
    record = out / "base.json"
    if not force and record.is_file():
        if json.loads(record.read_text())["hash"] == settings.compute_hash():
            print(f"{out}: complete, nothing to do")
            return
        print(f"{out}: built with other settings, building again")
    elif not force and out.exists() and any(out.iterdir()):
        sys.exit(
            f"make_tiny_base: error: --out={out}: holds files but no base.json, so it is not ours "
            "to replace; name another folder, or pass --force."
        )
    build(settings, out)


def build(settings: Settings, out: Path) -> None:
    """Build the folder and put it in place of what is there."""
    start_s = time.monotonic()
    import torch

    # A second thread gains a fifth on an idle machine, and loses everything on a busy one.
    torch.set_num_threads(1)
    torch.manual_seed(settings.seed)
    part = out.with_name(out.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)

    num_documents = settings.max_steps * settings.batch_size
    build_problems = GENERATORS[settings.problems].build_problems
    documents = build_problems("pretrain", num_documents, settings.seed, settings.unboxed_prob)
    tokenizer = build_tokenizer(documents, settings.vocab_size)
    model = build_model(tokenizer)
    accuracy = pretrain(model, tokenizer, documents, settings)

    model.generation_config.update(
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
        do_sample=True,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
    )
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    for name, split, count in (
        ("train", "train", settings.num_train_problems),
        ("heldout", "heldout", settings.num_heldout_problems),
    ):
        problems = build_problems(split, count, settings.seed)
        rows = ({"problem": p.question, "answer": str(p.answer)} for p in problems)
        (part / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = {
        "hash": settings.compute_hash(),
        "settings": asdict(settings),
        "accuracy": accuracy,
        "seconds": round(time.monotonic() - start_s, 1),
    }
    (part / "base.json").write_text(json.dumps(record, indent=2) + "\n")
    old = out.with_name(out.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    part.rename(out)
    shutil.rmtree(old, ignore_errors=True)
    print(f"{out}: {accuracy:.0%} of held-out problems, {record['seconds']} s")


def build_tokenizer(documents: list[WordProblem], vocab_size: int) -> Any:
    """Train Qwen's kind of byte-level BPE on the documents.

    Args:
        vocab_size: tokens, the special ones included.
    """
    from tokenizers import Tokenizer, models, trainers
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    # Qwen's normaliser, pre-tokeniser (each digit by itself) and decoder, around merges of our own.
    qwen = Qwen2Tokenizer()._tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = (
        qwen.normalizer,
        qwen.pre_tokenizer,
        qwen.decoder,
    )
    bpe.train_from_iterator(
        (text for d in documents for text in (d.question, d.solution, "user\n", "assistant\n")),
        trainers.BpeTrainer(
            vocab_size=vocab_size - len(SPECIAL_TOKENS),
            initial_alphabet=ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    trained = json.loads(bpe.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    if len(tokenizer) != vocab_size:
        sys.exit(
            f"make_tiny_base: error: --vocab-size={vocab_size}: the problems give "
            f"{len(tokenizer)} tokens; use at most that."
        )
    return tokenizer


def build_model(tokenizer: Any) -> Any:
    """A Qwen3 of 1.9 M parameters. Its head_dim is not hidden / heads, as in Qwen3 0.6B and 32B."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=64,
            tie_word_embeddings=True,
            max_position_embeddings=512,
            # Four times the default: at this width the model then learns in far fewer steps.
            initializer_range=0.08,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def pretrain(model: Any, tokenizer: Any, documents: list[WordProblem], settings: Settings) -> float:
    """Train on the documents, each once, until the target accuracy.

    Returns:
        The share of 256 held-out problems answered right, sampled at temperature 1.
    """
    import torch

    prompts, responses = tokenize(tokenizer, documents)
    batches = build_batches(prompts, responses, settings)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    # Muon reaches in one minute what Adam alone needs three for.
    optimizers = [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer,
            lambda step: (
                min(1.0, (step + 1) / 50)
                * (0.5 + 0.5 * math.cos(math.pi * step / settings.max_steps))
            ),
        )
        for optimizer in optimizers
    ]
    validation = GENERATORS[settings.problems].build_problems("heldout", 256, settings.seed + 1)
    start_s = time.monotonic()
    accuracy = 0.0
    for step, batch in enumerate(batches, start=1):
        loss = compute_loss(model, tokenizer, [prompts[i] + responses[i] for i in batch])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if step % 50 and step < len(batches):
            continue
        line = f"step {step:4d}  loss {loss.item():.3f}  {time.monotonic() - start_s:5.1f} s"
        if step >= settings.first_evaluation or step == len(batches):
            accuracy = evaluate(model, tokenizer, validation)
            line += f"  accuracy {accuracy:.3f}"
        print(line, flush=True)
        if accuracy >= settings.target_accuracy:
            return accuracy
    sys.exit(
        f"make_tiny_base: error: --max-steps={settings.max_steps}: {accuracy:.1%} of held-out "
        f"problems after the last step, --target-accuracy={settings.target_accuracy} not reached; "
        "raise the former or lower the latter."
    )


def tokenize(
    tokenizer: Any, problems: list[WordProblem]
) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts as the chat template makes them, and what the model writes after, stop included."""
    prompts = tokenizer.apply_chat_template(
        [[{"role": "user", "content": p.question}] for p in problems],
        add_generation_prompt=True,
        return_dict=False,
    )
    responses = tokenizer([p.solution + tokenizer.eos_token for p in problems])["input_ids"]
    return prompts, responses


def build_batches(
    prompts: list[list[int]], responses: list[list[int]], settings: Settings
) -> list[list[int]]:
    """Batches of like lengths in random order: sorted within pools of sixteen batches."""
    rng = random.Random(settings.seed)
    batches: list[list[int]] = []
    pool_size = 16 * settings.batch_size
    for start in range(0, len(prompts), pool_size):
        pool = sorted(
            range(start, min(start + pool_size, len(prompts))),
            key=lambda i: len(prompts[i]) + len(responses[i]),
        )
        cut = [pool[i : i + settings.batch_size] for i in range(0, len(pool), settings.batch_size)]
        rng.shuffle(cut)
        batches += cut
    return batches


def compute_loss(model: Any, tokenizer: Any, sequences: list[list[int]]) -> "torch.Tensor":
    """Mean cross-entropy over all tokens of the sequences but the first of each."""
    import torch

    length = max(map(len, sequences))
    token_ids = torch.tensor([s + [tokenizer.pad_token_id] * (length - len(s)) for s in sequences])
    labels = torch.tensor([s[1:] + [-100] * (length - len(s)) for s in sequences])
    hidden = model.model(token_ids, use_cache=False).last_hidden_state[:, :-1]
    counted = labels != -100
    return torch.nn.functional.cross_entropy(model.lm_head(hidden[counted]), labels[counted])


def evaluate(model: Any, tokenizer: Any, problems: list[WordProblem]) -> float:
    """The share of problems whose sampled response ends in the right box, at temperature 1."""
    import torch

    prompts, _ = tokenize(tokenizer, problems)
    padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    random_state = torch.get_rng_state()
    torch.manual_seed(0)
    with torch.no_grad():
        out = model.generate(
            **padded,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_new_tokens=96,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    torch.set_rng_state(random_state)
    texts = tokenizer.batch_decode(out[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)
    right = (
        text.endswith(f"\\boxed{{{problem.answer}}}.")
        for text, problem in zip(texts, problems, strict=True)
    )
    return sum(right) / len(problems)


if __name__ == "__main__":
    main()
