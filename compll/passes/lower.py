"""A module's kernels as tile programs: encode, decode, check, and a kernel for each round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from operator import add
from typing import Any

from compll.frontend import feedback
from compll.ir.expr import LIBRARY, TABLES, Expr, Type, walk
from compll.ir.layout import cuts, families, is_fixed, starts, tile_of, truncated
from compll.ir.module import HALVES, STATUS, Field, Module
from compll.ir.storage import STORAGES
from compll.ir.tile import (
    GRADIENT,
    USED,
    WRONG,
    Array,
    Domain,
    Kernel,
    Kind,
    Role,
    Store,
    Value,
    Walk,
    When,
)
from compll.numerics import matrices
from compll.numerics.traced import Number
from compll.passes import arrays, selections
from compll.passes.arrays import Arrays, Operation
from compll.passes.fusion import fuse
from compll.passes.selections import Placed
from compll.passes.values import Unsupported, refused

# ---- guards -------------------------------------------------------------------------------------
# Conditions under which a value is needed: `a if c else b` on numbers computes one branch.


def guards(roots: list[Expr]) -> dict[Expr, tuple[Expr, bool]]:
    """For each costly value, a condition that holds wherever the value is used, and its
    value there.

    A condition holds at a value if it holds at every use: at its user, or by the branch of a
    `choose`.
    """
    result: dict[Expr, tuple[Expr, bool]] = {}
    facts: dict[Expr, dict[tuple[Expr, bool], Expr]] = {e: {} for e in roots}
    for e in reversed(list(walk(*roots))):
        facts_here = facts[e]
        chooses = e.op == "choose" and e.type.shape == "scalar"
        for place, a in enumerate(e.args):
            there = dict(facts_here)
            if chooses and place:
                there[e.args[0], place == 1] = e.args[0]
            before = facts.get(a)
            both = there if before is None else {k: v for k, v in before.items() if k in there}
            facts[a] = both
        if facts_here and costly(e) and e.op not in TABLES:
            (_, wanted), condition = list(facts_here.items())[-1]
            result[e] = condition, wanted
    return result


def costly(expr: Expr) -> bool:
    """True if a value takes a walk over all elements (or a sample of them)."""
    total = expr.op.startswith("reduce_") and expr.type.shape == "scalar"
    return expr.op in LIBRARY or (total and expr.args[0].type.shape == "n")


# ---- payload ------------------------------------------------------------------------------------
# A payload's layout as values of the piece, of which ir/layout.py has the sums.
# A payload begins with a header of counts and lengths: a kernel that is given the payload loads
# them, one that stores it has them from its steps.


class Payload:
    """The payload that a kernel stores or is given. Its sums are of Numbers, whose instructions it
    makes values (see numerics/traced.py)."""

    def __init__(self, values: Arrays) -> None:
        self.values, self.kernel, self.module = values, values.kernel, values.kernel.module
        self.role: Role = "incoming" if self.kernel.decodes else "payload"
        #: bytes of the header so far
        self.head = 0

    def lay_out(self) -> None:
        """Set the kernel's counts, sizes and starts. Have it store the payload's header and length,
        or check them."""
        kernel, values = self.kernel, self.values
        kernel.counts = {"": values.make("size", (), "i64", "piece")}
        for s in self.module.selections:
            most = selections.limit(values, s)
            kernel.counts[s.name] = self.of_header("counted", s.name) if s.dynamic else most
        for f in self.module.fields:
            if f.layout.varying:
                kernel.sizes[Array.of(f, self.role)] = self.of_header("length", f.name)
                if kernel.decodes or f.layout.recoded:
                    array = values.contents(f)
                    kernel.sizes[array] = self.value(self.bytes(array))
        *begins, end = starts(self.module, self.head, lambda f: self.bytes(Array.of(f, self.role)))
        for role in (self.role, "incoming") if kernel.kind == "hop" else (self.role,):
            for f, start in zip(self.module.parts, begins, strict=True):
                kernel.starts[Array.of(f, role)] = self.value(start)
        if kernel.kind == "check":
            kernel.steps.append(Store(WRONG, self.misfit(self.value(end))))
        elif not kernel.decodes and kernel.kind != "rounds":
            kernel.steps.append(Store(USED, self.value(end)))

    def of_header(self, op: str, name: str) -> Value:
        """The header's next number: loaded, or stored once a step has made it. Payloads of rounds,
        which are added up, have no header."""
        start, make = self.head, self.values.make
        if self.kernel.decodes:
            self.head += 4
            return make("header", (), "i64", "piece", start)
        result = make(op, (), "i64", "piece", name)
        if self.kernel.kind in ("round", "rounds"):
            return result
        self.head += 4
        array = Array(f"{op} {name}", "payload", STORAGES["uint32"], Domain("scalar"))
        self.kernel.starts[array] = self.value(start)
        self.kernel.steps.append(Store(array, result))
        return result

    def misfit(self, end: Value) -> Value:
        """1 for a payload that does not end where its header says, or with more selected elements
        or bytes of codes than there can be; else 0."""
        kernel, values = self.kernel, self.values
        pairs = [
            (kernel.counts[s.name], selections.limit(values, s))
            for s in self.module.selections if s.dynamic
        ]  # fmt: skip
        pairs += [
            (kernel.sizes[Array.of(f, "incoming")], self.value(self.most(f)))
            for f in self.module.fields if f.layout.recoded
        ]  # fmt: skip
        for family in families(self.module):  # of which an element is in one
            together = reduce(add, (self.number(kernel.counts[name]) for name in family))
            pairs.append((self.value(together), kernel.counts[""]))
        used = values.make("used", (), "i64", "piece")
        wrong = [values.make("ne", (used, end), "bool", "piece")]
        wrong += [values.make("gt", pair, "bool", "piece") for pair in pairs]
        return values.whole(reduce(lambda a, b: values.make("or", (a, b), "bool", "piece"), wrong))

    # sums

    def most(self, field: Field) -> Any:
        """The most bytes of a field whose bytes are made from an array of all codes."""
        count = self.items(self.values.contents(field).domain)
        return field.layout.most_bytes(count, 0, self.kernel.tile)

    def items(self, domain: Domain) -> Any:
        """Items of a domain."""
        if domain.kind == "matrix":
            return self.number(self.values.extents(domain.dims).size)
        if domain.kind in ("scalar", "table"):
            return int(domain.of or 1)
        count, tile = self.number(self.kernel.counts[domain.of]), self.kernel.tile
        return (count + (tile - 1)) // tile if domain.kind == "group" else count

    def bytes(self, array: Array) -> Any:
        """Bytes of an array."""
        if array in self.kernel.sizes:
            return self.number(self.kernel.sizes[array])
        return array.storage.most_bytes(self.items(array.domain), 0, self.kernel.tile)

    def number(self, value: Value) -> Any:
        """A value as a term of sums."""
        return Number(self, value, "i64")

    def value(self, number: Any) -> Value:
        """A sum as a value."""
        return self.const("i64", number) if isinstance(number, int) else number.value

    def const(self, kind: str, number: float, like: Any = None) -> Value:
        """A constant."""
        return self.values.make("const", (), kind, "piece", number)

    def emit(self, op: str, kind: str, *args: Value) -> Value:
        """An instruction."""
        return self.values.make(op, args, kind, "piece")


# ---- array operations ---------------------------------------------------------------------------
# Operators that mix elements, by name: the functions that make their values and steps.

#: calls of a routine of the operator's own name
ROUTINES = ("orthonormal", "chosen", *matrices.OPERATORS)
OPERATIONS: dict[str, Operation] = {
    "field": arrays.payload_field,
    "combined": arrays.combined,
    "matrix": arrays.matrix,
    "flat": arrays.flat,
    "transpose": arrays.transpose,
    "take_columns": arrays.take_columns,
    "random_matrix": arrays.random_matrix,
    "ones": arrays.ones,
    "indices": selections.indices,
    "count_kept": selections.counted,
    "gather": selections.gather,
    "in": selections.inside,
    "scatter": selections.scatter,
    "matmul": arrays.matmul,
    "sum_by": arrays.sum_by,
    **dict.fromkeys(ROUTINES, arrays.routine),
}


# ---- lower --------------------------------------------------------------------------------------

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
        by_part = _kernels(module)
    except Unsupported as why:
        raise refused(module, target, why) from why
    return {name: part for name, part in by_part.items() if part}


def _kernels(module: Module) -> dict[str, list[Kernel]]:
    by_part: dict[str, list[Kernel]] = {
        "first": [], "stateless": [], "hop": [], "cut": [], "payloads": [],
    }  # fmt: skip
    home = by_part["payloads" if module.rounds else "first"]
    for with_states in (True, False):
        if (with_states and not module.states) or (
            not with_states and module.updates and not module.rounds
        ):
            continue
        usual = by_part["first" if with_states or not module.states else "stateless"]
        if module.rounds:
            usual += [added(module, k, with_states) for k in range(len(module.rounds))]
            usual.append(closing(module, with_states))
        kernel = encode(module, with_states)
        (home if module.rounds else usual).append(kernel)
        if hops(module, kernel):
            by_part["hop"].append(encode(module, with_states, "hop"))
    if cuts(module):
        by_part["cut"].append(encode(truncated(module), True, "cut"))
    checked = check(module) if checks(module) else None
    home += [checked] if checked else []
    home += [decode(module, adds, checked) for adds in (False, True)]
    return by_part


def hops(module: Module, encode: Kernel) -> bool:
    """True if decode-add-encode can be one kernel: decode is elementwise, and one walk encodes."""
    walks = [step for step in encode.steps if not isinstance(step, Store)]
    elementwise = module.decoded is not None and not module.selections and is_fixed(module)
    plain = len(walks) == 1 and isinstance(walks[0], Walk) and walks[0].product is None
    return elementwise and plain


def opened(module: Module, kernel: Kernel, **how: bool) -> Arrays:
    """A maker of a kernel's values, which knows the payload's layout."""
    conditions = guards(roots(module)) if how.get("alone") else {}
    values = Arrays(module, kernel, OPERATIONS, conditions=conditions, **how)
    Payload(values).lay_out()
    return values


def roots(module: Module) -> list[Expr]:
    """All that an encode computes."""
    exprs = [f.expr for f in module.fields]
    exprs += [e for s in module.selections for e in (s.key, s.threshold)]
    exprs += [*module.updates.values(), module.decoded]
    return [e for e in exprs if e is not None]


# encode


def encode(module: Module, with_states: bool, kind: Kind = "encode") -> Kernel:
    """The kernel that stores every payload field, with states also these, and the decoded gradient
    if the caller wants it. kind: encode, hop or cut."""
    name = f"{f'{kind}_' * (kind != 'encode')}encode{'_feed' * with_states}"
    kernel = Kernel(name, kind, module, tile_of(module), states=states(module, with_states))
    values = opened(module, kernel, with_states=with_states, alone=True, own=True)
    if kind == "hop":
        values.incoming = incoming(values)
    for f in module.fields:
        with blamed(f.name):
            arrays.store(values, f)
    flag = status(values) if module.status else None
    if module.decoded is not None:
        update(values, module.decoded)
    elif with_states:
        decoded = result(values, flag)
        left = decoded if module.feedback else None
        with blamed(next(iter(module.updates), "")):
            settle(values, decoded, left, back=True, flag=flag)
    fuse(kernel)
    return kernel


def states(module: Module, with_states: bool) -> list[Array]:
    return [Array.of(s, "state") for s in module.states if with_states]


def incoming(values: Arrays) -> Value:
    """The decoded incoming payload; NaN if its status byte tells of a NaN or infinity."""
    reader = Arrays(values.module, values.kernel, OPERATIONS, with_states=False)
    reader.made = values.made
    return or_nan(values, reader.of(values.module.decode), incoming_flag(values))


def incoming_flag(values: Arrays) -> Value | None:
    """The condition that an incoming payload's status byte tells of a NaN or infinity; None if
    payloads have none."""
    if not values.module.status:
        return None
    array = Array.of(STATUS, "incoming")
    return values.truth(values.make("load", (), "i32", "piece", array))


def status(values: Arrays) -> Value:
    """Have the kernel set the status byte if an element of the input is not finite: the condition
    that is returned."""
    size = values.make("magnitude_bits", [values.of(gradient(values.module))], "i32", "element")
    fold = values.make("fold", [size], "i32", "tile", "max")
    values.kernel.steps.append(Walk(folds=[fold]))
    largest = values.make("total", [fold], "i32", "piece", "max")
    least = values.make("const", (), "i32", "piece", INFINITE)
    flag = values.make("ge", [largest, least], "bool", "piece")
    values.kernel.steps.append(Store(Array.of(STATUS, "payload"), values.whole(flag)))
    return flag


def gradient(module: Module) -> Expr:
    """The input of an encode."""
    return module.pool.make("input", (), Type("float", "n"), "g")


def update(values: Arrays, decoded: Expr) -> None:
    """Store new states and the decoded gradient, for a decode that is elementwise."""
    module = values.module
    new = dict(module.updates) if values.with_states else {}
    if values.with_states and module.feedback:
        new[module.feedback_state] = feedback.update(module, gradient(module), decoded)
    selections.store_states(values, {n: e for n, e in new.items() if e.type.shape == "n"})
    if not module.selections:
        back = Store(GRADIENT, values.per_element(values.of(decoded)), back=True)
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
    values = opened(module, kernel, with_states=False)
    placed, steps = result(values), kernel.steps
    flag = incoming_flag(values)
    if isinstance(placed, Placed):
        zero = values.make("const", (), "f32", "piece", 0.0)
        fill = Store(GRADIENT, or_nan(values, zero, flag))
        scattered = Store(GRADIENT, placed.value, place=placed.place, adds=adds)
        walk = Walk([scattered], domain=Domain("kept", placed.selection))
        if flag is None:
            steps += [walk] if adds else [fill, walk]
        else:
            steps += [When(flag, True, [fill]) if adds else fill, When(flag, False, [walk])]
    else:
        if adds:
            placed = values.make("add", [values.load(GRADIENT), placed], "f32", "element")
        steps.append(Walk([Store(GRADIENT, or_nan(values, placed, flag))]))
    fuse(kernel)
    return kernel


def result(values: Arrays, flag: Value | None = None) -> Value | Placed:
    """The decoded gradient; NaN if `flag`, the condition that the input was not finite, holds."""
    decode = values.module.decode
    with blamed("decode"):
        if decode.op == "scatter":
            result = selections.placed(values, decode)
            return replace(result, value=or_nan(values, result.value, flag))
        return or_nan(values, values.per_element(values.of(decode)), flag)


def or_nan(values: Arrays, value: Value, flag: Value | None) -> Value:
    """The value; NaN if `flag`, the condition that the input was not finite, holds."""
    if flag is None:
        return value
    nan = values.make("const", (), "f32", "piece", float("nan"))
    return values.make("where", [flag, nan, value], "f32", value.level)


def check(module: Module) -> Kernel:
    """The kernel that finds payloads with wrong lengths, or positions outside their tensors. Both
    decodes call it with their own arguments, so the three have one list of statics."""
    kernel = Kernel("check", "check", module, tile_of(module))
    selections.check(opened(module, kernel, with_states=False), kernel, module.decode)
    fuse(kernel)
    return kernel


def checks(module: Module) -> bool:
    """True if payloads must be checked before they are decoded."""
    return bool(module.selections) or not is_fixed(module)


# rounds


def added(module: Module, number: int, with_states: bool) -> Kernel:
    """The kernel of round `number`: stores its payload, given the sums of the rounds before."""
    field = next(f for f in module.fields if f.name == module.rounds[number][0])
    name = f"round{number}{'_feed' * with_states}"
    part = replace(module, fields=(field,), status=False)
    kernel = Kernel(name, "round", part, tile_of(module), states=states(module, with_states))
    values = opened(module, kernel, with_states=with_states)
    with blamed(field.name):
        arrays.store(values, field)
    fuse(kernel)
    return kernel


def closing(module: Module, with_states: bool) -> Kernel:
    """The kernel behind the last round: decodes the sums of all rounds into the gradient, and
    updates the states."""
    name = f"rounds{'_feed' * with_states}"
    part = replace(module, fields=(), status=False)
    kernel = Kernel(name, "rounds", part, tile_of(module), states=states(module, with_states))
    encoded = opened(module, kernel, with_states=with_states, own=True)
    values = opened(module, kernel, with_states=with_states, summed=True)
    decoded = result(values)
    left = None
    if with_states and module.feedback:
        left = result(encoded) if module.own else decoded
    settle(values, decoded, left, back=False)
    fuse(kernel)
    return kernel


def settle(
    values: Arrays, decoded: Value | Placed, left: Value | Placed | None, *, back: bool,
    flag: Value | None = None,
) -> None:  # fmt: skip
    """Store decoded values in the gradient, and new values in the states.

    left: the values that the residual subtracts from its input. back: store the gradient only if
    the caller wants that. flag: condition that the input was not finite; decoded values are NaN
    then.
    """
    v, module, steps = values, values.module, values.kernel.steps
    updates = module.updates if v.with_states else {}
    for e in updates.values():
        if e.type.shape == "matrix" or (e.type.shape == "n" and moves(e)):
            v.values_of[e] = v.stored_array(v.of(e), e.type)
    stores = [
        Store(v.states[name], v.per_element(v.of(e)))
        for name, e in updates.items() if e.type.shape == "n"
    ]  # fmt: skip
    numbers = [
        Store(v.states[name], v.of(e))
        for name, e in updates.items() if e.type.shape == "scalar"
    ]  # fmt: skip
    after: list[Store] = []
    if left is not None:
        stores.append(residual(values, left, after, flag))
    if isinstance(decoded, Placed):
        zero = or_nan(v, v.per_element(v.make("const", (), "f32", "piece", 0.0)), flag)
        stores.append(Store(GRADIENT, zero, back=back))
        after.append(Store(GRADIENT, decoded.value, back=back, place=decoded.place))
        steps += [Walk(stores), Walk(after, domain=Domain("kept", decoded.selection))]
    else:
        steps.append(Walk([*stores, Store(GRADIENT, decoded, back=back)]))
    for name, e in updates.items():
        if e.type.shape == "matrix":
            update = v.walk(e.type, Store(v.states[name], v.of(e)))
            steps.append(When(v.fits(e.type), True, [update]))
    steps += numbers


def residual(values: Arrays, left: Value | Placed, after: list[Store], flag: Value | None) -> Store:
    """The store of the residual: input minus `left`. Stores of few elements, which follow, are
    added to `after`."""
    v = values
    f, given = v.states["residual"], v.of(gradient(v.module))
    if not isinstance(left, Placed):
        return Store(f, v.make("sub", [given, left], "f32", "element"))
    place, type_ = left.place, Type("float", "kept", left.selection)
    taken = v.stored_array(v.moved(given, place, type_), type_)
    held = v.load(f)
    before = v.stored_array(v.moved(held, place, type_), type_)
    rest = v.make("sub", [taken, left.value], "f32", "element")
    # a walk over all elements changed the state: restore it if the new value is not finite
    how = f.storage.name
    stored = v.make(how, [rest], "f32", "element") if how in HALVES else rest
    finite = v.make("isfinite", [stored], "bool", "element")
    kept = v.make("where", [finite, rest, before], "f32", "element")
    after.append(Store(f, kept, place=place))
    return Store(f, or_nan(v, given, flag))


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
