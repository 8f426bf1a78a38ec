import json
import threading
from fractions import Fraction
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from megatron_stapo.rewards.math_equivalence import explain_unparsable, judge, warm_up

CASES = Path(__file__).parent.parent / "cases"


def load_cases(name):
    return json.loads((CASES / name).read_text())["cases"]


def judge_box(box, answer):
    return judge(rf"\boxed{{{box}}}", answer)


@pytest.fixture(scope="module", autouse=True)
def _warm():
    warm_up()


@pytest.mark.parametrize("case", load_cases("rewards.json"), ids=lambda c: c["gold"])
def test_shared_cases_are_judged_as_a_mathematician_would(case):
    assert judge(case["response"], case["gold"]).correct == case["correct"]


def test_adversarial_pairs_are_judged_as_a_mathematician_would_or_are_listed():
    cases = load_cases("equivalence.json")
    wrong = [
        (case["gold"], case["response"], case["note"])
        for case in cases
        if judge(case["response"], case["gold"]).correct
        != (case["correct"] and not case.get("misjudged", False))
    ]
    assert not wrong
    # A listed error is always a right answer missed, never a wrong one taken.
    assert all(case["correct"] for case in cases if case.get("misjudged"))


NESTED_FRACTION = r"\frac{1}{" * 3000 + "1" + "}" * 3000


@pytest.mark.parametrize(
    "box",
    [
        "9**9**9",
        "9^{9^{9}}",
        "9^{9^9}",
        r"(10^9)!",
        "1000000!",
        r"10^{10^{10}}",
        "2^{1000000000}",
        r"\binom{10^{9}}{5\cdot10^{8}}",
        r"e^{e^{e^{e^{10}}}}",
        r"\exp(\exp(\exp(100)))",
        r"((5!)!)!",
        r"(2^{60000})\cdot(3^{60000})",
        r"\sin(2^{50000}\pi)",
        NESTED_FRACTION,
        "(" * 200 + "1" + ")" * 200,
        "{" * 10_000 + "1" + "}" * 10_000,
        "1" * 1_000_000,
        "0." + "1" * 5_000,
        "5\x00",
        "5\x1b[0m",
        "5\ud800",
        ",".join("123456789"[i % 9] for i in range(200)),
        r"\{" + ",".join(str(i) for i in range(100)) + r"\}",
        "1e999999",
        "1+" * 2_000 + "1",
    ],
    ids=lambda box: box.encode("ascii", "backslashreplace")[:24].decode(),
)
def test_what_is_too_large_to_compare_is_refused(box):
    verdict = judge_box(box, "5")
    assert (verdict.outcome, verdict.correct) == ("refused", False)
    assert len(verdict.extracted) <= 200


@pytest.mark.parametrize(
    "box", ["2^{2024}", r"\binom{2024}{1012}", "100!", "7" * 2000, "x^{2024}", "-1e300"]
)
def test_large_answers_that_are_answers_are_judged(box):
    assert judge_box(box, box).correct
    verdict = judge_box(box, "5")
    assert (verdict.outcome, verdict.correct) == ("judged", False)


@pytest.mark.parametrize("response", ["", "5", r"\boxed{", r"\boxed{5", r"\boxed 5", r"\fbox{5}"])
def test_no_complete_box_is_no_answer(response):
    verdict = judge(response, "5")
    assert (verdict.correct, verdict.outcome, verdict.extracted) == (False, "no_answer", None)


def test_it_runs_beside_the_main_thread():
    verdicts = []
    thread = threading.Thread(
        target=lambda: verdicts.extend(judge_box(r"\gcd(4,6)", a) for a in ("2", "3"))
    )
    thread.start()
    thread.join()
    assert [v.correct for v in verdicts] == [True, False]


@settings(max_examples=300, deadline=None)
@given(
    st.text(alphabet=st.characters(), max_size=60)
    | st.text(alphabet="0123456789xyein\\{}()[]^_!.,+-*/=<>|%&$ \n", max_size=60)
    | st.lists(
        st.sampled_from(
            [
                *(
                    r"\frac",
                    r"\sqrt",
                    r"\pm",
                    r"\cup",
                    r"\in",
                    r"\le",
                    r"\text{",
                    "or",
                    r"\{",
                    r"\}",
                ),
                *("{", "}", "(", ")", "[", "]", "^", "_", "!", "1", "23", "x", "e", "i", ",", "="),
                *("<", ".", r"\sin", r"\log", r"\binom", r"\lfloor", r"\rfloor", "&", r"\\"),
                *(r"\begin{pmatrix}", r"\end{pmatrix}", r"\pi", r"\infty", "|", r"\boxed{"),
            ]
        ),
        max_size=14,
    ).map(" ".join)
)
def test_any_text_is_judged_without_an_error(text):
    for verdict in (judge_box(text, "5"), judge_box("5", text), judge(text, text)):
        assert not verdict.correct or verdict.outcome == "judged"
    explain_unparsable(text)


integers = st.integers(-(10**30), 10**30)
fractions = st.fractions(min_value=-1000, max_value=1000, max_denominator=1000)


def write_polynomial(coefficients):
    terms = [f"{c}x^{{{i}}}" if i else str(c) for i, c in enumerate(coefficients)]
    return "+".join(terms).replace("+-", "-")


@settings(max_examples=100, deadline=None)
@given(integers, st.integers(1, 10**9))
def test_an_integer_equals_itself_and_no_other(number, difference):
    other = number + difference
    assert judge_box(str(number), str(number)).correct
    assert judge_box(f"{number}.0", str(number)).correct
    assert judge_box(rf"\frac{{{2 * number}}}{{2}}", str(number)).correct
    assert judge_box(rf"{number}\cdot\sqrt{{4}}", str(2 * number)).correct
    for wrong in (f"{other}", f"{other}.0", rf"{other}\cdot\sqrt{{1}}", rf"x={other}"):
        assert not judge_box(wrong, str(number)).correct
        assert not judge_box(str(number), wrong).correct


@settings(max_examples=100, deadline=None)
@given(fractions, st.fractions(min_value=Fraction(1, 10**12), max_value=1))
def test_a_fraction_equals_itself_in_every_notation_and_no_other(value, difference):
    top, bottom = value.numerator, value.denominator
    answer = rf"\frac{{{top}}}{{{bottom}}}"
    for right in (f"{top}/{bottom}", rf"-\dfrac{{{-top}}}{{{bottom}}}", rf"{top}\div {bottom}"):
        assert judge_box(right, answer).correct
    other = value + difference
    assert not judge_box(f"{other.numerator}/{other.denominator}", answer).correct
    rounded = f"{float(value):.12f}"
    assert judge_box(rounded, answer).correct == (Fraction(rounded) == value)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(-99, 99), min_size=2, max_size=6).filter(lambda c: c[-1]),
    st.integers(0, 5),
    st.integers(1, 9),
)
def test_a_polynomial_equals_itself_and_no_neighbour(coefficients, place, difference):
    answer = write_polynomial(coefficients)
    assert judge_box(answer, answer).correct
    reordered = write_polynomial(coefficients[:1]) + "".join(
        f"{c:+d}x^{i}" for i, c in reversed(list(enumerate(coefficients))) if i
    )
    assert judge_box(reordered, answer).correct
    assert judge_box(rf"\frac{{2({answer})}}{{2}}", answer).correct
    other = coefficients + [0] * 6
    other[place] += difference
    assert not judge_box(write_polynomial(other), answer).correct


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-50, 50), min_size=2, max_size=5, unique=True), st.randoms())
def test_order_counts_in_a_tuple_and_not_in_a_set(items, random):
    shuffled = list(items)
    random.shuffle(shuffled)
    texts = [", ".join(map(str, side)) for side in (items, shuffled)]
    assert judge_box(rf"\{{{texts[1]}\}}", rf"\{{{texts[0]}\}}").correct
    assert judge_box(f"({texts[1]})", f"({texts[0]})").correct == (items == shuffled)
    assert not judge_box(rf"\{{{texts[1]}, 51\}}", rf"\{{{texts[0]}\}}").correct


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("", "is empty"),
        ("  ", "is empty"),
        ("$ $", "is empty"),
        (r"\quad", "layout"),
        (r"\frac{1}{2", "opens { that nothing closes"),
        ("5}", "closes } that nothing opens"),
        ("1,2)", "closes ) that nothing opens"),
        ("(1,2", "opens ( that nothing closes"),
        (r"\left(1,2", "nothing closes"),
        ("9^{9^{9}}" + "+1" * 1500, "is refused: 3"),
        ("(" * 300 + "1" + ")" * 300, "is refused: groups"),
        ("5\x00", "is refused: control"),
        ("1" * 20_000, "is refused: 20000 characters"),
    ],
)
def test_a_truth_that_no_response_can_match_is_explained(answer, reason):
    assert reason in explain_unparsable(answer)


@pytest.mark.parametrize(
    "answer",
    [
        *("5", r"\boxed{204}", "$[0,1)$", "4.5e33", "np.arcsin(10/13)", r"\text{Evelyn}"),
        *(
            "$(1,8,19), (2,7,13)$",
            "1011_2",
            "y''+y=0",
            "]0,1[",
            r"\begin{pmatrix}1\\2\end{pmatrix}",
        ),
        *(r"\left(-\infty,0\right]", "100!", r"\frac{M g}{2 \ddot{x}}", "7" * 2000),
    ],
)
def test_a_truth_that_can_be_matched_has_nothing_to_explain(answer):
    assert explain_unparsable(answer) is None
