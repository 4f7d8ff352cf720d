"""A module's kernels as tile programs: encode, decode, check, and a kernel for each round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from compll.ir.capacity import capped, cuts
from compll.ir.expr import Expr, Type, walk
from compll.ir.layout import is_fixed, tile_of
from compll.ir.module import HALVES, STATUS, Module
from compll.ir.tile import GRADIENT, Array, Domain, Kernel, Kind, Store, Value, Walk, When
from compll.passes import array_fields, feedback, selections
from compll.passes.array_operations import OPERATIONS
from compll.passes.arrays import Arrays
from compll.passes.fusion import fuse
from compll.passes.guards import guards
from compll.passes.payload import Payload
from compll.passes.refusal import Unsupported, refused
from compll.passes.selections import Placed

#: the smallest bits, without the sign, of a float that is not finite
INFINITE = 0x7F800000


def kernels(module: Module, target: str = "cpu") -> dict[str, list[Kernel]]:
    """A spec's tile programs, in groups that are compiled together. Raises SpecError for the
    target.

    stateless: for a spec with states, the encode without them, which training never needs. hop:
    encodes of the gradient plus a payload, if one walk is enough: each walk would decode again.
    cut: the encode whose filters keep at most a given number of elements. payloads: if ranks
    combine in rounds, whole payloads, which tests and files need.
    """
    try:
        found = _kernels(module)
    except Unsupported as why:
        raise refused(module, target, why) from why
    return {name: part for name, part in found.items() if part}


def _kernels(module: Module) -> dict[str, list[Kernel]]:
    found: dict[str, list[Kernel]] = {
        "first": [], "stateless": [], "hop": [], "cut": [], "payloads": [],
    }  # fmt: skip
    home = found["payloads" if module.rounds else "first"]
    for fed in (True, False):
        if (fed and not module.states) or (not fed and module.updates and not module.rounds):
            continue
        usual = found["first" if fed or not module.states else "stateless"]
        if module.rounds:
            usual += [added(module, k, fed) for k in range(len(module.rounds))]
            usual.append(closing(module, fed))
        one = encode(module, fed)
        (home if module.rounds else usual).append(one)
        if hops(module, one):
            found["hop"].append(encode(module, fed, "hop"))
    if cuts(module):
        found["cut"].append(encode(capped(module), True, "cut"))
    checked = check(module) if checks(module) else None
    home += [checked] if checked else []
    home += [decode(module, adds, checked) for adds in (False, True)]
    return found


def hops(module: Module, encode: Kernel) -> bool:
    """True if decode-add-encode can be one kernel: decode is elementwise, and one walk encodes."""
    walks = [step for step in encode.steps if not isinstance(step, Store)]
    elementwise = module.decoded is not None and not module.selections and is_fixed(module)
    return elementwise and len(walks) == 1 and isinstance(walks[0], Walk)


def opened(module: Module, kernel: Kernel, **how: bool) -> Arrays:
    """A maker of a kernel's values, which knows the payload's layout."""
    conditions = guards(roots(module)) if how.get("alone") else {}
    values = Arrays(module, kernel, OPERATIONS, conditions=conditions, **how)
    Payload(values).lay_out()
    return values


def roots(module: Module) -> list[Expr]:
    """All that an encode computes."""
    found = [f.expr for f in module.fields]
    found += [e for s in module.selections for e in (s.key, s.threshold)]
    found += [*module.updates.values(), module.decoded]
    return [e for e in found if e is not None]


# encode


def encode(module: Module, fed: bool, kind: Kind = "encode") -> Kernel:
    """The kernel that stores every payload field, with states also these, and the decoded gradient
    if the caller wants it. kind: encode, hop or cut."""
    name = f"{f'{kind}_' * (kind != 'encode')}encode{'_feed' * fed}"
    kernel = Kernel(name, kind, module, tile_of(module), states=states(module, fed))
    values = opened(module, kernel, fed=fed, alone=True, own=True)
    if kind == "hop":
        values.incoming = incoming(values)
    for f in module.fields:
        with blamed(f.name):
            array_fields.store(values, f)
    told = status(values) if module.status else None
    if module.decoded is not None:
        update(values, module.decoded)
    elif fed:
        decoded = result(values, told)
        left = decoded if module.feedback else None
        with blamed(next(iter(module.updates), "")):
            settle(values, decoded, left, back=True, told=told)
    fuse(kernel)
    return kernel


def states(module: Module, fed: bool) -> list[Array]:
    return [Array.of(s, "state") for s in module.states if fed]


def incoming(values: Arrays) -> Value:
    """The decoded incoming payload; NaN if its status byte tells of a NaN or infinity."""
    reader = Arrays(values.module, values.kernel, OPERATIONS, fed=False)
    reader.made = values.made
    return or_nan(values, reader.of(values.module.decode), told_by(values))


def told_by(values: Arrays) -> Value | None:
    """The condition that an incoming payload's status byte tells of a NaN or infinity; None if
    payloads have none."""
    if not values.module.status:
        return None
    array = Array.of(STATUS, "incoming")
    return values.truth(values.make("load", (), "i32", "piece", array))


def status(values: Arrays) -> Value:
    """Have the kernel set the status byte if an element of the input is not finite: the condition
    that is returned."""
    size = values.make("magnitude_bits", [values.of(gradient(values.module))], "i32", "lane")
    fold = values.make("fold", [size], "i32", "tile", "max")
    values.kernel.steps.append(Walk(folds=[fold]))
    largest = values.make("total", [fold], "i32", "piece", "max")
    least = values.make("const", (), "i32", "piece", INFINITE)
    told = values.make("ge", [largest, least], "bool", "piece")
    values.kernel.steps.append(Store(Array.of(STATUS, "payload"), values.whole(told)))
    return told


def gradient(module: Module) -> Expr:
    """The input of an encode."""
    return module.pool.make("input", (), Type("float", "n"), "g")


def update(values: Arrays, decoded: Expr) -> None:
    """Store new states and the decoded gradient, for a decode that is elementwise."""
    module = values.module
    new = dict(module.updates) if values.fed_states else {}
    if values.fed_states and module.feedback:
        new[module.fed_state] = feedback.update(module, gradient(module), decoded)
    selections.store_states(values, {n: e for n, e in new.items() if e.type.shape == "n"})
    if not module.selections:
        back = Store(GRADIENT, values.lanes(values.of(decoded)), back=True)
        values.kernel.steps.append(Walk([back]))
    for name, e in new.items():
        if e.type.shape == "scalar":
            values.kernel.steps.append(Store(values.states[name], values.of(e)))


# decode


def decode(module: Module, adds: bool, check: Kernel | None) -> Kernel:
    """The kernel from a payload to the gradient; `adds`: adds to it. check: the kernel that it
    calls, with which it shares statics."""
    kind: Kind = "add" if adds else "set"
    kernel = Kernel(
        f"decode_{kind}", kind, module, tile_of(module), statics=check.statics if check else []
    )
    values = opened(module, kernel, fed=False)
    found, steps = result(values), kernel.steps
    told = told_by(values)
    if isinstance(found, Placed):
        zero = values.make("const", (), "f32", "piece", 0.0)
        fill = Store(GRADIENT, or_nan(values, zero, told))
        scattered = Store(GRADIENT, found.value, place=found.place, adds=adds)
        walk = Walk([scattered], domain=Domain("kept", found.selection))
        if told is None:
            steps += [walk] if adds else [fill, walk]
        else:
            steps += [When(told, True, [fill]) if adds else fill, When(told, False, [walk])]
    else:
        if adds:
            found = values.make("add", [values.load(GRADIENT), found], "f32", "lane")
        steps.append(Walk([Store(GRADIENT, or_nan(values, found, told))]))
    fuse(kernel)
    return kernel


def result(values: Arrays, told: Value | None = None) -> Value | Placed:
    """The decoded gradient; NaN if `told`, the condition that the input was not finite, holds."""
    decode = values.module.decode
    with blamed("decode"):
        if decode.op == "scatter":
            found = selections.placed(values, decode)
            return replace(found, value=or_nan(values, found.value, told))
        return or_nan(values, values.lanes(values.of(decode)), told)


def or_nan(values: Arrays, value: Value, told: Value | None) -> Value:
    """The value; NaN if `told`, the condition that the input was not finite, holds."""
    if told is None:
        return value
    nan = values.make("const", (), "f32", "piece", float("nan"))
    return values.make("where", [told, nan, value], "f32", value.level)


def check(module: Module) -> Kernel:
    """The kernel that finds payloads with wrong lengths, or positions outside their tensors. Both
    decodes call it with their own arguments, so the three have one list of statics."""
    kernel = Kernel("check", "check", module, tile_of(module))
    selections.check(opened(module, kernel, fed=False), kernel, module.decode)
    fuse(kernel)
    return kernel


def checks(module: Module) -> bool:
    """True if payloads must be checked before they are decoded."""
    return bool(module.selections) or not is_fixed(module)


# rounds


def added(module: Module, number: int, fed: bool) -> Kernel:
    """The kernel of round `number`: stores its payload, given the sums of the rounds before."""
    field = next(f for f in module.fields if f.name == module.rounds[number][0])
    name = f"round{number}{'_feed' * fed}"
    part = replace(module, fields=(field,), status=False)
    kernel = Kernel(name, "round", part, tile_of(module), states=states(module, fed))
    values = opened(module, kernel, fed=fed)
    with blamed(field.name):
        array_fields.store(values, field)
    fuse(kernel)
    return kernel


def closing(module: Module, fed: bool) -> Kernel:
    """The kernel behind the last round: decodes the sums of all rounds into the gradient, and
    updates the states."""
    name = f"rounds{'_feed' * fed}"
    part = replace(module, fields=(), status=False)
    kernel = Kernel(name, "rounds", part, tile_of(module), states=states(module, fed))
    own = opened(module, kernel, fed=fed, own=True)
    values = opened(module, kernel, fed=fed, summed=True)
    decoded = result(values)
    left = None
    if fed and module.feedback:
        left = result(own) if module.own else decoded
    settle(values, decoded, left, back=False)
    fuse(kernel)
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
        Store(v.states[name], v.lanes(v.of(e)))
        for name, e in updates.items() if e.type.shape == "n"
    ]  # fmt: skip
    numbers = [
        Store(v.states[name], v.of(e))
        for name, e in updates.items() if e.type.shape == "scalar"
    ]  # fmt: skip
    after: list[Store] = []
    if left is not None:
        stores.append(residual(values, left, after, told))
    if isinstance(decoded, Placed):
        zero = or_nan(v, v.lanes(v.make("const", (), "f32", "piece", 0.0)), told)
        stores.append(Store(GRADIENT, zero, back=back))
        after.append(Store(GRADIENT, decoded.value, back=back, place=decoded.place))
        steps += [Walk(stores), Walk(after, domain=Domain("kept", decoded.selection))]
    else:
        steps.append(Walk([*stores, Store(GRADIENT, decoded, back=back)]))
    for name, e in updates.items():
        if e.type.shape == "matrix":
            one = v.walk(e.type, Store(v.states[name], v.of(e)))
            steps.append(When(v.fits(e.type), True, [one]))
    steps += numbers


def residual(values: Arrays, left: Value | Placed, after: list[Store], told: Value | None) -> Store:
    """The store of the residual: input minus `left`. Stores of few elements, which follow, are
    added to `after`."""
    v = values
    f, given = v.states["residual"], v.of(gradient(v.module))
    if not isinstance(left, Placed):
        return Store(f, v.make("sub", [given, left], "f32", "lane"))
    place, type_ = left.place, Type("float", "kept", left.selection)
    own = v.stored_array(v.moved(given, place, type_), type_)
    held = v.load(f)
    before = v.stored_array(v.moved(held, place, type_), type_)
    rest = v.make("sub", [own, left.value], "f32", "lane")
    # a walk over all elements changed the state: restore it if the new value is not finite
    how = f.storage.name
    stored = v.make(how, [rest], "f32", "lane") if how in HALVES else rest
    finite = v.make("isfinite", [stored], "bool", "lane")
    kept = v.make("where", [finite, rest, before], "f32", "lane")
    after.append(Store(f, kept, place=place))
    return Store(f, or_nan(v, given, told))


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
