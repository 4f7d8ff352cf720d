"""Phases: the number of walks over memory after which a value is known, and conditions for needing
it.

A value of phase 2 p is known before walk p; one of phase 2 p + 1 depends on selections of walk p.
"""

from __future__ import annotations

from collections.abc import Mapping

from compll.ir.expr import Expr, walk
from compll.ir.module import Selection
from compll.ir.program import LIBRARY, TABLES, Sink


class Phases:
    """The phases of expressions, given the selections that they may depend on.

    first: the first walk that may select.
    """

    def __init__(self, first: int = 0) -> None:
        self.first = first
        self.selections: Mapping[str, Selection] = {}
        #: for each costly value that only one branch needs: a condition, and its value there
        self.guards: dict[int, tuple[Expr, bool]] = {}
        self.phases: dict[int, int] = {}

    def phase(self, expr: Expr) -> int:
        if id(expr) not in self.phases:
            for e in walk(expr):  # arguments first: no deep recursion
                if id(e) not in self.phases:
                    self.phases[id(e)] = self.find_phase(e)
        return self.phases[id(expr)]

    def find_phase(self, expr: Expr) -> int:
        below = max((self.phase(a) for a in expr.args), default=0)
        if id(expr) in self.guards:
            below = max(below, self.phase(self.guards[id(expr)][0]))
        if expr.op.startswith("reduce_"):
            if expr.args[0].type.shape == "kept":
                return below | 1
            return below if expr.type.shape == "group" else even(below) + 2
        if expr.op in LIBRARY:
            return even(below)
        if expr.op in ("in", "gather", "indices"):
            return max(below, self.selection_phase(str(expr.value)))
        if expr.op == "count_kept":
            return self.selection_phase(str(expr.value or expr.type.of)) | 1
        if expr.type.shape == "kept" and expr.type.of:
            return max(below, self.selection_phase(expr.type.of))
        return below

    def selection_phase(self, name: str) -> int:
        s = self.selections[name]
        keys = [s.key] if s.threshold is None else [s.key, s.threshold]
        return max(even(max(map(self.phase, keys))), 2 * self.first)

    def walk_of(self, sink: Sink) -> int:
        """The walk that writes a sink, or that the sink follows."""
        e = sink.expr
        if e.type.shape not in ("n", "group"):
            return self.phase(e) // 2
        if sink.kind == "state" and e.op == "where" and e.args[0].op == "in":
            # selected elements are written after the walk
            inside, a, b = map(self.phase, e.args)
            return max(inside // 2, a // 2, even(b) // 2)
        return even(self.phase(e)) // 2

    # guards: `a if c else b` on scalars computes one branch

    def find_guards(self, sinks: list[Sink]) -> None:
        """Find a condition for each costly value that holds wherever the value is used.

        A condition holds at a value if it holds at every use: at its user, or by the branch of a
        `choose`.
        """
        roots = [s.expr for s in sinks] + [
            e for s in self.selections.values() for e in (s.key, s.threshold) if e
        ]
        facts: dict[int, dict[tuple[int, bool], Expr]] = {id(e): {} for e in roots}
        for e in reversed(list(walk(*roots))):
            own = facts[id(e)]
            chooses = e.op == "choose" and e.type.shape == "scalar"
            for place, a in enumerate(e.args):
                there = dict(own)
                if chooses and place:
                    there[id(e.args[0]), place == 1] = e.args[0]
                known = facts.get(id(a))
                both = there if known is None else {k: v for k, v in known.items() if k in there}
                facts[id(a)] = both
            if own and costly(e) and e.op not in TABLES:
                (_, wanted), condition = list(own.items())[-1]
                self.guards[id(e)] = (condition, wanted)


def even(phase: int) -> int:
    """The first phase from `phase` on that comes before a walk."""
    return phase + phase % 2


def costly(expr: Expr) -> bool:
    """True if a value takes a walk over all elements (or a sample of them)."""
    total = expr.op.startswith("reduce_") and expr.type.shape == "scalar"
    return expr.op in LIBRARY or (total and expr.args[0].type.shape == "n")
