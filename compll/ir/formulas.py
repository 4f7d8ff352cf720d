"""Typed expressions as a person writes them: infix, with no more parentheses than needed."""

from __future__ import annotations

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
LEAVES = ("param", "input", "state", "field")
#: how tightly any factor of a product must bind
FACTOR = 11


def formula(node: Node, least: int = 0) -> str:
    """The expression, in parentheses where it binds less tightly than `least`."""
    parts: dict[int, tuple[str, int]] = {}
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
    if node.op == "const":
        return repr(node.value)
    if node.op in LEAVES:
        return str(node.value)
    if node.op == "literal":
        return f"[{', '.join(f'{x:.9g}' for x in node.value)}]"
    of = "" if node.value is None else f"[{node.value}]"
    return f"{node.op}{of}({', '.join(map(_within, args))})"
