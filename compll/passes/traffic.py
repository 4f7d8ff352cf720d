"""Memory traffic of an encode: bytes that its steps move, beside the least possible."""

from __future__ import annotations

from dataclasses import dataclass

from compll.ir.layout import limit
from compll.ir.module import Module
from compll.ir.static import extent
from compll.ir.storage import Storage
from compll.ir.tile import (
    FIELDS,
    SEARCHES,
    Array,
    Call,
    Domain,
    Kernel,
    Op,
    Store,
    Value,
    Walk,
    flat,
    order_inside,
)
from compll.passes import fusion, lower

#: elements of the tensor for which sizes are given; steps that move less than SMALL bytes an
#: element are left out
SIZE, SMALL = 1 << 24, 0.1
#: calls that read all of their input before they give a result, as totals do
WHOLE = ("product", "orthonormal", "top_columns", "sum_by", *SEARCHES)
WORD = 4.0  # bytes of an element of the gradient, or of its key


@dataclass(frozen=True)
class Pass:
    """A pass over memory: the names of arrays that it reads and writes, and bytes per element of
    the gradient.

    needs: values of the whole tensor that earlier walks made for it.
    """

    reads: tuple[str, ...]
    writes: tuple[str, ...]
    read: float
    written: float
    needs: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Traffic:
    """Every walk of an encode, beside the least that any program must do.

    least: bytes per element if each input is read and each result written once. chain: walks that
    no order can avoid, since each needs a total of the one before.
    """

    kernel: Kernel
    walks: tuple[Pass, ...]
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


def traffic_of(module: Module, *, with_states: bool) -> Traffic:
    """Memory traffic of an encode without write-back, bytes per element of the gradient.

    Selected elements are too few to count, unless they are drawn ones. So are samples, and searches
    that run only under a condition.
    """
    kernel = lower.encode(module, with_states)
    sizes = Sizes(kernel)
    walks = [moved for step in searched(kernel.steps) if (moved := sizes.walk(step)) is not None]
    return Traffic(kernel, tuple(walks), sizes.least(), sizes.depth())


def searched(steps: list[Op]) -> list[Op]:
    """The steps that every encode runs, with walks under conditions."""
    every = ((step, inner_step) for step in steps for inner_step in fusion.inner(step))
    return [
        inner_step
        for step, inner_step in every
        if inner_step is step or isinstance(inner_step, Walk)
    ]


class Sizes:
    """Bytes that a kernel's steps touch, per element of a gradient of SIZE elements."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        drawn = {s.name: s for s in kernel.module.selections if s.kind == "drawn"}
        self.kept = {s.name: 0 for s in kernel.module.selections}
        self.kept |= {name: limit(s, {}, SIZE) for name, s in drawn.items()}
        #: fields whose codes are made into bytes of varying length, which are about as many
        self.recoded = {f.name: f.layout for f in kernel.module.fields if f.layout.recoded}

    def domain(self, domain: Domain) -> float:
        """Elements of a domain, per element of the gradient."""
        if domain.kind == "matrix":
            rows, cols = (extent(d, SIZE) for d in domain.dims)  # also sizes no tensor may have
            return rows * cols / SIZE
        kept = self.kept.get(domain.of, 0) / SIZE
        return {"kept": kept, "group": 1 / self.kernel.tile, "n": 1.0}.get(domain.kind, 0.0)

    def array(self, array: Array) -> float:
        """Bytes of an array, per element of the gradient."""
        return item(array.storage) * self.domain(array.domain)

    def walk(self, step: Op) -> Pass | None:
        """Bytes that a step reads and writes; None if they are few."""
        reads: dict[str, float] = {}
        writes: dict[str, float] = {}
        needs: tuple[Value, ...] = ()
        if isinstance(step, Call):
            if step.routine in FIELDS or samples(step):
                return None
            needs = self.views(step, reads)
            if step.routine == "kth_largest":  # keys of all elements, which are read again
                writes["keys"] = reads["keys"] = WORD * self.domain(step.views[0].domain)
            elif step.routine not in SEARCHES:
                writes = {a.name: self.array(a) for a in step.made}
        elif isinstance(step, Walk):
            stores = [s for s in step.stores if not s.back]
            if step.stores and not (stores or step.folds or step.compacts):
                return None  # for the write-back alone, which an encode for training does not need
            size = self.domain(step.domain)
            for v in step.values:
                self.read(v, size, reads)
            writes = {s.array.name: self.stored(s, size) for s in stores}
            needs = tuple(v for v in step.values if v.level == "piece")
            if step.product is not None:
                del reads[step.product.made[0].name]
                needs += self.views(step.product, reads)
        reads, writes = ({k: v for k, v in each.items() if v} for each in (reads, writes))
        read, written = sum(reads.values()), sum(writes.values())
        large = max([0.0, *reads.values(), *writes.values()]) > SMALL
        return Pass(tuple(reads), tuple(writes), read, written, needs) if large else None

    def views(self, call: Call, reads: dict[str, float]) -> tuple[Value, ...]:
        """Add the arrays that a routine reads to `reads`; the piece's values that it needs."""
        needs: tuple[Value, ...] = ()
        for view in call.views:
            values = list(order_inside([view.value]))
            needs += tuple(v for v in values if v.level == "piece")
            for v in values:
                self.read(v, self.domain(view.domain), reads)
        return needs

    def stored(self, s: Store, size: float) -> float:
        """Bytes that a walk over so many elements stores."""
        per_group = s.array.domain.kind == "group"
        storage = self.recoded.get(s.array.name, s.array.storage)
        return item(storage) * (1 / self.kernel.tile if per_group else size)

    def read(self, v: Value, size: float, bytes_of: dict[str, float]) -> None:
        """Add the array that an element reads to `bytes_of`."""
        if v.level == "element" and v.op in ("load", "unpack", "at"):
            bytes_of[v.attr.name] = min(self.array(v.attr), item(v.attr.storage) * size)

    def least(self) -> float:
        """Bytes of inputs, states and results, each once."""
        reads: dict[str, float] = {}
        writes: dict[str, float] = {}
        for walk in self.kernel.walks:
            size, bytes_of = self.domain(walk.domain), dict[str, float]()
            for v in walk.values:
                if not (isinstance(v.attr, Array) and v.attr.role == "scratch"):
                    self.read(v, size, bytes_of)
            reads = {k: max(reads.get(k, 0.0), bytes_of.get(k, 0.0)) for k in reads | bytes_of}
            for s in walk.stores:
                name = s.array.name
                if s.array.role in ("payload", "state") or name in self.recoded:
                    writes[name] = max(writes.get(name, 0.0), self.stored(s, size))
        return sum(reads.values()) + sum(writes.values())

    def depth(self) -> int:
        """The longest chain of steps over all elements that depend on each other."""
        depths: dict[object, int] = {}
        last = 1
        for step in flat(self.kernel.steps):
            before = max((depths.get(key, 0) for key, _ in fusion.read(step)), default=0)
            turn = before + self.waits(step)
            depths |= {key: max(depths.get(key, 0), turn) for key in fusion.makes(step)}
            last = max(last, turn, before + self.stores(step))
        return last

    def stores(self, step: Op) -> bool:
        """True for a walk over all elements that stores or selects some."""
        if not isinstance(step, Walk) or self.domain(step.domain) <= SMALL:
            return False
        return bool(step.compacts) or any(not s.back for s in step.stores)

    def waits(self, step: Op) -> bool:
        """True if a step reads all elements before it gives a result."""
        if isinstance(step, Call):
            large = any(self.domain(view.domain) > SMALL for view in step.views)
            return step.routine in WHOLE and large and not samples(step)
        return isinstance(step, Walk) and bool(step.folds) and self.domain(step.domain) > SMALL


def samples(call: Call) -> bool:
    """True for a search among a sample alone."""
    return call.routine == "kth_largest" and len(call.numbers) > 1


def item(storage: Storage) -> float:
    """Bytes of an element of an array."""
    return 1.6 / 8 if storage.trits else storage.bits / 8


@dataclass(frozen=True)
class Merge:
    """Bytes per element of the gradient that decoding moves, alone and together with an encode.

    fused: decode, add and encode as one kernel; None if they cannot be one. separate:
    as two kernels.
    """

    payload: float
    decode: float
    add: float
    separate: float
    fused: float | None


def merge_traffic(module: Module, encode: Traffic) -> Merge:
    """Traffic of a dense payload: the payload is read once; the gradient is written, or read and
    written, once.

    A fused kernel neither writes the sum nor reads it again.
    """
    sizes = Sizes(encode.kernel)
    fields = [Array.of(f, "payload") for f in module.fields if f.shape in ("n", "group")]
    payload = sum(map(sizes.array, fields))
    separate = payload + 8 + encode.moved
    fused = payload + encode.moved if lower.hops(module, encode.kernel) else None
    return Merge(payload, payload + 4, payload + 8, separate, fused)
