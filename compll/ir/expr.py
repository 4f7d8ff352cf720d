"""The typed expression tree that every later stage works on.

Nodes are interned by a Pool, so equal expressions are the same object and a binding that is used
twice is computed once. Levels order how often a value changes: `static` (known from n, step and
the parameters, evaluated on the host), `scalar` (one per tensor, float64), `group` (one per group
of a grouped spec, float32), `n` (one per element, float32 or int32), and beside them `kept` (one
per selected element), `sample`, `table` (`of` says how many numbers) and `matrix` (`dims`: rows and
columns, as functions of n alone).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from compll.ir.formulas import formula

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
        key = (op, tuple(map(id, args)), type, value.__class__, value)
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
    seen: set[int] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        node, ready = stack.pop()
        if ready:
            yield node
        elif id(node) not in seen:
            seen.add(id(node))
            stack.append((node, True))
            if into(node):
                stack.extend((a, False) for a in reversed(node.args))


def leaves(*roots: Expr) -> tuple[str, ...]:
    """Names of the arrays of n elements that the expressions read: "g" and states."""
    found = (e for e in walk(*roots) if e.op in ("input", "state") and e.type.shape == "n")
    return tuple(dict.fromkeys(str(e.value) for e in found))


def rebuild(pool: Pool, root: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
    """A copy of `root` in which `change` replaces every node for which it returns an expression."""
    done: dict[int, Expr] = {}
    stack = [(root, False)]
    while stack:
        node, ready = stack.pop()
        if ready:
            args = tuple(done[id(a)] for a in node.args)
            same = all(a is b for a, b in zip(args, node.args, strict=True))
            done[id(node)] = node if same else pool.make(node.op, args, node.type, node.value)
        elif id(node) not in done:
            new = change(node)
            if new is not None:
                done[id(node)] = new
            else:
                stack.append((node, True))
                stack.extend((a, False) for a in reversed(node.args))
    return done[id(root)]
