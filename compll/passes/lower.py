"""Translation of a program of passes to tile programs."""

from __future__ import annotations

from compll.ir.capacity import capped, cuts
from compll.ir.layout import is_fixed, tile_of
from compll.ir.matrices import mixes
from compll.ir.module import Module
from compll.ir.program import Pass, Program, Sink, Unsupported
from compll.ir.tile import Kernel, Op, Store, Stream, Value, Walk, When
from compll.passes import array_kernels, selections
from compll.passes.refusal import refused
from compll.passes.schedule import hops, schedule
from compll.passes.thresholds import Thresholds
from compll.passes.values import Values


def encode(program: Program, name: str, *, feed: bool, hop: bool = False) -> Kernel:
    """The kernel of an encode. hop: its input is the gradient plus an incoming payload, decoded."""
    module = program.module
    kernel = Kernel(name, module, tile_of(module), states=list(module.states) if feed else [])
    values = Values(module, kernel)
    kernel.limits = {s.name: selections.limit(values, s) for s in module.selections}
    if hop:
        values.incoming = _incoming(values)
    thresholds = Thresholds(values, program.guards)
    selecting = selections.Selecting(values, thresholds)
    for one in program.passes:
        kernel.steps += thresholds.steps(one)
        usual = _walk(values, program, one)
        totals = selecting.select(one, usual)
        kernel.steps += [*_guarded(values, program, one, usual), *totals]
    kernel.steps += selecting.end()
    for sink in program.scalars:
        kernel.steps.append(values.stored(sink))
    kernel.steps += _recoded(values)
    return kernel


def _recoded(values: Values) -> list[Stream]:
    """Steps that turn arrays of codes into fields of varying length, or back."""
    return [Stream(f, values.codes_of(f)) for f in values.module.fields if f.recoded]


def _incoming(values: Values) -> Value:
    """The decoded incoming payload; NaN if its status byte tells of a NaN or infinity."""
    value = values.of(values.module.decode)
    if not values.module.status:
        return value
    told = values.make("told", (), "bool", "piece")
    nan = values.make("const", (), "f32", "piece", float("nan"))
    return values.make("where", [told, nan, value], "f32", "lane")


def _walk(values: Values, program: Program, one: Pass) -> Walk:
    found = Walk([store for s in one.sinks if (store := _store(values, one, s)) is not None])
    found.folds = [values.fold(e) for e in one.reductions if e.type.shape == "scalar"]
    if one.status:
        size = values.make("magnitude_bits", [values.of(program.gradient)], "i32", "lane")
        found.folds.append(values.make("fold", [size], "i32", "tile", "max"))
        values.kernel.bad = values.make("total", [found.folds[-1]], "i32", "piece", "max")
    return found


def _store(values: Values, one: Pass, sink: Sink) -> Store | None:
    """The store of a sink in a walk; None if the walk stores nothing for it."""
    if any(selections.mends(sink, s, one) for s in one.selections):
        return selections.rest(values, sink)
    return values.stored(sink)


def _guarded(values: Values, program: Program, one: Pass, usual: Walk) -> list[Op]:
    """A pass's walk, under its condition if it has one; no step if the walk does nothing."""
    guard = program.guard(one)
    if not (usual.roots or usual.compacts):
        return []
    if guard is None:
        return [usual]
    condition, wanted = guard
    return [When(values.of(condition), wanted, [usual])]


def decode(module: Module, name: str, *, add: bool, check: Kernel | None) -> Kernel:
    """The kernel of a decode. check: the kernel that it calls, with which it shares statics."""
    kernel = Kernel(name, module, tile_of(module), statics=check.statics if check else [])
    values = Values(module, kernel)
    kernel.limits = {s.name: selections.limit(values, s) for s in module.selections}
    kernel.steps += _recoded(values)
    if module.decode.op == "scatter":
        selections.scattered(values, kernel, module.decode, add=add)
        return kernel
    value = values.lanes(values.of(module.decode))
    kernel.steps += values.spread
    if add:
        there = values.make("load", (), "f32", "lane", "g")
        value = values.make("add", [there, value], "f32", "lane")
    kernel.steps.append(Walk([Store("gradient", None, value)]))
    return kernel


def check(module: Module) -> Kernel:
    """The kernel that finds payloads with wrong lengths, or positions outside their tensors. Both
    decodes call it with their own arguments, so the three have one list of statics."""
    if mixes(module):
        return array_kernels.check(module)
    kernel = Kernel("check", module, tile_of(module))
    values = Values(module, kernel)
    kernel.limits = {s.name: selections.limit(values, s) for s in module.selections}
    kernel.steps += _recoded(values)
    if module.selections:
        selections.check(values, kernel, module.decode)
    return kernel


def checks(module: Module) -> bool:
    """True if payloads must be checked before they are decoded."""
    return bool(module.selections) or not is_fixed(module) or mixes(module)


def kernels(module: Module, target: str = "cpu") -> dict[str, list[Kernel]]:
    """A spec's tile programs, in groups that are compiled together. Raises SpecError for the
    target.

    stateless: for a spec with states, the encode without them, which training never needs. hop:
    encodes of the gradient plus a payload, if one walk is enough: each walk would decode again.
    cut: the encode whose filters keep at most a given number of elements.
    """
    try:
        return array_kernels.kernels(module) if mixes(module) else _kernels(module)
    except Unsupported as why:
        raise refused(module, target, why) from why


def _kernels(module: Module) -> dict[str, list[Kernel]]:
    found: dict[str, list[Kernel]] = {"first": [], "stateless": [], "hop": [], "cut": []}
    for feed in (True, False):
        if (feed and not module.states) or (not feed and module.updates):
            continue
        program = schedule(module, feed=feed)
        name = "encode_feed" if feed else "encode"
        later = module.states and not feed
        found["stateless" if later else "first"].append(encode(program, name, feed=feed))
        if hops(module) and len(program.passes) == 1 and is_fixed(module):
            found["hop"].append(encode(program, f"hop_{name}", feed=feed, hop=True))
    if cuts(module):
        program = schedule(capped(module), feed=True)
        found["cut"].append(encode(program, "cut_encode_feed", feed=True))
    checked = check(module) if checks(module) else None
    found["first"] += [checked] if checked else []
    for add in (False, True):
        name = f"decode_{'add' if add else 'set'}"
        found["first"].append(decode(module, name, add=add, check=checked))
    return found
