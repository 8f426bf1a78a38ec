import pytest

from megatron_stapo.rewards.answer import find_last_box, unwrap_ground_truth
from megatron_stapo.rewards.dapo import judge as judge_dapo
from megatron_stapo.rewards.exact_box import judge as judge_exact_box


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"So \boxed{36}", "36"),
        (r"So \boxed{ 36 }.", "36"),
        (r"First \boxed{4}. No: \boxed{5}", "5"),
        ("The answer is 5.", None),
        (r"it is \boxed{12", None),
        (r"\boxed{5} and \boxed{", None),
        (r"\boxed{}", ""),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{\left\{1\right.}", r"\left\{1\right."),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed{ \boxed{ \boxed{5} } }", "5"),
        (r"\boxed{\text{not }\boxed{5}}", r"\text{not }\boxed{5}"),
        (r"\boxed{\boxed{4}\boxed{5}}", r"\boxed{4}\boxed{5}"),
        (r"\boxed{12 oh \boxed{5}", "5"),
        (r"} { \boxed{5} { } }", "5"),
        (r"\boxed 5 \boxed {6}", None),
        (r"\\boxed{5}", None),
        ("", None),
        (r"\boxed{" * 100_000, None),
        (r"\boxed{" * 100_000 + "5" + "}" * 100_000, "5"),
        ("{" * 1_000_000 + r"\boxed{5}", "5"),
    ],
)
def test_the_last_closed_box_counts(text, box):
    assert find_last_box(text) == box


@pytest.mark.parametrize(
    ("answer", "bare"),
    [
        ("204", "204"),
        (r"\boxed{204}", "204"),
        (r" $\boxed{ 204 }$ ", "204"),
        ("$$x$$", "x"),
        (r"\(x\)", "x"),
        (r"\[ x \]", "x"),
        ("$a$ and $b$", "$a$ and $b$"),
        (r"\$5", r"\$5"),
        ("$", "$"),
        ("", ""),
        (r"\boxed{1}, \boxed{2}", r"\boxed{1}, \boxed{2}"),
    ],
)
def test_a_ground_truth_is_unwrapped(answer, bare):
    assert unwrap_ground_truth(answer) == bare


@pytest.mark.parametrize(
    ("response", "answer", "correct", "outcome"),
    [
        (r"\boxed{204}", r"\boxed{204}", True, "judged"),
        (r"\boxed{ 204 }", "$204$", True, "judged"),
        (r"\boxed{204.0}", "204", False, "judged"),
        (r"\boxed{1/2}", r"\frac{1}{2}", False, "judged"),
        (r"\boxed{" + "x" * 500 + "} and" + " more" * 100, "x" * 500, True, "judged"),
        ("204", "204", False, "no_answer"),
        (r"\boxed{204", "204", False, "no_answer"),
    ],
)
def test_exact_box_compares_strings_of_any_length(response, answer, correct, outcome):
    verdict = judge_exact_box(response, answer)
    assert (verdict.correct, verdict.outcome) == (correct, outcome)
    assert verdict.extracted is None or len(verdict.extracted) <= 200


@pytest.mark.parametrize(
    ("response", "answer", "correct", "outcome"),
    [
        ("So\nAnswer: 42", "42", True, "judged"),
        ("answer : 42.", "42", False, "judged"),
        ("Answer: 41\nAnswer: 42", "42", True, "judged"),
        ("Answer: 42\nAnswer: 41", "42", False, "judged"),
        ("Answer:\n42", "42", True, "judged"),
        ("Answer: $42$", "42", True, "judged"),
        (r"Answer: \boxed{42}", "42", True, "judged"),
        ("Answer: x = 42", "42", True, "judged"),
        ("Answer: 1,234", "1234", True, "judged"),
        ("Answer: 42 degrees", "42", True, "judged"),
        (r"Answer: 42^\circ", "42", True, "judged"),
        (r"Answer: \frac12", r"\frac{1}{2}", True, "judged"),
        (r"Answer: \sqrt2", r"\sqrt{2}", True, "judged"),
        (r"Answer: 5\text{ cm}", "5", True, "judged"),
        ("Answer: 1/2", r"\frac{1}{2}", False, "judged"),
        (r"\boxed{42}", "42", False, "no_answer"),
        ("The answer is 42", "42", False, "no_answer"),
        ("Answer:", "", False, "no_answer"),
        ("Answer: $", "", False, "judged"),
        ("Answer: " + "1" * 5000, "42", False, "refused"),
        ("Answer: 42" + "\nx" * 1000, "42", True, "judged"),
    ],
)
def test_dapo_compares_the_last_answer_line_after_minervas_normalisation(
    response, answer, correct, outcome
):
    verdict = judge_dapo(response, answer)
    assert (verdict.correct, verdict.outcome) == (correct, outcome)


def test_dapo_reads_a_long_response_in_linear_time():
    # A quadratic search takes minutes here.
    assert judge_dapo("Answer:" * 200_000 + "\n" * 200_000, "5").outcome != "judged"
