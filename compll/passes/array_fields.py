"""Payload fields in kernels that mix elements, and sums of them over ranks."""

from __future__ import annotations

from compll.ir.expr import Expr
from compll.ir.module import POSITIONS, WHOLE, Field
from compll.ir.tile import Array, Call, Store, Value, View, Walk
from compll.numerics.bits import FORMATS
from compll.passes.arrays import ARRAYS, Arrays
from compll.passes.values import SHAPES


def field(values: Arrays, e: Expr) -> Value:
    """A payload field's value: combined over ranks, this rank's own, or as the payload holds it."""
    f = values.fields[str(e.value)]
    if values.summed:
        return read_sum(values, f, e)
    return stored_value(values, f, e) if values.own else read(values, f, e)


def combined(values: Arrays, e: Expr) -> Value:
    f = values.fields[str(e.value)]
    return stored_value(values, f, e) if values.alone else read_sum(values, f, e)


def read_sum(values: Arrays, f: Field, e: Expr) -> Value:
    """The mean over the ranks, or their maximum; see [Note: combined]."""
    given = Array.of(f, "sum")
    if given not in values.kernel.sums:
        values.kernel.sums.append(given)
    found = loaded(values, given, e)
    if f.name in values.extremes:
        return found
    single = values.make("convert", [found], "f32", found.level)
    workers = values.make("workers", (), "f32", "piece")
    mean = values.make("div", [single, workers], "f32", found.level)
    return mean if found.level == "lane" else values.make("convert", [mean], "f64", found.level)


def read(values: Arrays, f: Field, e: Expr) -> Value:
    """The value of an incoming payload's field."""
    array = read_stream(values, f) if f.layout.varying else Array.of(f, "incoming")
    return loaded(values, array, e)


def read_stream(values: Arrays, f: Field) -> Array:
    """The array that an incoming field of varying length is made into, by a call that is added on
    first use."""
    array, steps = values.contents(f), values.kernel.steps
    if not any(isinstance(step, Call) and array in step.made for step in steps):
        steps.append(Call(f.storage, made=(array,), attr=f))
    return array


def loaded(values: Arrays, array: Array, e: Expr) -> Value:
    """The value of an array that has the values of a payload field."""
    if array.domain.kind == "table":
        return values.make("load", (), "table", "piece", array)
    level, storage = SHAPES[e.type.shape], array.storage
    whole = storage.packed or storage.whole is not None
    kind = ("i64" if whole else "f64") if level == "piece" else "i32" if whole else "f32"
    found = values.make("unpack" if storage.packed else "load", (), kind, level, array)
    return typed(values, found, e)


def typed(values: Arrays, found: Value, e: Expr) -> Value:
    """The value as a number of the expression's type."""
    wide = found.level == "piece"
    kind = {"float": "f64" if wide else "f32", "int": "i64" if wide else "i32"}.get(
        e.type.dtype, "bool"
    )
    if kind == "bool":
        return values.truth(found)
    return found if found.kind == kind else values.make("convert", [found], kind, found.level)


def stored_value(values: Arrays, f: Field, e: Expr) -> Value:
    """The value that a decoder reads of this rank's field. For a maximum it is the ranks' one,
    if given."""
    if f.name in values.extremes and values.own and not values.alone:
        return read_sum(values, f, e)
    value = leaving(values, f)
    if f.shape == "table":
        return value
    if f.storage in FORMATS:
        value = values.make(f.storage, [value], value.kind, value.level)
    elif f.storage == "float32" and value.level == "piece":
        value = values.make("float32", [value], value.kind, value.level)
    return typed(values, value, e)


def leaving(values: Arrays, f: Field) -> Value:
    """The value that is stored in a payload field."""
    assert f.expr is not None
    value = values.of(f.expr)
    if f.shape == "table" or f.storage in POSITIONS:
        return value
    if f.expr.type.shape in ARRAYS:
        value = values.lanes(value)
    if f.packed and not f.layout.trits:
        value = values.code(f, value)
    elif f.storage in WHOLE or f.layout.trits:
        value = values.whole(value) if value.kind == "bool" else value
    elif value.kind not in ("f32", "f64"):
        value = values.make("convert", [value], "f32", value.level)
    if f.name in values.extremes:
        # The all-reduce of a maximum may lose a NaN: see [Note: combined].
        infinite = values.make("const", (), value.kind, "piece", float("inf"))
        finite = values.make("isfinite", [value], "bool", value.level)
        value = values.make("where", [finite, value, infinite], value.kind, value.level)
    return value


def store(values: Arrays, f: Field) -> None:
    """Add the steps that store a payload field."""
    value, made = leaving(values, f), Array.of(f, "payload")
    assert f.expr is not None
    if f.layout.recoded:
        array = values.contents(f)
        values.kernel.steps.append(Walk([Store(array, value)]))
        value = values.load(array)
    if f.layout.varying:
        length = values.kernel.sizes[made]
        step = Call(f.storage, (View(value),), (made,), results=(length,), attr=f)
        values.kernel.steps.append(step)
        return
    store = Store(made, value)
    elements = f.shape not in ("scalar", "table")
    values.kernel.steps.append(values.walk(f.expr.type, store) if elements else store)
