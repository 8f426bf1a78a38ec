"""Prompts in: from a data file to token ids, and in which order.

The order is a function of the seed and the position alone.
"""

import json
import random
from pathlib import Path
from typing import Any

from megatron_stapo.config import DataConfig
from megatron_stapo.types import Prompt


def load_tokenizer(model_path: str) -> Any:
    """Load the tokenizer of a model folder."""
    # Imported here because transformers takes a second, and a config error should not.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


def load_stop_token_ids(model_path: str) -> list[int]:
    """The tokens that end a response: the end-of-text of the generation config and of the
    tokenizer.

    Qwen3 Base ends its texts with one token and names another as its tokenizer's; either stops.
    """
    tokenizer = load_tokenizer(model_path)
    stop = {tokenizer.eos_token_id}
    file = Path(model_path) / "generation_config.json"
    if file.is_file():
        ids = json.loads(file.read_text()).get("eos_token_id", [])
        stop |= set(ids if isinstance(ids, list) else [ids])
    return sorted(stop)


def load_prompts(config: DataConfig, path: str, model_path: str) -> list[Prompt]:
    """Read problems and turn them into chat prompts, in the file's order.

    Args:
        config: columns, suffix and length limit.
        path: JSONL file.
        model_path: folder with the tokenizer and its chat template.

    Raises:
        ValueError: no such file, no rows, a missing column, an empty answer, or a prompt over
            data.max_prompt_tokens; names the row.
    """
    if not Path(path).is_file():
        raise ValueError(f"data: no file {path}; `make base` builds the problems of the demo.")
    import datasets

    rows = datasets.Dataset.from_json(path, cache_dir=None, keep_in_memory=True)
    for name in ("prompt_column", "answer_column"):
        column = getattr(config, name)
        if column not in rows.column_names:
            raise ValueError(
                f"data.{name}={column!r}: {path} has the columns {rows.column_names}; name one of "
                "them."
            )
    tokenizer = load_tokenizer(model_path)
    prompts = []
    for row, (problem, answer) in enumerate(
        zip(rows[config.prompt_column], rows[config.answer_column], strict=True)
    ):
        if not str(answer).strip():
            raise ValueError(f"data: row {row} of {path} has an empty {config.answer_column!r}.")
        token_ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": problem + config.prompt_suffix}],
            add_generation_prompt=True,
            return_dict=False,
        )
        if len(token_ids) > config.max_prompt_tokens:
            raise ValueError(
                f"data.max_prompt_tokens={config.max_prompt_tokens}: the prompt in row {row} of "
                f"{path} has {len(token_ids)} tokens; raise the limit or drop the row."
            )
        prompts.append(
            Prompt(prompt_id=row, problem=problem, answer=str(answer), token_ids=token_ids)
        )
    if not prompts:
        raise ValueError(f"data: {path} has no rows.")
    return prompts


class PromptStream:
    """Prompts without end: each epoch is a fresh shuffle of all of them."""

    def __init__(self, prompts: list[Prompt], seed: int) -> None:
        self._prompts = prompts
        self._seed = seed
        self.position = 0
        """Number of prompts drawn so far."""

    def next(self, num_prompts: int) -> list[Prompt]:
        """Draw the next prompts and advance the position."""
        drawn: list[Prompt] = []
        for position in range(self.position, self.position + num_prompts):
            epoch, index = divmod(position, len(self._prompts))
            if not drawn or index == 0:
                order = list(range(len(self._prompts)))
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            drawn.append(self._prompts[order[index]])
        self.position += num_prompts
        return drawn
