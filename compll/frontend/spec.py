"""A spec as its author wrote it: expressions as trees, and the sections of the file."""

from __future__ import annotations

import ast
import math
import re
import reprlib
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from compll.errors import Problems, Span
from compll.frontend.operators import OPERATORS as LANGUAGE
from compll.frontend.operators import SYNONYMS
from compll.frontend.source import Text

# ---- syntax -------------------------------------------------------------------------------------
# Stage 2: the text of an expression becomes a syntax tree.
# Python's own parser reads it (`ast`), and a whitelist keeps a small array language: numbers,
# names, arithmetic, comparisons, `and or not`, `a if c else b`, calls and one subscript.
# Nothing of a spec is ever executed as Python.

LIMIT_CHARS = 4000
LIMIT_DEPTH = 60
LINE_BREAK = re.compile("[\n\x85\u2028\u2029]")

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow",
    ast.FloorDiv: "floordiv", ast.Mod: "mod", ast.BitAnd: "bitand", ast.BitOr: "bitor",
    ast.BitXor: "bitxor", ast.LShift: "shl", ast.RShift: "shr", ast.MatMult: "matmul",
    ast.USub: "neg", ast.Not: "not", ast.And: "and", ast.Or: "or",
    ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne",
}  # fmt: skip


SYMBOLS = {"matmul": "@"}
EQUALITY = ("eq", "ne")
#: constructions of Python that are not in the language, in words
FOREIGN: dict[type[ast.AST], str] = {
    ast.Tuple: "a tuple", ast.Set: "a set", ast.Dict: "a mapping",
    ast.ListComp: "a comprehension", ast.SetComp: "a comprehension",
    ast.GeneratorExp: "a comprehension", ast.DictComp: "a comprehension", ast.Lambda: "lambda",
    ast.Attribute: "a dot", ast.Slice: "a slice", ast.Invert: "~", ast.Starred: "a star",
    ast.JoinedStr: "a text", ast.Constant: "a text", ast.NamedExpr: ":=", ast.Await: "await",
    ast.Yield: "yield", ast.In: "in", ast.NotIn: "not in", ast.Is: "is", ast.IsNot: "is not",
}  # fmt: skip
#: notations of other languages, with those of this one
ELSEWHERE = (
    ("&&", "write `a and b`"), ("||", "write `a or b`"), ("?", "write `a if c else b`"),
    ("!", "write `not a`"), ("|", "write abs(x) for the magnitude of x"), ("=", "compare with =="),
)  # fmt: skip


@dataclass(frozen=True)
class Number:
    """A literal: int, float or bool."""

    value: int | float | bool
    span: Span


@dataclass(frozen=True)
class Word:
    """A quoted text, to compare a parameter with."""

    value: str
    span: Span


@dataclass(frozen=True)
class Name:
    """A name."""

    name: str
    span: Span


@dataclass(frozen=True)
class Call:
    """An operator applied to arguments; `symbol` is False for infix notation."""

    op: str
    args: tuple[Syntax, ...]
    span: Span
    named: bool = True


Syntax = Number | Word | Name | Call


def parse(text: Text, problems: Problems) -> Syntax | None:
    """The syntax tree of `text`, or None with the reasons in `problems`."""
    source = text.value.strip()
    if not source:
        problems.add(text.span, "an expression is missing here")
        return None
    if len(text.value) > LIMIT_CHARS:
        problems.add(text.span, f"an expression has at most {LIMIT_CHARS} characters")
        return None
    return _Reader(text, problems).read()


def parse_part(whole: Text, part: str | None, start: int, problems: Problems) -> Syntax | None:
    """The syntax tree of a part of a text, which begins at `start` in it; None without a part."""
    if part is None:
        return None
    return parse(Text(part, whole.at(start)), problems)


class _Unsupported(Exception):
    """Raised inside the reader at the first construct outside the language."""


class _Reader:
    def __init__(self, text: Text, problems: Problems) -> None:
        self.text, self.problems = text, problems
        self.lead = len(text.value) - len(text.value.lstrip())
        stripped = text.value.strip()
        # A line break is a space like any other, unless a comment ends there.
        self.source = stripped if "#" in stripped else " ".join(LINE_BREAK.split(stripped))

    def read(self) -> Syntax | None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(self.source, mode="eval")
            return self.node(tree.body, 0)
        except SyntaxError as error:
            place = self.place(error.lineno or 1, max((error.offset or 1) - 1, 0))
            self.problems.add(place, f"not an expression: {error.msg}", self.advice())
        except (ValueError, RecursionError, MemoryError) as error:
            self.problems.add(self.text.span, f"not an expression: {error}")
        except _Unsupported:
            pass
        return None

    def advice(self) -> str:
        """A hint for a text that is not Python."""
        plain = re.sub("[<>=!]=", "", self.source)
        result = (hint for symbol, hint in ELSEWHERE if symbol in plain)
        return next(result, "expressions are written as in Python")

    def span(self, node: ast.AST) -> Span:
        line, col = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        text = self.lines()[line - 1]
        return self.place(line, len(text.encode()[:col].decode(errors="replace")))  # col: bytes

    def lines(self) -> list[str]:
        return self.source.split("\n")

    def place(self, line: int, col: int) -> Span:
        """The place in the file of the source's line (from 1) and column (from 0)."""
        before = sum(len(text) + 1 for text in self.lines()[: line - 1])
        return self.text.at(before + col + self.lead)

    def fail(self, node: ast.AST, message: str, hint: str = "") -> _Unsupported:
        self.problems.add(self.span(node), message, hint)
        return _Unsupported()

    def node(self, node: ast.expr, depth: int) -> Syntax:
        if depth > LIMIT_DEPTH:
            raise self.fail(node, f"nested more than {LIMIT_DEPTH} deep", "name a part of it")
        match node:
            case ast.Constant(value=bool() | int() | float()):
                return self.number(node)
            case ast.Name():
                return Name(self.name(node), self.span(node))
            case ast.BinOp(left=a, right=b, op=op) if type(op) in OPERATORS:
                return self.call(node, OPERATORS[type(op)], (a, b), depth)
            case ast.UnaryOp(op=ast.UAdd(), operand=a):
                return self.node(a, depth + 1)
            case ast.UnaryOp(op=op, operand=a) if type(op) in OPERATORS:
                return self.call(node, OPERATORS[type(op)], (a,), depth)
            case ast.BoolOp(op=op, values=values):
                return self.fold(node, OPERATORS[type(op)], values, depth)
            case ast.Compare():
                return self.compare(node, depth)
            case ast.IfExp(test=c, body=a, orelse=b):
                return self.call(node, "choose", (c, a, b), depth)
            case ast.Subscript(value=a, slice=b):
                return self.call(node, "gather", (a, b), depth)
            case ast.List(elts=values):
                return self.call(node, "literal", tuple(values), depth)
            case ast.Call():
                return self.function(node, depth)
        foreign = node.op if isinstance(node, ast.UnaryOp) else node
        raise self.fail(
            node,
            f"{described(foreign)} is not part of the language",
            "write transpose(m)"
            if getattr(foreign, "attr", "") in ("T", "t")
            else "an expression is made of numbers, names, + - * / ** // % comparisons, "
            "and, or, not, `a if c else b`, x[selection] and operators",
        )

    def name(self, node: ast.Name) -> str:
        """A name as it is written. Python reads other letters, such as full-width ones, as plain
        letters."""
        written = ast.get_source_segment(self.source, node)
        if written != node.id:
            raise self.fail(node, f"{written!r} is read as {node.id!r}", "write plain letters")
        return node.id

    def number(self, node: ast.Constant) -> Number:
        value = node.value
        assert isinstance(value, int | float)
        if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 2**63:
            raise self.fail(node, "an integer has at most 63 bits")
        return Number(value, self.span(node))

    def call(self, node: ast.expr, op: str, args: tuple[ast.expr, ...], depth: int) -> Call:
        return Call(op, tuple(self.node(a, depth + 1) for a in args), self.span(node), named=False)

    def fold(self, node: ast.expr, op: str, values: list[ast.expr], depth: int) -> Syntax:
        result = self.node(values[0], depth + 1)
        for value in values[1:]:
            result = Call(op, (result, self.node(value, depth + 1)), self.span(node), named=False)
        return result

    def compare(self, node: ast.Compare, depth: int) -> Syntax:
        left, result = node.left, None
        for op, right in zip(node.ops, node.comparators, strict=True):
            if type(op) not in OPERATORS:
                raise self.fail(node, f"{described(op)} is not part of the language")
            name = OPERATORS[type(op)]
            read = self.operand if name in EQUALITY else self.node
            sides = (read(left, depth + 1), read(right, depth + 1))
            pair: Syntax = Call(name, sides, self.span(node), named=False)
            result = pair if result is None else Call("and", (result, pair), self.span(node), False)
            left = right
        assert result is not None
        return result

    def operand(self, node: ast.expr, depth: int) -> Syntax:
        """A side of == or !=, the only place for a text."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return Word(node.value, self.span(node))
        return self.node(node, depth)

    def function(self, node: ast.Call, depth: int) -> Call:
        if not isinstance(node.func, ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
            name = SYNONYMS.get(name, name)
            hint = f"write {name}(...)" if name in LANGUAGE else "like mean(g)"
            raise self.fail(node, "only operators can be called, by their name", hint)
        if node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            over = {k.arg for k in node.keywords} & {"axis", "dim", "keepdim", "keepdims"}
            hint = (
                "a reduction is over all elements, or a group" if over else "without names or stars"
            )
            raise self.fail(node, "arguments are given by position", hint)
        args = tuple(self.node(a, depth + 1) for a in node.args)
        return Call(self.name(node.func), args, self.span(node))


def described(node: ast.AST) -> str:
    """A construction of Python in words."""
    if isinstance(node, ast.Constant) and not isinstance(node.value, str | bytes):
        return repr(node.value)
    return FOREIGN.get(type(node), type(node).__name__)


def parts(tree: Syntax) -> Iterator[Syntax]:
    """The tree and all trees in it."""
    yield tree
    for argument in tree.args if isinstance(tree, Call) else ():
        yield from parts(argument)


def names(tree: Syntax) -> set[str]:
    """All names that the tree mentions."""
    return {part.name for part in parts(tree) if isinstance(part, Name)}


def called(tree: Syntax) -> set[str]:
    """All operators that the tree uses."""
    return {part.op for part in parts(tree) if isinstance(part, Call)}


# ---- spec ---------------------------------------------------------------------------------------

Shape = Sequence[int]
#: sources of a parameter: sides of the matrix that has a tensor's first axis as rows
SIDES: dict[str, Callable[[Shape], int]] = {
    "rows": lambda shape: shape[0] if shape else 1,
    "columns": lambda shape: math.prod(shape[1:]),
}
ParamValue = int | float | bool | str
PARAM_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
ANY = "*"


def as_float(value: Any) -> float:
    """A number as a float; infinite if it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def shown(value: object) -> str:
    """A value for people, short: Python refuses to spell integers of thousands of digits, and
    values that hold one another many times are endless."""
    if type(value) is int and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    short = repr if isinstance(value, float | bool | str) else reprlib.repr
    return short(value)[:100]


@dataclass(frozen=True)
class Param:
    """A parameter: its type, default and range (ends included)."""

    name: str
    type: str
    default: ParamValue
    span: Span
    low: float | None = None
    high: float | None = None
    choices: tuple[ParamValue, ...] = ()
    about: str = ""
    #: a key of SIDES: the side of a tensor's shape that is the value if none is given; or ""
    side: str = ""

    def check(self, value: object) -> str | None:
        """The reason why `value` is not allowed, or None."""
        wanted = PARAM_TYPES[self.type]
        exact = isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
        if not exact and not (wanted is float and type(value) is int):
            return f"parameter {self.name!r} is {self.type}, not {shown(value)}"
        if self.choices and value not in self.choices:
            allowed = ", ".join(map(str, self.choices))
            return f"parameter {self.name!r} is one of {allowed}, not {shown(value)}"
        if isinstance(value, str):
            return None
        if isinstance(value, int) and wanted is int and abs(value) >= 2**53:
            return f"parameter {self.name!r} is an int below 2**53, not {shown(value)}"
        low = self.low if self.low is not None else float("-inf")
        high = self.high if self.high is not None else float("inf")
        if not low <= as_float(value) <= high:
            return f"parameter {self.name!r} is from {low:g} to {high:g}, not {shown(value)}"
        return None


def open_params(params: Iterable[Param], named: Collection[str]) -> tuple[Param, ...]:
    """Parameters that a shape may set: those that a caller has not named."""
    return tuple(p for p in params if p.side and p.name not in named)


def settled(open_: Iterable[Param], shape: Shape) -> Mapping[str, int]:
    """Values from a shape. A parameter that does not allow its value keeps the default."""
    values = {p.name: (p, SIDES[p.side](shape)) for p in open_}
    return {name: value for name, (p, value) in values.items() if p.check(value) is None}


@dataclass(frozen=True)
class Declared:
    """A declared tensor: a payload field or a state. `dim` is None for a scalar.

    second: the columns of a matrix, whose rows are `dim`. other: the declaration that takes its
    place if `condition`, of parameters, does not hold.
    """

    name: str
    base: str
    bits: Syntax | None
    dim: Syntax | None
    span: Span
    second: Syntax | None = None
    condition: Syntax | None = None
    other: Declared | None = None


@dataclass(frozen=True)
class Binding:
    """`name: expression`."""

    name: str
    value: Syntax
    span: Span


@dataclass(frozen=True)
class Chosen:
    """A section's choice: `value`, or with a condition of parameters `value` if it holds, else
    `other`.

    factor: for feedback, the residual's decay, or the share of a difference that the reference
    takes up; None for 1.
    """

    value: str
    span: Span
    condition: Syntax | None = None
    other: str = ""
    factor: Syntax | None = None


@dataclass(frozen=True)
class Spec:
    """A compressor as it is written."""

    path: str
    name: str
    about: str
    source: str
    params: tuple[Param, ...]
    group: Syntax | None
    state: tuple[Declared, ...]
    encode: tuple[Binding, ...]
    payload: tuple[Declared, ...]
    decode: tuple[Binding, ...]
    update: tuple[Binding, ...]
    owed: tuple[Binding, ...]
    feedback: Chosen
    merge: str
    unbiased: Chosen
    rounds: tuple[Binding, ...]
    when: Syntax | None
    spans: Mapping[str, Span]
    #: names whose definition could not be read (ANY: any name): their use is not another error
    broken: Set[str]
