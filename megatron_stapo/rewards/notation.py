r"""One spelling for what LaTeX, Unicode, numpy and calculators spell in many ways.

`normalise` changes how an answer is written, never what it says: two answers with the same
normal form are the same answer. Every pass is linear in the text.
"""

import re
import unicodedata

_UNICODE = {
    **dict.fromkeys("\u2212\u2013\u2014\u2010\u2011", "-"),
    **dict.fromkeys("\u00d7\u2a2f", r"\times "),
    **dict.fromkeys("\u00b7\u22c5\u2219", r"\cdot "),
    **dict.fromkeys("\u00a0\u2002\u2003\u2009\u200a\u202f\u3000", " "),
    **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff", ""),
    **dict.fromkeys("\u2019\u2032\u02b9", "'"),
    "\u00f7": r"\div ",
    "\u2044": "/",
    "\u2215": "/",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u2264": r"\le ",
    "\u2265": r"\ge ",
    "\u2260": r"\ne ",
    "\u2248": r"\approx ",
    "\u222a": r"\cup ",
    "\u2229": r"\cap ",
    "\u2208": r"\in ",
    "\u2205": r"\emptyset ",
    "\u00b1": r"\pm ",
    "\u2213": r"\mp ",
    "\u00b0": r"\degree ",
    "\u221a": r"\sqrt ",
    "\u00bd": r"\frac{1}{2}",
    "\u00bc": r"\frac{1}{4}",
    "\u00be": r"\frac{3}{4}",
    "\u2153": r"\frac{1}{3}",
    "\u2154": r"\frac{2}{3}",
    "\u20ac": r"\text{EUR}",
    "\u00a3": r"\text{GBP}",
    "\u3001": ",",
    "\uff61": ".",
    "\u3002": ".",
    **{chr(0x3B1 + i): "\\" + name + " " for i, name in enumerate(("alpha", "beta", "gamma"))},
    "\u03b8": r"\theta ",
    "\u03bb": r"\lambda ",
    "\u03c6": r"\phi ",
    "\u03c9": r"\omega ",
}
_UNICODE_TABLE = str.maketrans(_UNICODE)
_SUPERSCRIPTS = dict(
    zip("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
)
_SUPERSCRIPT_RUN = re.compile("[" + "".join(_SUPERSCRIPTS) + "]+")
# Digits of other scripts and mathematical letters have an ASCII form; accents are kept.
_FOLDED = re.compile("[\uff01-\uff5e\U0001d400-\U0001d7ff]")

_COMMAND_NAMES = {
    **dict.fromkeys(("dfrac", "tfrac", "cfrac"), r"\frac"),
    **dict.fromkeys(("dbinom", "tbinom"), r"\binom"),
    **dict.fromkeys(("leq", "leqslant", "leqq"), r"\le"),
    **dict.fromkeys(("geq", "geqslant", "geqq"), r"\ge"),
    "neq": r"\ne",
    **dict.fromkeys(("varnothing", "O"), r"\emptyset"),
    "lbrace": r"\{",
    "rbrace": r"\}",
    "lbrack": "[",
    "rbrack": "]",
    "lparen": "(",
    "rparen": ")",
    **dict.fromkeys(("lvert", "rvert", "vert", "mid"), "|"),
    "lt": "<",
    "gt": ">",
    **dict.fromkeys(("lor", "vee"), r" \or "),
    **dict.fromkeys(("land", "wedge"), r" \and "),
    "ast": "*",
    **dict.fromkeys(("cdotp", "bullet"), r"\cdot"),
    **dict.fromkeys(("dots", "ldots", "cdots", "dotsc", "dotsb", "dotsm"), r"\ldots"),
    **dict.fromkeys(("approxeq", "simeq", "thickapprox"), r"\approx"),
    **dict.fromkeys(("operatorname", "mathop", "mbox", "textup", "textrm", "textsf"), r"\text"),
    **dict.fromkeys(("textbf", "textit", "texttt", "textnormal", "textsc", "mathrm"), r"\text"),
    **dict.fromkeys(("mathsf", "mathtt", "hbox", "emph"), r"\text"),
    "tg": r"\tan",
    "arctg": r"\arctan",
    "ctg": r"\cot",
}
_LAYOUT = frozenset(
    (
        *("left", "right", "mleft", "mright", "big", "Big", "bigg", "Bigg", "bigl", "bigr"),
        *("Bigl", "Bigr", "biggl", "biggr", "Biggl", "Biggr", "middle", "limits", "nolimits"),
        *("displaystyle", "textstyle", "scriptstyle", "quad", "qquad", "thinspace", "enspace"),
        *("mathbf", "boldsymbol", "bm", "mathit", "bf", "it", "rm", "mathstrut", "strut"),
        *("negthinspace", "medspace", "thickspace", "space", "nobreak", "allowbreak"),
    )
)
_COMMAND = re.compile(r"\\([A-Za-z]+)|\\(.)", re.DOTALL)
_FUNCTION_NAMES = (
    *("arcsin", "arccos", "arctan", "sinh", "cosh", "tanh", "sin", "cos", "tan", "cot", "sec"),
    *("csc", "ln", "log", "exp"),
)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_BARE_FUNCTION = re.compile(
    r"(?<![A-Za-z\\])(?:np\.|numpy\.|math\.)?(" + "|".join(_FUNCTION_NAMES) + r")(?![A-Za-z{])"
)
_NUMPY_NAMES = (
    (re.compile(r"\b(?:np|numpy|math)\.pi\b"), r"\\pi "),
    (re.compile(r"\b(?:np|numpy|math)\.e\b"), "e"),
    (re.compile(r"\b(?:np|numpy|math)\.log10\b"), r"\\lg "),
    (re.compile(r"\b(?:np|numpy|math)\.log\b"), r"\\ln "),
    (re.compile(r"\b(?:np|numpy|math)\.sqrt\b"), "sqrt"),
    (re.compile(r"\b(?:np|numpy|math)\.arc?(sin|cos|tan)\b"), r"\\arc\1 "),
    (re.compile(r"\b(?:np|numpy|math)\.(?=[a-z])"), ""),
)
_BARE_PI = re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])")
_BARE_SQRT = re.compile(r"(?<![A-Za-z\\])sqrt\s*(?=[({])")
_SQRT_PAREN = re.compile(r"\\sqrt\s*\(")
# 4.5e33, 4.5E+33, 1e-5; blanks inside make it a difference, 2e - 1.
_SCIENTIFIC = re.compile(
    r"(?<![A-Za-z\\\d.])(\d{1,400}(?:\.\d{0,400})?|\.\d{1,400})[eE]([+-]?\d{1,6})(?![\d.]*[A-Za-z])"
)
_DEGREE = re.compile(
    r"\^\s*(?:\{\s*\\circ\s*\}|\\circ)|\\degree|\\circ(?=\s*$)|\\text\s*\{\s*\\degree\s*\}"
)
_BRACED_COMMA = re.compile(r"(?<=\d)\s*\{\s*,\s*\}\s*(?=\d)")
_TIGHT_COMMA = re.compile(r"(?<=\d),\\!\s*(?=\d)")
_REPEATING = re.compile(
    r"(?<![\d.])(\d{0,40})\.(\d{0,40})\\(?:overline|bar)\s*\{\s*(\d{1,40})\s*\}"
)
_CHOOSE = re.compile(r"\{([^{}\\]{1,100})\\choose([^{}\\]{1,100})\}")
_BARE_OR = re.compile(r"(?<![A-Za-z\\])(or|and)(?![A-Za-z])")
_BLANKS = re.compile(r"\s+")
_TRAILING = re.compile(r"\s*[.,;:]?\s*$")
_ELLIPSIS = re.compile(r"\.\s*\.\s*\.[\s.]*")
_SHORT_SCRIPT = re.compile(r"([_^])\{([0-9A-Za-z])\}(?![0-9A-Za-z])")


def normalise(text: str) -> str:
    r"""Rewrite an answer in one spelling.

    Args:
        text: the content of a box, or an unwrapped ground truth.

    Returns:
        LaTeX over ASCII where the characters have such a form: no layout or spacing commands, no
        dollars, `\frac`, `\text{...}` for every upright word, `\or` and `\and` between
        alternatives, `\degree`, products for e-notation, fractions for repeating decimals.
    """
    # First, so that no pattern below meets a long run.
    text = _BLANKS.sub(" ", text).replace("\u2026", "...")
    text = _ELLIPSIS.sub(r"\\ldots ", text)
    text = _SUPERSCRIPT_RUN.sub(
        lambda run: "^{" + "".join(_SUPERSCRIPTS[c] for c in run.group()) + "}", text
    )
    text = text.translate(_UNICODE_TABLE)
    text = _FOLDED.sub(lambda match: unicodedata.normalize("NFKC", match.group()), text)
    text = text.replace(r"\$", r"\text{USD}").replace("$", " ")
    # Before spaces go: 1{,}000 and 1,\!000 are numbers, 1, 000 is not.
    text = _BRACED_COMMA.sub(",", text)
    text = _TIGHT_COMMA.sub(",", text)
    text = _COMMAND.sub(_rename, text)
    text = text.replace("~", " ")
    text = _TEXT.sub(_lift_text, text)
    for pattern, replacement in _NUMPY_NAMES:
        text = pattern.sub(replacement, text)
    text = text.replace("**", "^")
    text = _BARE_FUNCTION.sub(r"\\\1 ", text)
    text = _BARE_PI.sub(r"\\pi ", text)
    text = _BARE_SQRT.sub(r"\\sqrt", text)
    text = _brace_roots(text)
    text = _CHOOSE.sub(r"\\binom{\1}{\2}", text)
    text = _BARE_OR.sub(r"\\\1 ", text)
    text = _DEGREE.sub(r"\\degree ", text)
    text = _SCIENTIFIC.sub(r"\1\\times 10^{\2}", text)
    text = _REPEATING.sub(_write_repeating, text)
    text = re.sub(r"(?<!\\)%", r"\\%", text)
    text = _BLANKS.sub(" ", text).strip()
    return _TRAILING.sub("", text)


def compact(text: str) -> str:
    """Remove blanks that separate nothing: equal results are equal answers.

    Args:
        text: a normal form.

    Returns:
        The text with single blanks between digits and between letters, none elsewhere.
    """
    text = re.sub(r"(?<![0-9A-Za-z.]) | (?![0-9A-Za-z.])", "", text)
    return _SHORT_SCRIPT.sub(r"\1\2", text)


def _rename(match: re.Match[str]) -> str:
    name, char = match.groups()
    if name is None:
        return {"\\": r"\\", "!": "", "(": " ", ")": " ", "[": " ", "]": " "}.get(
            char, " " if char in ",;:> \n\t" else "\\" + char
        )
    if name in _LAYOUT:
        return " "
    return _COMMAND_NAMES.get(name, "\\" + name)


def _lift_text(match: re.Match[str]) -> str:
    """Make operators and letters of upright words; keep the words."""
    word = match.group(1).strip()
    if word in ("or", "and"):
        return f" \\{word} "
    if word in _FUNCTION_NAMES:
        return f"\\{word} "
    if word in ("e", "i", "d"):
        return word
    if not word:
        return " "
    if not any(c.isalpha() for c in word) and "\\" not in word:
        return word
    if word.lower() in ("percent", "pct"):
        return r"\%"
    return r"\text{" + _BLANKS.sub(" ", word) + "}"


def _brace_roots(text: str) -> str:
    r"""Write sqrt(x) as \sqrt{x}: the parentheses are the argument, nothing after them."""
    if not _SQRT_PAREN.search(text):
        return text
    pieces = list(text)
    open_roots: list[bool] = []
    starts = {match.end() - 1 for match in _SQRT_PAREN.finditer(text)}
    for at, char in enumerate(text):
        if char == "(":
            open_roots.append(at in starts)
            if at in starts:
                pieces[at] = "{"
        elif char == ")" and open_roots and open_roots.pop():
            pieces[at] = "}"
    return "".join(pieces)


def _write_repeating(match: re.Match[str]) -> str:
    whole, fixed, period = match.groups()
    digits = int((whole or "0") + fixed + period) - int((whole or "0") + fixed)
    return rf"\frac{{{digits}}}{{{'9' * len(period)}{'0' * len(fixed)}}}"
