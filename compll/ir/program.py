"""An encode as passes over memory: passes.schedule makes them, and backends compile them.

A pass is one walk over all tiles. A reduction's value exists after its pass; a value that depends
on it goes to a later pass. In a grouped spec reductions end inside the tile, so there is one pass.
A pass compacts selections; values over selected elements are computed right after it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from compll.ir.expr import Expr
from compll.ir.module import Field, Module, Selection

TABLES = ("quantiles",)
LIBRARY = ("kth_largest", "adjust", "bisect", *TABLES)
REDUCTIONS = ("reduce_sum", "reduce_min", "reduce_max")
TOTALS = (*LIBRARY, *REDUCTIONS)


@dataclass(frozen=True)
class Sink:
    """A value that leaves a pass. kind: field | state | back (the gradient, decoded)."""

    kind: str
    name: str
    expr: Expr
    field: Field | None = None


@dataclass
class Pass:
    """A walk over memory, and the values computed before and after it.

    scalars: tensor-level values computed before the walk, in order. late: tensor-level values
    computed after it, from its selections. kept: sinks of selected elements, stored after it.
    """

    scalars: list[Expr] = field(default_factory=list)
    reductions: list[Expr] = field(default_factory=list)
    selections: list[Selection] = field(default_factory=list)
    sinks: list[Sink] = field(default_factory=list)
    late: list[Expr] = field(default_factory=list)
    kept: list[Sink] = field(default_factory=list)
    status: bool = False


@dataclass(frozen=True)
class Program:
    """An encode as passes. guards: conditions of calls and reductions that are needed only if they
    hold.

    named: the spec's bindings as they stand in the passes, where g may be g + residual.
    """

    module: Module
    passes: tuple[Pass, ...]
    scalars: tuple[Sink, ...]
    guards: dict[int, tuple[Expr, bool]]
    gradient: Expr
    writes_back: bool
    named: dict[str, Expr]

    def guard(self, one: Pass) -> tuple[Expr, bool] | None:
        """The condition without which a walk can be skipped: the one that all its reductions share.
        None if the walk is always needed."""
        if one.sinks or one.selections or one.status or not one.reductions:
            return None
        found = [self.guards.get(id(e)) for e in one.reductions]
        same = all(g is not None and g == found[0] for g in found)
        return found[0] if same else None


class Unsupported(Exception):
    """A shape of program that a backend does not compile; the message says which.

    name: the field or state in which it occurs. expr: the expression to blame.
    """

    def __init__(
        self, message: str, name: str = "", expr: Expr | None = None, hint: str = ""
    ) -> None:
        super().__init__(message)
        self.name, self.expr, self.hint = name, expr, hint
