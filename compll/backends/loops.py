"""A walk's body as few loops over the elements of a tile, for backends that keep tiles in memory.

A fold needs all elements, so values that depend on it belong to a later stage. Within a stage,
loops differ by their stride: at each of `stride` places a loop visits the elements place,
place + stride, place + 2 * stride, ... This is the order of sums, and the order of packed codes in
bytes (see [Note: packing] in layout.py). Stores to the gradient or a state come in the last loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from compll.ir.tile import Compact, Store, Value, Walk
from compll.numerics.numbers import lane_count

#: instructions from which a value that several loops use is kept instead of computed again
WORTH = 2
COSTS = {"draw": 10, "div": 4, "sqrt": 4, "exp": 10, "log": 10, "log2": 10, "pow": 20, "load": 0}


@dataclass
class Loop:
    """Folds and stores that one loop over elements computes. kept: values that later loops read."""

    stage: int
    stride: int
    folds: list[Value] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    kept: list[Value] = field(default_factory=list)
    compacts: list[Compact] = field(default_factory=list)


def loops(walk: Walk, tile: int, *, ordered: bool = True) -> list[Loop]:
    """The loops of a walk, in order. ordered: the order of elements matters and values are kept
    between loops; false if a thread has few elements of each tile."""
    stages = _stages(walk)
    all_loops: list[Loop] = []
    folds = [v for v in walk.values if v.op == "fold"]
    for fold in folds:
        stride = lane_count(tile) if ordered and fold.attr == "sum" else 0
        _loop(all_loops, stages[fold] - 1, stride).folds.append(fold)
    element_stores = [s for s in walk.stores if s.value.level == "element"]
    for store in element_stores:
        if not store.in_place:
            stage = max(stages[v] for v in (store.value, store.place or store.value))
            _loop(all_loops, stage, _stride(store, tile) if ordered else 0).stores.append(store)
    last = [s for s in element_stores if s.in_place]
    if last or walk.compacts:
        all_loops = _with_last(all_loops, walk, last, stages, tile, ordered)
    all_loops.sort(key=lambda loop: loop.stage)  # stable: the last of its stage stays the last
    for loop in all_loops:
        loop.stride = loop.stride or tile
    if ordered:
        _keep(all_loops)
    return all_loops


def _with_last(
    all_loops: list[Loop], walk: Walk, stores: list[Store], stages: dict[Value, int], tile: int,
    ordered: bool,
) -> list[Loop]:  # fmt: skip
    """The loops with a last one that overwrites memory, or that selects, which needs the order of
    elements."""
    roots = [s.value for s in stores] + [v for each in walk.compacts for v in each.roots]
    stage = max([each.stage for each in all_loops] + [stages[v] for v in roots])
    strides = (0, tile) if walk.compacts else tuple(each.stride for each in all_loops)
    scattered = any(s.place is not None for s in stores)  # an element at a time, unlike others
    together = [
        each
        for each in all_loops
        if each.stage == stage and each.stride in strides and not scattered
        and (not (ordered and each.folds)
             or (walk.compacts and all(f.attr != "sum" for f in each.folds)))
    ]  # fmt: skip
    loop = together[-1] if together else Loop(stage, 0)
    loop.stride = tile if walk.compacts else loop.stride
    loop.stores += stores
    loop.compacts = walk.compacts
    return [each for each in all_loops if each is not loop] + [loop]


def _stages(walk: Walk) -> dict[Value, int]:
    """Rounds of folds after which each value is known."""
    stages: dict[Value, int] = {}
    for v in walk.values:
        made_of = [stages[a] for a in v.args if v.level != "piece"]
        stages[v] = max(made_of, default=0) + (v.op == "fold")
    return stages


def _stride(store: Store, tile: int) -> int:
    """Distance of elements that share a byte of the tile's packed codes; 0: any stride will do."""
    storage = store.array.storage
    return storage.tile_bytes(tile) if storage.parts else 0


def _loop(all_loops: list[Loop], stage: int, stride: int) -> Loop:
    """The loop of this stage and stride. A loop without a stride of its own joins another."""
    for loop in all_loops:
        if loop.stage == stage and (loop.stride == stride or 0 in (loop.stride, stride)):
            loop.stride = loop.stride or stride
            return loop
    all_loops.append(Loop(stage, stride))
    return all_loops[-1]


def _keep(all_loops: list[Loop]) -> None:
    """Have the first of several loops that use a costly value keep it for the others.

    Values that only a kept value needs are not kept.
    """
    users: dict[Value, list[Loop]] = {}
    for loop in all_loops:
        for v in order_of_elements(loop, ()):
            users.setdefault(v, []).append(loop)
    kept: set[Value] = set()
    for v in reversed(list(users)):
        by = users[v]
        within = [w for w in users if any(a is v for a in w.args)]
        inside = any(w in kept and users[w] == by for w in within)
        if len(by) > 1 and v.kind in ("f32", "i32") and cost(v) >= WORTH and not inside:
            kept.add(v)
            by[0].kept.append(v)


def order_of_elements(
    loop: Loop,
    computed: Iterable[Value],
    args: Callable[[Value], Iterable[Value]] = lambda v: v.args,
) -> list[Value]:
    """Values per element that a loop computes, arguments first, without those in `computed` and
    their arguments. args: the values that a value is made of."""
    given = set(computed)
    roots = [f.args[0] for f in loop.folds] + [s.value for s in loop.stores] + loop.kept
    roots += [s.place for s in loop.stores if s.place is not None]
    roots += [v for compact in loop.compacts for v in compact.roots]
    seen: dict[Value, None] = {}

    def visit(v: Value) -> None:
        if v.level != "element" or v in seen or v in given:
            return
        for a in args(v):
            visit(a)
        seen[v] = None

    for root in roots:
        visit(root)
    return list(seen)


def cost(v: Value) -> int:
    """Approximate number of instructions that a value takes for an element, with its arguments."""
    base = 2 if v.op == "load" and v.attr.storage.bits < 32 else 1
    return COSTS.get(v.op, base) + sum(cost(a) for a in v.args if a.level == "element")
