"""Memory traffic of kernels that mix elements: bytes that their steps read and write."""

from __future__ import annotations

from collections.abc import Iterator

from compll.ir.expr import Expr
from compll.ir.layout import field_bytes, limit
from compll.ir.matrices import extent, mixes
from compll.ir.module import Field, Module
from compll.ir.rounds import rounds
from compll.ir.static import evaluate
from compll.ir.tile import Call, Extents, Kernel, Op, Value, flat, order, walk_of
from compll.passes import array_kernels
from compll.passes.schedule import schedule
from compll.passes.traffic import Traffic, Walk, traffic

#: elements of the tensor for which sizes are given; steps that move less than SMALL bytes an
#: element are left out
SIZE, SMALL = 1 << 24, 0.1
#: calls that read all of their input before they give a result, as totals do
WHOLE = ("product", "orthonormal", "top_columns", "sum_by")


def traffic_of(module: Module, *, feed: bool) -> Traffic:
    """Memory traffic of an encode, bytes per element of the gradient."""
    if not mixes(module):
        return traffic(schedule(module, feed=feed))
    kernel = array_kernels.encode(module, feed)
    sizes = Sizes(kernel)
    held = sum(s.item_bits / 8 * sizes.of(s.shape, "", s.dims) for s in kernel.states)
    fields = sum(field_bytes(f, module, SIZE, sizes.kept) for f in module.fields)
    found = [one for step in flat(kernel.steps) if (one := sizes.walk(step)) is not None]
    return Traffic(tuple(found), 4.0 + 2 * held + fields / SIZE, max(1, sizes.depth(kernel)))


class Sizes:
    """Bytes that a kernel's steps touch, per element of a gradient of SIZE elements."""

    def __init__(self, kernel: Kernel) -> None:
        module = kernel.module
        self.kept = {s.name: SIZE if s.dynamic else limit(s, {}, SIZE) for s in module.selections}

    def of(self, shape: str, of: str, dims: tuple[Expr, ...]) -> float:
        """Elements of a domain, per element of the gradient."""
        if dims:
            rows, cols = (extent(d, SIZE) for d in dims)  # also sizes that no tensor may have
            return rows * cols / SIZE
        return 0.0 if shape == "scalar" else self.kept[of] / SIZE if of in self.kept else 1.0

    def array(self, f: object) -> float:
        """Bytes of an array, per element of the gradient."""
        if not isinstance(f, Field):
            return 4.0
        return f.item_bits / 8 * self.of(f.shape, f.of, f.dims)

    def domain(self, of: str, matrix: Extents | None) -> float:
        return self.of("", of, matrix.dims if matrix else ())

    def walk(self, step: Op) -> Walk | None:
        """Bytes that a step reads and writes; None if they are few."""
        reads: dict[str, float] = {}
        writes: dict[str, float] = {}
        if isinstance(step, Call):
            for v in (v for view in step.views for v in order([view.value])):
                self.read(v, 1e9, reads)
            writes = {f.name: self.array(f) for f in step.made}
        elif (one := walk_of(step)) is not None:
            size = self.domain(one.of, one.matrix)
            for v in one.values:
                self.read(v, size, reads)
            for s in one.stores:
                if not s.back and (s.field is not None or s.target != "gradient"):
                    writes[s.name] = (s.field.item_bits / 8 if s.field else 4.0) * size
            writes |= {f.name: 4.0 * size for c in one.compacts for f, _ in c.parts}
        read, written = sum(reads.values()), sum(writes.values())
        large = max([0.0, *reads.values(), *writes.values()]) > SMALL
        return Walk(tuple(reads), tuple(writes), read, written) if large else None

    def read(self, v: Value, size: float, found: dict[str, float]) -> None:
        """Add the array that a lane reads to `found`."""
        if v.level == "lane" and v.op in ("load", "unpack", "at"):
            bits = v.attr.item_bits if isinstance(v.attr, Field) else 32
            name = v.attr.name if isinstance(v.attr, Field) else "g"
            found[name] = min(self.array(v.attr), bits / 8 * size)

    def depth(self, kernel: Kernel) -> int:
        """The longest chain of steps over all elements that depend on each other."""
        known: dict[object, int] = {}
        for step in flat(kernel.steps):
            one = walk_of(step)
            roots = [v.value for v in step.views] if isinstance(step, Call) else []
            roots = roots if one is None else one.roots
            before = max((known.get(key(v), 0) for v in order(roots)), default=0)
            if isinstance(step, Call):
                large = any(self.array(f) > SMALL for f in inputs(step))
                known |= dict.fromkeys(step.made, before + (large and step.routine in WHOLE))
            elif one is not None:
                known |= dict.fromkeys(one.folds, before + 1)
                known |= {s.field: before for s in one.stores if s.field is not None}
        return max(known.values(), default=0)


def key(v: Value) -> object:
    """The identity of a value: its array, or the fold of a total."""
    return v.args[0] if v.op == "total" else v.attr if isinstance(v.attr, Field) else v


def inputs(call: Call) -> Iterator[object]:
    """Arrays that a routine reads."""
    return (v.attr for view in call.views for v in order([view.value]) if v.op == "load")


def rounds_text(module: Module) -> Iterator[str]:
    """Lines that describe the rounds to a person."""
    for number, one in enumerate(rounds(module), 1):
        size = one.payload_bytes(10**6)
        yield (
            f"round {number}: the {one.how} of {one.name} over the ranks, "
            f"{size} bytes for n = 1000000"
        )
    if module.when is not None:
        sizes = [10**k for k in range(1, 9) if evaluate(module.when, {"n": 10**k})]
        yield f"worth while for {min(sizes) if sizes else 'no'} elements or more, by powers of ten"
