"""Which values of a spec that is computed an array at a time are arrays, and which only elements.

An elementwise expression, up to the next array, is one step; a sum of such a one, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from compll.ir.expr import Expr, walk
from compll.ir.matrices import extent, short
from compll.ir.module import Module

#: columns of a product up to which its factors are not written down before
NARROW = 16
#: operators over elements of which one depends on others, or on a table
WHOLE = ("hadamard", "flat", "scatter", "spread", "lookup", "bucket")


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
    """What operators take as arrays; sums and extremes take elements as they come."""
    users = (e for e in walk(*roots) if not elementwise(e) and not e.op.startswith("reduce_"))
    return (a for e in users for a in e.args)


def leaves(e: Expr) -> Iterator[Expr]:
    """The arrays and numbers that an expression takes, through what is elementwise."""
    inner = walk(*e.args, into=lambda a: elementwise(a) and a.op != "lift")
    return (a for a in inner if not elementwise(a))


def ranked(e: Expr) -> Expr:
    """The matrix that top_columns reads: of magnitudes, that of which they are."""
    (x,) = e.args
    return x.args[0] if x.op == "abs" else x


def of_gradient(e: Expr, n: int) -> Expr | None:
    """What takes the gradient in a step that with feedback reads gradient and residual itself.

    A narrow product of matrix(g, columns), or of its transpose, with another, unless it is short; a
    sum of all elements; some elements (see cpu/array_kernels.py).
    """
    if e.op in ("reduce_sum", "gather"):
        return e if e.args[0].op == "input" else None
    if e.op != "matmul" or short(e):
        return None
    plain = e.args[0].args[0] if e.args[0].op == "transpose" else e.args[0]
    direct = plain.op == "matrix" and plain.args[0].op == "input"
    return plain if direct and extent(e.type.dims[1], n) <= NARROW else None


def writes_input(module: Module, n: int) -> bool:
    """Whether a step of an encode takes the sum of gradient and residual as an array."""
    aside = {id(of_gradient(e, n)) for e in steps(module)}
    users = (e for e in steps(module) if any(a.op == "input" for a in e.args))
    return any(id(e) not in aside for e in users)


def steps(module: Module) -> Iterator[Expr]:
    """What is computed, in order: every payload field, the decode that feedback needs, updates."""
    roots = [f.expr for f in module.fields if f.expr is not None]
    roots += [module.decode] if module.feedback else []
    for e in walk(*roots, *module.updates.values()):
        if e.args and e.type.shape != "static":
            yield e


def last_product(module: Module) -> Expr | None:
    """The product that decode ends with, if any: its rows go to where they are wanted."""
    decode = module.decode
    product = decode.args[0] if decode.op == "flat" else decode
    return product if product.op == "matmul" else None
