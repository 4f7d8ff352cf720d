"""Fusion: a kernel's steps in an order that walks over memory as seldom as possible.

Lowering leaves a step for every value that takes one, in the order in which values need each other.
Here a step that is no walk comes as soon as all that it needs exists; walks over the same elements
that are ready at once become one walk. A walk that overwrites a state or the gradient is ready once
nobody else reads the old values, except the walk itself, element by element. Last, short products
move into the walks that read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from compll.ir.tile import (
    ELEMENTS,
    SIZES,
    Array,
    Call,
    Domain,
    Kernel,
    Op,
    Store,
    Value,
    Walk,
    When,
    order,
)
from compll.passes.arrays import OWN
from compll.passes.values import Unsupported

#: the identity of a result of a step: an array, the fold of a total, a routine's value, or a count
Key = Any
#: values of the piece that steps make
MADE = ("total", "result", *SIZES, "table")


@dataclass
class Node:
    """A step and what it waits for. before: nodes that come before it; beside: before it, or in the
    same walk."""

    step: Op
    before: set[int] = field(default_factory=set)
    beside: set[int] = field(default_factory=set)

    @property
    def walk(self) -> Walk | None:
        """The walk that may become a part of another, also one under a condition of which only
        totals are needed."""
        step = self.step
        if isinstance(step, When) and len(step.steps) == 1 and isinstance(step.steps[0], Walk):
            step = step.steps[0] if not step.steps[0].stores else step
        if not isinstance(step, Walk) or any(s.place and not s.in_place for s in step.stores):
            return None  # stores at places of their own take a loop of single elements
        return step

    @property
    def domain(self) -> Domain:
        """The elements that its walk runs over."""
        assert self.walk is not None
        return self.walk.domain


def fuse(kernel: Kernel) -> None:
    """Order and fuse the steps of a kernel. Raises Unsupported."""
    waiting = dict(enumerate(nodes(kernel)))
    ordered: list[Op] = []
    while waiting:
        ready = [i for i, n in waiting.items() if not n.before & waiting.keys()]
        taken = chosen(waiting, ready)
        if not taken:
            raise Unsupported("values that wait for each other")
        ordered.append(joined([waiting.pop(i) for i in taken]))
    kernel.steps = ordered
    inline(kernel)


def chosen(waiting: dict[int, Node], ready: list[int]) -> list[int]:
    """The nodes that come next: one that is no walk, or walks that become one; last, numbers that
    are stored."""
    stores = [i for i in ready if stored_last(waiting[i].step)]
    for i in ready:
        if waiting[i].walk is None and i not in stores and not waiting[i].beside & waiting.keys():
            return [i]
    batches = {waiting[i].domain: batch(waiting, ready, waiting[i].domain) for i in ready
               if waiting[i].walk is not None}  # fmt: skip
    sizes = dict.fromkeys(batches, 0)
    for n in waiting.values():
        if n.walk is not None and n.domain in sizes:
            sizes[n.domain] += 1
    # a walk for which others of its domain need not wait any longer; else one over all elements
    whole = [b for domain, b in batches.items() if b and len(b) == sizes[domain]]
    rest = [b for domain, b in sorted(batches.items(), key=lambda batch: batch[0] != ELEMENTS) if b]
    return next(iter([*whole, *rest, stores[:1]]))


def stored_last(step: Op) -> bool:
    """True for a number of the piece that a payload or a state keeps, or the payload's length: it
    is stored when all walks are done. One that fills the gradient or ends a check is not: later
    steps build on that."""
    return isinstance(step, Store) and step.array.role in ("payload", "state", "used")


def batch(waiting: dict[int, Node], ready: list[int], domain: Domain) -> list[int]:
    """The nodes of a domain that can be one walk now."""
    result = [i for i in ready if waiting[i].walk is not None and waiting[i].domain == domain]
    while True:
        kept = [i for i in result if not (waiting[i].beside & waiting.keys()) - set(result)]
        if kept == result:
            return result
        result = kept


def joined(nodes: list[Node]) -> Op:
    """The nodes as one step. Walks under different conditions run unconditionally."""
    if len(nodes) == 1:
        return nodes[0].step
    walks = [n.walk for n in nodes if n.walk is not None]
    walk = Walk(
        [s for w in walks for s in w.stores],
        list(dict.fromkeys(f for w in walks for f in w.folds)),
        [c for w in walks for c in w.compacts],
        domain=walks[0].domain,
    )  # fmt: skip
    guards = {(s.condition, s.wanted) if isinstance(s := n.step, When) else None for n in nodes}
    first = nodes[0].step
    if len(guards) == 1 and isinstance(first, When):
        return When(first.condition, first.wanted, [walk])
    return walk


# products


def inline(kernel: Kernel) -> None:
    """Put each short product into the walk that reads it, if no other step does, and nothing in
    between overwrites what it is made of: the walk computes its elements, and no array holds them.

    Several readers would each compute all of it again, and routines read its elements often.
    """
    steps = kernel.steps
    for call in [s for s in steps if isinstance(s, Call) and s.routine == "product" and s.attr]:
        (made,) = call.made
        readers = [step for step in steps if made in dict(read(step))]
        walk = readers[0] if len(readers) == 1 else None
        if not isinstance(walk, Walk) or not simple(walk, made):
            continue
        between = steps[steps.index(call) : steps.index(walk)]
        if dict(read(call)).keys().isdisjoint(key for step in between for key in overwritten(step)):
            walk.product = call
            steps.remove(call)
            kernel.scratch.remove(made)


def simple(walk: Walk, product: Array) -> bool:
    """True if a walk over the elements only stores values made of the same elements of the product
    and of arrays that are not the kernel's own."""
    lanes = [v for v in walk.values if v.level != "piece"]
    own = {v.attr for v in lanes if v.op == "load" and v.attr.role == "scratch"}
    plain = all(v.level == "element" and v.op not in OWN for v in lanes)
    stores = all(
        s.array.role in ("state", "gradient", "scratch") and not s.packed and s.place is None
        for s in walk.stores
    )
    alone = not (walk.folds or walk.compacts) and walk.domain == ELEMENTS
    return own == {product} and plain and stores and alone


# dependences


def nodes(kernel: Kernel) -> Iterator[Node]:
    """The steps with what they wait for."""
    makers = makers_of(kernel.steps)
    readers: dict[Key, list[tuple[int, Domain | None]]] = {}
    writers: dict[Key, list[int]] = {}
    for i, step in enumerate(kernel.steps):
        for key, read_domain in read(step):
            readers.setdefault(key, []).append((i, domain_of(step) if read_domain else None))
        for key in overwritten(step):
            writers.setdefault(key, []).append(i)
    for i, step in enumerate(kernel.steps):
        node = Node(step)
        for key in needs(step, kernel):
            node.before |= makers.get(key, set())
        for key in makes(step):  # zeros of an array, and then some elements
            node.before |= {j for j in makers[key] if j < i and isinstance(key, Array)}
        for key in overwritten(step):
            node.before |= {j for j in writers[key] if j < i}
            for j, domain in readers.get(key, []):
                beside = domain is not None and domain == domain_of(step)
                (node.beside if beside else node.before).add(j)
        node.before.discard(i)
        node.beside.discard(i)
        yield node


def makers_of(steps: list[Op]) -> dict[Key, set[int]]:
    """The steps that make each result, by their numbers."""
    makers: dict[Key, set[int]] = {}
    for i, step in enumerate(steps):
        for key in makes(step):
            makers.setdefault(key, set()).add(i)
    return makers


def depends(kernel: Kernel, roots: Iterable[Value], target: Op) -> bool:
    """True if values can be computed only after the target."""
    makers = makers_of(kernel.steps)
    made = {i for key, _ in inputs(roots) for i in makers.get(key, ())}
    return bool(made and made & followers(kernel, target))


def followers(kernel: Kernel, target: Op) -> set[int]:
    """The numbers of the target, and of steps that need its results."""
    makers = makers_of(kernel.steps)
    after = {i for i, step in enumerate(kernel.steps) if step is target}
    before = [
        {i for key in needs(step, kernel) for i in makers.get(key, ())} for step in kernel.steps
    ]
    while more := {i for i, needed in enumerate(before) if needed & after} - after:
        after |= more
    return after


def domain_of(step: Op) -> Domain | None:
    """The elements that a walk runs over; None for other steps."""
    return step.domain if isinstance(step, Walk) else None


def inner(step: Op) -> list[Op]:
    """The step, or the steps under its condition."""
    return step.steps if isinstance(step, When) else [step]


def makes(step: Op) -> Iterator[Key]:
    """The results of a step that others read."""
    for inner_step in inner(step):
        if isinstance(inner_step, Call):
            yield from inner_step.made
            yield from inner_step.results
        elif isinstance(inner_step, Walk):
            yield from inner_step.folds
            yield from (s.array for s in inner_step.stores if s.array.role == "scratch")
            for compact in inner_step.compacts:
                yield "counted", compact.selection
                yield from (a for a, _ in compact.parts)


def overwritten(step: Op) -> Iterator[Key]:
    """The gradient and states that a step overwrites."""
    for inner_step in inner(step):
        for s in stores_of(inner_step):
            if s.in_place and s.array.domain.kind != "scalar":
                yield s.array


def stores_of(step: Op) -> list[Store]:
    """The stores of a walk, or the step itself."""
    return step.stores if isinstance(step, Walk) else [step] if isinstance(step, Store) else []


def needs(step: Op, kernel: Kernel) -> Iterator[Key]:
    """Results of other steps that a step reads, and those that decide where it stores."""
    yield from (key for key, _ in read(step))
    for inner_step in inner(step):
        if isinstance(inner_step, Walk) and inner_step.domain.of:
            yield "counted", inner_step.domain.of
        stored = (
            inner_step.made
            if isinstance(inner_step, Call)
            else [s.array for s in stores_of(inner_step)]
        )
        starts = [kernel.starts[a] for a in stored if a in kernel.starts]
        yield from (key for key, _ in inputs(starts))


def read(step: Op) -> Iterator[tuple[Key, bool]]:
    """Results that a step reads, and gradient and states, each with true if each element
    reads its own alone."""
    if isinstance(step, When):
        yield from inputs([step.condition])
    for inner_step in inner(step):
        if isinstance(inner_step, Call):
            yield from ((key, False) for key, _ in inputs(v.value for v in inner_step.views))
            yield from inputs(inner_step.numbers)
        elif isinstance(inner_step, Store):
            yield from inputs([inner_step.value])
        elif isinstance(inner_step, Walk):
            limits = [c.limit for c in inner_step.compacts if c.limit is not None]
            yield from inputs([*inner_step.roots, *limits])


def inputs(roots: Iterable[Value]) -> Iterator[tuple[Key, bool]]:
    """Arrays and numbers that values are computed from; see `read`."""
    for v in order(roots, into=lambda v: v.op not in MADE):
        if v.op == "total":
            yield v.args[0], True
        elif v.op == "counted":
            yield (v.op, v.attr), True
        elif v.op in MADE:
            yield v, True
        elif v.op in ("load", "unpack", "at", "spread") and v.level != "piece":
            yield v.attr, v.op in ("load", "unpack")
