r"""The rule "math_verify", the default: the last box is mathematically equal to the ground truth.

A wrong answer that scores as right teaches the policy the wrong answer, so every doubt is decided
against equality: rounding, words beside a number, several answers for one, two readings. Lists,
pairs, intervals, sets, matrices and relations are told apart here; a single expression is compared
by `expression`, and one that it cannot read by math_verify, behind guards. `docs/rewards.md`
states every decision.
"""

import logging
import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Literal

from megatron_stapo.rewards import MAX_EXTRACTED_CHARS, Verdict
from megatron_stapo.rewards.answer import find_last_box, unwrap_ground_truth
from megatron_stapo.rewards.expression import (
    MAX_DEPTH,
    MAX_LITERAL_DIGITS,
    AmbiguousError,
    Expression,
    TooLargeError,
    UnreadableError,
    are_equal,
    are_proportional,
    parse_expression,
)
from megatron_stapo.rewards.notation import compact, normalise

MAX_ANSWER_CHARS = 10_000
"""Of a box or a truth that is compared at all; the longest truth in use has under 1,000."""
MAX_READ_CHARS = 3_000
"""Of an answer that is read as mathematics; a longer one is compared as a string."""
MAX_ITEMS = 64
"""Of a list, set or matrix row; matching is quadratic."""

_FORBIDDEN = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffe\uffff]")
_BRACKET = re.compile(r"[{}()\[\]]")
_PLAIN_NUMBER = re.compile(r"([+-]?)\s?(\d+)(?:\.(\d*))?", re.ASCII)
_PLAIN_FRACTION = re.compile(
    r"([+-]?)\s?(?:\\[dt]?frac\s?\{(\d+)\}\s?\{(\d+)\}|(\d+)/(\d+))", re.ASCII
)


def judge(response: str, answer: str) -> Verdict:
    """Judge whether the last box of a response is mathematically equal to the ground truth.

    Args:
        response: decoded text.
        answer: the ground truth; a box or dollars around it are removed first.

    Returns:
        judged, no_answer, or refused where the box or the truth is too large to compare. Never
        raises on text; time and memory are bounded by the caller, see `pool`.
    """
    box = find_last_box(response)
    if box is None:
        return Verdict(correct=False, outcome="no_answer", extracted=None)
    try:
        correct = _are_equivalent(unwrap_ground_truth(answer), box)
    except TooLargeError:
        return Verdict(correct=False, outcome="refused", extracted=box[:MAX_EXTRACTED_CHARS])
    return Verdict(correct=correct, outcome="judged", extracted=box[:MAX_EXTRACTED_CHARS])


def explain_unparsable(answer: str) -> str | None:
    """Say why no response can ever match a ground truth.

    Args:
        answer: the ground truth of the data file.

    Returns:
        The reason, or None where the boxed truth itself is judged correct.
    """
    truth = unwrap_ground_truth(answer)
    if _read_plain(truth) is not None:
        return None
    if not truth:
        return "is empty"
    reason = _find_unbalanced(truth)
    if reason:
        return reason
    try:
        _check_size(truth)
        normal = normalise(truth)
        if not normal:
            return "holds nothing but layout"
        _read_truth(normal)
    except TooLargeError as error:
        return f"is refused: {error}"
    if not judge(rf"\boxed{{{truth}}}", answer).correct:
        return "is not judged equal to itself"
    return None


def _find_unbalanced(text: str) -> str | None:
    depths = {"{": 0, r"\{": 0, r"\left": 0, "(": 0}
    opening = {"{": "{", r"\{": r"\{", r"\left": r"\left", "(": "(", "[": "("}
    closing = {"}": "{", r"\}": r"\{", r"\right": r"\left", ")": "(", "]": "("}
    for match in re.finditer(r"\\left\b|\\right\b|\\[^A-Za-z]|\\[A-Za-z]+|[{}()\[\]]", text):
        token = match.group()
        if token in opening:
            depths[opening[token]] += 1
        elif token in closing:
            depths[closing[token]] -= 1
            # Brackets may face outwards: ]0, 1[ is an open interval.
            if depths[closing[token]] < 0 and token not in ")]":
                return f"closes {token} that nothing opens"
    for token, depth in depths.items():
        if depth:
            action = ("opens", "closes") if depth > 0 else ("closes", "opens")
            name = token if depth > 0 else ")"
            return f"{action[0]} {name} that nothing {action[1]}"
    return None


def _check_size(text: str) -> None:
    if len(text) > MAX_ANSWER_CHARS:
        raise TooLargeError(f"{len(text)} characters, limit {MAX_ANSWER_CHARS}")
    if _FORBIDDEN.search(text):
        raise TooLargeError("control characters or lone surrogates")
    if _measure_depth(text) > MAX_DEPTH:
        raise TooLargeError(f"groups nested more than {MAX_DEPTH} deep")


def _are_equivalent(truth: str, given: str) -> bool:
    if not given or not truth:
        return False
    if truth == given:
        return True
    plain = (_read_plain(truth), _read_plain(given))
    if plain[0] is not None and plain[1] is not None:
        return plain[0] == plain[1]
    _check_size(truth)
    _check_size(given)
    truth, given = normalise(truth), normalise(given)
    if not truth or not given:
        return False
    if compact(truth) == compact(given):
        return True
    if _find_unbalanced(given) or _find_unbalanced(truth):
        return False
    words = (_read_words(truth), _read_words(given))
    if words[0] is not None or words[1] is not None:
        return words[0] == words[1]
    gold_readings, is_one_number = _read_truth(truth)
    given_readings, is_one_number_too = _read_answer(given)
    if is_one_number and is_one_number_too:
        # 100,200 against 200,100: two numbers with separators, not two lists.
        return _match(gold_readings[0], given_readings[0])
    return any(_match(gold, other) for gold in gold_readings for other in given_readings)


def _read_plain(text: str) -> Fraction | None:
    """Read a bare integer, decimal or fraction of integers, without any of the machinery."""
    if len(text) > 2 * MAX_LITERAL_DIGITS:
        return None
    match = _PLAIN_NUMBER.fullmatch(text)
    if match:
        sign, whole, decimals = match.groups()
        decimals = decimals or ""
        if len(whole) + len(decimals) > MAX_LITERAL_DIGITS:
            return None
        value = Fraction(int(whole + decimals), 10 ** len(decimals))
        return -value if sign == "-" else value
    match = _PLAIN_FRACTION.fullmatch(text)
    if match:
        sign = match.group(1)
        numerator, denominator = (group for group in match.groups()[1:] if group)
        if max(len(numerator), len(denominator)) > MAX_LITERAL_DIGITS or not int(denominator):
            return None
        value = Fraction(int(numerator), int(denominator))
        return -value if sign == "-" else value
    return None


# --- Words ---------------------------------------------------------------------------------------

_UNIT_ALIASES = {
    "centimeter": "cm",
    "centimetre": "cm",
    "millimeter": "mm",
    "kilometer": "km",
    "kilometre": "km",
    "meter": "m",
    "metre": "m",
    "inche": "in",
    "inch": "in",
    "feet": "ft",
    "foot": "ft",
    "mile": "mi",
    "second": "s",
    "sec": "s",
    "minute": "min",
    "hour": "h",
    "hr": "h",
    "gram": "g",
    "kilogram": "kg",
    "dollar": "USD",
    "pound": "lb",
    "litre": "L",
    "liter": "L",
    "deg": "degree",
    "sq": "square",
    "yr": "year",
    "mph": "mi/h",
}
_UNITS = frozenset(_UNIT_ALIASES.values()) | frozenset(
    (
        *("square", "cubic", "per", "unit", "day", "week", "month", "year", "cent", "yard", "yd"),
        *("acre", "gallon", "ounce", "oz", "ton", "joule", "J", "newton", "N", "watt", "W", "Hz"),
        *("K", "kelvin", "mol", "volt", "V", "ohm", "Pa", "eV", "keV", "MeV", "kJ", "kW", "nm"),
        *("erg", "AU", "pc", "kpc", "Mpc", "ly", "rad", "radian", "sr", "point", "way", "USD"),
        *("EUR", "GBP", "coin", "student", "people", "person", "time", "ml", "mL", "cc", "dm"),
        *("amu", "bit", "byte", "bar", "atm", "cal", "kcal", "rpm", "fs", "ns", "ms", "us", "A"),
        *("solution", "integer", "number", "digit", "term", "step", "marble", "apple", "game"),
        *("C", "F", "T", "mg", "dB", "fm", "Angstrom", "kN", "kPa", "GHz", "MHz"),
    )
)
_WORD = re.compile(r"[A-Za-z]+")
_UNIT_TAIL = re.compile(
    r"\s*(?:\\cdot\s*)?\\text\{([A-Za-z./ ^0-9-]{1,60})\}\s*(?:\^\s*\{?\s*([+-]?\d)\s*\}?)?\s*$"
)
_BARE_UNIT_TAIL = re.compile(
    r"(?<=[\d})])\s+((?:square |cubic |sq |per )?[A-Za-z]{2,12}(?:(?:/| per )[A-Za-z]{1,12})?"
    r"|[A-Za-z]/[A-Za-z]{1,12})"
    r"(?:\^\s*\{?\s*(\d)\s*\}?)?\s*$"
)
_CURRENCY_HEAD = re.compile(r"^\s*\\text\{(USD|EUR|GBP)\}\s*")
_TEXT_GROUP = re.compile(r"\\text\s*\{([^{}]*)\}")
_TEXT_SUBSCRIPT = re.compile(r"_\s*\{?\s*\\text\{([A-Za-z0-9 ]+)\}\s*\}?")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_SUBSCRIPT = re.compile(r"_\s*(?:\{[^{}]*\}|\w)")
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[a-zA-Z*]+\}")
_CHOICE = re.compile(r"\(?\s*([A-Z])\s*[).]?")
# Short words that read as products of letters but never are.
_SHORT_WORDS = frozenset(
    (
        *("no", "not", "yes", "is", "the", "any", "all", "for", "if", "to", "so", "of", "then"),
        *("but", "was", "its", "an", "true", "none", "odd", "even"),
    )
)


@lru_cache(maxsize=4096)
def _read_words(text: str) -> str | None:
    """Read an answer that is words, wholly or beside its formula: it is compared as a string.

    Returns None for a formula, units included. A choice letter counts as a word only in \\text or
    parentheses; `C` alone is a formula whose words are the same letter, see below.
    """
    plain = _TEXT_GROUP.sub(lambda match: f" {match.group(1)} ", text)
    choice = _CHOICE.fullmatch(plain.strip())
    if choice:
        return choice.group(1)
    stripped, _ = _split_unit(text)
    stripped = _TEXT_SUBSCRIPT.sub("_1", stripped)
    stripped = _ENVIRONMENT.sub(" ", stripped)
    has_words = r"\text" in stripped or not stripped.isascii()
    bare = _SUBSCRIPT.sub(" ", _COMMAND.sub(" ", stripped))
    for word in _WORD.findall(bare):
        # Four letters in a row are hardly ever a product of variables.
        if len(word) >= 4 or word.lower() in _SHORT_WORDS:
            has_words = True
    if not has_words:
        return None
    return " ".join(re.sub(r"[\s{}.,;:!?\"'`]+", " ", plain).casefold().split())


def _split_unit(text: str) -> tuple[str, str]:
    """Split an answer into its value and its unit; the unit is empty where there is none."""
    head = _CURRENCY_HEAD.match(text)
    if head:
        rest = text[head.end() :]
        return (rest, head.group(1)) if rest else (text, "")
    if text.endswith(r"\degree"):
        return text[: -len(r"\degree")].rstrip(), "degree"
    tail = _UNIT_TAIL.search(text[-100:]) or _BARE_UNIT_TAIL.search(text[-100:])
    if tail:
        start = max(len(text) - 100, 0) + tail.start()
        value = text[:start].rstrip()
        unit = _read_unit(tail.group(1), tail.group(2))
        if value and unit and not value.endswith((",", "+", "-", "=", "(", r"\cdot", "/", "^")):
            if unit in ("C", "F") and value.endswith(r"\degree"):
                value = value[: -len(r"\degree")].rstrip()
            return value, unit
    return text, ""


def _read_unit(words: str, power: str | None) -> str:
    """One spelling of a unit; empty where a word is not one."""
    unit = []
    for word in re.findall(r"[A-Za-z]+|[/^]|-?\d", words):
        if word.isalpha():
            lower = word.lower() if len(word) > 2 else word
            for name in (word, word.removesuffix("s"), word.removesuffix("es"), lower):
                name = _UNIT_ALIASES.get(name, _UNIT_ALIASES.get(name.lower().rstrip("s"), name))
                if name in _UNITS or "/" in name:
                    break
            else:
                return ""
            unit.append("/" if name == "per" else name)
        elif word != "^":
            unit.append(word)
    if unit[:1] == ["square"] and len(unit) > 1:
        unit = [unit[1], "2", *unit[2:]]
    if unit[:1] == ["cubic"] and len(unit) > 1:
        unit = [unit[1], "3", *unit[2:]]
    return "".join(unit) + (power or "")


# --- Structure -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One reading of an answer, a tree of containers over single expressions."""

    kind: Literal["scalar", "list", "set", "sequence", "union", "matrix", "equation", "inequality"]
    text: str
    """Compact normal form."""
    items: tuple["Answer", ...] = ()
    brackets: str = ""
    """Of a sequence, e.g. "[)"; of a matrix, its environment and row length; of an inequality, its
    sign, < or \\le; of a list, "or" where repeats count once."""
    name: str = ""
    """Left side of an assignment such as x = 5, S \\in ..., f(x) = ..."""
    unit: str = ""


_RELATIONS = ("=", "<", ">", r"\le", r"\ge", r"\in", r"\approx", r"\ne", r"\equiv", r"\to")
_SPLIT_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)
_NUMBER_WITH_SEPARATORS = re.compile(r"[+-]?\s?\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_SPACED_NUMBER = re.compile(r"(?<![\d.,])(\d{1,3})((?: \d{3})+)(?![\d])")
_NAME = re.compile(
    r"(?:[A-Za-z]|\\(?:alpha|beta|gamma|delta|theta|lambda|mu|rho|sigma|tau|phi|omega|ell|varphi))"
    r"(?:_(?:\w|\{[\w,+\- ]*\}))?'*(?:\([A-Za-z0-9]{1,3}(?:,[A-Za-z0-9]{1,3})*\))?"
)
_LABEL = re.compile(r"(?!-)[A-Za-z+|(),\-\\]*(?:_(?:\w|\{[\w,+\- ]*\})[A-Za-z+|(),\-\\]*)*")
_MATRIX = re.compile(
    r"\\begin\s*\{([pbBvV]?matrix|array)\}(?:\s*\{[lcr| ]+\})?(.*)\\end\s*\{\1\}", re.DOTALL
)


@lru_cache(maxsize=1024)
def _read_truth(text: str) -> tuple[tuple[Answer, ...], bool]:
    """`_read_answer`, remembered: a truth is compared with a group of responses."""
    return _read_answer(text)


def _read_answer(text: str) -> tuple[tuple[Answer, ...], bool]:
    """All readings of an answer, and whether the first is a number with thousands separators."""
    if len(text) > MAX_READ_CHARS:
        raise TooLargeError(f"{len(text)} characters to read, limit {MAX_READ_CHARS}")
    text = _join_spaced_number(text)
    value, unit = _split_unit(text)
    bare = value.strip()
    if _NUMBER_WITH_SEPARATORS.fullmatch(bare):
        number = _read_item(bare.replace(",", ""), unit)
        return (number, _read(text)), True
    if "=" in bare:
        name, _, right = bare.rpartition("=")
        if _NUMBER_WITH_SEPARATORS.fullmatch(right.strip()):
            return (_read(f"{name}={right.replace(',', '')}", unit),), True
    return (_read(text),), False


def _join_spaced_number(text: str) -> str:
    r"""Write 10 000 and 10\,000 as 10000: groups of three after at most three digits."""
    return _SPACED_NUMBER.sub(lambda match: match.group(1) + match.group(2).replace(" ", ""), text)


def _split(text: str, separators: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Split at separators outside of all groups; the parts, and the separators between them."""
    parts, found, start, depth = [], [], 0, 0
    for match in _SPLIT_TOKEN.finditer(text):
        token = match.group()
        if token in ("{", "(", "[", r"\{", r"\langle", r"\begin", r"\lfloor", r"\lceil"):
            depth += 1
        elif token in ("}", ")", "]", r"\}", r"\rangle", r"\end", r"\rfloor", r"\rceil"):
            depth -= 1
        elif token in separators and depth == 0:
            parts.append(text[start : match.start()])
            found.append(token)
            start = match.end()
    parts.append(text[start:])
    return parts, found


def _read(text: str, unit: str = "") -> Answer:
    text = text.strip()
    parts, found = _split(text, (",", ";", r"\or", r"\and"))
    if len(parts) > 1:
        # 1, 2, and 3 has an empty part between the comma and the word.
        items = [part for part in parts if part.strip()]
        if len(items) > MAX_ITEMS:
            raise TooLargeError(f"{len(items)} items, limit {MAX_ITEMS}")
        answers = [item for part in items for item in _expand_signs(_read_item(part, ""))]
        return Answer(
            "list",
            compact(text),
            tuple(answers),
            brackets="or" if r"\or" in found else "",
        )
    item = _read_item(text, unit)
    expanded = _expand_signs(item)
    if len(expanded) > 1:
        return Answer("list", compact(text), tuple(expanded), brackets="or")
    return item


def _expand_signs(item: Answer) -> list[Answer]:
    r"""Write an item with \pm as two."""
    if not re.search(r"\\[pm][pm](?![A-Za-z])", item.text) or item.kind in ("list", "set"):
        return [item]
    both = []
    for plus, minus in (("+", "-"), ("-", "+")):
        text = re.sub(r"\\pm(?![A-Za-z])", plus, item.text)
        text = re.sub(r"\\mp(?![A-Za-z])", minus, text)
        both.append(_read_item(text, item.unit))
    return both


def _read_item(text: str, unit: str) -> Answer:
    text = text.strip()
    parts, found = _split(text, _RELATIONS)
    if found:
        return _read_relation(text, [part.strip() for part in parts], found)
    if not unit:
        text, unit = _split_unit(text)
    return _read_value(text, "", unit)


def _read_relation(text: str, parts: list[str], found: list[str]) -> Answer:
    if len(parts) > MAX_ITEMS:
        raise TooLargeError(f"a chain of {len(parts)} relations, limit {MAX_ITEMS}")
    whole = compact(text)
    if r"\approx" in found:
        # An exact value before its rounding counts; after a bare name the rounding is the value.
        at = found.index(r"\approx")
        if at == 0 and not _NAME.fullmatch(compact(parts[0])) and parts[0]:
            return _read_item(parts[0], "")
        if at > 0:
            return _read_relation(text, parts[: at + 1], found[:at])
        found[0] = "="
    if found == [r"\in"] and _NAME.fullmatch(compact(parts[0])):
        return _read_value(parts[1], compact(parts[0]), "")
    if all(sign == "=" for sign in found):
        return _read_equation(whole, parts)
    if all(sign in ("<", r"\le") for sign in found) or all(sign in (">", r"\ge") for sign in found):
        if found[0] in (">", r"\ge"):
            parts = parts[::-1]
            found = [{">": "<", r"\ge": r"\le"}[sign] for sign in found[::-1]]
        return _read_inequality(whole, parts, found)
    return Answer("scalar", whole)


def _read_equation(whole: str, parts: list[str]) -> Answer:
    if not parts[0]:
        # "= 5"
        parts = parts[1:]
    if not all(parts):
        return Answer("scalar", whole)
    if len(parts) == 1:
        value, unit = _split_unit(parts[0])
        return _read_value(value, "", unit)
    values = []
    for part in parts:
        value, unit = _split_unit(part)
        values.append(_read_value(value, "", unit))
    name = compact(parts[0])
    is_label = _NAME.fullmatch(name) is not None or (
        _LABEL.fullmatch(name) is not None
        and not _has_variables(values[-1].text)
        # (y, x) = (1, 2) says something else than (1, 2).
        and not ("," in name and sorted(_WORD.findall(name)) != _WORD.findall(name))
    )
    members = values[1:] if is_label else values
    # Every link of a chain must hold, else it gives several answers.
    if len(members) > 1 and all(not _has_variables(member.text) or is_label for member in members):
        if not all(_match(members[0], other) for other in members[1:]):
            return Answer("scalar", whole)
        is_label = is_label or len(parts) > 1
        name = name if len(members) < len(parts) else ""
    elif not is_label and len(parts) > 2:
        return Answer("scalar", whole)
    if not is_label:
        return Answer("equation", whole, tuple(values))
    last = members[-1]
    return Answer(last.kind, last.text, last.items, last.brackets, name, last.unit)


def _has_variables(text: str) -> bool:
    return re.search(r"[A-Za-df-hj-z]", _COMMAND.sub(" ", text)) is not None


def _read_inequality(whole: str, parts: list[str], found: list[str]) -> Answer:
    names = [_NAME.fullmatch(compact(part)) is not None for part in parts]
    opening = {"<": "(", r"\le": "["}
    closing = {"<": ")", r"\le": "]"}
    infinity = r"\infty"
    if len(parts) == 3 and names[1]:
        low, high = parts[0], parts[2]
        brackets, name = opening[found[0]] + closing[found[1]], parts[1]
    elif len(parts) == 2 and names[0] and not names[1]:
        low, high, brackets, name = "-" + infinity, parts[1], "(" + closing[found[0]], parts[0]
    elif len(parts) == 2 and names[1] and not names[0]:
        low, high, brackets, name = parts[0], infinity, opening[found[0]] + ")", parts[1]
    elif len(parts) == 2:
        sides = (_read_value(parts[0], "", ""), _read_value(parts[1], "", ""))
        return Answer("inequality", whole, sides, found[0])
    else:
        return Answer("scalar", whole)
    ends = (_read_value(low, "", ""), _read_value(high, "", ""))
    return Answer("sequence", whole, ends, brackets, compact(name))


def _read_value(text: str, name: str, unit: str) -> Answer:
    text = text.strip()
    whole = compact(text)
    if whole == r"+\infty":
        whole = r"\infty"
    if whole in (r"\emptyset", r"\{\}"):
        return Answer("set", r"\emptyset", (), name=name)
    parts, found = _split(text, (r"\cup",))
    if found:
        items = tuple(_read_value(part, "", "") for part in parts)
        return Answer("union", whole, items, name=name)
    matrix = _MATRIX.fullmatch(text)
    if matrix:
        return _read_matrix(whole, matrix.group(1), matrix.group(2), name)
    if whole.startswith(r"\{") and _closes_at_end(whole):
        inner = whole[2:-2]
        if "|" in inner or ":" in inner:
            return Answer("scalar", whole, name=name)
        return Answer("set", whole, _read_items(inner), name=name)
    if whole and whole[0] in "([" and _closes_at_end(whole):
        parts, found = _split(whole[1:-1], (",", ";"))
        if len(parts) > 1:
            return Answer("sequence", whole, _read_items(whole[1:-1]), whole[0] + whole[-1], name)
        if whole[0] == "(":
            # Redundant parentheses around one value.
            return _read_value(whole[1:-1], name, unit)
    return Answer("scalar", whole, name=name, unit=unit)


def _read_items(text: str) -> tuple[Answer, ...]:
    parts, _ = _split(text, (",", ";", r"\or", r"\and"))
    parts = [part for part in parts if part.strip()]
    if len(parts) > MAX_ITEMS:
        raise TooLargeError(f"{len(parts)} items, limit {MAX_ITEMS}")
    return tuple(item for part in parts for item in _expand_signs(_read_item(part, "")))


def _read_matrix(whole: str, environment: str, body: str, name: str) -> Answer:
    rows = [row for row in body.split(r"\\") if row.strip()]
    if len(rows) + body.count("&") > MAX_ITEMS:
        raise TooLargeError(f"a matrix of more than {MAX_ITEMS} entries")
    cells = [[_read_value(cell, "", "") for cell in row.split("&")] for row in rows]
    size = len(cells[0]) if cells else 0
    if not size or any(len(row) != size for row in cells):
        return Answer("scalar", whole, name=name)
    kind = "|" if environment == "vmatrix" else "||" if environment == "Vmatrix" else "["
    items = tuple(cell for row in cells for cell in row)
    return Answer("matrix", whole, items, f"{kind}{size}", name)


def _closes_at_end(text: str) -> bool:
    """Tell whether the first group of the text ends where the text ends; brackets may mix."""
    depth = 0
    for match in _SPLIT_TOKEN.finditer(text):
        token = match.group()
        if token in ("{", "(", "[", r"\{"):
            depth += 1
        elif token in ("}", ")", "]", r"\}"):
            depth -= 1
            if depth == 0:
                return match.end() == len(text)
    return False


# --- Comparison ----------------------------------------------------------------------------------


def _match(gold: Answer, given: Answer) -> bool:
    """Compare two readings; names count only where both have one."""
    if gold.name and given.name and gold.name != given.name:
        return False
    if gold.text == given.text and gold.kind == given.kind and gold.unit == given.unit:
        return True
    if gold.kind == "list" or given.kind == "list":
        return _match_lists(gold, given)
    if gold.kind == "set" or given.kind == "set":
        if gold.kind == given.kind:
            return _match_unordered(gold.items, given.items, once=True)
        single, other = (gold, given) if gold.kind == "set" else (given, gold)
        return len(single.items) == 1 and _match(single.items[0], other)
    if "union" in (gold.kind, given.kind):
        return gold.kind == given.kind and _match_unordered(gold.items, given.items, once=True)
    if gold.kind != given.kind:
        return _match_equation_of_name(gold, given)
    if gold.kind in ("sequence", "matrix"):
        return (
            gold.brackets == given.brackets
            and len(gold.items) == len(given.items)
            and all(_match(a, b) for a, b in zip(gold.items, given.items, strict=True))
        )
    if gold.kind in ("equation", "inequality"):
        return _match_relations(gold, given)
    return _match_units(gold, given)


def _match_lists(gold: Answer, given: Answer) -> bool:
    """Several answers, order free; alternatives ("or") and sets do not count repeats."""
    if "union" in (gold.kind, given.kind):
        listed = gold if gold.kind == "list" else given
        if listed.brackets != "or":
            return False
    elif not {gold.kind, given.kind} <= {"list", "set"} and "or" not in (
        gold.brackets,
        given.brackets,
    ):
        return False
    items = [
        answer.items if answer.kind in ("list", "set", "union") else (answer,)
        for answer in (gold, given)
    ]
    # Without a common variable x = 1, y = 2 would equal 2, 1.
    names = [{item.name for item in side} for side in items]
    if any(len(side) > 1 for side in names) and names[0] != names[1]:
        return False
    once = "or" in (gold.brackets, given.brackets) or "set" in (gold.kind, given.kind)
    return _match_unordered(items[0], items[1], once=once)


def _match_unordered(gold: tuple[Answer, ...], given: tuple[Answer, ...], once: bool) -> bool:
    if once:
        gold, given = _drop_repeats(gold), _drop_repeats(given)
    if len(gold) != len(given):
        return False
    left = list(given)
    for item in gold:
        for at, other in enumerate(left):
            if _match(item, other):
                del left[at]
                break
        else:
            return False
    return True


def _drop_repeats(items: tuple[Answer, ...]) -> tuple[Answer, ...]:
    kept: list[Answer] = []
    for item in items:
        if not any(_match(item, other) for other in kept):
            kept.append(item)
    return tuple(kept)


def _match_equation_of_name(gold: Answer, given: Answer) -> bool:
    r"""Compare y = 2x + 1, read as a value with a name, with 2x - y + 1 = 0."""
    if {gold.kind, given.kind} != {"scalar", "equation"}:
        return False
    named, equation = (gold, given) if gold.kind == "scalar" else (given, gold)
    if not named.name:
        return False
    sides = (Answer("scalar", named.name), Answer("scalar", named.text))
    return _match_relations(Answer("equation", named.text, sides), equation)


def _match_relations(gold: Answer, given: Answer) -> bool:
    if len(gold.items) != 2 or len(given.items) != 2:
        return False
    positive = gold.kind == "inequality"
    if positive and gold.brackets != given.brackets:
        return False
    differences = []
    for relation in (gold, given):
        left, right = (item.text for item in relation.items)
        try:
            differences.append(_parse(f"({left})-({right})"))
        except (UnreadableError, AmbiguousError):
            return False
    return are_proportional(differences[0], differences[1], positive)


def _match_units(gold: Answer, given: Answer) -> bool:
    if gold.unit and given.unit and gold.unit != given.unit:
        return False
    percent = [text.endswith(r"\%") for text in (gold.text, given.text)]
    values = [text.removesuffix(r"\%") for text in (gold.text, given.text)]
    if percent[0] == percent[1]:
        return _match_values(*values)
    # 50\% is 0.5; where a question asks for a percentage, it is also 50.
    if _match_values(*values):
        return True
    hundredth = [f"({v})/100" if p else v for v, p in zip(values, percent, strict=True)]
    return _match_values(*hundredth)


def _match_values(gold: str, given: str) -> bool:
    if gold == given:
        return bool(gold)
    expressions: list[Expression] = []
    unreadable = False
    for text in (gold, given):
        try:
            expressions.append(_parse(text))
        except AmbiguousError:
            return False
        except UnreadableError:
            unreadable = True
    if unreadable:
        return _match_by_math_verify(gold, given)
    return are_equal(expressions[0], expressions[1])


@lru_cache(maxsize=4096)
def _parse(text: str) -> Expression:
    return parse_expression(text)


# --- math_verify ---------------------------------------------------------------------------------

MAX_MATH_VERIFY_CHARS = 80
"""Of an answer that math_verify parses: its grammar takes milliseconds a token."""
_MAX_MATH_VERIFY_DEPTH = 3
# Only what it is known to read as a reader does and to evaluate at once. Elsewhere it rounds
# decimals, adds 3 4, takes 5!! for (5!)!, forgets the case of letters and computes towers.
_MATH_VERIFY_COMMANDS = frozenset(
    (
        *(r"\gcd", r"\max", r"\min", r"\bmod", r"\det", r"\lcm", r"\frac", r"\sqrt"),
        *(r"\cdot", r"\times", r"\pi", r"\binom"),
    )
)
_MATH_VERIFY_TEXT = re.compile(r"(?:[a-z0-9+\-*/(){},\s]|\^\{?\d{1,2}(?!\d)|\\[a-z]+)+", re.ASCII)
_NUMBERS_IN_A_ROW = re.compile(r"\d\s+\d|\d{9}")


def _match_by_math_verify(gold: str, given: str) -> bool:
    """Compare what `expression` cannot read, where math_verify is known to read it rightly."""
    letters = []
    for text in (gold, given):
        if (
            len(text) > MAX_MATH_VERIFY_CHARS
            or not _MATH_VERIFY_TEXT.fullmatch(text)
            or _NUMBERS_IN_A_ROW.search(text)
            or not set(_COMMAND.findall(text)) <= _MATH_VERIFY_COMMANDS
            or _measure_depth(text) > _MAX_MATH_VERIFY_DEPTH
        ):
            return False
        letters.append(set("".join(_WORD.findall(_COMMAND.sub(" ", text)))))
    if letters[0] != letters[1]:
        return False
    from math_verify import LatexExtractionConfig, parse, verify

    _silence_math_verify()
    readings = []
    for text in (gold, given):
        # Its own time-outs are signals, which only a main thread may set; the pool has the limit.
        # Without the string that it falls back on where it cannot read the text.
        reading = parse(
            f"${text}$",
            extraction_config=[LatexExtractionConfig()],
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )
        if not reading:
            return False
        readings.append(reading[0])
    return bool(verify(readings[0], readings[1], timeout_seconds=None))


def _silence_math_verify() -> None:
    # It warns once a process that its time-outs are off, which is meant.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _measure_depth(text: str) -> int:
    depth = deepest = 0
    for match in _BRACKET.finditer(text):
        depth += 1 if match.group() in "{([" else -1
        if depth > deepest:
            deepest = depth
            if deepest > MAX_DEPTH:
                break
    return deepest


def warm_up() -> None:
    """Import and fill what the first comparison needs, so that no limit counts it."""
    from math_verify import parse

    _silence_math_verify()
    # Its parser learns each form of input when it first meets it, in a fraction of a second.
    for text in (r"\gcd(4, 6)^{9}", r"\frac{1}{2} + \max(x, -1)"):
        parse(f"${text}$", parsing_timeout=None)
    # The last has mpmath compute what its gamma function keeps.
    for left, right in ((r"\frac{\sqrt{2}}{2}", r"\sin(\pi/4)"), ("(n+1)!", "n!(n+1)")):
        judge(rf"\boxed{{{left}}}", right)
