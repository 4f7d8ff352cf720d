"""Selections: the walk that selects captures what later walks over the selected elements need."""

from __future__ import annotations

from dataclasses import dataclass, replace

from compll.ir.expr import Expr, Type, walk
from compll.ir.module import Selection
from compll.ir.storage import FLOAT32, INT32
from compll.ir.tile import ELEMENTS, WRONG, Array, Call, Compact, Domain, Kernel, Store, Value, Walk
from compll.passes import arrays, fusion
from compll.passes.arrays import Arrays, Selecting
from compll.passes.values import Values


@dataclass(frozen=True)
class Placed:
    """A result that is zero outside a selection: its places and values."""

    selection: str
    place: Value
    value: Value


def limit(values: Values, s: Selection) -> Value:
    """The most elements of a selection."""
    size = values.make("size", (), "i64", "piece")
    return values.make("as_count", [values.of(s.limit), size], "i64", "piece")


# selecting


def select(values: Arrays, name: str) -> Selecting:
    """The walk that selects, added on first use."""
    if name not in values.selecting:
        s = next(s for s in values.module.selections if s.name == name)
        selecting = compact(values, s)
        step = Walk(compacts=[selecting], domain=Domain("kept", s.of) if s.of else ELEMENTS)
        values.selecting[name] = Selecting(selecting, step)
        values.kernel.steps.append(step)
    return values.selecting[name]


def compact(values: Arrays, s: Selection) -> Compact:
    """The selection itself. The arrays that it fills are added when values are captured."""
    if s.kind == "filter":
        key = values.per_element(values.of(s.key))
        if s.unlimited:
            return Compact(s.name, [], always=key)
        return Compact(s.name, [], first=key, limit=limit(values, s))
    assert s.threshold is not None
    values.of(s.threshold)
    result, larger = values.searches.kth[s.threshold].results
    key = values.order_key(values.per_element(values.of(s.key)))
    return Compact(
        s.name, [],
        always=values.make("gt", [key, result], "bool", "element"),
        first=values.make("eq", [key, result], "bool", "element"),
        limit=values.make("sub", [limit(values, s), larger], "i64", "piece"),
    )  # fmt: skip


def captured(values: Arrays, name: str, value: Value) -> Value:
    """A selected element's value: captured by the walk that selects; if that walk does not know it,
    computed again, or read at the element's place."""
    selecting = select(values, name)
    if value.level == "piece":
        return value
    if data_dependent(values, selecting, value):
        if value.op == "load":
            return values.at(value, captured(values, name, values.position()))
        args = [captured(values, name, a) for a in value.args]
        return values.make(value.op, args, value.kind, value.level, value.attr)
    value = values.per_element(value)
    if value.kind == "bool":
        return values.truth(captured(values, name, values.whole(value)))
    if value not in selecting.parts:
        storage = {"f32": FLOAT32, "i32": INT32}[value.kind]
        array = values.scratch(f"{name}.{len(selecting.parts)}", storage, Domain("kept", name))
        selecting.parts[value] = array
        selecting.compact.parts.append((array, value))
    return values.load(selecting.parts[value])


def data_dependent(values: Arrays, selecting: Selecting, value: Value) -> bool:
    """True if a value is known only after the walk that selects."""
    if value not in selecting.data_dependent:
        selecting.data_dependent[value] = fusion.depends(values.kernel, [value], selecting.walk)
    return selecting.data_dependent[value]


# operators


def positions(values: Arrays, name: str) -> Value:
    """Positions of the elements of a selection, in a walk over them."""
    s = next(s for s in values.module.selections if s.name == name)
    if s.kind != "drawn":
        return captured(values, name, values.position())
    if s not in values.arrays:  # all ranks draw the same
        f = values.array(Type("int", "kept", name))
        values.kernel.steps.append(Call("drawn", made=(f,), numbers=(values.kernel.counts[name],)))
        values.arrays[s] = values.load(f)
    return values.arrays[s]


def counted(values: Arrays, e: Expr) -> Value:
    """Have elements selected that are counted."""
    name = str(e.value or e.type.of)
    if drawn(values, name):
        return positions(values, name)
    select(values, name)
    return values.position()


def indices(values: Arrays, e: Expr) -> Value:
    return positions(values, str(e.value))


def gather(values: Arrays, e: Expr) -> Value:
    """The selected elements. Those at drawn positions are an array: several walks read it, and
    states change before the last."""
    (x,), name = e.args, str(e.value)
    value = values.of(x)
    if not drawn(values, name):
        return captured(values, name, value)
    place = positions(values, name)
    return values.stored_array(values.moved(values.per_element(value), place, x.type), e.type)


def inside(values: Arrays, e: Expr) -> Value:
    """The elements of a selection, as an array of conditions."""
    place = positions(values, str(e.value))
    mark = values.per_element(values.make("const", (), "i32", "piece", 1))
    type_ = replace(e.type, dtype="int")
    f = filled(values, type_, Type("int", "kept", str(e.value)), mark, place)
    return values.truth(values.load(f))


def scatter(values: Arrays, e: Expr) -> Value:
    result = placed(values, e)
    return values.load(filled(values, e.type, e.args[1].type, result.value, result.place))


def placed(values: Arrays, e: Expr) -> Placed:
    """The values that a scatter writes, and their places."""
    place, value = (values.per_element(values.of(a)) for a in e.args)
    return Placed(e.args[0].type.of, place, value)


def filled(values: Arrays, type_: Type, of: Type, value: Value, place: Value) -> Array:
    """A new array of zeros, with some elements stored at their places."""
    f = values.array(type_)
    zero = values.per_element(values.make("const", (), value.kind, "piece", 0))
    values.kernel.steps.append(values.walk(type_, Store(f, zero)))
    values.kernel.steps.append(values.walk(of, Store(f, value, place=place)))
    return f


# states


def store_states(values: Arrays, new: dict[str, Expr]) -> None:
    """Add the steps that store the states' new values.

    `where(selection, a, b)` is stored by the walk that selects, as far as it knows a and b; a walk
    over the selected elements stores what is known later, or all if the others stay as they are.
    If the walk must leave the state alone, a later one asks an array of marks.
    """
    for e in new.values():  # all that they need is known before any is stored
        for part in parts(values, e):
            values.of(part)
    marked = set[str]()
    while more := {n for n in new.keys() - marked if marks(values, n, new, marked)}:
        marked |= more
    for name, e in new.items():
        if name not in marked and chooses(values, e):
            choose(values, name, e)
        else:
            store = Store(values.states[name], values.per_element(values.of(e)))
            values.kernel.steps.append(values.walk(e.type, store))


def chooses(values: Arrays, e: Expr) -> bool:
    """True for where(selection, a, b) of a selection that a walk makes."""
    by_selection = e.op == "where" and e.args[0].op == "in"
    return by_selection and not drawn(values, str(e.args[0].value))


def parts(values: Arrays, e: Expr) -> tuple[Expr, ...]:
    """The values between which a selection chooses, in a state's update; else the update itself."""
    return e.args[1:] if chooses(values, e) else (e,)


def marks(values: Arrays, name: str, new: dict[str, Expr], marked: set[str]) -> bool:
    """True if the walk that selects must leave a state alone: it does not know the new value of
    others, or something that needs the selection reads the state. marked: states known to be so."""
    e, f, kernel = new[name], values.states[name], values.kernel
    if not chooses(values, e) or stays(name, e):
        return False
    selecting = select(values, str(e.args[0].value))
    after = fusion.followers(kernel, selecting.walk)
    if data_dependent(values, selecting, values.of(e.args[2])) or any(
        kernel.steps[i] is not selecting.walk and f in dict(fusion.read(kernel.steps[i]))
        for i in after
    ):
        return True
    for other in new.keys() - {name}:
        new_values = [values.of(part) for part in parts(values, new[other])]
        if all(f not in dict(fusion.inputs([v])) for v in new_values):
            continue
        if other in marked or any(data_dependent(values, selecting, v) for v in new_values):
            return True
        if chooses(values, new[other]):
            walk = select(values, str(new[other].args[0].value)).walk
            if walk is not selecting.walk and any(kernel.steps[i] is walk for i in after):
                return True
    return False


def stays(name: str, e: Expr) -> bool:
    """True if elements that are not selected keep their values."""
    return e.args[2].op == "state" and e.args[2].value == name


def choose(values: Arrays, name: str, e: Expr) -> None:
    """Add the stores of where(selection, a, b)."""
    f, selection = values.states[name], str(e.args[0].value)
    selecting, after = select(values, selection), Walk(domain=Domain("kept", selection))
    a, b = (values.narrow(values.of(part), "element") for part in e.args[1:])
    if stays(name, e) or data_dependent(values, selecting, a):
        place = captured(values, selection, values.position())
        mended = captured(values, selection, values.per_element(a))
        after.stores = [Store(f, mended, place=place)]
    if not stays(name, e):
        taken = values.make("selected", (), "bool", "element", selection)
        here = values.load(f) if after.stores else a
        value = values.make("where", [taken, here, b], "f32", "element")
        selecting.walk.stores.append(Store(f, value))
    if after.stores:
        values.kernel.steps.append(after)


def drawn(values: Arrays, name: str) -> bool:
    """True for a selection of elements that all ranks draw."""
    return any(s.kind == "drawn" for s in values.module.selections if s.name == name)


# payloads


def check(values: Arrays, kernel: Kernel, decode: Expr) -> None:
    """Add a check that a spread has as many values as elements, that positions ascend within the
    tensor, and that streams are whole, also those that decode does not use."""
    check_spread(values, kernel, decode)
    places = {e.args[0].value for e in walk(decode) if e.op == "scatter"}
    for f in values.module.fields:
        if f.layout.varying:
            arrays.read_stream(values, f)
        elif f.name in places:
            kernel.steps.append(Call("ascending", attr=f))


def check_spread(values: Values, kernel: Kernel, decode: Expr) -> None:
    folds, wrong = [], values.make("const", (), "i32", "piece", 0)
    for e in walk(decode):
        if e.op == "spread":
            inside = values.of(e.args[0])
            folds.append(values.make("fold", [inside], "i32", "tile", "count"))
            result = values.make("total", [folds[-1]], "f64", "piece", "count")
            result = values.make("convert", [result], "i64", "piece")
            size = kernel.counts[e.args[1].type.of]
            other = values.whole(values.make("ne", [result, size], "bool", "piece"))
            wrong = values.make("add", [wrong, other], "i32", "piece")
    if folds:
        kernel.steps.append(Walk(folds=folds))
        kernel.steps.append(Store(WRONG, wrong))
