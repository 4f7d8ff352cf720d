"""Memory traffic of specs that are computed an array at a time (see [Note: arrays])."""

from __future__ import annotations

from collections.abc import Iterator

from compll.ir import Expr, Module, walk
from compll.layout import field_bytes
from compll.matrices import extents
from compll.passes import schedule
from compll.static import evaluate
from compll.traffic import Traffic, Walk, traffic

#: elements of the tensor for which sizes are given; a smaller array does not count as a walk
SIZE, SMALL = 1 << 24, 0.1
VIEWS = ("transpose", "flat", "lift")


def traffic_of(module: Module, *, feed: bool) -> Traffic:
    """Memory traffic of an encode, in passes or an array at a time."""
    return array_traffic(module) if module.arrays else traffic(schedule(module, feed=feed))


def array_traffic(module: Module) -> Traffic:
    """What every operator over large arrays reads and writes, bytes per element of the gradient."""
    names = {id(e): name for name, e in module.bindings.items() if e.args}
    walks = [one for e in steps(module) for one in _walk(e, names)]
    if module.feedback:
        walks = [Walk(("g", "residual"), ("input",), 8.0, 4.0), *walks]
        walks.append(Walk(("input", "decoded"), ("residual",), 8.0, 4.0))
    sizes = [field_bytes(f, module, SIZE, 0) / SIZE for f in module.fields]
    least = 4.0 + 8.0 * module.feedback + sum(sizes)
    return Traffic(tuple(walks), least, max(_depths(module).values(), default=0))


def steps(module: Module) -> Iterator[Expr]:
    """What is computed, in order: every payload field, the decode that feedback needs, updates."""
    roots = [f.expr for f in module.fields if f.expr is not None]
    roots += [module.decode] if module.feedback else []
    for e in walk(*roots, *module.updates.values()):
        if e.args and e.type.shape != "static":
            yield e


def _bytes(e: Expr) -> float:
    """Bytes of a value, for each element of the gradient."""
    if e.type.shape == "matrix":
        rows, cols = extents(e.type.dims, SIZE)
        return 4.0 * rows * cols / SIZE
    return 4.0 if e.type.shape == "n" else 0.0


def _source(e: Expr) -> Expr:
    """What a view looks at."""
    while e.op in VIEWS and e.args:
        e = e.args[0]
    return e


def _walk(e: Expr, names: dict[int, str]) -> Iterator[Walk]:
    reads = [a for a in map(_source, e.args) if _bytes(a) > SMALL]
    if e.op in VIEWS or (_bytes(e) <= SMALL and not reads):
        return
    called = [names.get(id(a), str(a.value or a.op)) for a in reads]
    made = names.get(id(e), e.op)
    yield Walk(tuple(called), (made,), sum(map(_bytes, reads)), _bytes(e))


def _depths(module: Module) -> dict[int, int]:
    """For every value, how many walks over all elements must come before it is there."""
    by_name = {f.name: f.expr for f in module.fields if f.expr is not None}
    depth: dict[int, int] = {}
    for e in steps(module):
        for leaf in walk(e):
            if id(leaf) not in depth:
                before = [depth.get(id(a), 0) for a in leaf.args]
                if leaf.op in ("combined", "field"):
                    before = [depth.get(id(by_name[str(leaf.value)]), 0)]
                whole = leaf.op == "matmul" and max(map(_bytes, (leaf, *leaf.args))) > SMALL
                depth[id(leaf)] = whole + max(before, default=0)
    return depth


def rounds_text(module: Module) -> Iterator[str]:
    """The rounds, for people."""
    by_name = {f.name: f for f in module.fields}
    for number, (name, how) in enumerate(module.rounds, 1):
        size = field_bytes(by_name[name], module, 10**6, 0)
        yield f"round {number}: the {how} of {name} over the ranks, {size} bytes for n = 1000000"
    if module.when is not None:
        sizes = [10**k for k in range(1, 9) if evaluate(module.when, {"n": 10**k})]
        yield f"worth while for {min(sizes) if sizes else 'no'} elements or more, by powers of ten"
