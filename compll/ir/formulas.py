"""Typed expressions as a person writes them: infix, with no more parentheses than needed, and by
the names that a spec gives to their parts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class Node(Protocol):
    """A part of an expression: an operator, its arguments and a value. ir.Expr, which imports this
    module, fits it."""

    @property
    def op(self) -> str: ...

    @property
    def args(self) -> tuple[Node, ...]: ...

    @property
    def value(self) -> Any: ...

    @property
    def type(self) -> Any: ...


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
DRAWS = {"uniform": "random(0, 1)", "shared": "shared(0, 1)", "group_size": "size of the group"}
#: how tightly any factor of a product must bind
FACTOR = 11


def formula(node: Node, least: int = 0, names: Mapping[int, str] | None = None) -> str:
    """The expression, in parentheses where it binds less tightly than `least`.

    names: those of its parts, by their id.
    """
    parts: dict[int, tuple[str, int]] = {key: (name, 20) for key, name in (names or {}).items()}
    parts.pop(id(node), None)
    stack = [node]
    while stack:
        if waiting := [a for a in stack[-1].args if id(a) not in parts]:
            stack += waiting
        else:
            done = stack.pop()
            parts[id(done)] = _written(done, [parts[id(a)] for a in done.args])
    return _within(parts[id(node)], least)


def _within(part: tuple[str, int], least: int = 0) -> str:
    """A part, in parentheses where it binds less tightly than `least`."""
    text, binds = part
    return f"({text})" if binds < least else text


def _written(node: Node, args: list[tuple[str, int]]) -> tuple[str, int]:
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


def _called(node: Node, args: list[tuple[str, int]]) -> str:
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
    elif op in ("hadamard", "indices", "combined"):
        texts.append(str(value))
    name = {"trunc": "int", "code": f"stored.{value}"}.get(op, op.removeprefix("reduce_"))
    return f"{name}({', '.join(texts)})"
