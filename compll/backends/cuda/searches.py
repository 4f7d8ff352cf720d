"""Searched thresholds and tables: the k-th largest and quantiles by the digits of keys, other
thresholds by counts.

A walk stores the keys once; histograms of their digits need only them (see searches.cuh). For a
sample, the elements that keys are made of are collected first.
"""

from __future__ import annotations

from typing import Any

from compll.backends.cuda.body import Body
from compll.backends.cuda.walk_kernel import Region
from compll.ir.expr import Expr
from compll.ir.static import depends
from compll.ir.storage import INT32
from compll.ir.tile import ELEMENTS, Array, Domain, Search, Store, Value, Walk
from compll.numerics import tries

ROUNDS = ((11, 21), (11, 10), (10, 0))  # bits and shift of a digit, from the upper ones
EACH = 16384  # keys of a block, whose histogram has 2048 bins to clear and to add to the piece's
KEYS = Array("keys", "scratch", INT32)
BINS = 8192  # most bins of the histograms of several ranks in a block's shared memory
EACH_RANKED = 4096  # keys of a block with these
#: a search's memory: the state of tries.py, of which LEFT is the number that are left, and the tree
#: of thresholds from TREE on
LEFT, TREE, SEARCH = 2, 3, 3 + tries.SIZE


def search(p: Any, step: Search) -> None:
    """Compute the step's numbers or its table. p: the Printer."""
    if step.how == "kth_largest":
        kth_largest(p, step)
    elif step.how == "quantiles":
        quantiles(p, step)
    else:
        threshold_search(p, step)


# digits


def kth_largest(p: Any, step: Search) -> None:
    """Search digit by digit: a histogram of keys with the digits found so far, then the next
    digit."""
    if step.sample is None:
        keys, domain = KEYS, step.walk.domain
        length = p.plan.limits.get(domain.of)
        store_keys(p, step, keys)
    else:
        keys, length = sample(p, step), step.sample
        domain = keys.domain
    grid = p.plan.grid(domain, EACH)

    def memory(b: Body) -> tuple[str, str, str]:
        """The histogram, the digits found so far, and the rank among keys with these digits."""
        return (
            b.memory("hist", "uint64", -1, 2048), b.memory("radix_prefix", "uint32", -1),
            b.memory("radix_rank", "int64", -1),
        )  # fmt: skip

    k, b = p.value(step.numbers[0]), p.open_phase()
    _, prefix, rank = memory(b)
    b.first(f"*{rank} = {k}, *{prefix} = 0;")
    for number, (bits, shift) in enumerate(ROUNDS):
        with p.kernel("digits", grid, 256) as b:
            hist, prefix, _ = memory(b)
            own = b.elements(keys)
            size = b.given("n") if length is None else b.value(length)
            digit = f"count_digits<{bits}, {shift}, {min(number, 1)}>"
            b.call(digit, own, f"own * {EACH}", size, EACH, prefix, hist)
        with p.kernel("pick", -1, 256) as b:
            b.call(f"pick<{bits}>", *memory(b))
            if shift == 0:
                _, prefix, rank = memory(b)
                b.add("__syncthreads();")
                b.leave(id(step.made[0]), b.declare("i32", f"(i32)(*{prefix} ^ 0x80000000u)"))
                b.leave(id(step.made[1]), b.declare("i64", f"{b.value(step.numbers[0])} - *{rank}"))


def store_keys(p: Any, step: Search, keys: Array, region: Region | None = None) -> None:
    """Store the keys of all elements of a walk, or of a region's."""
    key = step.walk.compacts[0].parts[0][1]
    p.walk_kernel("keys", Walk([Store(keys, key)], domain=step.walk.domain), {}, region)


def round_bits(ranks: int) -> list[int]:
    """Bits of each digit, in a search for `ranks` ranks at once."""
    upper = ROUNDS[0][0]  # one histogram
    most = min(upper, max(5, (BINS // ranks).bit_length() - 1))
    left = 32 - upper
    rounds = -(-left // most)
    return [upper, *(left // rounds + (k < left % rounds) for k in range(rounds))]


def quantiles(p: Any, step: Search) -> None:
    """Search all ranks at once: keys that have the digits found for a rank are counted by their
    next digit."""
    p.walk_kernel("keys", step.walk, {})
    count, keys = step.attr - 1, step.walk.stores[0].array
    rounds = round_bits(count)
    bins, shift = max(1 << rounds[0], count << max(rounds[1:])), 32

    def memory(b: Body) -> tuple[str, str, str]:
        """Histograms, the digits found so far and the next ones, and the ranks."""
        return (
            b.memory(f"bins{count}", "uint64", -1, bins),
            b.memory(f"known{count}", "uint32", -1, 2 * count),
            b.memory(f"ranks{count}", "int64", -1, count),
        )  # fmt: skip

    b = p.open_phase()
    each = f"for (i64 j = threadIdx.x; j < {count}; j += blockDim.x)"
    b.add(f"{each} {memory(b)[2]}[j] = (j + 1) * {b.given('n')} / {step.attr};")
    for number, bits in enumerate(rounds):
        shift -= bits
        now, after = (f" + {(number + k) % 2 * count}" for k in (0, 1))
        with p.kernel("digits", p.plan.grid(ELEMENTS, EACH_RANKED), 256) as b:
            hist, known, _ = memory(b)
            own = b.elements(keys)
            digit = f"count_digits<{bits}, {shift}, {count if number else 0}>"
            at = f"own * {EACH_RANKED}"
            b.call(digit, own, at, b.given("n"), EACH_RANKED, known + now, hist)
        with p.kernel("pick", -1, 256) as b:
            hist, known, ranks = memory(b)
            start = str(number == 0).lower()
            b.call(
                f"pick_ranks<{bits}>", hist, known + now, known + after, ranks, count, start, bins
            )
            if shift == 0:
                key = f"(i32)(({known}{after})[j] ^ 0x80000000u)"
                b.add(f"{each} {b.value(step.made[0])}[j] = op_from_key({key});")


# samples


def told_by_host(v: Value, statics: list[Expr]) -> Expr | int | None:
    """A number that the host knows without the step; None for others."""
    if v.op in ("as_count", "max", "convert"):
        return told_by_host(v.args[0], statics)
    if v.op == "const":
        return int(v.attr)
    known = statics[v.attr] if v.op == "static" else None
    return None if known is None or "step" in depends(known) else known


def sample(p: Any, step: Search) -> Array:
    """Leave the keys of a sample, in the array that it returns."""
    assert step.sample is not None
    plan = p.plan
    count = told_by_host(step.sample, plan.statics)
    known = plan.module.pool.const(count) if isinstance(count, int) else count
    domain, size = ELEMENTS if known is None else Domain("sample", dims=(known,)), step.sample
    keys = Array("sampled keys", "scratch", INT32, domain)
    if step.walk.placed:
        store_keys(p, step, KEYS)
        gather(p, size, {KEYS: keys})
        return keys
    samples = {
        a: Array(f"sample {k}", "scratch", domain=domain) for k, a in enumerate(step.sampled)
    }
    gather(p, size, samples)

    def remade(b: Body) -> dict[Array, str]:
        return {a: b.elements(of_sample) for a, of_sample in samples.items()}

    region = Region(plan.tiles(domain), lambda b: b.value(size), remade)
    store_keys(p, step, keys, region)
    return keys


def gather(p: Any, size: Value, samples: dict[Array, Array]) -> None:
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
            for array, of_sample in samples.items():
                b.add(f"{b.elements(of_sample)}[j] = {b.elements(array)}[i];")


# counts


def threshold_search(p: Any, step: Search) -> None:
    """adjust or bisect: walks count for a tree of thresholds, until a count fits."""
    name = p.plan.fresh("search")
    for q, v in enumerate(step.chosen):
        p.plan.elsewhere[id(v)] = (name, SEARCH, TREE + q)
    p.require([*step.numbers, *(v for v in step.walk.values if v.level == "piece")])

    def given(b: Body) -> str:
        """Declare the operator's numbers; returns a pointer to the search's memory."""
        b.add(f"const double given[] = {{{', '.join(map(b.value, step.numbers))}}};")
        return b.memory(name, "float64", -1, SEARCH)

    with p.kernel("begin", -1, 32) as b:
        b.first(f"begin_{step.how}(given, {given(b)});")
    most = told_by_host(step.numbers[-1], p.plan.statics)
    most = tries.MOST if most is None else most
    totals = {id(f): f"tried{q}_{name}" for q, f in enumerate(step.walk.folds)}
    region = p.region(step.walk)
    ended = f"{name}[p * {SEARCH} + {LEFT}] < 0.0"
    p.walk_kernel("tries", step.walk, totals, region, repeat=most, until=ended)
    with p.kernel("decide", -1, 256, most) as b:
        b.skip(ended)
        search = given(b)
        b.add(f"double counts[{len(totals)}];")
        for q, f in enumerate(step.walk.folds):
            b.add(f"counts[{q}] = (double)block_count({p.parts_of(b, f, totals[id(f)], region)});")
        b.add("if (threadIdx.x) return;")
        b.add(f"double found[{2 + SEARCH}];")
        b.call(f"decide_{step.how}", "given", search, "counts", "found")
        for k, v in enumerate(step.made):
            b.add(f"{p.plan.place(id(v))} = slot_of(found[{k}]);")
        b.add(f"for (int k = 0; k < {SEARCH}; ++k) {search}[k] = found[2 + k];")
