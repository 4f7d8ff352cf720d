"""Selections in kernels that mix elements: positions, and elements at those."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compll.ir.expr import Expr, Type
from compll.ir.module import Field, Selection
from compll.ir.tile import (
    SCRATCH,
    Call,
    Store,
    Value,
    Walk,
)
from compll.passes.arrays import Arrays
from compll.passes.selections import compact


@dataclass(frozen=True)
class Placed:
    """A result that is zero outside a selection: its places and values."""

    selection: str
    place: Value
    value: Value


def positions(values: Arrays, name: str) -> Value:
    """Positions of the elements of a selection."""
    s = next(s for s in values.module.selections if s.name == name)
    if id(s) not in values.arrays:
        values.arrays[id(s)] = drawn(values, s) if s.kind == "drawn" else selected(values, s)
    return values.arrays[id(s)]


def drawn(values: Arrays, s: Selection) -> Value:
    """Positions that all ranks draw."""
    f = values.array(Type("int", "kept", s.name))
    values.kernel.steps.append(Call("drawn", (), (f,), numbers=(values.kernel.limits[s.name],)))
    return values.load(f)


def selected(values: Arrays, s: Selection) -> Value:
    """Positions that a walk collects."""
    if s.threshold is not None:
        values.of(s.threshold)
    one = compact(values, values.thresholds, s)
    f = Field(f"{s.name}.0", "int32", 32, "kept", s.name)
    one.parts.append((f, values.position()))
    values.kernel.steps.append(Walk(compacts=[one], of=s.of))
    return values.load(f)


def counted(values: Arrays, e: Expr) -> Value:
    """The positions of the selection of which the elements are counted."""
    return positions(values, str(e.value or e.type.of))


def indices(values: Arrays, e: Expr) -> Value:
    return positions(values, str(e.value))


def gather(values: Arrays, e: Expr) -> Value:
    """The selected elements as an array: several walks read it, and states change before the
    last."""
    (x,), place = e.args, positions(values, str(e.value))
    return values.stored_array(values.moved(values.lanes(values.of(x)), place, x.type), e.type)


def inside(values: Arrays, e: Expr) -> Value:
    place = positions(values, str(e.value))
    one = values.lanes(values.make("const", (), "i32", "piece", 1))
    type_ = replace(e.type, dtype="int")
    f = filled(values, type_, Type("int", "kept", str(e.value)), one, place)
    return values.truth(values.load(f))


def scatter(values: Arrays, e: Expr) -> Value:
    found = placed(values, e)
    return values.load(filled(values, e.type, e.args[1].type, found.value, found.place))


def placed(values: Arrays, e: Expr) -> Placed:
    """The values that a scatter writes, and their places."""
    place, value = (values.lanes(values.of(a)) for a in e.args)
    return Placed(e.args[0].type.of, place, value)


def filled(values: Arrays, type_: Type, of: Type, value: Value, place: Value) -> Field:
    """A new array of zeros, with some lanes stored at their places."""
    f = values.array(type_)
    zero = values.lanes(values.make("const", (), value.kind, "piece", 0))
    values.kernel.steps.append(values.walk(type_, Store(SCRATCH, f, zero)))
    values.kernel.steps.append(values.walk(of, Store(SCRATCH, f, value, place=place)))
    return f
