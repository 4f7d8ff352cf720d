"""Matrices made of elements, and elements at other places of matrices."""

from __future__ import annotations

from compll.ir.expr import Expr
from compll.ir.tile import Value
from compll.numerics.matrices import DRAW
from compll.passes.arrays import Arrays


def matrix(values: Arrays, e: Expr) -> Value:
    values.kernel.rooms["matrix", e.type.dims] = None
    return values.element(e, values.position())


def flat(values: Arrays, e: Expr) -> Value:
    (x,) = e.args
    values.kernel.rooms["flat", x.type.dims] = None
    value = values.of(x)
    stored = value.op == "load" and value.attr.role == "scratch"
    return value if stored else values.stored_array(value, x.type)


def transpose(values: Arrays, e: Expr) -> Value:
    (x,) = e.args
    if any(d.op == "const" and d.value == 1 for d in x.type.dims):
        return values.of(x)  # the same memory
    row, column = values.place(e.type.dims)
    return values.element(x, values.do("add", values.do("mul", column, values.cols(x)), row))


def take_columns(values: Arrays, e: Expr) -> Value:
    x, at = e.args
    row, column = values.place(e.type.dims)
    position = values.of(at)
    if at.type.dims[0] is not e.type.dims[0]:
        position = values.element(at, column)
    cols, zero = values.cols(x), values.constant(0)
    inside = values.do(
        "and", values.do("ge", position, zero, kind="bool"),
        values.do("lt", position, cols, kind="bool"), kind="bool",
    )  # fmt: skip
    near = values.do("where", inside, position, zero)
    found = values.element(x, values.do("add", values.do("mul", row, cols), near))
    return values.do("where", inside, found, values.constant(0.0), kind="f32")


def random_matrix(values: Arrays, e: Expr) -> Value:
    u = values.make("draw", (), "f32", "lane", DRAW)
    twice = values.do("mul", values.constant(2.0), u, kind="f32")
    return values.do("sub", twice, values.constant(1.0), kind="f32")


def ones(values: Arrays, e: Expr) -> Value:
    return values.lanes(values.constant(1.0))
