import pytest

from megatron_stapo.rewards.boxed import compute_boxed_reward


@pytest.mark.parametrize(
    ("response", "answer", "correct"),
    [
        (r"So \boxed{36}", "36", True),
        (r"So \boxed{ 36 }.", "36", True),
        (r"First \boxed{4}. No: \boxed{5}", "5", True),
        (r"\boxed{5}. Checking again gives \boxed{6}", "5", False),
        ("The answer is 5.", "5", False),
        (r"... so it is \boxed{12", "12", False),
        (r"... so it is \boxed{1", "12", False),
        (r"\boxed{5} and \boxed{", "5", False),
        (r"\boxed{}", "0", False),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", True),
        (r"\boxed{-3}", "3", False),
        ("", "1", False),
        (r"\boxed{" * 100_000, "1", False),
    ],
)
def test_the_last_closed_box_counts(response, answer, correct):
    assert compute_boxed_reward(response, answer) == (1.0 if correct else -1.0)
