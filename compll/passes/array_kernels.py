"""Kernels of a spec that mixes elements: encode, decode, and a kernel for each round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from compll.ir.expr import Expr, Type, walk
from compll.ir.layout import TILE
from compll.ir.module import HALVES, Module
from compll.ir.program import Unsupported
from compll.ir.tile import Ascending, Kernel, Store, Value, Walk, When
from compll.passes import array_fields, array_selections, selections
from compll.passes.array_operations import OPERATIONS
from compll.passes.array_selections import Placed
from compll.passes.arrays import Arrays
from compll.passes.merge import merged

#: the smallest bits, without the sign, of a float that is not finite
INFINITE = 0x7F800000


def kernels(module: Module) -> dict[str, list[Kernel]]:
    """All kernels, in groups that are compiled together. Raises Unsupported.

    If ranks combine in rounds, the first group has all that training needs. Whole payloads, which
    tests and files need, are compiled when the first of them is asked for.
    """
    if module.group:
        what = "a grouped spec with matrices, rounds or drawn()"
        raise Unsupported(what, module.fields[0].name)
    found: dict[str, list[Kernel]] = {"first": [], "stateless": [], "payloads": []}
    for fed in (True, False):
        if fed and not module.states:
            continue
        usual = "first" if fed or not module.states else "stateless"
        if module.rounds:
            found[usual] += [added(module, k, fed) for k in range(len(module.rounds))]
            found[usual].append(closing(module, fed))
        found["payloads" if module.rounds else usual].append(encode(module, fed))
    checked = check(module)
    home = "payloads" if module.rounds else "first"
    found[home] += [checked, *(decode(module, adds, checked) for adds in (False, True))]
    for kernel in (k for part in found.values() for k in part):
        kernel.steps = merged(kernel.steps)
    return {name: part for name, part in found.items() if part}


def opened(module: Module, kernel: Kernel, **how: bool) -> Arrays:
    """A maker of a kernel's values. Sets the kernel's limits and sizes."""
    values = Arrays(module, kernel, OPERATIONS, **how)
    kernel.limits = {s.name: selections.limit(values, s) for s in module.selections}
    known = (*kernel.module.fields, *(array_fields.summed(f) for f in module.fields))
    kernel.sizes = {f.name: values.extents(f.dims) for f in known if f.shape == "matrix"}
    return values


def encode(module: Module, fed: bool) -> Kernel:
    """The kernel that stores every payload field; with states, also the decoded gradient and new
    states."""
    kernel = Kernel(
        f"encode{'_feed' * fed}", module, TILE, states=list(module.states) if fed else []
    )
    values = opened(module, kernel, fed=fed, alone=True, own=True)
    for s in module.selections:
        if s.kind != "drawn":
            array_selections.positions(
                values, s.name
            )  # positions of fields depend on the number of elements
    for f in module.fields:
        with blamed(f.name):
            array_fields.store(values, f)
    told = status(values) if module.status else None
    if fed:
        decoded = result(values, told)
        left = decoded if module.feedback else None
        with blamed(next(iter(module.updates), "")):
            settle(values, decoded, left, back=True, told=told)
    return kernel


def status(values: Arrays) -> Value:
    """Have the kernel set the status byte if an element of the input is not finite. Returns that
    condition."""
    size = values.make("magnitude_bits", [values.of(gradient(values.module))], "i32", "lane")
    fold = values.make("fold", [size], "i32", "tile", "max")
    values.kernel.steps.append(Walk(folds=[fold]))
    values.kernel.bad = values.make("total", [fold], "i32", "piece", "max")
    least = values.make("const", (), "i32", "piece", INFINITE)
    return values.make("ge", [values.kernel.bad, least], "bool", "piece")


def gradient(module: Module) -> Expr:
    """The input of an encode."""
    return module.pool.make("input", (), Type("float", "n"), "g")


def result(values: Arrays, told: Value | None = None) -> Value | Placed:
    """The decoded gradient; NaN if `told`, the condition that the input was not finite, holds."""
    decode = values.module.decode
    with blamed("decode"):
        if decode.op == "scatter":
            found = array_selections.placed(values, decode)
            return replace(found, value=or_nan(values, found.value, told))
        return or_nan(values, values.lanes(values.of(decode)), told)


def or_nan(values: Arrays, value: Value, told: Value | None) -> Value:
    if told is None:
        return value
    nan = values.make("const", (), "f32", "piece", float("nan"))
    return values.make("where", [told, nan, value], "f32", "lane")


def decode(module: Module, adds: bool, check: Kernel) -> Kernel:
    """The kernel from a payload to the gradient; `adds`: adds to it. check: see lower.check."""
    name = f"decode_{'add' if adds else 'set'}"
    kernel = Kernel(name, module, TILE, statics=check.statics)
    values = opened(module, kernel, fed=False)
    found = result(values)
    if isinstance(found, Placed):
        if not adds:
            zero = values.make("const", (), "f32", "piece", 0.0)
            kernel.steps.append(Store("zero", None, zero))
        target = "scatter_add" if adds else "scatter"
        kernel.steps.append(
            Walk([Store(target, None, found.value, place=found.place)], of=found.selection)
        )
        return kernel
    if adds:
        there = values.make("load", (), "f32", "lane", "g")
        found = values.make("add", [there, found], "f32", "lane")
    kernel.steps.append(Walk([Store("gradient", None, found)]))
    return kernel


def check(module: Module) -> Kernel:
    """The kernel that checks lengths of payloads, and that positions lie in their tensors."""
    kernel = Kernel("check", module, TILE)
    values = opened(module, kernel, fed=False)
    if module.decode.op != "scatter":
        selections.check(values, kernel, module.decode)
    for e in walk(module.decode):
        if e.op == "field" and values.fields[e.value].layout.varying:
            values.of(e)  # reads the stream
        elif e.op == "scatter" and e.args[0].op == "field":
            f = values.fields[e.args[0].value]
            if not f.layout.varying:
                kernel.steps.append(Ascending(f))
    return kernel


def added(module: Module, number: int, fed: bool) -> Kernel:
    """The kernel of round `number`: stores its payload, given the sums of the rounds before."""
    field = next(f for f in module.fields if f.name == module.rounds[number][0])
    name = f"round{number}{'_feed' * fed}"
    kernel = Kernel(name, replace(module, fields=(field,), status=False), TILE)
    kernel.states = list(module.states) if fed else []
    values = opened(module, kernel, fed=fed)
    with blamed(field.name):
        array_fields.store(values, field)
    return kernel


def closing(module: Module, fed: bool) -> Kernel:
    """The kernel behind the last round: decodes the sums of all rounds into the gradient, and
    updates the states."""
    kernel = Kernel(f"rounds{'_feed' * fed}", replace(module, fields=(), status=False), TILE)
    kernel.states = list(module.states) if fed else []
    own = opened(module, kernel, fed=fed, own=True)
    values = opened(module, kernel, fed=fed, summed=True)
    decoded = result(values)
    left = None
    if fed and module.feedback:
        left = result(own) if module.own else decoded
    settle(values, decoded, left, back=False)
    return kernel


def settle(
    values: Arrays, decoded: Value | Placed, left: Value | Placed | None, *, back: bool,
    told: Value | None = None,
) -> None:  # fmt: skip
    """Store decoded values in the gradient, and new values in the states.

    left: the values that the residual subtracts from its input. back: store the gradient only if
    the caller wants that. told: condition that the input was not finite; decoded values are NaN
    then.
    """
    v, module, steps = values, values.module, values.kernel.steps
    updates = module.updates if v.fed_states else {}
    for e in updates.values():
        if e.type.shape == "matrix" or (e.type.shape == "n" and moves(e)):
            v.known[id(e)] = v.stored_array(v.of(e), e.type)
    stores = [
        Store("state", v.states[name], v.lanes(v.of(e)))
        for name, e in updates.items() if e.type.shape == "n"
    ]  # fmt: skip
    numbers = [
        Store("state", v.states[name], v.of(e))
        for name, e in updates.items() if e.type.shape == "scalar"
    ]  # fmt: skip
    after: list[Store] = []
    if left is not None:
        stores.append(residual(values, left, after, told))
    if isinstance(decoded, Placed):
        zero = or_nan(v, v.lanes(v.make("const", (), "f32", "piece", 0.0)), told)
        stores.append(Store("gradient", None, zero, back=back))
        after.append(Store("scatter", None, decoded.value, back=back, place=decoded.place))
        steps += [Walk(stores), Walk(after, of=decoded.selection)]
    else:
        steps.append(Walk([*stores, Store("gradient", None, decoded, back=back)]))
    for name, e in updates.items():
        if e.type.shape == "matrix":
            one = v.walk(e.type, Store("state", v.states[name], v.of(e)))
            steps.append(When(v.fits(e.type), True, [one]))
    steps += numbers


def residual(values: Arrays, left: Value | Placed, after: list[Store], told: Value | None) -> Store:
    """The store of the residual: input minus `left`. Stores of few elements, which follow, are
    added to `after`."""
    v = values
    f, given = v.states["residual"], v.of(gradient(v.module))
    if not isinstance(left, Placed):
        return Store("state", f, v.make("sub", [given, left], "f32", "lane"))
    place, type_ = left.place, Type("float", "kept", left.selection)
    own = v.stored_array(v.moved(given, place, type_), type_)
    held = v.make("load", (), "f32", "lane", f)
    before = v.stored_array(v.moved(held, place, type_), type_)
    rest = v.make("sub", [own, left.value], "f32", "lane")
    # a walk over all elements changed the state: restore it if the new value is not finite
    stored = v.make(f.storage, [rest], "f32", "lane") if f.storage in HALVES else rest
    finite = v.make("isfinite", [stored], "bool", "lane")
    kept = v.make("where", [finite, rest, before], "f32", "lane")
    after.append(Store("state", f, kept, place=place))
    return Store("state", f, or_nan(v, given, told))


def moves(e: Expr) -> bool:
    """True if an element depends on inputs or states at other places."""
    return any(a.op in ("flat", "lookup", "gather") for a in walk(e))


@contextmanager
def blamed(name: str) -> Iterator[None]:
    """Name this field, state or section in Unsupported errors that name none."""
    try:
        yield
    except Unsupported as why:
        raise why if why.name else Unsupported(str(why), name, why.expr, why.hint) from why
