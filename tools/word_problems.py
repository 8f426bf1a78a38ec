"""Arithmetic word problems with worked solutions: the whole world of the tiny base model.

Owns the templates and the splits. The split of a problem is a hash of its question, so no question
is ever in two splits, whatever the seeds and the counts.
"""

import hashlib
import operator
import random
from dataclasses import dataclass

MAX_VALUE = 199
"""Inclusive limit on every number, given or computed; the smallest is 0."""

NAMES = [
    "Tom",
    "Ann",
    "Sam",
    "Mia",
    "Leo",
    "Zoe",
    "Ben",
    "Eva",
    "Max",
    "Amy",
    "Dan",
    "Ida",
    "Kim",
    "Joe",
    "Liz",
    "Roy",
]
THINGS = [
    "apples",
    "pears",
    "plums",
    "lemons",
    "melons",
    "nuts",
    "eggs",
    "cups",
    "caps",
    "books",
    "pens",
    "pencils",
    "cards",
    "stamps",
    "shells",
    "stones",
    "marbles",
    "beads",
    "buttons",
    "candles",
    "tickets",
    "flowers",
]

FACTORS = range(2, 10)
ADDENDS = range(2, 13)
"""A number that any step multiplies is drawn from `FACTORS`, every other one from `ADDENDS`."""

NUM_BUCKETS = 16
SPLIT_BUCKETS = {"pretrain": range(0, 11), "train": range(11, 15), "heldout": range(15, 16)}
"""The values of a question's hash, modulo `NUM_BUCKETS`, that put it in a split."""

TEMPLATES = (
    # One step.
    (
        "{x} has {a} {things}. {y} has {b} more than {x}. How many {things} does {y} have?",
        ("a + b",),
    ),
    ("{x} has {a} {things} and {y} has {b}. How many {things} do they have together?", ("a + b",)),
    (
        "{x} has {a} {things} and gives {b} to {y}. How many {things} does {x} have left?",
        ("a - b",),
    ),
    ("{x} fills {a} bags with {b} {things} each. How many {things} does {x} have?", ("a * b",)),
    # Two steps.
    (
        "{x} has {a} {things}, finds {b} more and gives {c} to {y}. "
        "How many {things} does {x} have left?",
        ("a + b", "p - c"),
    ),
    (
        "{x} has {a} {things}. {y} has {b} times as many. How many {things} do they have together?",
        ("a * b", "p + a"),
    ),
    (
        "{x} fills {a} bags with {b} {things} each and gives {c} to {y}. "
        "How many {things} does {x} have left?",
        ("a * b", "p - c"),
    ),
    (
        "{x} has {a} coins and buys {b} {things} for {c} coins each. "
        "How many coins does {x} have left?",
        ("b * c", "a - p"),
    ),
    # Three steps.
    (
        "{x} buys {a} {things} for {b} coins each. {y} buys {c} for {d} coins each. "
        "How many coins do they pay together?",
        ("a * b", "c * d", "p + q"),
    ),
    (
        "{x} has {a} coins, sells {b} {things} for {c} coins each and gives {d} to {y}. "
        "How many coins does {x} have left?",
        ("b * c", "p + a", "q - d"),
    ),
    (
        "{x} has {a} {things}. {y} has {b} times as many and gives {c} away. "
        "How many {things} do they have together?",
        ("a * b", "p - c", "q + a"),
    ),
    (
        "{x} fills {a} bags with {b} {things} each, finds {c} more and gives {d} to {y}. "
        "How many {things} does {x} have left?",
        ("a * b", "p + c", "q - d"),
    ),
)
"""Each question with its steps "left operator right": a to d are the numbers it gives, p, q, r the
results of its steps in order; the last result is the answer."""

# Several wordings for the same step give the policy something to choose that does not matter for
# the answer.
FIRST_WORDINGS = ("First, {}.", "We start with {}.", "To begin, {}.")
NEXT_WORDINGS = ("Then {}.", "Next, {}.", "Now we have {}.")
LAST_WORDINGS = ("So the answer is \\boxed{{{}}}.", "The answer is \\boxed{{{}}}.")
PLAIN_LAST_WORDINGS = ("So the answer is {}.", "The answer is {}.")

OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul}


@dataclass(frozen=True, kw_only=True)
class WordProblem:
    """One question, the solution the base model learns to write, and the answer the reward compares
    with."""

    question: str
    solution: str
    answer: int
    num_steps: int


def compute_split(question: str) -> str:
    """Return the split a question belongs to, by its text alone."""
    bucket = int.from_bytes(hashlib.sha256(question.encode()).digest()[:8]) % NUM_BUCKETS
    return next(split for split, buckets in SPLIT_BUCKETS.items() if bucket in buckets)


def build_problems(
    split: str, num_problems: int, seed: int, unboxed_prob: float = 0.0
) -> list[WordProblem]:
    """Draw distinct problems of one split; the same arguments give the same list.

    Args:
        split: a key of `SPLIT_BUCKETS`.
        num_problems: how many. A template is drawn anew where its numbers leave the limits.
        seed: any integer. Different seeds draw different problems of the same split.
        unboxed_prob: probability that a solution states its answer without a box.
    """
    rng = random.Random(f"{seed} {split}")
    problems: dict[str, WordProblem] = {}
    while len(problems) < num_problems:
        problem = _draw_problem(rng, unboxed_prob)
        if problem is not None and compute_split(problem.question) == split:
            problems.setdefault(problem.question, problem)
    return list(problems.values())


def _draw_problem(rng: random.Random, unboxed_prob: float) -> WordProblem | None:
    """Fill one random template; None where the numbers leave 0 to `MAX_VALUE`."""
    template, steps = rng.choice(TEMPLATES)
    factors = {letter for step in steps if "*" in step for letter in step}
    values = {letter: rng.choice(FACTORS if letter in factors else ADDENDS) for letter in "abcd"}
    sentences: list[str] = []
    for result, step in zip("pqr", steps, strict=False):
        left, symbol, right = step.split()
        values[result] = OPERATORS[symbol](values[left], values[right])
        if not 0 <= values[result] <= MAX_VALUE:
            return None
        wordings = NEXT_WORDINGS if sentences else FIRST_WORDINGS
        equation = f"{values[left]}{symbol}{values[right]}={values[result]}"
        sentences.append(rng.choice(wordings).format(equation))
    answer = values[result]
    last_wordings = PLAIN_LAST_WORDINGS if rng.random() < unboxed_prob else LAST_WORDINGS
    sentences.append(rng.choice(last_wordings).format(answer))
    x, y = rng.sample(NAMES, 2)
    question = template.format(x=x, y=y, things=rng.choice(THINGS), **values)
    return WordProblem(
        question=question, solution=" ".join(sentences), answer=answer, num_steps=len(steps)
    )
