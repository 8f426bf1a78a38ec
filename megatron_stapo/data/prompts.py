"""Prompts in: from problems to token ids, and in which order.

The order is a function of the seed and the position alone.
"""

import json
import random
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from megatron_stapo.config import DataConfig
from megatron_stapo.data.sources import LoadReport, Problem, load_problems
from megatron_stapo.rewards.math_equivalence import explain_unparsable
from megatron_stapo.types import Prompt

_END_OF_TEXT = ("<|endoftext|>", "<|im_end|>")


def load_tokenizer(model_path: str) -> Any:
    """Load the tokenizer of a model folder."""
    # Imported here because transformers takes a second, and a config error should not.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def load_stop_token_ids(model_path: str) -> list[int]:
    """The tokens that end a response: what the tokenizer, config.json and generation_config.json
    each call the end, and both of Qwen's own ends.

    A Qwen3 Base model ends its texts with <|endoftext|>, its chats with <|im_end|>, and the three
    files do not agree on which; either stops.
    """
    tokenizer = load_tokenizer(model_path)
    stop = {tokenizer.eos_token_id}
    stop |= {tokenizer.get_vocab().get(token) for token in _END_OF_TEXT}
    for name in ("config.json", "generation_config.json"):
        file = Path(model_path) / name
        if file.is_file():
            ids = json.loads(file.read_text()).get("eos_token_id")
            stop |= set(ids if isinstance(ids, list) else [ids])
    return sorted(stop - {None})


def load_training_prompts(
    config: DataConfig, rule: str, num_prompts_per_step: int, model_path: str
) -> tuple[list[Prompt], LoadReport, int]:
    """Load the training problems, and refuse those that no run could learn from.

    Args:
        config: source, suffix and limits.
        rule: of reward.rule; with math_verify every ground truth must be one that it can match.
        num_prompts_per_step: distinct problems that a step draws.
        model_path: folder with the tokenizer and its chat template.

    Returns:
        The prompts in the source's order, what was left out, and the number of prompts left out for
        their length.

    Raises:
        ValueError: of `load_problems`; a ground truth that the rule can never match, by row and
            value; ground truths that are all alike; or fewer problems than a step needs.
    """
    problems, report = load_problems(
        config.source,
        keep_duplicates=config.keep_duplicates,
        drop_chinese=config.drop_chinese,
    )
    if rule == "math_verify":
        for problem in problems:
            if reason := explain_unparsable(problem.answer):
                raise ValueError(
                    f"data.source={config.source}: row {problem.row} has the ground truth "
                    f"{problem.answer!r:.80}: {reason}. reward.rule=math_verify would call every "
                    "answer wrong; correct or drop the row, or use reward.rule=exact_box."
                )
    if len({problem.answer for problem in problems}) == 1:
        raise ValueError(
            f"data.source={config.source}: the ground truth of all {len(problems)} problems is "
            f"{problems[0].answer!r}, so a model learns to say that and no more; check the answer "
            "column."
        )
    prompts = build_prompts(problems, config.prompt_suffix, model_path)
    num_read = len(prompts)
    prompts = [p for p in prompts if len(p.token_ids) <= config.max_prompt_tokens]
    if len(prompts) < num_prompts_per_step:
        raise ValueError(
            f"data.source={config.source}: {len(prompts)} of {num_read} problems have at most "
            f"data.max_prompt_tokens={config.max_prompt_tokens} tokens, and a step draws "
            f"rollout.num_prompts_per_step={num_prompts_per_step} distinct ones; raise the limit, "
            "lower the number, or give more problems."
        )
    return prompts, report, num_read - len(prompts)


def build_prompts(problems: Sequence[Problem], suffix: str, model_path: str) -> list[Prompt]:
    """Turn problems into chat prompts of one user turn, without a system message.

    Args:
        suffix: appended to the problem.
        model_path: folder with the tokenizer and its chat template.
    """
    chats = [[{"role": "user", "content": p.problem + suffix}] for p in problems]
    token_ids = load_tokenizer(model_path).apply_chat_template(
        chats, add_generation_prompt=True, return_dict=False
    )
    return [
        Prompt(prompt_id=p.row, problem=p.problem, answer=p.answer, token_ids=ids)
        for p, ids in zip(problems, token_ids, strict=True)
    ]


class PromptStream:
    """Prompts without end: each epoch is a fresh shuffle of all of them."""

    def __init__(self, prompts: list[Prompt], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])
        self.position = 0
        """Number of prompts drawn or passed over so far: a stream that is set to it goes on as the
        one that it was read from."""

    def next(self, num_prompts: int, taken: Collection[int] = ()) -> list[Prompt]:
        """Draw the next prompts, each another one, and advance the position.

        Where a draw reaches into the next epoch, it passes over what it holds from the last one, so
        that no step has two groups of one problem. What is passed over is left out of that epoch.

        Args:
            taken: prompt_ids to pass over, too: those of the step's earlier draws.

        Raises:
            ValueError: there are not so many prompts.
        """
        taken_ids = set(taken)
        if len(self._prompts) - len(taken_ids) < num_prompts:
            raise ValueError(
                f"data.source: a step needs {num_prompts} problems beside the {len(taken_ids)} it "
                f"has drawn, and there are {len(self._prompts)}; give more problems, or lower "
                "rollout.num_prompts_per_step."
            )
        drawn: list[Prompt] = []
        while len(drawn) < num_prompts:
            prompt = self._prompts[self._find_index(self.position)]
            self.position += 1
            if prompt.prompt_id not in taken_ids:
                taken_ids.add(prompt.prompt_id)
                drawn.append(prompt)
        return drawn

    def _find_index(self, position: int) -> int:
        epoch, index = divmod(position, len(self._prompts))
        if self._order[0] != epoch:
            order = list(range(len(self._prompts)))
            random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][index]
