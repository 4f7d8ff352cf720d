"""Memory traffic of specs that are computed an array at a time (see [Note: arrays])."""

from __future__ import annotations

from collections.abc import Iterator

from compll.ir.expr import Expr, walk
from compll.ir.layout import field_bytes, limit
from compll.ir.matrices import extent
from compll.ir.module import Module
from compll.ir.rounds import rounds
from compll.ir.static import evaluate
from compll.passes.array_steps import (
    arrays,
    elementwise,
    last_product,
    leaves,
    of_gradient,
    outcomes,
    ranked,
    steps,
    writes_input,
)
from compll.passes.schedule import schedule
from compll.passes.traffic import Traffic, Walk, traffic

#: elements of the tensor for which sizes are given; a smaller array does not count as a walk
SIZE, SMALL = 1 << 24, 0.1
VIEWS = ("transpose", "flat", "lift", "matrix")


def traffic_of(module: Module, *, feed: bool) -> Traffic:
    """Memory traffic of an encode, in passes or an array at a time."""
    return array_traffic(module) if module.arrays else traffic(schedule(module, feed=feed))


def array_traffic(module: Module) -> Traffic:
    """What every step over large arrays reads and writes, bytes per element of the gradient.

    Elementwise operators up to the next array are one step.
    """
    names = {id(e): name for name, e in module.bindings.items() if e.args}
    sized = Sizes(module)
    kept = {id(e) for e in arrays(*outcomes(module))}
    single = [e for e in steps(module) if not elementwise(e) or id(e) in kept]
    written = module.feedback and writes_input(module, SIZE)
    fed = [e for e in single if module.feedback and fed_by(e, written)]
    last = last_product(module) if module.feedback and not module.own else None
    held = next((s.item_bits / 8 for s in module.states if s.name == "residual"), 4.0)
    both = 4.0 + held
    walks = [
        sized.fed(e, names, both) if e in fed else one
        for e in single
        if e is not last
        for one in sized.walk(e, names)
    ]
    if written:
        walks = [Walk(("g", "residual"), ("input",), both, 4.0), *walks]
    if last is not None or (module.feedback and not written):
        walks.append(Walk(("g", "residual"), ("residual",), both, held))
    elif module.feedback:
        walks.append(Walk(("input", "decoded"), ("residual",), 8.0, held))
    sizes = [field_bytes(f, module, SIZE, sized.kept.get(f.of, 0)) / SIZE for f in module.fields]
    least = 4.0 + 2 * held * module.feedback + sum(sizes)
    return Traffic(tuple(walks), least, max(sized.depths().values(), default=0))


def fed_by(e: Expr, written: bool) -> bool:
    """Whether a step reads gradient and residual itself; only products do so in any case."""
    return of_gradient(e, SIZE) is not None and (e.op == "matmul" or not written)


def _source(e: Expr) -> Expr:
    """What a view looks at."""
    while e.op in VIEWS and e.args:
        e = e.args[0]
    return e


class Sizes:
    """Bytes of a module's values, for each element of a gradient of SIZE."""

    def __init__(self, module: Module) -> None:
        self.module = module
        #: codes, which take a byte
        self.codes = {id(f.expr) for f in module.fields if f.most}
        tops = [e for e in steps(module) if e.op == "top_columns"]
        #: magnitudes that are not written down
        self.passing = {id(e.args[0]) for e in tops if ranked(e) is not e.args[0]}
        self.kept = {s.name: limit(s, {}, SIZE) for s in module.selections if s.kind == "drawn"}

    def of(self, e: Expr) -> float:
        """Bytes of one value."""
        if id(e) in self.codes:
            return 1.0
        if e.type.shape == "matrix":
            rows, cols = (extent(d, SIZE) for d in e.type.dims)  # also what no tensor may have
            return 4.0 * rows * cols / SIZE
        return {"n": 4.0, "kept": 4.0 * self.kept.get(e.type.of, 0) / SIZE}.get(e.type.shape, 0.0)

    def walk(self, e: Expr, names: dict[int, str]) -> Iterator[Walk]:
        """What a step reads and writes, unless that is little."""
        if e.op in VIEWS or id(e) in self.passing:
            return
        taken = (ranked(e),) if e.op == "top_columns" else leaves(e)
        reads = [a for a in map(_source, taken) if self.of(a) > SMALL]
        few = e.op in ("gather", "take_columns")
        sizes = [min(self.of(a), self.of(e)) if few else self.of(a) for a in reads]
        if self.of(e) <= SMALL and not any(size > SMALL for size in sizes):
            return
        called = [names.get(id(a), a.value if isinstance(a.value, str) else a.op) for a in reads]
        yield Walk(tuple(called), (names.get(id(e), e.op),), sum(sizes), self.of(e))

    def fed(self, e: Expr, names: dict[int, str], both: float) -> Walk:
        """That of a step that reads gradient and residual itself, `both` bytes an element."""
        share = self.of(e) / 4 if e.op == "gather" else 1.0
        return Walk(("g", "residual"), (names.get(id(e), e.op),), share * both, self.of(e))

    def whole(self, e: Expr) -> bool:
        """Whether it needs all of a large value before it gives any of its own."""
        whole = e.op in (
            "matmul",
            "top_columns",
            "row_max",
            "row_min",
            "sum_by",
            "left_vectors",
            "singular_values",
            "right_vectors",
        ) or e.op.startswith("reduce_")
        return whole and max(map(self.of, (e, *e.args))) > SMALL

    def depths(self) -> dict[int, int]:
        """For every value, how many walks over all elements must come before it is there."""
        by_name = {f.name: f.expr for f in self.module.fields if f.expr is not None}
        depth: dict[int, int] = {}
        for e in steps(self.module):
            for leaf in walk(e):
                if id(leaf) not in depth:
                    before = [depth.get(id(a), 0) for a in leaf.args]
                    if leaf.op in ("combined", "field"):
                        before = [depth.get(id(by_name[str(leaf.value)]), 0)]
                    depth[id(leaf)] = self.whole(leaf) + max(before, default=0)
        return depth


def rounds_text(module: Module) -> Iterator[str]:
    """The rounds, for people."""
    for number, one in enumerate(rounds(module), 1):
        size = one.payload_bytes(10**6)
        yield (
            f"round {number}: the {one.how} of {one.name} over the ranks, "
            f"{size} bytes for n = 1000000"
        )
    if module.when is not None:
        sizes = [10**k for k in range(1, 9) if evaluate(module.when, {"n": 10**k})]
        yield f"worth while for {min(sizes) if sizes else 'no'} elements or more, by powers of ten"
