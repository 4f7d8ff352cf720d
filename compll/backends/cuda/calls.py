"""Routines that mix elements, as kernels: matrices, transforms, drawn selections. arrays.cuh has
their bodies.

A routine reads views of arrays (see View in arrays.cuh); an expression of several arrays is stored
as one first. Drawn positions, and products that walks compute, have no kernel: their elements are
computed on each read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from compll.backends.cuda.body import Body
from compll.backends.cuda.printer import Printer
from compll.ir.storage import INT32
from compll.ir.tile import ELEMENTS, Array, Call, Domain, Extents, View
from compll.numerics.matrices import CHUNK

EACH = 2048  # elements of a block
SUMMED = 8192  # elements of a block that adds up, whose sums it clears and adds to the piece's
RADIX = 16  # elements that a thread mixes at a time
MULTIPLY = 256  # threads that compute a part of a product
BASIS = 128  # threads that make columns orthonormal: one for each lane of [Note: order of sums]
#: text of a view in a given kernel
Text = Callable[[Body], str]


class Calls:
    """The routines of the plan that `printer` makes."""

    def __init__(self, printer: Printer) -> None:
        self.printer, self.plan = printer, printer.plan

    def emit(self, call: Call) -> None:
        """Add the kernels of a routine."""
        self.printer.require(call.numbers)
        getattr(self, call.routine)(call, [self.view(v) for v in call.views])

    # arrays

    def view(self, view: View) -> Text:
        """The text of a matrix or array that a routine reads."""
        domain = view.domain
        array = self.printer.array(view.value, domain)

        def text(b: Body) -> str:
            count, pointer = b.items(domain), b.elements(array)
            if view.matrix is None:
                return named(b, array, f"{pointer}, 1, {count}, 0, 1, {count}")
            rows, cols = map(b.value, (view.matrix.rows, view.matrix.cols))
            down, across = ("1", rows) if view.turned else (cols, "1")
            return named(b, array, f"{pointer}, {rows}, {cols}, {down}, {across}, {count}")

        return text

    def made(self, b: Body, call: Call) -> str:
        """Pointer to the array that a routine fills."""
        return b.elements(call.made[0])

    def memory(self, b: Body, name: str, dtype: str, call: Call) -> str:
        """Scratch memory with a number for each element of that array."""
        grid = self.plan.tiles(call.made[0].domain)
        return b.memory(name, dtype, grid, self.plan.shape.tile)

    def lazily(self, call: Call, text: Callable[[Body, str], str]) -> None:
        """Have elements of that array computed on each read."""
        self.plan.elements[call.made[0]] = text

    # kernels

    @contextmanager
    def over(self, what: str, domain: Domain) -> Iterator[Body]:
        """A kernel with a thread for each item i of a domain."""
        grid, threads = self.plan.grid(domain, EACH), self.plan.shape.threads
        with self.printer.kernel(what, grid, threads) as b:
            end = f"i < {b.items(domain)} && i < own * {EACH} + {EACH}"
            with b.block(f"for (i64 i = own * {EACH} + threadIdx.x; {end}; i += {threads})"):
                yield b

    def blocks(self, what: str, domain: Domain, each: int = 1) -> AbstractContextManager[Body]:
        """A kernel with a block for every `each` items of a domain."""
        grid = self.plan.grid(domain, each)
        return self.printer.kernel(what, grid, self.plan.shape.threads)

    # routines, by their names: see Call in ir/tile.py

    def product(self, call: Call, views: list[Text]) -> None:
        """A product, a part of it per block, and of its inner dimension a chunk; then sums of
        several chunks. A short one is added up by a thread per element."""
        a, other = views
        if call.attr:
            with self.over("product", call.made[0].domain) as b:
                b.add(f"{self.made(b, call)}[i] = short_product({a(b)}, {other(b)}, i);")
            return
        name, inner = self.plan.fresh("parts"), extents(call.views[0])
        blocks, kept, joined = (
            self.plan.grid(Domain(kind, dims=(*extents(call).dims, inner.dims[1])), each)
            for kind, each in (("products", 1), ("parts", 1), ("joined", MULTIPLY))
        )
        with self.printer.kernel("product", blocks, MULTIPLY) as b:
            b.resident = 4  # of 64 registers a thread
            parts, routine = b.memory(name, "float64", kept), f"product<{MULTIPLY}, {CHUNK}>"
            b.call(routine, a(b), other(b), "own", self.made(b, call), parts)
        with self.printer.kernel("chunks", joined, MULTIPLY) as b:
            parts, size = b.memory(name, "float64", kept), b.items(call.made[0].domain)
            chunks = f"({b.value(inner.cols)} + {CHUNK - 1}) / {CHUNK}"
            b.add(f"const i64 i = own * {MULTIPLY} + threadIdx.x;")
            total = f"sum_chunks({parts} + i, {chunks}, {size})"
            b.add(f"if (i < {size}) {self.made(b, call)}[i] = {total};")

    def inlined(self, call: Call) -> None:
        """Have the walk that comes next compute the elements of a short product."""
        a, other = [self.view(v) for v in call.views]
        self.lazily(call, lambda b, i: f"short_product({a(b)}, {other(b)}, {i})")

    def orthonormal(self, call: Call, views: list[Text]) -> None:
        """Orthonormal columns: a block makes all of them in order; see [Note: orthonormal]."""
        name = self.plan.fresh("basis")
        with self.printer.kernel("orthonormal", -1, BASIS) as b:
            spare, spared = views[-1](b), str(len(views) > 1).lower()
            basis = self.memory(b, name, "float64", call)
            b.call("orthonormal", views[0](b), spare, spared, basis, self.made(b, call))

    def top_columns(self, call: Call, views: list[Text]) -> None:
        """Positions of the k largest elements of each row: a warp per row."""
        warps = self.plan.shape.threads // 32
        with self.blocks("top_columns", self.rows(call), warps) as b:
            row = f"own * {warps} + threadIdx.x / 32"
            cols = b.value(extents(call).cols)
            b.call("top_columns", views[0](b), row, cols, self.made(b, call))

    def rows(self, call: Call) -> Domain:
        """The domain of a matrix's rows."""
        return Domain.matrix((extents(call).dims[0], self.plan.module.pool.const(1)))

    def zeros(self, to: Text, domain: Domain) -> None:
        """Zero an array."""
        with self.over("zeros", domain) as b:
            b.add(f"{to(b)}[i] = 0;")

    def place_columns(self, call: Call, views: list[Text]) -> None:
        """Place the elements of a row in order: a thread per row."""
        at, x = views
        self.zeros(lambda b: self.made(b, call), Domain.matrix(extents(call).dims))
        with self.over("place", self.rows(call)) as b:
            cols = b.value(extents(call).cols)
            b.call("place_columns", at(b), x(b), "i", cols, self.made(b, call))

    def sum_by(self, call: Call, views: list[Text]) -> None:
        """Sums by index. Integers add up to the same in any order: see [Note: sums by index]."""
        index, x = views
        items, domain = call.views[0].domain, Domain.matrix(extents(call).dims)
        name = self.plan.fresh("sums")

        def sums(b: Body) -> str:
            return self.memory(b, name, "uint64", call)

        def units(b: Body) -> str:
            return f"(float){b.value(call.numbers[0])}, {b.items(items)}"

        self.zeros(sums, domain)
        with self.blocks("sums", items, SUMMED) as b:
            begin = f"own * {SUMMED}"
            end = f"op_min({b.items(items)}, {begin} + {SUMMED})"
            up, to = f"sum_up({units(b)})", (sums(b), b.items(domain))
            b.call("add_items", index(b), x(b), up, begin, end, *to)
        with self.over("rounded", domain) as b:
            sum_ = f"(double)(i64){sums(b)}[i]"
            b.add(f"{self.made(b, call)}[i] = (float)({sum_} * sum_down({units(b)}));")

    def hadamard(self, call: Call, views: list[Text]) -> None:
        """The transform: blocks mix near elements in shared memory, then threads mix distant ones.

        All distances are powers of two, in rising order; the last kernel multiplies by the factor.
        """
        block, threads = call.attr, self.plan.shape.threads
        near, top = RADIX * threads, block.bit_length() - 1
        far = list(distances(near, block))
        with self.blocks("near", ELEMENTS, near) as b:
            begin, n = f"own * {near}", b.given("n")
            b.add(f"__shared__ float part[{near + near // 32}];")
            b.call(f"stage_near<{near}, {threads}>", views[0](b), begin, n, "part")
            for h, radix in distances(1, min(near, block)):
                b.call(f"mix_near<{near}, {threads}, {h}, {radix}>", begin, n, "part")
            factor = -1 if far else top
            b.call(f"leave_near<{near}, {threads}>", begin, n, factor, "part", self.made(b, call))
        for h, radix in far:
            with self.blocks("far", ELEMENTS, threads * radix) as b:
                x, blocks = self.made(b, call), "firsts[p + 1] - firsts[p]"
                factor = top if (h, radix) == far[-1] else -1
                b.call(f"mix_far<{threads}, {radix}>", x, b.given("n"), "own", blocks, h, factor)

    def drawn(self, call: Call, views: list[Text]) -> None:
        """Positions that all ranks draw: one thread finds the start of the circle, then each
        position is computed on its own."""
        name = self.plan.fresh("drawn")
        with self.printer.kernel("draw", -1, 32) as b:
            step, tensor, offset, n = map(b.given, ("step", "tensor", "offset", "n"))
            keys = f"stream(0, {step}, {tensor}, -3, {offset})"
            to, count = b.memory(name, "int64", -1, 3), b.value(call.numbers[0])
            b.first(f"if ({count}) draw_positions({to}, {keys}, {n}, {count});")

        def element(b: Body, i: str) -> str:
            keys = b.memory(name, "int64", -1, 3)
            return f"(i32)drawn_at({keys}, {b.given('n')}, {b.value(call.numbers[0])}, {i})"

        self.lazily(call, element)

    def chosen(self, call: Call, views: list[Text]) -> None:
        """Columns chosen by their chances: one thread goes along them."""
        with self.printer.kernel("choose", -1, 32) as b:
            step, tensor, offset = map(b.given, ("step", "tensor", "offset"))
            keys = f"stream(seed, {step}, {tensor}, {call.attr}, {offset} >> 32)"
            to = f"{b.value(extents(call).cols)}, {self.made(b, call)}"
            b.first(f"choose({views[0](b)}, {offset}, {keys}, {to});")


def extents(of: Call | View) -> Extents:
    """Rows and columns of a routine's result, or of a view."""
    assert of.matrix is not None
    return of.matrix


def distances(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Pairs of a distance and a number of elements to mix at that distance, for powers of two from
    `first` to `end`."""
    while first < end:
        radix = min(RADIX, end // first)
        yield first, radix
        first *= radix


def named(b: Body, array: Array, given: str) -> str:
    """The name of a view in a kernel."""
    if ("view", given) not in b.named:
        name = b.name("view")
        kind = "i32" if array.storage == INT32 else "float"
        b.hoist(name, f"const View<{kind}> {name} = {{{given}}};")
        b.named["view", given] = name
    return b.named["view", given]
