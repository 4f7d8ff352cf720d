"""Searched thresholds and tables: the k-th largest and quantiles by the digits of keys, other
thresholds by counts.

A walk stores the keys once; histograms of their digits need only them (see searches.cuh). For a
sample, the elements that keys are made of are collected first.
"""

from __future__ import annotations

from collections.abc import Callable

from compll.backends.cuda.body import Body
from compll.backends.cuda.elements import Region
from compll.backends.cuda.plans import BINS, PlanBuilder
from compll.backends.cuda.printer import Printer
from compll.ir.expr import Expr
from compll.ir.static import depends
from compll.ir.storage import INT32
from compll.ir.tile import ELEMENTS, Array, Call, Domain, Store, Value, View, Walk
from compll.numerics.numbers import MOST_TRIES, TRIES
from compll.passes.arrays import counting, of_sample, sampled

ROUNDS = ((11, 21), (11, 10), (10, 0))  # bits and shift of a digit, from the upper ones
EACH = 16384  # keys of a block, whose histogram has 2048 bins to clear and to add to the piece's
EACH_RANKED = 4096  # keys of a block with these
#: a search's memory: the state of numbers.py, of which LEFT is the number that are left, and the tree
#: of thresholds from TREE on
LEFT, TREE, SEARCH = 2, 3, 3 + TRIES


# digits


def kth_largest(p: Printer, call: Call) -> None:
    """Search digit by digit: a histogram of keys with the digits found so far, then the next
    digit."""
    (view,), (key, larger), (rank_of, *size) = call.views, call.results, call.numbers
    keys = sample(p, view, size[0]) if size else store_keys(p, view)
    grid = p.plan.grid(keys.domain, EACH)

    def memory(b: Body) -> tuple[str, str, str]:
        """The histogram, the digits found so far, and the rank among keys with these digits."""
        return (
            b.memory("hist", "uint64", -1, 2048, kept=True), b.memory("radix_prefix", "uint32", -1),
            b.memory("radix_rank", "int64", -1),
        )  # fmt: skip

    k, b = p.value(rank_of), p.open_phase()
    _, prefix, rank = memory(b)
    b.first(f"*{rank} = {k}, *{prefix} = 0;")
    for number, (bits, shift) in enumerate(ROUNDS):
        with p.kernel("digits", grid, 256) as b:
            hist, prefix, _ = memory(b)
            data = b.elements(keys)
            length = b.value(size[0]) if size else b.items(keys.domain)
            digit = f"count_digits<{bits}, {shift}, {min(number, 1)}>"
            b.call(digit, data, f"own * {EACH}", length, EACH, prefix, hist)
        with p.kernel("pick", -1, 256) as b:
            b.call(f"pick<{bits}>", *memory(b))
            if shift == 0:
                _, prefix, rank = memory(b)
                b.add("__syncthreads();")
                b.leave(key, b.declare("i32", f"(i32)(*{prefix} ^ 0x80000000u)"))
                b.leave(larger, b.declare("i64", f"{b.value(rank_of)} - *{rank}"))


def store_keys(p: Printer, view: View) -> Array:
    """Leave the keys of a view's elements, in the array that it returns."""
    keys = Array("keys", "scratch", INT32, view.domain)
    p.walk_kernel("keys", Walk([Store(keys, view.value)], domain=view.domain), {})
    return keys


def round_bits(ranks: int) -> list[int]:
    """Bits of each digit, in a search for `ranks` ranks at once."""
    upper = ROUNDS[0][0]  # one histogram
    most = min(upper, max(5, (BINS // ranks).bit_length() - 1))
    left = 32 - upper
    rounds = -(-left // most)
    return [upper, *(left // rounds + (k < left % rounds) for k in range(rounds))]


def quantiles(p: Printer, call: Call) -> None:
    """Search all ranks at once: keys that have the digits found for a rank are counted by their
    next digit."""
    count, keys = call.attr - 1, call.views[0].value.attr
    rounds = round_bits(count)
    bins, shift = max(1 << rounds[0], count << max(rounds[1:])), 32

    def memory(b: Body) -> tuple[str, str, str]:
        """Histograms, the digits found so far and the next ones, and the ranks."""
        return (
            b.memory(f"bins{count}", "uint64", -1, bins, kept=True),
            b.memory(f"known{count}", "uint32", -1, 2 * count),
            b.memory(f"ranks{count}", "int64", -1, count),
        )  # fmt: skip

    b = p.open_phase()
    each = f"for (i64 j = threadIdx.x; j < {count}; j += blockDim.x)"
    b.add(f"{each} {memory(b)[2]}[j] = (j + 1) * {b.given('n')} / {call.attr};")
    for number, bits in enumerate(rounds):
        shift -= bits
        now, after = (f" + {(number + k) % 2 * count}" for k in (0, 1))
        with p.kernel("digits", p.plan.grid(ELEMENTS, EACH_RANKED), 256) as b:
            hist, digits, _ = memory(b)
            data = b.elements(keys)
            digit = f"count_digits<{bits}, {shift}, {count if number else 0}>"
            at = f"own * {EACH_RANKED}"
            b.call(digit, data, at, b.given("n"), EACH_RANKED, digits + now, hist)
        with p.kernel("pick", -1, 256) as b:
            hist, digits, ranks = memory(b)
            start = str(number == 0).lower()
            b.call(
                f"pick_ranks<{bits}>", hist, digits + now, digits + after, ranks, count, start, bins
            )
            if shift == 0:
                key = f"(i32)(({digits}{after})[j] ^ 0x80000000u)"
                b.add(f"{each} {b.value(call.results[0])}[j] = op_from_key({key});")


# samples


def host_scalar(v: Value, plan: PlanBuilder) -> Expr | None:
    """A number that the host knows without the step; None for others. It is not yet clamped."""
    pool = plan.module.pool
    if v.op == "const":
        return pool.const(int(v.attr))
    if v.op == "static":
        expr = plan.statics[v.attr]
        return None if "step" in depends(expr) else expr
    if v.op in ("as_count", "convert"):
        return host_scalar(v.args[0], plan)
    result = [host_scalar(a, plan) for a in v.args] if v.op == "max" else [None]
    if (first := result[0]) is None or (second := result[1]) is None:
        return None
    return pool.make("max", (first, second), first.type)


def sample(p: Printer, view: View, size: Value) -> Array:
    """Leave the keys of a sample of `size` elements, in the array that it returns."""
    plan = p.plan
    count = host_scalar(size, plan)
    domain = ELEMENTS if count is None else Domain("sample", dims=(count,))
    keys = Array("sampled keys", "scratch", INT32, domain)
    arrays = sampled(view)
    if not arrays:
        gather(p, size, {store_keys(p, view): keys})
        return keys
    samples = {a: Array(f"sample {k}", "scratch", domain=domain) for k, a in enumerate(arrays)}
    gather(p, size, samples)
    region = Region(plan.tiles(domain), lambda b: b.value(size))
    p.walk_kernel("keys", Walk([Store(keys, of_sample(view, samples))]), {}, region)
    return keys


def gather(p: Printer, size: Value, samples: dict[Array, Array]) -> None:
    """Collect elements of a sample. samples: for each array, the one that they are copied to."""
    shape = p.plan.shape
    per = shape.teams * shape.tile
    grid = p.plan.tiles(next(iter(samples.values())).domain)
    with p.kernel("sample", grid, 256) as b:
        count, n, tensor, step = b.value(size), *map(b.given, ("n", "tensor", "step"))
        b.add(f"const i32 key = (i32)(stream(seed, {step}, {tensor}, -1, 0) >> 32);")
        b.add(f"const i64 end = op_min({count}, (own + 1) * {per});")
        with b.block(f"for (i64 j = own * {per} + threadIdx.x; j < end; j += 256)"):
            b.add(f"const i64 i = sample_position(key, {n}, {count}, j);")
            for array, to in samples.items():
                b.add(f"{b.elements(to)}[j] = {b.elements(array)}[i];")


# counts


def threshold_search(p: Printer, call: Call) -> None:
    """adjust or bisect: walks count for a tree of thresholds, until a count fits."""
    name = p.plan.fresh("search")
    tried, walk = counting(call.views[0])
    for q, v in enumerate(tried):
        p.plan.elsewhere[v] = f"{name}[p * {SEARCH} + {TREE + q}]"
    p.require([*call.numbers, *(v for v in walk.values if v.level == "piece")])

    def given(b: Body) -> str:
        """Declare the operator's numbers; returns a pointer to the search's memory."""
        b.add(f"const double given[] = {{{', '.join(map(b.value, call.numbers))}}};")
        return b.memory(name, "float64", -1, SEARCH)

    with p.kernel("begin", -1, 32) as b:
        b.first(f"begin_{call.routine}(given, {given(b)});")
    most = host_scalar(call.numbers[-1], p.plan) or MOST_TRIES
    totals = {f: f"tried{q}_{name}" for q, f in enumerate(walk.folds)}
    region = p.region(walk)
    ended = f"{name}[p * {SEARCH} + {LEFT}] < 0.0"
    p.walk_kernel("tries", walk, totals, region, repeat=most, until=ended)
    with p.kernel("decide", -1, 256, most) as b:
        b.skip(ended)
        search = given(b)
        b.add(f"double counts[{len(totals)}];")
        for q, f in enumerate(walk.folds):
            b.add(f"counts[{q}] = (double)block_count({p.parts_of(b, f, totals[f], region)});")
        b.add("if (threadIdx.x) return;")
        b.add(f"double found[{2 + SEARCH}];")
        b.call(f"decide_{call.routine}", "given", search, "counts", "found")
        for k, v in enumerate(call.results):
            b.add(f"{p.plan.place(v)} = slot_of(found[{k}]);")
        b.add(f"for (int k = 0; k < {SEARCH}; ++k) {search}[k] = found[2 + k];")


ROUTINES: dict[str, Callable[[Printer, Call], None]] = {
    "kth_largest": kth_largest, "adjust": threshold_search, "bisect": threshold_search,
    "quantiles": quantiles,
}  # fmt: skip
