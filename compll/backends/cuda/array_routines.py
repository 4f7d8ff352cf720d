"""What mixes the elements of arrays: matrices, transforms, selections that are drawn. Their bodies stand
in arrays.cuh.

MAKERS make an array; PLACES give an element that is computed where it is read. p: the ArrayPrinter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from compll.backends.cuda import spectra
from compll.backends.cuda.array_values import element
from compll.backends.cuda.body import Body
from compll.backends.cuda.domains import PIECE, Domain, domain_of
from compll.backends.cuda.views import View
from compll.ir.expr import Expr, Type
from compll.ir.program import Unsupported
from compll.ir.tile import Value

ALONE = "a spec that is computed an array at a time"
EACH = 2048  # elements of a block
RADIX = 16  # elements that a thread mixes at a time
BASIS = 128  # threads that make columns orthonormal: one for each lane of [Note: order of sums]


@contextmanager
def over(p: Any, what: str, domain: Domain) -> Iterator[Body]:
    """A kernel with a thread for each item i of a domain."""
    grid, threads = p.plan.grid(domain, EACH), p.plan.shape.threads
    with p.printer.kernel(what, grid, threads) as b:
        end = f"i < {b.count(domain)} && i < own * {EACH} + {EACH}"
        with b.block(f"for (i64 i = own * {EACH} + threadIdx.x; {end}; i += {threads})"):
            yield b


@contextmanager
def blocks(p: Any, what: str, domain: Domain, each: int = 1, threads: int = 0) -> Iterator[Body]:
    """A kernel with a block for every `each` items of a domain."""
    grid = -1 if domain == PIECE else p.plan.grid(domain, each)
    with p.printer.kernel(what, grid, threads or p.plan.shape.threads) as b:
        yield b


def zeros(p: Any, e: Expr) -> View:
    """An array of zeros."""
    made: View = p.new_array(e.type)
    with over(p, "zeros", domain_of(e.type)) as b:
        b.add(f"{made.pointer(b)}[i] = 0;")
    return made


def called(p: Any, e: Expr, call: str, domain: Domain, each: int = 1, threads: int = 0) -> View:
    """What a function makes of arrays. call: with places for their texts, and by name."""
    views = [p.array(a) for a in e.args]
    made: View = p.new_array(e.type)
    with blocks(p, call.partition("(")[0].partition("<")[0], domain, each, threads) as b:
        given = {"out": made.pointer(b), "threads": p.plan.shape.threads, "each": each}
        sizes = {f"dim{k}": b.dim(d) for k, d in enumerate(e.type.dims)}
        b.add(call.format(*(v.text(b) for v in views), **given, **sizes))
    return made


def place(p: Any, e: Expr, call: str) -> Value:
    """What a function gives of an element's number i. call: with places for arrays."""
    views = [p.array(a) for a in e.args]
    return element(e, lambda b, i, _: call.format(*(v.text(b) for v in views), i=i))


# selections that are drawn


def drawn(p: Any, name: str) -> Callable[[Body, str], str]:
    """The position of a selection's item, as text in a kernel."""
    one = next(s for s in p.module.selections if s.name == name)
    if one.kind != "drawn":
        raise Unsupported(f"{one.kind}() in {ALONE}", name, hint="drawn(k) draws elements")
    kept, memory = Domain("kept", name), f"drawn_{name}"
    if name not in p.drawn:
        p.drawn.add(name)
        with blocks(p, "draw", PIECE, threads=32) as b:
            step, tensor, offset, n = map(b.given, ("step", "tensor", "offset", "n"))
            keys = f"stream(0ull, {step}, (u64){tensor}, (u64)-3ll, (u64)({offset}))"
            to, count = b.memory(memory, "uint64", -1, 3), b.count(kept)
            draw = f"draw_positions({to}, {keys}, (u64){n}, (u64){count});"
            b.add(f"if (threadIdx.x == 0 && {count}) {draw}")

    def text(b: Body, item: str) -> str:
        keys = b.memory(memory, "uint64", -1, 3)
        return f"drawn_at({keys}, {b.given('n')}, {b.count(kept)}, {item})"

    return text


def place_gather(p: Any, e: Expr) -> Value:
    view, at = p.array(e.args[0]), drawn(p, str(e.value))
    found = element(e, lambda b, i, _: f"{view.text(b)}.get({at(b, i)})")
    truth: Value = p.values.truth(found) if e.type.dtype == "bool" else found
    return truth


def place_indices(p: Any, e: Expr) -> Value:
    at = drawn(p, str(e.value))
    return element(e, lambda b, i, _: f"(i32){at(b, i)}")


def make_in(p: Any, e: Expr) -> View:
    at, made = drawn(p, str(e.value)), zeros(p, e)
    with over(p, "mark", Domain("kept", str(e.value))) as b:
        b.add(f"{made.pointer(b)}[{at(b, 'i')}] = 1;")
    return made


def positions(p: Any, e: Expr) -> Callable[[Body, str], str]:
    """Where a scatter goes. Raises Unsupported for others than those of a drawn selection."""
    if e.args[0].op != "indices":
        raise Unsupported(f"scatter at other positions than a selection's in {ALONE}", "", e)
    return drawn(p, str(e.args[0].value))


def make_scatter(p: Any, e: Expr) -> View:
    at, view, made = positions(p, e), p.array(e.args[1]), zeros(p, e)
    with over(p, "scatter", domain_of(e.args[1].type)) as b:
        b.add(f"{made.pointer(b)}[{at(b, 'i')}] = {view.text(b)}.get(i);")
    return made


# elements at other places


def place_take_columns(p: Any, e: Expr) -> Value:
    x, at = map(p.array, e.args)
    return element(e, lambda b, i, _: f"taken({x.text(b)}, {at.text(b, e.type.dims)}, {i})")


def place_lookup(p: Any, e: Expr) -> Value:
    if e.args[0].type.shape != "matrix":
        raise Unsupported(f"tables in {ALONE}", "", e)
    row, index = p.array(e.args[0]), p.values.argument(e.args[1], e)
    return element(e, lambda b, _, args: f"looked_up({row.text(b)}, {args[0]})", index)


def place_random_matrix(p: Any, e: Expr) -> Value:
    def text(b: Body, i: str, _: list[str]) -> str:
        step, tensor = map(b.given, ("step", "tensor"))
        b.hoist("rm", f"const u64 rm = stream(0ull, {step}, (u64){tensor}, (u64)-2ll, 0ull);")
        return f"random_element({i}, rm, {step}, {tensor})"

    return element(e, text)


def place_matmul(p: Any, e: Expr) -> Value:
    """A short product, in the order of [Note: order of matrix products]."""
    return place(p, e, "short_product({}, {}, {i})")


# matrices


def rows_of(p: Any, e: Expr) -> Domain:
    """The rows of a matrix."""
    return Domain("matrix", "", (e.type.dims[0], p.module.pool.const(1)))


def make_matmul(p: Any, e: Expr) -> View:
    """A block computes a part of the product."""
    domain = Domain("products", "", e.type.dims)
    return called(p, e, "product<{threads}>({}, {}, own, {out});", domain)


def make_orthonormal(p: Any, e: Expr) -> View:
    """A block makes all columns, one after the other; see [Note: orthonormal]."""
    basis, grid = p.plan.fresh("basis"), p.region(domain_of(e.type)).grid
    p.plan.memory(basis, "float64", str(grid), p.plan.shape.tile)
    at = f"{basis} + item_at[{grid} * (pieces + 1) + p] * {p.plan.shape.tile}"
    spare = "{1}, true" if len(e.args) > 1 else "{0}, false"
    return called(p, e, f"orthonormal({{0}}, {spare}, {at}, {{out}});", PIECE, threads=BASIS)


def make_row_extreme(p: Any, e: Expr) -> View:
    """The largest element of each row, or the smallest; a warp a row."""
    largest = str(e.op == "row_max").lower()
    row = "own * {each} + threadIdx.x / 32"
    call = f"row_extreme({{}}, {row}, {largest}, {{out}});"
    return called(p, e, call, rows_of(p, e), p.plan.shape.threads // 32)


def make_top_columns(p: Any, e: Expr) -> View:
    """The largest elements of each row; a warp a row."""
    call = "top_columns({}, own * {each} + threadIdx.x / 32, {dim1}, {out});"
    return called(p, e, call, rows_of(p, e), p.plan.shape.threads // 32)


def make_place_columns(p: Any, e: Expr) -> View:
    """A thread places the elements of a row, one after the other."""
    at, x = map(p.array, e.args)
    made = zeros(p, e)
    with over(p, "place", rows_of(p, e)) as b:
        cols = b.dim(e.type.dims[1])
        b.add(f"place_columns({at.text(b)}, {x.text(b)}, i, {cols}, {made.pointer(b)});")
    return made


def make_sum_by(p: Any, e: Expr) -> View:
    """See [Note: sums by index]: in any order, as whole numbers add up to the same."""
    index, x = map(p.array, e.args)
    pool, items, domain = p.module.pool, domain_of(e.args[0].type), domain_of(e.type)
    size_of = pool.make("abs", e.args[1:], e.args[1].type)
    largest = p.values.of(pool.make("reduce_max", (size_of,), Type("float", "scalar")))
    made: View = p.new_array(e.type)
    memory, grid, tile = p.plan.fresh("sums"), p.region(domain).grid, p.plan.shape.tile
    p.printer.require([largest])

    def sums(b: Body) -> str:
        return b.memory(memory, "int64", grid, tile)

    def shift(b: Body) -> str:
        return f"sum_shift((float){b.value(largest)}, {b.count(items)})"

    with over(p, "zeros", domain) as b:
        b.add(f"{sums(b)}[i] = 0;")
    with over(p, "sums", items) as b:
        to = f"{sums(b)} + inside({index.text(b)}.get(i), {b.count(domain)})"
        b.add(f"atomicAdd((u64*)({to}), (u64)sum_item({x.text(b)}.get(i), {shift(b)}));")
    with over(p, "rounded", domain) as b:
        b.add(f"{made.pointer(b)}[i] = sum_value({sums(b)}[i], {shift(b)});")
    return made


# the Walsh-Hadamard transform


def distances(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Distances, and how many elements so far apart are mixed, from one power of two to another."""
    while first < end:
        radix = min(RADIX, end // first)
        yield first, radix
        first *= radix


def make_hadamard(p: Any, e: Expr) -> View:
    """A block mixes what lies near in shared memory; then threads mix what lies further apart.

    All distances are powers of two, in rising order; the last kernel multiplies by the factor.
    """
    x, block = p.array(e.args[0]), int(e.value)
    made: View = p.new_array(e.type)
    n, threads = Domain("n"), p.plan.shape.threads
    near, top = RADIX * threads, block.bit_length() - 1
    far = list(distances(near, block))
    with blocks(p, "near", n, near) as b:
        own = f"own * {near}, {b.given('n')}"
        b.add(f"__shared__ float part[{near + near // 32}];")
        b.add(f"stage_near<{near}, {threads}>({x.text(b)}, {own}, part);")
        for h, radix in distances(1, min(near, block)):
            b.add(f"mix_near<{near}, {threads}, {h}, {radix}>({own}, part);")
        to = f"{own}, {-1 if far else top}, part, {made.pointer(b)}"
        b.add(f"leave_near<{near}, {threads}>({to});")
    for h, radix in far:
        with blocks(p, "far", n, threads * radix) as b:
            own = f"{made.pointer(b)}, {b.given('n')}, own, firsts[p + 1] - firsts[p]"
            factor = top if (h, radix) == far[-1] else -1
            b.add(f"mix_far<{threads}, {radix}>({own}, {h}, {factor});")
    return made


def make_chosen(p: Any, e: Expr) -> View:
    """One thread goes along the chances."""
    keys = f"stream(seed, step, (u64)tensor, {int(e.value)}ull, (u64)(offset >> 32))"
    call = f"choose({{}}, (u32)offset, {keys}, {{dim1}}, {{out}});"
    chances = p.array(e.args[0])
    made: View = p.new_array(e.type)
    with blocks(p, "choose", PIECE, threads=32) as b:
        for name in ("step", "tensor", "offset"):
            b.given(name)
        given = {"dim1": b.dim(e.type.dims[1]), "out": made.pointer(b)}
        b.add(f"if (threadIdx.x == 0) {call.format(chances.text(b), **given)}")
    return made


MAKERS: dict[str, Callable[[Any, Expr], View]] = {
    "in": make_in, "scatter": make_scatter, "matmul": make_matmul, "orthonormal": make_orthonormal,
    "row_max": make_row_extreme, "row_min": make_row_extreme, "top_columns": make_top_columns,
    "place_columns": make_place_columns, "sum_by": make_sum_by, "hadamard": make_hadamard,
    "chosen": make_chosen,
}  # fmt: skip
PLACES: dict[str, Callable[[Any, Expr], Value]] = {
    "gather": place_gather, "indices": place_indices, "take_columns": place_take_columns,
    "lookup": place_lookup, "random_matrix": place_random_matrix, "matmul": place_matmul,
    "singular_values": spectra.value, "left_vectors": spectra.vector,
    "right_vectors": spectra.vector,
}  # fmt: skip
