"""From a program of passes to tile programs.

What tile programs do not have yet raises NotLowered, here, in values.py and in selections.py.
"""

from __future__ import annotations

from compll.ir.capacity import capped, cuts
from compll.ir.layout import is_fixed, tile_of
from compll.ir.module import Module
from compll.ir.program import Pass, Program
from compll.ir.tile import Kernel, NotLowered, Store, Stream, Value, Walk
from compll.passes import selections
from compll.passes.schedule import hops, schedule
from compll.passes.values import SHAPES, Values


def _whole(module: Module) -> None:
    """Raise NotLowered for what is not made of tiles alone."""
    if module.arrays:
        raise NotLowered("matrices and rounds")
    selections.refuse(module)
    for f in (*module.fields, *module.states):
        if f.shape not in SHAPES:
            raise NotLowered(f"a field {f.storage}[{f.shape}]")
    if any(s.shape != "n" for s in module.states):
        raise NotLowered("a state per tensor")


def encode(program: Program, name: str, *, feed: bool, hop: bool = False) -> Kernel:
    """The kernel of an encode; `hop`: of what is there plus what a payload decodes to."""
    module = program.module
    _whole(module)
    kernel = Kernel(name, module, tile_of(module), states=list(module.states) if feed else [])
    values = Values(module, kernel)
    kernel.limits = {s.name: selections.limit(values, s) for s in module.selections}
    if hop:
        values.incoming = _incoming(values)
    for one in program.passes:
        usual = _walk(values, program, one)
        if one.selections:
            selections.encode(values, program, one, usual)
        else:
            kernel.steps.append(usual)
    for sink in program.scalars:
        kernel.steps.append(values.stored(sink))
    kernel.steps += _runs(values)
    return kernel


def _runs(values: Values) -> list[Stream]:
    """What shortens or lengthens runs of trits."""
    runs = [f for f in values.module.fields if f.storage == "runs"]
    return [Stream(f, values.bytes_of_trits(f)) for f in runs]


def _incoming(values: Values) -> Value:
    """What the payload that is taken in decodes to: NaN where it tells of a NaN or infinity."""
    value = values.of(values.module.decode)
    if not values.module.status:
        return value
    told = values.make("told", (), "bool", "piece")
    nan = values.make("const", (), "f32", "piece", float("nan"))
    return values.make("where", [told, nan, value], "f32", "lane")


def _walk(values: Values, program: Program, one: Pass) -> Walk:
    if program.guard(one) is not None:
        raise NotLowered("a walk that is not always wanted")
    found = Walk([values.stored(s) for s in one.sinks])
    if values.module.group == 0:
        found.folds = [values.fold(e) for e in one.reductions]
    if one.status:
        size = values.make("magnitude_bits", [values.of(program.gradient)], "i32", "lane")
        found.folds.append(values.make("fold", [size], "i32", "tile", "max"))
        values.kernel.bad = values.make("total", [found.folds[-1]], "i32", "piece", "max")
    return found


def decode(module: Module, name: str, *, add: bool) -> Kernel:
    """The kernel of a decode."""
    _whole(module)
    kernel = Kernel(name, module, tile_of(module), adds=add)
    values = Values(module, kernel)
    kernel.limits = {s.name: selections.limit(values, s) for s in module.selections}
    kernel.steps += _runs(values)
    if module.decode.op == "scatter":
        selections.scattered(values, kernel, module.decode, add=add)
        return kernel
    value = values.lanes(values.of(module.decode))
    if add:
        there = values.make("load", (), "f32", "lane", "g")
        value = values.make("add", [there, value], "f32", "lane")
    kernel.steps.append(Walk([Store("gradient", None, value)]))
    return kernel


def check(module: Module) -> Kernel:
    """The kernel that finds payloads with wrong lengths, or positions outside their tensors."""
    kernel = Kernel("check", module, tile_of(module))
    values = Values(module, kernel)
    kernel.limits = {s.name: selections.limit(values, s) for s in module.selections}
    kernel.steps += _runs(values)
    if module.selections:
        selections.check(values, kernel, module.decode)
    return kernel


def kernels(module: Module) -> dict[str, list[Kernel]]:
    """A spec's tile programs, by what is compiled together. Raises NotLowered, Unsupported.

    stateless: of a spec with states, the encode without them, which training never needs. hop:
    encodes that take a payload in, where one walk is enough: several would decode in each. cut: the
    encode whose filters keep as many elements as it is told.
    """
    _whole(module)
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
    if module.selections or not is_fixed(module):
        found["first"].append(check(module))  # which the decodes call first
    for add in (False, True):
        name = "decode_add" if add else "decode_set"
        found["first"].append(decode(module, name, add=add))
    return found
