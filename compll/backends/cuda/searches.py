"""Searched thresholds: the k-th largest by its digits, others by counts.

A walk stores the keys once; histograms of their digits need only them (see searches.cuh). For a
sample, the elements that keys are made of are collected first.
"""

from __future__ import annotations

from typing import Any

from compll.backends.cuda.body import Body
from compll.backends.cuda.domains import ELEMENTS, Domain
from compll.backends.cuda.grids import MOST_ROUNDS
from compll.backends.cuda.walk_kernel import Region
from compll.ir.expr import Expr
from compll.ir.module import Field
from compll.ir.static import depends
from compll.ir.tile import SCRATCH, Search, Store, Value, Walk
from compll.numerics import tries

ROUNDS = ((11, 21), (11, 10), (10, 0))  # bits and shift of a digit, from the upper ones
EACH = 16384  # keys of a block, whose histogram has 2048 bins to clear and to add to the piece's
KEYS = Field("keys", "int32", 0, SCRATCH)
#: a search's memory: the state of tries.py, of which LEFT is the number that are left, and the tree
#: of thresholds from TREE on
LEFT, TREE, SEARCH = 2, 3, 3 + tries.SIZE


def kth_largest(p: Any, step: Search) -> None:
    """Compute the step's two numbers. p: the Printer."""
    key = step.walk.compacts[0].parts[0][1]
    of = step.walk.of
    keys = Walk([Store(SCRATCH, KEYS, key)], of=of)
    if step.sample is None:
        p.walk_kernel("keys", keys, {})
        grid = p.plan.grid(Domain("kept", of) if of else ELEMENTS, EACH)
        length = p.plan.limits[of] if of else None
        name, tiles = "own_keys", 0
    else:
        tiles, name = sample(p, step, keys), "sample_keys"
        grid = p.plan.grid(p.plan.grids[tiles].domain, EACH)
        length = step.sample
    radix(p, step, name, tiles, grid, length)


def told_by_host(v: Value, statics: list[Expr]) -> Expr | int | None:
    """A number that the host knows without the step; None for others."""
    if v.op in ("as_count", "max", "convert"):
        return told_by_host(v.args[0], statics)
    if v.op == "const":
        return int(v.attr)
    known = statics[v.attr] if v.op == "static" else None
    return None if known is None or "step" in depends(known) else known


def radix(p: Any, step: Search, name: str, tiles: int, grid: int, length: Value | None) -> None:
    """Search digit by digit: a histogram of keys with the digits found so far, then the next
    digit."""
    k = p.value(step.numbers[0])
    p.open_phase().add(f"if (threadIdx.x == 0) {memory(p.phase)[2]}[0] = {k};")
    p.open_phase().add(f"if (threadIdx.x == 0) {memory(p.phase)[1]}[0] = 0;")
    for bits, shift in ROUNDS:
        with p.kernel("digits", grid, 256) as b:
            hist, prefix, _ = memory(b)
            keys = b.memory(name, "int32", tiles, p.plan.shape.tile)
            size = b.given("n") if length is None else b.value(length)
            b.add(
                f"histogram<{bits}, {shift}>({keys}, own * {EACH}, {size}, {EACH}, *{prefix}, {hist});"
            )
        with p.kernel("pick", -1, 256) as b:
            hist, prefix, rank = memory(b)
            b.add(f"pick<{bits}>({hist}, {prefix}, {rank});")
            if shift == 0:
                b.add("__syncthreads();")
                b.leave(id(step.made[0]), b.declare("i32", f"(i32)(*{prefix} ^ 0x80000000u)"))
                b.leave(id(step.made[1]), b.declare("i64", f"{b.value(step.numbers[0])} - *{rank}"))


def memory(b: Body) -> tuple[str, str, str]:
    """A piece's histogram, the digits found so far, and the rank among keys with these digits."""
    return (
        b.memory("hist", "uint64", -1, 2048), b.memory("radix_prefix", "uint32", -1),
        b.memory("radix_rank", "int64", -1),
    )  # fmt: skip


def sample(p: Any, step: Search, keys: Walk) -> int:
    """Leave the keys of a sample; returns the grid of its tiles."""
    assert step.sample is not None
    plan = p.plan
    count = told_by_host(step.sample, plan.statics)
    grid = 0 if count is None else plan.tiles(Domain("sample", count))
    tile, size = plan.shape.tile, step.sample
    if step.walk.placed:
        p.walk_kernel("keys", keys, {})
        gather(
            p,
            grid,
            size,
            {"sample_keys": ("int32", lambda b: b.memory("own_keys", "int32", 0, tile))},
        )
        return grid
    loads = [v.attr for v in step.walk.values if v.op == "load" and v.level == "lane"]
    arrays = {("g" if a == "g" else f"state {a.name}"): a for a in loads}
    names = {name: f"sample{k}" for k, name in enumerate(arrays)}
    sources = {
        names[name]: ("float32", lambda b, a=a: b.given("xs") if a == "g" else b.state(a))
        for name, a in arrays.items()
    }
    gather(p, grid, size, sources)

    def remade(b: Body) -> dict[str, str]:
        found = {name: b.memory(m, "float32", grid, tile) for name, m in names.items()}
        return found | {"own_keys": b.memory("sample_keys", "int32", grid, tile)}

    p.walk_kernel("keys", keys, {}, Region(grid, lambda b: b.value(size), remade))
    return grid


def gather(p: Any, grid: int, size: Value, sources: dict[str, Any]) -> None:
    """Collect elements of a sample. sources: for each memory, its type and the array it is copied
    from."""
    shape = p.plan.shape
    per = shape.teams * shape.tile
    with p.kernel("sample", grid, 256) as b:
        count, n, tensor, step = b.value(size), *map(b.given, ("n", "tensor", "step"))
        b.add(f"const i32 key = (i32)(stream(seed, {step}, {tensor}, -1, 0) >> 32);")
        with b.block(
            f"for (i64 j = own * {per} + threadIdx.x; j < {count} && j < own * {per} + {per}; j += 256)"
        ):
            b.add(f"const i64 i = sample_position(key, {n}, {count}, j);")
            for name, (kind, source) in sources.items():
                to = b.memory(name, kind, grid, shape.tile)
                b.add(f"{to}[j] = load1({source(b)}, i);")


def threshold_search(p: Any, step: Search) -> None:
    """adjust or bisect: walks count for a tree of thresholds, until a count fits."""
    name = p.plan.fresh("search")
    for q, v in enumerate(step.chosen):
        p.plan.elsewhere[id(v)] = (name, SEARCH, TREE + q)
    p.require([*step.numbers, *(v for v in step.walk.values if v.level == "piece")])
    with p.kernel("begin", -1, 32) as b:
        search = given(b, name, step)
        b.add(f"if (threadIdx.x == 0) begin_{step.how}(given, {search});")
    rounds = told_by_host(step.numbers[-1], p.plan.statics)
    rounds = MOST_ROUNDS if rounds is None else rounds
    totals = {id(f): f"tried{q}_{name}" for q, f in enumerate(step.walk.folds)}
    region = p.region(step.walk)
    until = f"if ({name}[p * {SEARCH} + {LEFT}] < 0.0) return;"
    p.walk_kernel("tries", step.walk, totals, region, repeat=rounds, until=until)
    with p.kernel("decide", -1, 256, rounds) as b:
        b.add(until)
        search = given(b, name, step)
        b.add(f"double counts[{len(step.chosen)}];")
        for q, f in enumerate(step.walk.folds):
            b.add(f"counts[{q}] = (double)block_count({p.parts_of(b, f, totals[id(f)], region)});")
        b.add("if (threadIdx.x) return;")
        b.add(f"double found[{2 + SEARCH}];")
        b.add(f"decide_{step.how}(given, {search}, counts, found);")
        for k, v in enumerate(step.made):
            b.add(f"{b.plan.slot(id(v))} = slot_of(found[{k}]);")
        b.add(f"for (int k = 0; k < {SEARCH}; ++k) {search}[k] = found[2 + k];")


def given(b: Body, name: str, step: Search) -> str:
    """Declare the operator's numbers; returns a pointer to the search's state."""
    numbers = ", ".join(b.value(v) for v in step.numbers)
    b.add(f"const double given[] = {{{numbers}}};")
    return b.memory(name, "float64", -1, SEARCH)
