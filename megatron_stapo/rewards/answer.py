r"""Where an answer stands: the last box of a response, and the bare text of a ground truth."""

import re

_BOX = r"\boxed{"
# An escaped character is skipped as a whole: the brace of \{ opens no group.
_BOX_PIECE = re.compile(r"[{}]|\\(?:boxed\{|.)", re.DOTALL)
_WRAPPERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"))


def find_last_box(text: str) -> str | None:
    r"""Find what the last `\boxed{...}` holds, in time linear in the text.

    Args:
        text: a response, LaTeX and prose.

    Returns:
        The content of the last box, blanks at its ends removed; of a box inside a box the outer
        one counts, and a box that holds nothing but a box is the inner one. None where there is no
        box or the last one is not closed: a response cut off inside its answer has none.
    """
    open_groups: list[int] = []  # where a box's content starts; -1 for another group
    last_content: tuple[int, int] | None = None
    at = text.find(_BOX)
    while at >= 0:
        num_backslashes = 1
        while at >= num_backslashes and text[at - num_backslashes] == "\\":
            num_backslashes += 1
        if num_backslashes % 2 == 0:
            at = text.find(_BOX, at + 1)  # a line break and a word
            continue
        for piece in _BOX_PIECE.finditer(text, at):
            token = piece.group()
            if token == "{":
                open_groups.append(-1)
            elif token == "}":
                start = open_groups.pop()
                if start >= 0:
                    last_content = (start, piece.start())
                if not open_groups:
                    # Outside of boxes prose may hold stray braces, and is most of the text.
                    at = text.find(_BOX, piece.end())
                    break
            elif token == _BOX:
                open_groups.append(piece.end())
                last_content = None
        else:
            break
    if last_content is None:
        return None
    return _unwrap_boxes(text[slice(*last_content)].strip())


def unwrap_ground_truth(answer: str) -> str:
    r"""Strip what published ground truths are wrapped in: blanks, `$...$`, `\(...\)`, `\boxed{}`.

    Args:
        answer: the ground truth of the data file; AIME24 publishes `\boxed{204}`.

    Returns:
        The bare answer. `$a$ and $b$` stays as it is: the dollars do not enclose the whole.
    """
    while True:
        stripped = _unwrap_boxes(answer.strip())
        for start, end in _WRAPPERS:
            inner = stripped[len(start) : len(stripped) - len(end)]
            if (
                len(stripped) > len(start) + len(end)
                and stripped.startswith(start)
                and stripped.endswith(end)
                and "$" not in inner
                and start not in inner
                and not inner.endswith("\\")
            ):
                stripped = inner.strip()
                break
        if stripped == answer:
            return answer
        answer = stripped


def _unwrap_boxes(text: str) -> str:
    """Remove the boxes that enclose the whole text, however many, in one pass."""
    if not text.startswith(_BOX):
        return text
    closed_at: dict[int, int] = {}
    open_groups: list[int] = []
    for piece in _BOX_PIECE.finditer(text):
        token = piece.group()
        if token in ("{", _BOX):
            open_groups.append(piece.start())
        elif token == "}":
            if not open_groups:
                return text
            closed_at[open_groups.pop()] = piece.start()
    start, end = 0, len(text)
    while text.startswith(_BOX, start) and closed_at.get(start) == end - 1:
        start += len(_BOX)
        end -= 1
        while start < end and text[start].isspace():
            start += 1
        while end > start and text[end - 1].isspace():
            end -= 1
    return text[start:end]
