"""The rule verifier: the last `\\boxed{}` of a response against the answer, as strings."""

CORRECT = 1.0
WRONG = -1.0


def compute_boxed_reward(response: str, answer: str) -> float:
    """Judge a response by its last complete box.

    Args:
        response: decoded text.
        answer: the ground truth, without a box.

    Returns:
        Reward units: 1 if the box holds the answer, surrounding blanks aside, else -1. A response
        without a box, or whose last box is not closed, is wrong.

    Source: the exact-match verifier of JustRL, arXiv:2512.16649.
    """
    return CORRECT if _find_last_box(response) == answer.strip() else WRONG


def _find_last_box(text: str) -> str | None:
    marker = r"\boxed{"
    start = text.rfind(marker)
    if start < 0:
        return None
    start += len(marker)
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end].strip()
    return None
