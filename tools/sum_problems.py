"""Chains of additions and subtractions with worked solutions: reasoning-gym's chain_sum.

The questions are those of `load_problems("gym:chain_sum?...")`, word for word, so that a recipe can
name the same source; the solutions are ours. Its parts are the splits: no question is ever in two,
whatever the seeds and the counts.
"""

import random
import re

from word_problems import (
    FIRST_WORDINGS,
    LAST_WORDINGS,
    NEXT_WORDINGS,
    OPERATORS,
    PLAIN_LAST_WORDINGS,
    WordProblem,
)

from megatron_stapo.data.sources import load_problems

SOURCE = "gym:chain_sum?max_terms=4&max_digits=1"
"""Two to four terms of one digit; a recipe adds size= and part=. At two digits the base model gets
8 % right after all its 800 steps, at one 36 % after half of them."""


def build_problems(
    split: str, num_problems: int, seed: int, unboxed_prob: float = 0.0
) -> list[WordProblem]:
    """Draw distinct problems of one split; the same arguments give the same list.

    Args:
        split: a part of a gym source: pretrain, train or heldout.
        num_problems: how many.
        seed: of the source. Different seeds draw different problems of the same split.
        unboxed_prob: probability that a solution states its answer without a box.
    """
    rng = random.Random(f"{seed} {split}")
    problems, _ = load_problems(f"{SOURCE}&part={split}&seed={seed}&size={num_problems}")
    return [_work_out(p.problem, int(p.answer), rng, unboxed_prob) for p in problems]


def _work_out(question: str, answer: int, rng: random.Random, unboxed_prob: float) -> WordProblem:
    """Add and subtract from left to right, a sentence a step."""
    first, *rest = re.findall(r"\d+|[-+]", question.partition(":")[2])
    result = int(first)
    sentences: list[str] = []
    for symbol, term in zip(rest[::2], rest[1::2], strict=True):
        left, result = result, OPERATORS[symbol](result, int(term))
        wordings = NEXT_WORDINGS if sentences else FIRST_WORDINGS
        sentences.append(rng.choice(wordings).format(f"{left}{symbol}{term}={result}"))
    assert result == answer, f"{question} is {answer}, not {result}"
    last_wordings = PLAIN_LAST_WORDINGS if rng.random() < unboxed_prob else LAST_WORDINGS
    num_steps = len(sentences)
    sentences.append(rng.choice(last_wordings).format(answer))
    return WordProblem(
        question=question, solution=" ".join(sentences), answer=answer, num_steps=num_steps
    )
