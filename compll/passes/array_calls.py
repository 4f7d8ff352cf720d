"""Calls of routines that mix elements, and views that they read."""

from __future__ import annotations

from dataclasses import replace

from compll.ir.expr import Expr, Type
from compll.ir.matrices import NARROW, short
from compll.ir.tile import Call, Value, View, order
from compll.passes.arrays import OWN, Arrays


def view(values: Arrays, e: Expr) -> View:
    """The array that a routine reads for an expression."""
    if e.op == "transpose":
        before = view(values, e.args[0])
        return replace(before, matrix=values.extents(e.type.dims), turned=not before.turned)
    if e.type.shape != "matrix":
        return View(plain(values, values.lanes(values.of(e)), e.type))
    made = values.extents(e.type.dims)
    if e.op == "matrix":
        values.kernel.rooms["matrix", e.type.dims] = None
        return View(
            plain(values, values.lanes(values.of(e.args[0])), e.args[0].type), made, ends=True
        )
    if e.op in ("abs", "neg"):
        inner = view(values, e.args[0])
        return replace(inner, value=values.make(e.op, [inner.value], "f32", "lane"))
    return View(plain(values, values.of(e), e.type), made)


def plain(values: Arrays, value: Value, type_: Type) -> Value:
    """The value in a form that routines can read at any place: made of loads, else stored in an
    array."""
    mixed = any(v.op in OWN and v.level == "lane" for v in order([value]))
    return values.stored_array(value, type_) if mixed or value.kind == "bool" else value


def call(
    values: Arrays, e: Expr, *args: Expr, routine: str = "", attr: int = 0,
    numbers: tuple[Value, ...] = (),
) -> Value:  # fmt: skip
    """An array that a routine makes. Equal calls share it."""
    views = tuple(view(values, x) for x in args)
    matrix = values.extents(e.type.dims) if e.type.shape == "matrix" else None
    key = (routine or e.op, views, matrix, attr, numbers)
    if key not in values.arrays:
        f = values.array(e.type)
        values.kernel.steps.append(Call(routine or e.op, views, (f,), matrix, numbers, attr=attr))
        values.arrays[key] = values.load(f)
    return values.arrays[key]


def matmul(values: Arrays, e: Expr) -> Value:
    a, b = e.args
    width = b.type.dims[1]
    if not short(e) and not (width.op == "const" and int(width.value) <= NARROW):
        solid(values, a)  # read again for every few columns
    solid(values, b)
    return call(values, e, a, b, routine="product", attr=int(short(e)))


def solid(values: Arrays, e: Expr) -> None:
    """Have the elements of a matrix stored in memory."""
    while e.op in ("transpose", "matrix"):
        (e,) = e.args
    if values.elementwise(e):
        values.known[id(e)] = values.stored_array(values.lanes(values.of(e)), e.type)


def routine(values: Arrays, e: Expr) -> Value:
    return call(values, e, *e.args, attr=int(e.value or 0))


def sum_by(values: Arrays, e: Expr) -> Value:
    index, x = e.args
    pool = values.module.pool
    size = pool.make("abs", (x,), x.type)
    largest = values.of(pool.make("reduce_max", (size,), Type("float", "scalar")))
    return call(values, e, index, x, numbers=(largest,))
