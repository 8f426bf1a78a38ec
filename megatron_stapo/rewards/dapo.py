r"""The rule "dapo": the last `Answer:` line and the ground truth, both normalised, are equal.

The normalisation is the one of Minerva (Lewkowycz et al., arXiv:2206.14858, appendix D.1), which
DAPO's scorer applies. It is a string rule: it knows `\frac12`, not one half.
"""

import re
from collections import deque

from megatron_stapo.rewards import MAX_EXTRACTED_CHARS, Verdict
from megatron_stapo.rewards.answer import unwrap_ground_truth

# Longer lines hold no answer; the patterns below are quadratic in the worst case.
MAX_ANSWER_CHARS = 2000
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
# Articles, dollar signs and blanks go, in this order: "a " before the blanks that mark it.
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    ("\\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_DROPPED = (
    *("square", "ways", "integers", "dollars", "mph", "inches", "hours", "km", "units"),
    *(r"\ldots", "sue", "points", "feet", "minutes", "digits", "cents", "degrees", "cm", "gm"),
    *("pounds", "meters", "meals", "edges", "students", "childrentickets", "multiples"),
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}"),
    *(r"\text{}", r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_WRAPPED = re.compile(r"\\(?:text|textbf|overline)\{([^{}]*)\}")
_BOXED = re.compile(r"\\boxed\{(.*)\}", re.DOTALL)
_SHORT_FRAC = re.compile(r"frac([^{])(.)")
_SHORT_SQRT = re.compile(r"sqrt([^{])")


def judge(response: str, answer: str) -> Verdict:
    r"""Judge a response by its last `Answer: ...` line.

    Unlike the published function, the whole response is read, not its last 300 characters.

    Args:
        response: decoded text.
        answer: the ground truth; a box or dollars around it are removed first.

    Returns:
        Correct where the normalised strings are equal; an empty one is never correct.

    Source: DAPO, arXiv:2503.14476; verl verl/utils/reward_score/math_dapo.py,
    `is_correct_minerva` and `normalize_final_answer`.
    """
    line = _find_last_answer_line(response)
    if line is None:
        return Verdict(correct=False, outcome="no_answer", extracted=None)
    extracted = line[:MAX_EXTRACTED_CHARS]
    if len(line) > MAX_ANSWER_CHARS or len(answer) > MAX_ANSWER_CHARS:
        return Verdict(correct=False, outcome="refused", extracted=extracted)
    given = _normalise(line)
    return Verdict(
        correct=bool(given) and given == _normalise(unwrap_ground_truth(answer)),
        outcome="judged",
        extracted=given[:MAX_EXTRACTED_CHARS],
    )


def _find_last_answer_line(response: str) -> str | None:
    lines = deque(_ANSWER_LINE.finditer(response), maxlen=1)
    return lines[0].group(1).strip() if lines else None


def _normalise(text: str) -> str:
    text = text.rpartition("=")[2]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for dropped in _DROPPED:
        text = text.replace(dropped, "")
    parts = text.split("$")
    if len(parts) >= 3:
        # Formula in prose: the formula alone.
        text = parts[1]
    text = text.replace("$", "")
    text = _WRAPPED.sub(r"\1", text)
    text = _BOXED.sub(r"\1", text)
    text = _SHORT_FRAC.sub(r"frac{\1}{\2}", text)
    text = _SHORT_SQRT.sub(r"sqrt{\1}", text)
    if text.replace(",", "").isdigit():
        text = text.replace(",", "")
    return text.strip()
