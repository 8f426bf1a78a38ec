r"""The rule "exact_box": the last `\boxed{}` and the ground truth are the same string."""

from megatron_stapo.rewards import MAX_EXTRACTED_CHARS, Verdict
from megatron_stapo.rewards.answer import find_last_box, unwrap_ground_truth


def judge(response: str, answer: str) -> Verdict:
    r"""Judge a response by its last complete box, as strings.

    JustRL keeps the last 300, then the last 100 characters of a response before it looks for the
    box. This rule looks at the whole response: the window cuts the opening off any box whose
    content and epilogue are longer than 100 characters, and so scores right answers as wrong.

    Args:
        response: decoded text.
        answer: the ground truth; a box or dollars around it are removed first.

    Returns:
        Correct where the two strings are equal, blanks at the ends aside. `\frac{1}{2}` is not
        `1/2` here.

    Source: JustRL, arXiv:2512.16649; thunlp/JustRL cf444e9,
    train/verl/utils/reward_score/math_dapo.py, `is_correct_strict_box`.
    """
    box = find_last_box(response)
    if box is None:
        return Verdict(correct=False, outcome="no_answer", extracted=None)
    return Verdict(
        correct=box == unwrap_ground_truth(answer),
        outcome="judged",
        extracted=box[:MAX_EXTRACTED_CHARS],
    )
