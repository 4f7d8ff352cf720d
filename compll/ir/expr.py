"""The typed expression tree that every later stage works on.

Nodes are interned by a Pool, so equal expressions are the same object and a binding that is used
twice is computed once. Levels order how often a value changes: `static` (known from n, step and
the parameters, evaluated on the host), `scalar` (one per tensor, float64), `group` (one per group
of a grouped spec, float32), `n` (one per element, float32 or int32), and beside them `kept` (one
per selected element), `sample`, `table` (`of` says how many numbers) and `matrix` (`dims`: rows and
columns, as functions of n alone).

Expressions are printed as a person writes them: infix, with no more parentheses than needed, and by
the names that a spec gives to their parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

LEVELS = {
    "static": 0,
    "scalar": 1,
    "group": 1,
    "n": 2,
    "kept": 2,
    "sample": 2,
    "table": 1,
    "matrix": 1,
}
#: operators whose value a search finds, those that make a table, and all that look at every element
LIBRARY = ("kth_largest", "adjust", "bisect", "quantiles")
TABLES = ("quantiles",)
TOTALS = (*LIBRARY, "reduce_sum", "reduce_min", "reduce_max")
#: infix operators: symbol, and how tightly they bind (as in Python)
INFIX = {
    "or": ("or", 1), "and": ("and", 2), "lt": ("<", 4), "le": ("<=", 4), "gt": (">", 4),
    "ge": (">=", 4), "eq": ("==", 4), "ne": ("!=", 4), "bitor": ("|", 5), "bitxor": ("^", 6),
    "bitand": ("&", 7), "shl": ("<<", 8), "shr": (">>", 8), "add": ("+", 9), "sub": ("-", 9),
    "mul": ("*", 10), "div": ("/", 10), "floordiv": ("//", 10), "mod": ("%", 10),
    "matmul": ("@", 10), "pow": ("**", 12),
}  # fmt: skip
COMPARED = 4
PREFIX = {"not": ("not ", 3), "neg": ("-", 11)}
#: conversions, which nobody writes
SILENT = ("lift", "float", "int")
#: leaves that a spec writes as calls; other leaves are names
CALLS = ("indices", "combined", "count_kept", "ones", "random_matrix")
#: calls of which nobody writes the value
HIDDEN = ("spread", "scatter", "chosen", "code")
DRAWS = {"uniform": "random(0, 1)", "shared": "shared(0, 1)", "group_size": "size of the group"}
#: how tightly any factor of a product must bind
FACTOR = 11


@dataclass(frozen=True)
class Type:
    """dtype: float, int, bool, str or selection. shape: a level. of: for `kept`, the selection's
    name.

    dims: for a matrix, the static expressions of its rows and columns, which depend on n alone.
    """

    dtype: str
    shape: str
    of: str = ""
    dims: tuple[Expr, ...] = ()

    def __str__(self) -> str:
        shape = {"n": "[n]", "kept": f"[{self.of}]", "sample": "[sample]", "group": "[groups]"}
        if self.shape == "table":
            return f"{self.dtype}[{self.of}]"
        if self.shape == "matrix":
            return f"{self.dtype}[{', '.join(map(str, self.dims))}]"
        return self.dtype + shape.get(
            self.shape, "" if self.shape == "scalar" else f" ({self.shape})"
        )


@dataclass(frozen=True, eq=False)
class Expr:
    """An operator applied to expressions; `value` holds a constant, a name or a draw's number."""

    op: str
    args: tuple[Expr, ...]
    type: Type
    value: Any = None

    def __str__(self) -> str:
        return formula(self)


@dataclass
class Pool:
    """Makes expressions; equal ones are identical."""

    table: dict[Any, Expr] = field(default_factory=dict)

    def make(self, op: str, args: tuple[Expr, ...], type: Type, value: Any = None) -> Expr:
        """The one node with these parts."""
        # True == 1 == 1.0 in Python, so the constant's class is part of the key.
        key = (op, args, type, value.__class__, value)
        node = self.table.get(key)
        if node is None:
            node = self.table[key] = Expr(op, args, type, value)
        return node

    def const(self, value: float | int | bool | str) -> Expr:
        """A literal."""
        dtype = {bool: "bool", int: "int", str: "str"}.get(value.__class__, "float")
        return self.make("const", (), Type(dtype, "static"), value)


def walk(*roots: Expr, into: Callable[[Expr], bool] = lambda e: True) -> Iterator[Expr]:
    """Every node below `roots` once, arguments first. Nodes for which `into` is false hide their
    arguments."""
    seen: set[Expr] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            if into(node):
                stack.extend((a, False) for a in reversed(node.args))


def leaves(*roots: Expr) -> tuple[str, ...]:
    """Names of the arrays of n elements that the expressions read: "g" and states."""
    result = (e for e in walk(*roots) if e.op in ("input", "state") and e.type.shape == "n")
    return tuple(dict.fromkeys(str(e.value) for e in result))


def rebuild(pool: Pool, root: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
    """A copy of `root` in which `change` replaces every node for which it returns an expression."""
    done: dict[Expr, Expr] = {}
    stack = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            args = tuple(done[a] for a in node.args)
            same = all(a is b for a, b in zip(args, node.args, strict=True))
            done[node] = node if same else pool.make(node.op, args, node.type, node.value)
        elif node not in done:
            new = change(node)
            if new is not None:
                done[node] = new
            else:
                stack.append((node, True))
                stack.extend((a, False) for a in reversed(node.args))
    return done[root]


# text


def formula(node: Expr, least: int = 0, names: Mapping[Expr, str] | None = None) -> str:
    """The expression, in parentheses where it binds less tightly than `least`.

    names: those of its parts, by their id.
    """
    parts: dict[Expr, tuple[str, int]] = {key: (name, 20) for key, name in (names or {}).items()}
    parts.pop(node, None)
    stack = [node]
    while stack:
        if waiting := [a for a in stack[-1].args if a not in parts]:
            stack += waiting
        else:
            done = stack.pop()
            parts[done] = _written(done, [parts[a] for a in done.args])
    return _within(parts[node], least)


def _within(part: tuple[str, int], least: int = 0) -> str:
    """A part, in parentheses where it binds less tightly than `least`."""
    text, binds = part
    return f"({text})" if binds < least else text


def _written(node: Expr, args: list[tuple[str, int]]) -> tuple[str, int]:
    """The expression with these arguments, and how tightly its outermost operator binds."""
    op = node.op
    if op in SILENT:
        return args[0]
    if op in INFIX:
        symbol, binds = INFIX[op]
        # ** groups from the right, the others from the left, comparisons not at all
        left = binds + (op == "pow" or binds == COMPARED)
        right = binds + (op != "pow")
        return f"{_within(args[0], left)} {symbol} {_within(args[1], right)}", binds
    if op in PREFIX:
        symbol, binds = PREFIX[op]
        return symbol + _within(args[0], binds), binds
    if op == "choose":
        return f"{_within(args[1], 1)} if {_within(args[0], 1)} else {_within(args[2])}", 0
    return _called(node, args), 20


def _called(node: Expr, args: list[tuple[str, int]]) -> str:
    op, value = node.op, node.value
    if op == "const":
        return repr(value)
    if op == "literal":
        return f"[{', '.join(f'{x:.9g}' for x in value)}]"
    if not args and op not in CALLS:
        return DRAWS.get(op, str(value))
    texts = [_within(arg) for arg in args]
    if op == "gather":
        return f"{_within(args[0], 20)}[{value}]"
    if op in ("ones", "random_matrix", "sum_by"):
        texts += map(formula, node.type.dims[-1:] if args else node.type.dims)
    elif op == "count_kept":
        op, texts = "count", [value or node.type.of]
    elif value is not None and op not in HIDDEN:
        texts.append(str(value))
    name = {"trunc": "int", "code": f"stored.{value}"}.get(op, op.removeprefix("reduce_"))
    return f"{name}({', '.join(texts)})"


class Printer:
    """Writes expressions as a person does, with the names that the spec gives to their parts."""

    def __init__(self, bindings: Mapping[str, Expr]) -> None:
        named = reversed(list(bindings.items()))
        self.names = {e: name for name, e in named if e.args}

    def __call__(self, expr: Expr) -> str:
        """The expression itself, with its parts by name."""
        return formula(expr, names=self.names)

    def part(self, expr: Expr) -> str:
        """The expression's name, or the expression itself."""
        return self.names.get(expr) or self(expr)

    def values(self, expr: Expr) -> set[str]:
        """Names of the values that a number is computed from: bindings, and totals over
        elements."""
        if expr in self.names or expr.op in TOTALS:
            return {self.part(expr)}
        return {name for a in expr.args for name in self.values(a)}
