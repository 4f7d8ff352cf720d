"""Which values of a spec that is computed an array at a time are arrays, and which only elements.

An elementwise expression, up to the next array, is one step; a sum of such a one, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from compll.ir import Expr, Module, walk

#: operators over elements of which one depends on others, or on a table
WHOLE = ("hadamard", "flat", "scatter", "lookup", "bucket")


def elementwise(e: Expr) -> bool:
    """Whether an element of it follows from the same element of its arguments."""
    made = bool(e.args) or e.op in ("uniform", "shared")
    return made and e.type.shape == "n" and e.op not in WHOLE


def outcomes(module: Module) -> list[Expr]:
    """What is wanted in the end: payload fields, the decoded value, the states' new values."""
    fields = [f.expr for f in module.fields if f.expr is not None]
    return [*fields, module.decode, *module.updates.values()]


def arrays(*roots: Expr) -> Iterator[Expr]:
    """Elementwise expressions that become arrays: roots, and what other operators take."""
    seen: set[int] = set()
    for e in (*roots, *taken(*roots)):
        if elementwise(e) and e.op != "lift" and id(e) not in seen:
            seen.add(id(e))
            yield e


def taken(*roots: Expr) -> Iterator[Expr]:
    """What operators take as arrays; sums take elements as they come."""
    users = (e for e in walk(*roots) if not elementwise(e) and e.op != "reduce_sum")
    return (a for e in users for a in e.args)


def leaves(e: Expr) -> Iterator[Expr]:
    """The arrays and numbers that an expression takes, through what is elementwise."""
    inner = walk(*e.args, into=lambda a: elementwise(a) and a.op != "lift")
    return (a for a in inner if not elementwise(a))
