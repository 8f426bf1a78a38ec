r"""Reads one LaTeX expression strictly and tells whether two of them are equal everywhere.

What has two readings (`1/2x`, `\sin(x)^2`, `f(2x)`) is refused, not guessed. Values are exact
fractions where they are rational, else numbers of 60 digits and more; two expressions with
variables are compared at fixed points. Nothing is simplified or expanded, so the time is bounded by
the length of the text, and `TooLargeError` comes before any arithmetic.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import mpmath

MAX_DEPTH = 40
"""Of nested groups; ordinary answers stay below 10."""
MAX_DIGITS = 20_000
"""Of any number that evaluating an expression could produce; 2^{2024} has 610."""
MAX_LITERAL_DIGITS = 4_000
"""Of a number as written; Python converts at most 4,300 by default."""
MAX_COMPARED_DIGITS = 3_000
"""Of expressions that are compared by their decimals, not exactly."""
MAX_COMPARISON_COST = 100_000
"""Of steps times digits, a step being a root, a power or a function, at one point."""
_GUARD_DIGITS = 60
"""Working precision beyond the digits that must agree by `_compute_digits`."""
_AGREEING_DIGITS = 40
"""Expressions that agree to this many digits, and those of `_compute_digits`, are equal."""


class UnreadableError(Exception):
    """The text has a construct that this grammar does not know."""


class AmbiguousError(Exception):
    """The text has more than one reading, or none."""


class TooLargeError(Exception):
    """The text nests too deeply or its value has too many digits."""


@dataclass(frozen=True, slots=True)
class Expression:
    """A node of the parsed expression; n-ary sums and products keep the tree flat."""

    op: str
    args: tuple["Expression", ...] = ()
    value: Fraction | None = None
    """Of op "number"."""
    name: str = ""
    """Of ops "symbol" and "function"."""


_TOKEN = re.compile(
    r"\s*(?:(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<command>\\[A-Za-z]+|\\.)|(?P<char>[^\s]))\s*"
)
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    r"\sin": mpmath.sin,
    r"\cos": mpmath.cos,
    r"\tan": mpmath.tan,
    r"\cot": mpmath.cot,
    r"\sec": mpmath.sec,
    r"\csc": mpmath.csc,
    r"\arcsin": mpmath.asin,
    r"\arccos": mpmath.acos,
    r"\arctan": mpmath.atan,
    r"\arccot": mpmath.acot,
    r"\sinh": mpmath.sinh,
    r"\cosh": mpmath.cosh,
    r"\tanh": mpmath.tanh,
    r"\exp": mpmath.exp,
    r"\ln": mpmath.log,
    r"\log": lambda x: mpmath.log(x) / mpmath.log(10),
    r"\lg": lambda x: mpmath.log(x) / mpmath.log(10),
}
_INVERSES = {
    r"\sin": r"\arcsin",
    r"\cos": r"\arccos",
    r"\tan": r"\arctan",
    r"\cot": r"\arccot",
}
_GREEK = frozenset(
    "\\" + name
    for name in (
        *("alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta"),
        *("vartheta", "iota", "kappa", "lambda", "mu", "nu", "xi", "rho", "sigma", "tau"),
        *("upsilon", "phi", "varphi", "chi", "psi", "omega", "Gamma", "Delta", "Theta"),
        *("Lambda", "Xi", "Sigma", "Phi", "Psi", "Omega", "ell", "hbar"),
    )
)
_ACCENTS = frozenset([r"\dot", r"\ddot", r"\dddot", r"\hat", r"\bar", r"\vec", r"\tilde"])
_TIMES = frozenset([r"\cdot", r"\times", "*"])
_DIVIDE = frozenset(["/", r"\div"])
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_CALLED_LETTERS = frozenset("fghFGHPQ")
"""Letters that before a parenthesis are functions to a reader, where x(x+1) is a product."""


def parse_expression(text: str) -> Expression:
    """Read one expression: no relation, no list, no words.

    Args:
        text: LaTeX without layout commands, see `notation.normalise`.

    Returns:
        The tree.

    Raises:
        UnreadableError: an unknown command or character, or text that ends early.
        AmbiguousError: more than one reading.
        TooLargeError: too deep, or a value of more than MAX_DIGITS digits.
    """
    expression = _Parser(text).parse()
    measure_digits(expression)
    return expression


class _Parser:
    """Recursive descent over tokens; `depth` counts the groups around the position."""

    def __init__(self, text: str) -> None:
        self._tokens: list[str] = []
        end = 0
        for match in _TOKEN.finditer(text):
            self._tokens.append(match.group().strip())
            end = match.end()
        assert end == len(text) or not text.strip()
        self._at = 0
        self._depth = 0
        self._num_open_bars = 0

    def parse(self) -> Expression:
        expression = self._parse_sum()
        if self._peek():
            raise UnreadableError(f"unexpected {self._peek()!r}")
        return expression

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at] if at < len(self._tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        if not token:
            raise UnreadableError("text ends early")
        self._at += 1
        return token

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise UnreadableError(f"expected {token!r}")

    def _parse_sum(self) -> Expression:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise TooLargeError(f"groups nested more than {MAX_DEPTH} deep")
        terms = []
        while True:
            negative = False
            while self._peek() in ("+", "-"):
                negative ^= self._next() == "-"
            term = self._parse_product()
            terms.append(Expression("neg", (term,)) if negative else term)
            if self._peek() not in ("+", "-"):
                break
        self._depth -= 1
        return terms[0] if len(terms) == 1 else Expression("add", tuple(terms))

    def _parse_product(self) -> Expression:
        factors = [self._parse_factor()]
        divided = False
        while True:
            token = self._peek()
            if token in _TIMES:
                self._next()
                factors.append(self._parse_signed_factor())
            elif token in _DIVIDE:
                self._next()
                factors.append(Expression("inv", (self._parse_signed_factor(),)))
                divided = token == "/"
            elif self._starts_factor(token):
                if divided:
                    raise AmbiguousError("a/bc is (a/b)c or a/(bc)")
                if token[0].isdigit() or token[0] == ".":
                    raise AmbiguousError("a number follows a factor without an operator")
                factors.append(self._parse_implicit(factors[-1]))
                if factors[-1].op == "mixed":
                    factors[-2:] = [Expression("add", (factors[-2], *factors[-1].args))]
            else:
                break
        return factors[0] if len(factors) == 1 else Expression("mul", tuple(factors))

    def _parse_implicit(self, before: Expression) -> Expression:
        """Parse a factor without an operator before it; 2\\frac{1}{3} is a mixed number."""
        mixed = (
            self._peek() == r"\frac"
            and before.op == "number"
            and self._tokens[self._at - 1].isdigit()
        )
        factor = self._parse_factor()
        if mixed:
            is_proper = (
                factor.op == "mul"
                and factor.args[0].op == "number"
                and factor.args[1].op == "inv"
                and factor.args[1].args[0].op == "number"
            )
            if is_proper:
                value = _evaluate_exactly(factor)
                if value is None or not 0 < value < 1:
                    raise AmbiguousError("a number before a fraction: a sum or a product")
                return Expression("mixed", (factor,))
        return factor

    def _parse_signed_factor(self) -> Expression:
        if self._peek() == "-":
            self._next()
            return Expression("neg", (self._parse_factor(),))
        return self._parse_factor()

    def _starts_factor(self, token: str) -> bool:
        if not token:
            return False
        if token[0] == "\\":
            return token not in (r"\cdot", r"\times", r"\div", r"\rfloor", r"\rceil", r"\%")
        return token[0].isalnum() or token in "({[." or (token == "|" and not self._num_open_bars)

    def _parse_factor(self) -> Expression:
        base = self._parse_base()
        while True:
            token = self._peek()
            if token == "^":
                self._next()
                exponent = self._parse_argument(allow_sign=True)
                if self._peek() == "^":
                    # Right associative only with braces; 2^3^4 is a TeX error, ** is a tower.
                    self._next()
                    exponent = Expression("pow", (exponent, self._parse_tower()))
                base = Expression("pow", (base, exponent))
            elif token == "!":
                self._next()
                if self._peek() == "!":
                    raise AmbiguousError("n!! is a double factorial or a factorial twice")
                base = Expression("factorial", (base,))
            else:
                return base

    def _parse_tower(self) -> Expression:
        levels = [self._parse_argument(allow_sign=True)]
        while self._peek() == "^":
            self._next()
            levels.append(self._parse_argument(allow_sign=True))
            if len(levels) > MAX_DEPTH:
                raise TooLargeError("a tower of powers")
        tower = levels.pop()
        while levels:
            tower = Expression("pow", (levels.pop(), tower))
        return tower

    def _parse_argument(self, allow_sign: bool = False) -> Expression:
        """Parse what TeX takes as one argument: a group, or a token; whole numbers stay whole."""
        token = self._peek()
        if token == "{":
            return self._parse_group()
        if allow_sign and token in ("+", "-"):
            return self._parse_signed_factor_base()
        return self._parse_base()

    def _parse_signed_factor_base(self) -> Expression:
        sign = self._next()
        base = self._parse_base()
        return Expression("neg", (base,)) if sign == "-" else base

    def _parse_group(self) -> Expression:
        opening = self._next()
        num_open_bars, self._num_open_bars = self._num_open_bars, 0
        inner = self._parse_sum()
        self._num_open_bars = num_open_bars
        self._expect(_CLOSING[opening])
        return inner

    def _parse_base(self) -> Expression:
        token = self._peek()
        if not token:
            raise UnreadableError("text ends early")
        if token[0].isdigit() or token[0] == ".":
            return self._parse_number()
        if token in _CLOSING:
            return self._parse_group()
        if token == "|":
            self._next()
            self._num_open_bars += 1
            inner = self._parse_sum()
            self._num_open_bars -= 1
            self._expect("|")
            return Expression("function", (inner,), name="abs")
        if token[0] == "\\":
            return self._parse_command()
        if token.isascii() and token.isalpha():
            return self._parse_symbol()
        raise UnreadableError(f"unexpected {token!r}")

    def _parse_number(self) -> Expression:
        token = self._next()
        if len(token) > MAX_LITERAL_DIGITS:
            raise TooLargeError(f"a number of {len(token)} digits")
        if self._peek() == "_":
            raise UnreadableError("a number with a base")
        if not token.isascii() or token == ".":
            raise UnreadableError(f"unexpected {token!r}")
        return Expression("number", value=Fraction(token.rstrip(".") or "x"))

    def _parse_symbol(self) -> Expression:
        name = self._next()
        if self._peek() == "_":
            self._next()
            name += "_" + self._take_subscript()
        primes = 0
        while self._peek() == "'":
            self._next()
            primes += 1
        name += "'" * primes
        if name == "e":
            return Expression("constant", name="e")
        if name == "i":
            return Expression("constant", name="i")
        if self._peek() == "(" and (name[0] in _CALLED_LETTERS or primes):
            raise AmbiguousError(f"{name}(...) is a value of a function or a product")
        return Expression("symbol", name=name)

    def _take_subscript(self) -> str:
        token = self._next()
        if token != "{":
            if not token[0].isalnum():
                raise UnreadableError("a subscript of an unknown form")
            return token
        depth = 1
        parts: list[str] = []
        while True:
            token = self._next()
            depth += {"{": 1, "}": -1}.get(token, 0)
            if not depth:
                return " ".join(parts)
            parts.append(token)

    def _parse_command(self) -> Expression:
        token = self._peek()
        if token == r"\pi":
            self._next()
            if self._peek() == "_":
                raise UnreadableError("a subscript of pi")
            return Expression("constant", name="pi")
        if token in _GREEK:
            return self._parse_symbol()
        if token in _ACCENTS:
            return self._parse_accented()
        if token == r"\frac":
            self._next()
            self._refuse_derivative()
            numerator = self._parse_frac_argument()
            denominator = self._parse_frac_argument()
            return Expression("mul", (numerator, Expression("inv", (denominator,))))
        if token == r"\sqrt":
            return self._parse_root()
        if token == r"\binom":
            self._next()
            return Expression("binom", (self._parse_argument(), self._parse_argument()))
        if token in (r"\lfloor", r"\lceil"):
            self._next()
            inner = self._parse_sum()
            self._expect(token.replace("l", "r", 1))
            return Expression("function", (inner,), name=token[2:])
        if token in _FUNCTIONS:
            return self._parse_function()
        raise UnreadableError(f"unknown command {token}")

    def _parse_accented(self) -> Expression:
        """Parse \\dot{x}, a variable of its own."""
        accent = self._next()
        braced = self._peek() == "{"
        if braced:
            self._next()
        letter = self._parse_base()
        if braced:
            self._expect("}")
        if letter.op != "symbol":
            raise UnreadableError(f"{accent} of more than a letter")
        name = accent + letter.name
        if self._peek() == "_":
            self._next()
            name += "_" + self._take_subscript()
        return Expression("symbol", name=name)

    def _refuse_derivative(self) -> None:
        # As a quotient of products dy/dx would be y/x.
        if self._peek() == "{" and self._peek(1) == "d":
            raise UnreadableError("a quotient of differentials")

    def _parse_frac_argument(self) -> Expression:
        # TeX takes one digit: \frac12 is a half.
        token = self._peek()
        if token.isdigit() and len(token) > 1:
            self._tokens[self._at : self._at + 1] = [token[0], token[1:]]
        return self._parse_argument()

    def _parse_root(self) -> Expression:
        self._next()
        if self._peek() != "[":
            if self._peek().isdigit() and len(self._peek()) > 1:
                raise AmbiguousError(r"\sqrt12 is the root of 1, times 2, or of 12")
            half = Expression("number", value=Fraction(1, 2))
            return Expression("pow", (self._parse_argument(), half))
        index = self._parse_group()
        return Expression("root", (self._parse_argument(), index))

    def _parse_function(self) -> Expression:
        name = self._next()
        power: Expression | None = None
        base: Expression | None = None
        while self._peek() in ("^", "_"):
            if self._next() == "^":
                power = self._parse_argument(allow_sign=True)
            else:
                base = self._parse_argument()
        if (base is not None) != (name == r"\log") and base is not None:
            raise UnreadableError(f"{name} with a base")
        if power is not None and _is_minus_one(power):
            if name not in _INVERSES:
                raise AmbiguousError(f"{name}^{{-1}} is an inverse or a reciprocal")
            name, power = _INVERSES[name], None
        argument = self._parse_function_argument()
        value = Expression("function", (argument,), name=name)
        if base is not None:
            logarithm = Expression("function", (base,), name=r"\ln")
            value = Expression(
                "mul",
                (
                    Expression("function", (argument,), name=r"\ln"),
                    Expression("inv", (logarithm,)),
                ),
            )
        return Expression("pow", (value, power)) if power is not None else value

    def _parse_function_argument(self) -> Expression:
        if self._peek() in _CLOSING:
            argument = self._parse_group()
            if self._peek() in ("^", "!"):
                raise AmbiguousError("f(x)^n is a power of the value or of the argument")
            return argument
        factors = [self._parse_factor()]
        while (
            (token := self._peek())
            and self._starts_factor(token)
            and token not in _FUNCTIONS
            and token not in "({["
        ):
            if token[0].isdigit() or token[0] == ".":
                raise AmbiguousError("a number follows a factor without an operator")
            factors.append(self._parse_factor())
        if self._peek() == "/":
            raise AmbiguousError("sin a/b is (sin a)/b or sin(a/b)")
        return factors[0] if len(factors) == 1 else Expression("mul", tuple(factors))


def _is_minus_one(node: Expression) -> bool:
    return node.op == "neg" and node.args[0].op == "number" and node.args[0].value == 1


def _find_symbols(node: Expression) -> frozenset[str]:
    if node.op == "symbol":
        return frozenset([node.name])
    return frozenset().union(*(_find_symbols(arg) for arg in node.args))


@dataclass(frozen=True, slots=True)
class _Size:
    """What computing a node can take."""

    digits: float
    """Of numerator and denominator together where the value is rational; else of the precision
    that tells the value from one nearby. Every part of the node is within it."""
    magnitude: float
    """Upper bound of the decimal logarithm of the absolute value."""
    is_constant: bool


_SYMBOL_MAGNITUDE = 0.61
"""Of a variable at the points of comparison, between 1/4 and 4."""
_MAX_MAGNITUDE = 12.0
"""Of an exponent that is not rational."""
_VARIABLE_DIGITS = 100.0
"""Most that a power with a variable exponent counts: at one of the points it is not extreme."""


def measure_digits(node: Expression) -> int:
    """Bound the digits that comparing an expression can need.

    Raises:
        TooLargeError: more than MAX_DIGITS.
    """
    return math.ceil(_measure(node).digits)


def _measure(node: Expression) -> _Size:
    sizes = [_measure(arg) for arg in node.args]
    is_constant = all(size.is_constant for size in sizes)
    digits = sum(size.digits for size in sizes)
    magnitude = sum(max(size.magnitude, 0.0) for size in sizes)
    if node.op == "number":
        assert node.value is not None
        parts = [_count_digits(node.value.numerator), _count_digits(node.value.denominator)]
        digits, magnitude = sum(parts), parts[0] - parts[1]
    elif node.op == "symbol":
        digits, magnitude, is_constant = _SYMBOL_MAGNITUDE, _SYMBOL_MAGNITUDE, False
    elif node.op == "constant":
        digits, magnitude = 1.0, 0.5
    elif node.op == "add":
        magnitude = max(size.magnitude for size in sizes) + math.log10(len(sizes))
    elif node.op == "inv":
        magnitude = digits
    elif node.op == "pow":
        digits = max(sizes[0].digits, 0.3) * _bound_value(node.args[1], sizes[1])
        magnitude = digits
        if not sizes[1].is_constant:
            digits = min(digits, _VARIABLE_DIGITS)
    elif node.op == "factorial":
        value = _bound_value(node.args[0], sizes[0])
        digits = magnitude = value * math.log10(value + 1)
        if not is_constant:
            digits = min(digits, _VARIABLE_DIGITS)
    elif node.op == "binom":
        digits = magnitude = 0.31 * _bound_value(node.args[0], sizes[0]) + sizes[1].digits
        if not is_constant:
            digits = min(digits, _VARIABLE_DIGITS)
    elif node.op == "function" and node.name == r"\exp":
        digits = magnitude = 0.5 * _bound_value(node.args[0], sizes[0])
        if not is_constant:
            digits = min(digits, _VARIABLE_DIGITS)
    if digits > MAX_DIGITS:
        raise TooLargeError(f"a value of more than {MAX_DIGITS} digits")
    return _Size(digits, magnitude, is_constant)


def _count_digits(number: int) -> float:
    return abs(number).bit_length() * math.log10(2) if number not in (0, 1, -1) else 0.0


def _bound_value(node: Expression, size: _Size) -> float:
    """Bound the absolute value of an exponent or of a factorial's argument."""
    exact = _evaluate_exactly(node)
    if exact is not None:
        return float(min(abs(exact), Fraction(10**12)))
    if size.magnitude > _MAX_MAGNITUDE:
        raise TooLargeError(f"a power of more than 10^{_MAX_MAGNITUDE:.0f}")
    return float(10.0**size.magnitude)


def _evaluate_exactly(node: Expression) -> Fraction | None:
    """Evaluate where every step is rational; None elsewhere, ZeroDivisionError included."""
    if node.op == "number":
        return node.value
    if node.op in ("symbol", "constant", "function", "root"):
        return None
    values = []
    for arg in node.args:
        value = _evaluate_exactly(arg)
        if value is None:
            return None
        values.append(value)
    if node.op == "add":
        return sum(values, Fraction(0))
    if node.op == "mul":
        return math.prod(values, start=Fraction(1))
    first = values[0]
    if node.op == "neg":
        return -first
    if node.op == "inv":
        return 1 / first if first else None
    if node.op == "pow":
        if values[1].denominator != 1 or (not first and values[1] <= 0):
            return None
        return Fraction(first ** int(values[1]))
    if node.op == "factorial":
        return Fraction(math.factorial(int(first))) if _is_natural(first) else None
    if node.op == "binom":
        if not (_is_natural(first) and _is_natural(values[1])):
            return None
        return Fraction(math.comb(int(first), int(values[1])))
    return None


def _is_natural(value: Fraction) -> bool:
    return value.denominator == 1 and value >= 0


def _evaluate(node: Expression, point: Mapping[str, Any]) -> Any:
    """Evaluate in the current mpmath precision; ValueError where the value does not exist."""
    exact = node.value if node.op == "number" else None
    if exact is not None:
        return mpmath.mpf(exact.numerator) / exact.denominator
    if node.op == "symbol":
        return point[node.name]
    if node.op == "constant":
        return {"e": mpmath.e, "pi": mpmath.pi, "i": mpmath.mpc(0, 1)}[node.name] * mpmath.mpf(1)
    values = [_evaluate(arg, point) for arg in node.args]
    if node.op == "add":
        return sum(values[1:], values[0])
    if node.op == "mul":
        return math.prod(values[1:], start=values[0])
    first = values[0]
    if node.op == "neg":
        return -first
    if node.op == "inv":
        return 1 / first
    if node.op == "pow":
        return first ** values[1]
    if node.op == "root":
        return _take_root(first, values[1])
    if node.op == "factorial":
        return mpmath.factorial(first)
    if node.op == "binom":
        return mpmath.binomial(first, values[1])
    if node.name == "abs":
        return abs(first)
    if node.name == "floor":
        return mpmath.floor(first)
    if node.name == "ceil":
        return mpmath.ceil(first)
    return _FUNCTIONS[node.name](first)


def _take_root(value: Any, index: Any) -> Any:
    """The real root of a negative number where the index is odd, else the principal one."""
    if isinstance(value, mpmath.mpf) and value < 0 and mpmath.isint(index) and index % 2 == 1:
        return -((-value) ** (1 / index))
    return value ** (1 / index)


_POINTS = 4


def _choose_point(number: int, symbols: frozenset[str]) -> dict[str, Any]:
    """Fixed values for the variables: all positive, then of mixed signs."""
    point = {}
    for symbol in symbols:
        digest = hashlib.sha256(f"{number} {symbol}".encode()).digest()
        # Between 1/4 and 4, of both signs from the second point on.
        value = mpmath.mpf(int.from_bytes(digest[:16], "big") % 10**30) / 10**30 * 3.75 + 0.25
        point[symbol] = -value if number % 2 and (digest[16] & 1 or number == 1) else value
    return point


def are_equal(first: Expression, second: Expression) -> bool:
    """Tell whether two expressions have the same value everywhere.

    Args:
        first: a parsed expression.
        second: another.

    Returns:
        True where both are rational and the same, or agree at every point tried and exist at one.
        A decimal is exact: 0.33 is not 1/3. Values agree to 40 digits and three times those that
        the expressions spell out, so that no decimal is taken for the number that it rounds.
    """
    exact = (_evaluate_exactly(first), _evaluate_exactly(second))
    if exact[0] is not None and exact[1] is not None:
        return exact[0] == exact[1]
    digits = _compute_digits(first, second)
    symbols = _find_symbols(first) | _find_symbols(second)
    num_existing = 0
    with mpmath.workdps(_GUARD_DIGITS + digits):
        for number in range(_POINTS if symbols else 1):
            values = _evaluate_pair(first, second, _choose_point(number, symbols))
            if values is None:
                return False
            if values[0] is not None:
                num_existing += 1
                if not _is_same(*values, digits):
                    return False
    return num_existing > 0


def _compute_digits(first: Expression, second: Expression) -> int:
    digits = max(measure_digits(first), measure_digits(second))
    if digits > MAX_COMPARED_DIGITS:
        raise TooLargeError(f"{digits} digits to compare, limit {MAX_COMPARED_DIGITS}")
    cost = (_GUARD_DIGITS + 3 * digits) * (_count_steps(first) + _count_steps(second))
    if cost > MAX_COMPARISON_COST:
        raise TooLargeError(f"{cost} steps times digits to compare, limit {MAX_COMPARISON_COST}")
    # cos(10^-30) differs from 1 by 60 digits: a function can double what the text spells out.
    return 3 * digits


_STEP_WEIGHTS = {"pow": 1, "root": 1, "function": 1, "factorial": 40, "binom": 120}


def _count_steps(node: Expression) -> int:
    return _STEP_WEIGHTS.get(node.op, 0) + sum(_count_steps(arg) for arg in node.args)


def are_proportional(first: Expression, second: Expression, positive: bool = False) -> bool:
    """Tell whether one expression is a constant times the other: the same equation, `= 0`.

    Args:
        first: left side minus right side of one equation.
        second: of the other.
        positive: whether the constant must be positive: the same inequality.

    Returns:
        True where the quotient is one real number, not 0, at every point.
    """
    quotients = []
    symbols = _find_symbols(first) | _find_symbols(second)
    if not symbols:
        return False
    digits = _compute_digits(first, second)
    with mpmath.workdps(_GUARD_DIGITS + digits):
        for number in range(_POINTS):
            values = _evaluate_pair(first, second, _choose_point(number, symbols))
            if values is None:
                return False
            if values[0] is not None:
                if not values[0] or not values[1]:
                    return False
                quotients.append(values[0] / values[1])
        if len(quotients) < 2:
            return False
        if positive and (mpmath.im(quotients[0]) or mpmath.re(quotients[0]) <= 0):
            return False
        return all(_is_same(quotients[0], other, digits) for other in quotients[1:])


def _evaluate_pair(
    first: Expression, second: Expression, point: Mapping[str, Any]
) -> tuple[Any, Any] | None:
    """The two values; (None, None) where neither exists, None where only one does."""
    values: list[Any] = []
    for expression in (first, second):
        try:
            value = _evaluate(expression, point)
            values.append(value if mpmath.isfinite(value) else None)
        except (ArithmeticError, ValueError, TypeError, mpmath.libmp.NoConvergence):
            values.append(None)
    if (values[0] is None) != (values[1] is None):
        return None
    return values[0], values[1]


def _is_same(first: Any, second: Any, digits: int) -> bool:
    tolerance = mpmath.mpf(10) ** -(_AGREEING_DIGITS + digits)
    scale = max(abs(first), abs(second))
    # Next to an exact zero a difference has no scale of its own.
    floor = tolerance if not first or not second else 0
    return bool(abs(first - second) <= max(tolerance * scale, floor))
