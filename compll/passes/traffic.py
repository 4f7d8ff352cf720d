"""Memory traffic of an encode: bytes that its walks move, beside the least that any program
must."""

from __future__ import annotations

from dataclasses import dataclass

from compll.ir.expr import Expr, leaves, walk
from compll.ir.module import Module
from compll.ir.program import LIBRARY, REDUCTIONS, Program, Sink


@dataclass(frozen=True)
class Walk:
    """A walk over memory: the names of elements that it reads and writes, and bytes per element.

    needs: values of the whole tensor that earlier walks made for it.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    read: float
    written: float
    needs: tuple[Expr, ...] = ()


@dataclass(frozen=True)
class Traffic:
    """Every walk of an encode, beside the least that any program must do.

    least: bytes per element if each input is read and each result written once. chain: walks that
    no order can avoid, since each needs a total of the one before.
    """

    walks: tuple[Walk, ...]
    least: float
    chain: int

    @property
    def passes(self) -> tuple[tuple[float, float], ...]:
        """Bytes per element read and written by each walk."""
        return tuple((w.read, w.written) for w in self.walks)

    @property
    def moved(self) -> float:
        """All bytes moved per element."""
        return sum(w.read + w.written for w in self.walks)


def traffic(program: Program) -> Traffic:
    """Memory traffic of an encode (without write-back), bytes per element of the gradient."""
    walks, inputs, written, final = list[Walk](), set[str](), 0.0, list[Expr]()
    for one in program.passes:
        library = [e for e in one.scalars if _walks(e, program)]
        walks += [_library_walk(e, program.module) for e in library]
        sinks = [s for s in one.sinks if s.kind != "back" and not _kept_only(s)]
        keys = [e for s in one.selections for e in (s.key, s.threshold) if e is not None]
        used = [s.expr for s in sinks] + keys
        reads = set(leaves(*used, *one.reductions))
        sizes = {s.name: _written(s, program.module) for s in sinks}
        if not reads and not sizes:
            continue  # for the write-back alone, which an encode for training does not need
        size, wrote = _read(reads, program.module), sum(sizes.values())
        needs = _needs(used + [e.args[0] for e in one.reductions])
        walks.append(Walk(tuple(sorted(reads)), tuple(sizes), size, wrote, needs))
        inputs, written, final = inputs | reads, written + wrote, final + used
    least = _read(inputs, program.module) + written
    return Traffic(tuple(walks), least, _chain(final, program))


def _needs(roots: list[Expr]) -> tuple[Expr, ...]:
    """Values of the whole tensor that these expressions use."""
    found: dict[int, Expr] = {}
    seen: set[int] = set()

    def visit(e: Expr) -> None:
        if id(e) in seen:
            return
        seen.add(id(e))
        if e.type.shape in ("scalar", "table"):
            found[id(e)] = e
        for a in e.args if e.type.shape not in ("scalar", "table") else ():
            visit(a)

    for root in roots:
        visit(root)
    return tuple(found.values())


def _chain(final: list[Expr], program: Program) -> int:
    """The longest chain of walks of which each needs a total that the one before computes.

    final: expressions that the walks store and select by.
    """
    depth: dict[int, int] = {}
    totals = [s.expr for s in program.scalars]
    for e in walk(*final, *totals):
        total = e.op in REDUCTIONS and e.type.shape == "scalar" and e.args[0].type.shape == "n"
        own = total or _walks(e, program)
        depth[id(e)] = own + max((depth[id(a)] for a in e.args), default=0)
    last = max((1 + depth[id(e)] for e in final), default=0)
    return max(last, max((depth[id(e)] for e in totals), default=0))


def _kept_only(sink: Sink) -> bool:
    """True if only the selected elements of a state change: too few to count."""
    rest = sink.expr.args[2] if sink.expr.op == "where" and sink.expr.args[0].op == "in" else None
    return rest is not None and rest.op == "state" and rest.value == sink.name


def _walks(expr: Expr, program: Program) -> bool:
    """True if a tensor-level value is a library call over all elements in every step."""
    guarded = id(expr) in program.guards
    return expr.op in LIBRARY and expr.args[0].op != "sample" and not guarded


def _library_walk(expr: Expr, module: Module) -> Walk:
    """The walk of a library call: adjust reads once; the others also write keys to scratch
    and read them again."""
    reads = set(leaves(*expr.args))
    size, needs = _read(reads, module), _needs(list(expr.args))
    if expr.op in ("kth_largest", "quantiles"):
        return Walk((*sorted(reads), "keys"), ("keys",), size + 4.0, 4.0, needs)
    return Walk(tuple(sorted(reads)), (), size, 0.0, needs)


def _read(names: set[str], module: Module) -> float:
    """Bytes per element of the named arrays: gradient and states."""
    kept = {s.name: s.item_bits / 8 for s in module.states}
    return sum(kept.get(name, 4.0) for name in names)


def _written(sink: Sink, module: Module) -> float:
    """Bytes per element that a walk stores for a sink."""
    if sink.kind == "state":
        return next(s.item_bits / 8 for s in module.states if s.name == sink.name)
    return _bits(sink, module) / 8


def _bits(sink: Sink, module: Module) -> float:
    if sink.field is None:
        return 0.0
    per = 1.6 if sink.field.trits else sink.field.item_bits
    return per / module.group if sink.field.shape == "group" else float(per)


@dataclass(frozen=True)
class Merge:
    """Bytes per element of the gradient that decoding moves, alone and together with an encode.

    fused: decode, add and encode as one kernel; None if they cannot be one. apart: as two kernels.
    """

    payload: float
    decode: float
    add: float
    apart: float
    fused: float | None


def merge_traffic(module: Module, encode: Traffic, one_kernel: bool) -> Merge:
    """Traffic of a dense payload: the payload is read once; the gradient is written, or read and
    written, once.

    A fused kernel neither writes the sum nor reads it again.
    """
    parts = [f for f in module.fields if f.shape in ("n", "group")]
    sizes = [_bits(Sink("field", f.name, f.expr, f), module) / 8 for f in parts if f.expr]
    payload = sum(sizes)
    apart = payload + 8 + encode.moved
    fused = payload + encode.moved if one_kernel else None
    return Merge(payload, payload + 4, payload + 8, apart, fused)
