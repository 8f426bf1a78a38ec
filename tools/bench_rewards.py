"""Time the verifiers on a step's worth of responses, without and with adversarial ones.

    .venv/bin/python tools/bench_rewards.py

Prints, for 2,048 responses of about 4,000 tokens and two workers, the seconds, and how much longer
it takes when one in twenty is made to stall or to crash the verifier.
"""

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from megatron_stapo.rewards import Verdict
from megatron_stapo.rewards.pool import VerifierPool
from megatron_stapo.rewards.worker import RULE_PATHS

NUM_RESPONSES = 2048
RESPONSE_CHARS = 16_000
"""About 4,000 tokens of reasoning."""
ADVERSARIAL_FRAC = 0.05
MARGIN_S = 0.5
"""What a verdict may take beyond the limit."""

SENTENCES = (
    "Let $x = \\frac{{{a}}}{{{b}}}$ and consider the sum $\\sum_{{k=1}}^{{{a}}} k^{b}$. ",
    "Wait, that gives {a} \\cdot {b} = {c}, so I check the case $n = {a}$ again. ",
    "By symmetry the triangle with sides {a}, {b} and $\\sqrt{{{c}}}$ is similar to the first. ",
    "Hence the set $\\{{{a}, {b}\\}}$ has two elements, and the answer may be \\boxed{{{a}}}. ",
)


@dataclass(frozen=True)
class Problem:
    """A response as it goes to the pool."""

    response: str
    answer: str
    is_correct: bool | None
    """None for adversarial responses, whose verdict depends on the limit alone."""


def write_reasoning(rng: random.Random) -> str:
    """RESPONSE_CHARS characters and a little more of worked steps, without a box."""
    parts: list[str] = []
    size = 0
    while size < RESPONSE_CHARS:
        a, b = rng.randint(2, 99), rng.randint(2, 9)
        parts.append(rng.choice(SENTENCES).format(a=a, b=b, c=a * b))
        size += len(parts[-1])
    return "".join(parts)


def draw_answer(rng: random.Random) -> tuple[str, str, str]:
    """A ground truth, an equal answer in another notation, and a wrong one."""
    a, b, c = (rng.randint(2, 60) for _ in range(3))
    kinds = (
        (f"{a}", f"{a}", f"{a + 1}"),
        (f"{1000 * a}", f"{a},000", f"{a},001"),
        (rf"\frac{{{a}}}{{61}}", f"{a}/61", rf"\frac{{{a + 1}}}{{61}}"),
        (rf"{a}\sqrt{{3}}", rf"\sqrt{{{3 * a * a}}}", rf"{a}\sqrt{{2}}"),
        (f"({a},{b})", rf"\left({a}, {b}\right)", f"({a},{b + 1})"),
        (rf"[{a}, {a + b})", rf"{a} \le x < {a + b}", f"[{a}, {a + b}]"),
        (f"(x+{a})(x-{b})", f"x^2+{a}x-{b}x-{a * b}".replace("+-", "-"), f"x^2+{a * b}"),
        (rf"{a}, {a + b}", rf"x={a + b} \text{{ or }} x={a}", f"{a}"),
        (rf"\frac{{{a}\pi}}{{{b}}}", rf"\frac{{{a}}}{{{b}}}\pi", rf"\frac{{\pi}}{{{a * b}}}"),
        (rf"{a}+{b}\sqrt{{{c}}}", rf"\sqrt{{{c}}}\cdot {b} + {a}", rf"{a}-{b}\sqrt{{{c}}}"),
        (f"2^{{{a}}}", rf"2\cdot 2^{{{a - 1}}}", f"2^{{{a - 1}}}"),
        (rf"{a}^\circ", f"{a}", rf"{a + 1}^\circ"),
        (r"\text{Evelyn}", "Evelyn", rf"\text{{Bob {a}}}"),
        (f"y={a}x+{b}", f"{a}x-y+{b}=0", f"y={b}x+{a + 60}"),
    )
    return rng.choice(kinds)


def build_ordinary(rng: random.Random, reasonings: list[str]) -> Problem:
    """A reasoning with a box that holds, as often as not, the right answer."""
    truth, equal, wrong = draw_answer(rng)
    is_correct = rng.random() < 0.5
    box = equal if is_correct else wrong
    response = f"{rng.choice(reasonings)}\n\nThe answer is $\\boxed{{{box}}}$."
    return Problem(response, truth, is_correct)


def nest(opening: str, core: str, closing: str, depth: int) -> str:
    """The core in depth pairs of brackets."""
    return opening * depth + core + closing * depth


ADVERSARIAL_BOXES: dict[str, Callable[[], str]] = {
    "900,000 digits": lambda: "7" * 900_000,
    "a million digits": lambda: "7" * 1_000_000,
    "3,900 digits": lambda: "1" * 3_900 + ".5",
    "nested braces": lambda: nest("{", "1", "}", 10_000),
    "nested parentheses": lambda: nest("(", "1", ")", 1_400),
    "deepest parentheses": lambda: nest("(", "x", "+1)", 39),
    "deepest roots": lambda: nest(r"\sqrt{1+", "x", "}", 38),
    "tower": lambda: "9**9**9",
    "tower of groups": lambda: "9^{9^{9}}",
    "tall tower": lambda: "^".join("2" * 500),
    "factorial": lambda: "(10^9)!",
    "factorials": lambda: nest("(", "5", "!)", 30),
    "binomial": lambda: r"\binom{10^{12}}{5\cdot 10^{11}}",
    "exponentials": lambda: r"e^{e^{e^{e^{9}}}}",
    "endless fraction": lambda: nest(r"\frac{1}{1+", "1", "}", 3_000),
    "fraction at the limit": lambda: nest(r"\frac{1}{x+", "1", "}", 38),
    "a sum of fractions": lambda: "+".join(f"1/{n}" for n in range(1_000, 1_450)),
    "a sum of roots": lambda: "+".join(rf"\sqrt{{{n}}}" for n in range(100, 390)),
    "sines of powers": lambda: "+".join(rf"\sin 7^{{{n}}}" for n in range(10, 60)),
    "gammas": lambda: "+".join(f"x_{{{n}}}!" for n in range(250)),
    "large powers": lambda: r"(x+1)^{3000}-(x-1)^{1500}",
    "digits to compare": lambda: r"\sin(2^{9000})",
    "a long list": lambda: ",".join(rf"\sqrt{{{n}}}" for n in range(64)),
    "a longer list": lambda: ",".join(str(n) for n in range(600)),
    "a matrix": lambda: (
        r"\begin{pmatrix}" + r"\\".join("1&x" for _ in range(500)) + r"\end{pmatrix}"
    ),
    "math_verify": lambda: r"\gcd(\max(x+y, (a+b)(c+d)(x+y)), \min((a+1)(b+1), x^9y^9))",
    "math_verify's powers": lambda: r"\max(99999999^{99}, 3)^{99}",
    "signs": lambda: r"\pm" * 700 + "1",
    "relations": lambda: "=".join("x" * 700),
    "unions": lambda: r"\cup".join("(1,2)" for _ in range(400)),
    "NUL": lambda: "5\x00" * 100,
    "surrogates": lambda: "\ud800" * 1_000,
    "words": lambda: r"\text{" + "any answer " * 800 + "}",
    "open texts": lambda: r"\text{" * 1_400,
    "blanks": lambda: "5" + " " * 9_000 + "x",
    "circles": lambda: r"\circ " * 2_000 + "x",
}
ADVERSARIAL_TAILS: dict[str, Callable[[], str]] = {
    "only an open box": lambda: r"\boxed{",
    "open boxes": lambda: r"\boxed{" * 10_000,
    "boxes in boxes": lambda: nest(r"\boxed{", "5", "}", 2_000),
    "two boxes": lambda: r"\boxed{5} and \boxed{6}",
    "megabytes": lambda: "{ } \\boxed 5 " * 400_000 + r"\boxed{5}",
    "answer lines": lambda: "Answer:" * 200_000 + "\n" * 100_000,
}


LIKELY_NAMES = (
    "a million digits",
    "nested braces",
    "tower",
    "endless fraction",
    "NUL",
    "only an open box",
    "two boxes",
    "megabytes",
)
"""What a policy does write; the others were made to be slow for this very rule."""


def list_adversarial() -> dict[str, str]:
    """One response of every kind, by name."""
    responses = {name: rf"So \boxed{{{make()}}}" for name, make in ADVERSARIAL_BOXES.items()}
    return responses | {name: "So " + make() for name, make in ADVERSARIAL_TAILS.items()}


def measure(pool: VerifierPool, problems: list[Problem]) -> tuple[float, list[Verdict]]:
    """Seconds of wall clock until all are judged, and the verdicts."""
    start = time.perf_counter()
    futures: list[Future[Verdict]] = [pool.submit(p.response, p.answer) for p in problems]
    verdicts = [future.result() for future in futures]
    return time.perf_counter() - start, verdicts


def main() -> None:
    """Time the rounds and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rule", choices=RULE_PATHS, default="math_verify")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--timeout-s", type=float, default=5.0)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--each", action="store_true", help="time every adversarial response")
    arguments = parser.parse_args()
    rng = random.Random(0)
    reasonings = [write_reasoning(rng) for _ in range(64)]
    adversarial = list_adversarial()
    names = list(adversarial)
    rounds: list[list[list[Problem]]] = []
    for _ in range(arguments.num_rounds):
        # New problems each time: a verifier remembers what it has parsed.
        sides = [[build_ordinary(rng, reasonings) for _ in range(NUM_RESPONSES)] for _ in range(3)]
        for mixed, own_names in zip(sides[1:], (LIKELY_NAMES, names), strict=True):
            places = rng.sample(range(NUM_RESPONSES), int(NUM_RESPONSES * ADVERSARIAL_FRAC))
            for i, place in enumerate(places):
                name = own_names[i % len(own_names)]
                mixed[place] = Problem(adversarial[name], mixed[place].answer, None)
        rounds.append(sides)
    with VerifierPool(arguments.rule, arguments.num_workers, arguments.timeout_s) as pool:
        pool.submit("", "").result()
        slowest = 0.0
        for name in names:
            start = time.perf_counter()
            outcomes = [
                pool.submit(adversarial[name], answer).result().outcome
                for answer in ("5", r"\frac{x}{7}", r"\max(x,1)")
            ]
            seconds = (time.perf_counter() - start) / len(outcomes)
            slowest = max(slowest, seconds)
            if arguments.each:
                print(f"{name:24} {seconds:7.3f} s  {' '.join(outcomes)}")
        bound = arguments.timeout_s + MARGIN_S
        within = "within" if slowest <= bound else "NOT WITHIN"
        print(f"adversarial, each alone: at most {slowest:.2f} s, {within} {bound} s")
        # In turns, and the median of each: other processes share the cores.
        timed = [[measure(pool, problems) for problems in sides] for sides in rounds]
    seconds, *mixed_seconds = (
        statistics.median(side[0] for side in sides) for sides in zip(*timed, strict=True)
    )
    wrong = sum(
        problem.is_correct is not None and verdict.correct != problem.is_correct
        for problems, sides in zip(rounds, timed, strict=True)
        for problem_list, (_, verdicts) in zip(problems, sides, strict=True)
        for problem, verdict in zip(problem_list, verdicts, strict=True)
    )
    print(
        f"{NUM_RESPONSES} ordinary responses: {seconds:.2f} s, {NUM_RESPONSES / seconds:.0f}/s; "
        f"{wrong} misjudged in {3 * len(rounds)} rounds"
    )
    for which, kinds in ((1, LIKELY_NAMES), (2, names)):
        outcomes = Counter(v.outcome for sides in timed for v in sides[which][1])
        print(
            f"with {ADVERSARIAL_FRAC:.0%} adversarial of {len(kinds)} kinds: "
            f"{mixed_seconds[which - 1]:.2f} s, {mixed_seconds[which - 1] / seconds:.2f} times as "
            f"long; {dict(outcomes)}"
        )


if __name__ == "__main__":
    main()
