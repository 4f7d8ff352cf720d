"""What mixes the elements of arrays: matrices, transforms, selections that are drawn. Their bodies stand
in arrays.cuh and spectra.cuh.

MAKERS make an array; place_... give an element that is computed where it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from compll.backends.cuda.body import Body
from compll.backends.cuda.domains import PIECE, Domain, domain_of
from compll.backends.cuda.views import View
from compll.ir.expr import Expr, Type
from compll.ir.program import Unsupported
from compll.ir.tile import Value

EACH = 2048  # elements of a block
RADIX = 16  # elements that a thread mixes at a time
BASIS = 128  # threads that make columns orthonormal: one for each lane of [Note: order of sums]


@contextmanager
def over(p: Any, what: str, domain: Domain) -> Iterator[Body]:
    """A kernel with a thread for each item i of a domain."""
    grid, threads = p.plan.grid("elements", EACH, domain), p.plan.shape.threads
    with p.printer.kernel(what, grid, threads) as b:
        end = f"i < {b.count(domain)} && i < own * {EACH} + {EACH}"
        with b.block(f"for (i64 i = own * {EACH} + threadIdx.x; {end}; i += {threads})"):
            yield b


@contextmanager
def blocks(p: Any, what: str, domain: Domain, each: int = 1, threads: int = 0) -> Iterator[Body]:
    """A kernel with a block for every `each` items of a domain."""
    grid = -1 if domain == PIECE else p.plan.grid("elements", each, domain)
    with p.printer.kernel(what, grid, threads or p.plan.shape.threads) as b:
        yield b


def rows_of(p: Any, x: Expr) -> Domain:
    """The rows of a matrix."""
    return Domain("matrix", "", (x.type.dims[0], p.module.pool.const(1)))


def zeros(p: Any, made: View, domain: Domain) -> None:
    """Zeros for all elements."""
    with over(p, "zeros", domain) as b:
        b.add(f"{made.pointer(b)}[i] = 0;")


# selections that are drawn


def drawn(p: Any, name: str) -> Callable[[Body, str], str]:
    """The position of a selection's item, as text in a kernel."""
    one = next(s for s in p.module.selections if s.name == name)
    if one.kind != "drawn":
        alone = "a spec that is computed an array at a time"
        raise Unsupported(f"{one.kind}() in {alone}", name, hint="drawn(k) draws elements")
    kept, memory = Domain("kept", name), f"drawn_{name}"
    if name not in p.drawn:
        p.drawn.add(name)
        with blocks(p, "draw", PIECE, threads=32) as b:
            step, tensor, offset = map(b.given, ("step", "tensor", "offset"))
            keys = f"stream(0ull, {step}, (u64){tensor}, (u64)-3ll, (u64)({offset}))"
            to, count = b.memory(memory, "uint64", -1, 3), b.count(kept)
            b.add(
                f"if (threadIdx.x == 0 && {count}) "
                f"draw_positions({to}, {keys}, (u64){b.given('n')}, (u64){count});"
            )

    def text(b: Body, item: str) -> str:
        keys = b.memory(memory, "uint64", -1, 3)
        return f"drawn_at({keys}, {b.given('n')}, {b.count(kept)}, {item})"

    return text


def place_gather(p: Any, e: Expr) -> Value:
    view, at = p.array(e.args[0]), drawn(p, str(e.value))
    found: Value = p.values.element(e, lambda b, i, args: f"{view.text(b)}.get({at(b, i)})")
    return truth_of(p, e, found)


def truth_of(p: Any, e: Expr, found: Value) -> Value:
    """What is in memory of a condition as a truth."""
    truth: Value = p.values.truth(found) if e.type.dtype == "bool" else found
    return truth


def place_indices(p: Any, e: Expr) -> Value:
    at = drawn(p, str(e.value))
    found: Value = p.values.element(e, lambda b, i, args: f"(i32){at(b, i)}")
    return found


def make_in(p: Any, e: Expr) -> View:
    made: View = p.new_array(e.type)
    at = drawn(p, str(e.value))
    zeros(p, made, domain_of(e.type))
    with over(p, "mark", Domain("kept", str(e.value))) as b:
        b.add(f"{made.pointer(b)}[{at(b, 'i')}] = 1;")
    return made


def positions(p: Any, e: Expr) -> Callable[[Body, str], str]:
    """Where a scatter goes. Raises Unsupported for others than those of a drawn selection."""
    if e.args[0].op != "indices":
        alone = "a spec that is computed an array at a time"
        raise Unsupported(f"scatter at other positions than a selection's in {alone}", "", e)
    return drawn(p, str(e.args[0].value))


def make_scatter(p: Any, e: Expr) -> View:
    at, view = positions(p, e), p.array(e.args[1])
    made: View = p.new_array(e.type)
    zeros(p, made, domain_of(e.type))
    with over(p, "scatter", domain_of(e.args[1].type)) as b:
        b.add(f"{made.pointer(b)}[{at(b, 'i')}] = {view.text(b)}.get(i);")
    return made


# elements at other places


def place_take_columns(p: Any, e: Expr) -> Value:
    x, at = map(p.array, e.args)
    found: Value = p.values.element(
        e, lambda b, i, args: f"taken({x.text(b)}, {at.text(b, e.type.dims)}, {i})"
    )
    return found


def place_lookup(p: Any, e: Expr) -> Value:
    if e.args[0].type.shape != "matrix":
        raise Unsupported("tables in a spec that is computed an array at a time", "", e)
    row, index = p.array(e.args[0]), p.values.argument(e.args[1], e)
    found: Value = p.values.element(
        e, lambda b, i, args: f"looked_up({row.text(b)}, {args[0]})", index
    )
    return found


def place_random_matrix(p: Any, e: Expr) -> Value:
    def text(b: Body, i: str, args: list[str]) -> str:
        step, tensor = map(b.given, ("step", "tensor"))
        b.hoist("rm", f"const u64 rm = stream(0ull, {step}, (u64){tensor}, (u64)-2ll, 0ull);")
        return f"random_element({i}, rm, {step}, {tensor})"

    found: Value = p.values.element(e, text)
    return found


def place_matmul(p: Any, e: Expr) -> Value:
    """A short product, in the order of [Note: order of matrix products]."""
    x, y = map(p.array, e.args)
    found: Value = p.values.element(
        e, lambda b, i, args: f"short_product({x.text(b)}, {y.text(b)}, {i})"
    )
    return found


# matrices


def make_matmul(p: Any, e: Expr) -> View:
    """A block computes a part of the product."""
    x, y = map(p.array, e.args)
    made: View = p.new_array(e.type)
    with blocks(p, "product", Domain("products", "", e.type.dims)) as b:
        given = f"{x.text(b)}, {y.text(b)}, own, {made.pointer(b)}"
        b.add(f"product<{p.plan.shape.threads}>({given});")
    return made


def make_orthonormal(p: Any, e: Expr) -> View:
    """A block makes all columns, one after the other; see [Note: orthonormal]."""
    views = [p.array(a) for a in e.args]
    made: View = p.new_array(e.type)
    basis = p.plan.fresh("basis")
    grid = p.region(domain_of(e.type)).grid
    with blocks(p, "orthonormal", PIECE, threads=BASIS) as b:
        held = b.memory(basis, "float64", grid, p.plan.shape.tile)
        x, spare = (views[k].text(b) for k in (0, -1))
        b.add(
            f"orthonormal({x}, {spare}, {str(len(views) > 1).lower()}, {held}, {made.pointer(b)});"
        )
    return made


def make_row_extreme(p: Any, e: Expr) -> View:
    """The largest element of each row, or the smallest; a warp a row."""
    x, warps = p.array(e.args[0]), p.plan.shape.threads // 32
    made: View = p.new_array(e.type)
    with blocks(p, "extremes", rows_of(p, e), warps) as b:
        largest = str(e.op == "row_max").lower()
        b.add(
            f"row_extreme({x.text(b)}, own * {warps} + threadIdx.x / 32, {largest}, {made.pointer(b)});"
        )
    return made


def make_top_columns(p: Any, e: Expr) -> View:
    """The largest elements of each row; a warp a row."""
    x, warps = p.array(e.args[0]), p.plan.shape.threads // 32
    made: View = p.new_array(e.type)
    with blocks(p, "top", rows_of(p, e), warps) as b:
        k = b.dim(e.type.dims[1])
        b.add(
            f"top_columns({x.text(b)}, own * {warps} + threadIdx.x / 32, {k}, {made.pointer(b)});"
        )
    return made


def make_place_columns(p: Any, e: Expr) -> View:
    """A thread places the elements of a row, one after the other."""
    at, x = map(p.array, e.args)
    made: View = p.new_array(e.type)
    zeros(p, made, domain_of(e.type))
    with over(p, "place", rows_of(p, e)) as b:
        cols = b.dim(e.type.dims[1])
        b.add(f"place_columns({at.text(b)}, {x.text(b)}, i, {cols}, {made.pointer(b)});")
    return made


def make_sum_by(p: Any, e: Expr) -> View:
    """See [Note: sums by index]: in any order, as whole numbers add up to the same."""
    index, x = (p.array(a) for a in e.args)
    pool, items, domain = p.module.pool, domain_of(e.args[0].type), domain_of(e.type)
    size_of = pool.make("abs", e.args[1:], e.args[1].type)
    largest = p.values.of(pool.make("reduce_max", (size_of,), Type("float", "scalar")))
    made: View = p.new_array(e.type)
    sums = p.plan.fresh("sums")
    grid, tile = p.region(domain).grid, p.plan.shape.tile
    p.printer.require([largest])

    def shift(b: Body) -> str:
        return f"sum_shift((float){b.value(largest)}, {b.count(items)})"

    with over(p, "zeros", domain) as b:
        b.add(f"{b.memory(sums, 'int64', grid, tile)}[i] = 0;")
    with over(p, "sums", items) as b:
        to = f"{b.memory(sums, 'int64', grid, tile)} + inside({index.text(b)}.get(i), {b.count(domain)})"
        b.add(f"atomicAdd((u64*)({to}), (u64)sum_item({x.text(b)}.get(i), {shift(b)}));")
    with over(p, "rounded", domain) as b:
        whole = f"{b.memory(sums, 'int64', grid, tile)}[i]"
        b.add(f"{made.pointer(b)}[i] = sum_value({whole}, {shift(b)});")
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
    near = RADIX * threads
    far = list(distances(near, block))
    top = block.bit_length() - 1
    with blocks(p, "near", n, near) as b:
        b.add(f"__shared__ float part[{near + near // 32}];")
        given = f"{x.text(b)}, own * {near}, {b.given('n')}"
        b.add(f"stage_near<{near}, {threads}>({given}, part);")
        for h, radix in distances(1, min(near, block)):
            b.add(f"mix_near<{near}, {threads}, {h}, {radix}>(own * {near}, {b.given('n')}, part);")
        to = f"own * {near}, {b.given('n')}, {-1 if far else top}, part, {made.pointer(b)}"
        b.add(f"leave_near<{near}, {threads}>({to});")
    for h, radix in far:
        with blocks(p, "far", n, threads * radix) as b:
            given = f"{made.pointer(b)}, {b.given('n')}, own, firsts[p + 1] - firsts[p]"
            b.add(
                f"mix_far<{threads}, {radix}>({given}, {h}, {top if (h, radix) == far[-1] else -1});"
            )
    return made


# singular vectors: see [Note: CUDA singular vectors] in spectra.cuh


@dataclass(frozen=True)
class Spectrum:
    """Of a matrix with a shorter side of r: vectors float64 [r, r], a row each; lengths float64 [r];
    order int32 [r], the longest first."""

    view: View
    vectors: Callable[[Body], str]
    lengths: Callable[[Body], str]
    order: Callable[[Body], str]


def spectrum(p: Any, m: Expr) -> Spectrum:
    """The Gram matrix, its eigenvectors, their products' lengths; once."""
    if id(m) not in p.spectra:
        p.spectra[id(m)] = make_spectrum(p, m)
    found: Spectrum = p.spectra[id(m)]
    return found


def make_spectrum(p: Any, m: Expr) -> Spectrum:
    view, dims, threads = p.array(m), m.type.dims, p.plan.shape.threads

    def memory(kind: str, dtype: str = "float64", factor: int = 1) -> Callable[[Body], str]:
        name, grid = p.plan.fresh(kind), p.plan.grid("elements", 1, Domain(kind, "", dims))
        return lambda b: b.memory(name, dtype, grid, factor)

    gram, vectors, parts = memory("square"), memory("square"), memory("grams")
    lengths, order, angles = memory("short"), memory("short", "int32"), memory("short", factor=2)
    squares = memory("squares")
    with blocks(p, "gram", Domain("gram", "", dims)) as b:
        b.add(f"gram_part<{threads}>({view.text(b)}, own, {parts(b)});")
    with over(p, "gram", Domain("square", "", dims)) as b:
        b.add(f"{gram(b)}[i] = gram_sum({view.text(b)}, i, {parts(b)});")
    with blocks(p, "eigenvectors", PIECE) as b:
        short = f"{view.text(b)}.shorter()"
        b.add(f"eigenvectors({gram(b)}, {vectors(b)}, {angles(b)}, {short});")
    with blocks(p, "squares", Domain("lengths", "", dims)) as b:
        b.add(f"square_part<{threads}>({view.text(b)}, own, {vectors(b)}, {squares(b)});")
    with blocks(p, "lengths", PIECE) as b:
        b.add(f"by_length({squares(b)}, {view.text(b)}, {lengths(b)}, {order(b)});")
    return Spectrum(view, vectors, lengths, order)


def place_singular_values(p: Any, e: Expr) -> Value:
    one = spectrum(p, e.args[0])
    found: Value = p.values.element(
        e, lambda b, i, args: f"(float){one.lengths(b)}[{one.order(b)}[{i}]]"
    )
    return found


def place_vectors(p: Any, e: Expr) -> Value:
    """An element of a vector: of the shorter side, or of a product with such a one."""
    one, left = spectrum(p, e.args[0]), str(e.op == "left_vectors").lower()

    def text(b: Body, i: str, args: list[str]) -> str:
        given = f"{one.view.text(b)}, {one.vectors(b)}, {one.lengths(b)}, {one.order(b)}"
        return f"vector_at<{left}>({given}, {i}, {b.dim(e.type.dims[1])})"

    found: Value = p.values.element(e, text)
    return found


place_left_vectors = place_right_vectors = place_vectors


def make_chosen(p: Any, e: Expr) -> View:
    """One thread goes along the chances."""
    chances = p.array(e.args[0])
    made: View = p.new_array(e.type)
    with blocks(p, "choose", PIECE, threads=32) as b:
        step, tensor, offset = map(b.given, ("step", "tensor", "offset"))
        keys = f"stream(seed, {step}, (u64){tensor}, {int(e.value)}ull, (u64)({offset} >> 32))"
        u = f"uniform((u32){offset}, {keys})"
        most = b.dim(e.type.dims[1])
        b.add(f"if (threadIdx.x == 0) choose({chances.text(b)}, {u}, {most}, {made.pointer(b)});")
    return made


MAKERS: dict[str, Callable[[Any, Expr], View]] = {
    "in": make_in, "scatter": make_scatter, "matmul": make_matmul, "orthonormal": make_orthonormal,
    "row_max": make_row_extreme, "row_min": make_row_extreme, "top_columns": make_top_columns,
    "place_columns": make_place_columns, "sum_by": make_sum_by, "hadamard": make_hadamard,
    "chosen": make_chosen,
}  # fmt: skip
