"""Products of matrices on CUDA, and orthonormal columns: those of numerics/matrices.py, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

from compll.backends.cuda.domains import COLUMNS, PIECE, ROWS, Domain, domain_of
from compll.backends.cuda.elements import Place
from compll.backends.cuda.steps import Steps
from compll.ir.expr import Expr

DEPTH = 64  # of the inner dimension that a block holds at a time
THREADS = 128  # that make columns orthonormal: one for each lane of [Note: order of sums]


def along_columns(e: Expr) -> bool:
    """Whether neighbours of a row are neighbours in memory."""
    turned = False
    while e.op == "transpose":
        turned, (e,) = not turned, e.args
    return not turned


class Products(Steps):
    """Makes products that are too long to be computed where they are read, and bases."""

    def make_matmul(self, e: Expr) -> None:
        """A block computes ROWS x COLUMNS elements; see [Note: order of matrix products]."""
        a, b = e.args
        made = self.new_array(e)
        with self.kernel("product", Domain("products", "", e.type.dims), 1):
            rows, inner, cols = (self.dim(d) for d in (*a.type.dims, b.type.dims[1]))
            self.block_of("own", rows, cols)
            self.accumulate("0", inner, "float", partial(self.load_left, a, rows, inner),
                      partial(self.load_right, b, inner))  # fmt: skip
            with self.each_total():
                to = f"{self.held(made)}[(row0 + r) * {cols} + col0 + c]"
                self.body.add(f"if (row0 + r < {rows}) {to} = (float)total[s];")

    def make_row_max(self, e: Expr) -> None:
        """The largest element of each row, or the smallest."""
        (x,), made = e.args, self.new_array(e)
        largest = e.op == "row_max"
        how = "max" if largest else "min"
        with self.rows_by_warps(x, "extremes"):
            self.body.add(f"i32 best = {-2147483647 if largest else 2147483647};")
            with self.each_of_row(x):
                as_key = "(i32)(own_key ^ 0x80000000u)"
                self.body.add(f"if (there) best = i_{how}(best, {as_key});")
            self.body.add(f"best = team_{how}<32>(best);")
            self.body.add(f"if (u == 0 && real) {self.held(made)}[t] = unkey(best);")

    make_row_min = make_row_max

    @contextmanager
    def rows_by_warps(self, x: Expr, what: str) -> Iterator[None]:
        """A kernel with a warp for each row: row r, which is row t if that is `real`; lane u."""
        warps = self.threads // 32
        rows = Domain("matrix", "", (x.type.dims[0], self.module.pool.const(1)))
        with self.kernel(what, rows, warps):
            count = self.dim(x.type.dims[0])
            self.head.add(f"const i64 t = own * {warps} + threadIdx.x / 32;")
            self.head.add(f"const bool real = t < {count};")
            self.head.add(f"const i64 r = real ? t : {count} - 1;")
            self.head.add("const int u = threadIdx.x % 32;")
            yield

    @contextmanager
    def each_of_row(self, x: Expr) -> Iterator[None]:
        """A loop over a warp's row, 32 columns at a time: column c, its key, whether it is there."""
        cols = self.dim(x.type.dims[1])
        with self.inner(f"for (i64 c0 = 0; c0 < {cols}; c0 += 32)"):
            self.body.add(f"const bool there = c0 + u < {cols};")
            self.body.add("const i64 c = there ? c0 + u : 0;")
            value = self.value(x, Place("matrix", "r", "c"))
            self.body.add(f"const u32 own_key = (u32)key({value}) ^ 0x80000000u;")
            yield

    def make_top_columns(self, e: Expr) -> None:
        """The k-th largest key of a row bit by bit, then positions in order."""
        (x,), made = e.args, self.new_array(e)
        with self.rows_by_warps(x, "top"):
            add = self.body.add
            k, to = self.dim(e.type.dims[1]), self.held(made)
            add("u32 least = 0;")
            with self.inner("for (int bit = 31; bit >= 0; --bit)"):
                add("const u32 tried = least | 1u << bit;")
                add("i64 count = 0;")
                with self.each_of_row(x):
                    add("count += __popc(__ballot_sync(FULL, there && own_key >= tried));")
                add(f"if (count >= {k}) least = tried;")
            add("i64 larger = 0, found = 0;")
            with self.each_of_row(x):
                add("larger += __popc(__ballot_sync(FULL, there && own_key > least));")
            add(f"i64 ties = {k} - larger;")
            add("const u32 before = (1u << u) - 1;")
            with self.each_of_row(x):
                add("const u32 equal = __ballot_sync(FULL, there && own_key == least);")
                add("const bool tied = (equal >> u & 1) && __popc(equal & before) < ties;")
                add("const bool hit = tied || (there && own_key > least);")
                add("const u32 hits = __ballot_sync(FULL, hit);")
                add(f"if (real && hit) {to}[t * {k} + found + __popc(hits & before)] = (i32)c;")
                add("ties -= __popc(equal);")
                add("found += __popc(hits);")
            with self.inner(f"for (i64 j = found + u; j < {k}; j += 32)"):
                add(f"if (real) {to}[t * {k} + j] = -1;")

    def make_place_columns(self, e: Expr) -> None:
        """A thread places the elements of a row, one after the other."""
        at, x = e.args
        made, domain = self.new_array(e), domain_of(e.type)
        rows = Domain("matrix", "", (e.type.dims[0], self.module.pool.const(1)))
        with self.over("zeros", domain) as i:
            self.body.add(f"{self.held(made)}[{i}] = 0;")
        with self.over("place", rows) as i:
            cols, k = self.dim(e.type.dims[1]), self.dim(at.type.dims[1])
            with self.inner(f"for (i64 j = 0; j < {k}; ++j)"):
                place = Place("matrix", i, "j")
                to, value = self.value(at, place), self.value(x, place)
                target = f"{self.held(made)}[{i} * {cols} + {to}]"
                self.body.add(f"if ({to} >= 0 && {to} < {cols}) {target} = {value};")

    def block_of(self, number: str, rows: str, cols: str) -> None:
        """Declarations of what a block computes of a matrix, by the number of the part."""
        self.head.add(f"const i64 across = ({cols} + {COLUMNS - 1}) / {COLUMNS};")
        self.head.add(f"const i64 row0 = {number} / across * {ROWS};")
        self.block_columns(f"{number} % across", cols)

    def block_columns(self, number: str, cols: str) -> None:
        """Declarations of the columns of a block."""
        self.head.add(f"const i64 col0 = ({number}) * {COLUMNS};")
        self.head.add(
            f"const int width = {cols} - col0 < {COLUMNS} ? (int)({cols} - col0) : {COLUMNS};"
        )

    def accumulate(
        self, begin: str, end: str, dtype: str, left: Callable[[], None], right: Callable[[], None]
    ) -> None:
        """Sums over an inner dimension, of what `left` and `right` put into shared memory."""
        self.hoist("left", f"__shared__ float left[{ROWS}][{DEPTH + 1}];")
        self.hoist("right", f"__shared__ {dtype} right[{DEPTH}][{COLUMNS}];")
        self.body.add(f"double total[{ROWS * COLUMNS // self.threads}] = {{0.0}};")
        with self.inner(f"for (i64 k0 = {begin}; k0 < {end}; k0 += {DEPTH})"):
            left()
            right()
            self.body.add("__syncthreads();")
            self.body.add(f"const int depth = {end} - k0 < {DEPTH} ? (int)({end} - k0) : {DEPTH};")
            with self.each_total():
                self.body.add("#pragma unroll 4")
                with self.inner("for (int k = 0; k < depth; ++k)"):
                    self.body.add("total[s] += (double)left[r][k] * (double)right[k][c];")
            self.body.add("__syncthreads();")

    @contextmanager
    def each_total(self) -> Iterator[None]:
        """A loop over the sums of a thread: number s, of row r and column c of the block."""
        count = ROWS * COLUMNS // self.threads
        self.body.add("#pragma unroll")
        with self.inner(f"for (int s = 0; s < {count}; ++s)"):
            self.body.add(f"const int o = threadIdx.x + s * {self.threads};")
            self.body.add(f"if (o >= {ROWS} * width) break;")
            self.body.add("const int r = o / width, c = o % width;")
            yield

    def load_left(self, a: Expr, rows: str, inner: str) -> None:
        """A block's rows of the left matrix."""
        with self.inner(f"for (int e = threadIdx.x; e < {ROWS * DEPTH}; e += {self.threads})"):
            straight = along_columns(a)
            k, r = (f"e % {DEPTH}", f"e / {DEPTH}") if straight else (f"e / {ROWS}", f"e % {ROWS}")
            self.body.add(f"const int kl = {k}, rl = {r};")
            self.body.add(f"const bool inl = row0 + rl < {rows} && k0 + kl < {inner};")
            self.body.add("const i64 ra = inl ? row0 + rl : 0, ka = inl ? k0 + kl : 0;")
            value = self.value(a, Place("matrix", "ra", "ka"))
            self.body.add(f"left[rl][kl] = inl ? {value} : 0.0f;")

    def load_right(self, b: Expr, inner: str) -> None:
        """A block's columns of the right matrix."""
        with self.inner(f"for (int e = threadIdx.x; e < {DEPTH} * width; e += {self.threads})"):
            self.body.add("const int kr = e / width, cr = e % width;")
            self.body.add(f"const i64 kb = k0 + kr < {inner} ? k0 + kr : 0, cb = col0 + cr;")
            value = self.value(b, Place("matrix", "kb", "cb"))
            self.body.add(f"right[kr][cr] = {value};")

    def make_orthonormal(self, e: Expr) -> None:
        """A block makes all columns, one after the other; see [Note: orthonormal]."""
        a, *spare = e.args
        made, domain = self.new_array(e), domain_of(e.type)
        basis = self.memory(self.name("basis"), "float64", domain)
        with self.kernel("orthonormal", PIECE, 1, THREADS):
            rows, cols = map(self.dim, e.type.dims)
            held = self.held(basis)
            with self.inner(f"for (i64 c = 0; c < {cols}; ++c)"):
                self.fill_column(held, rows, a)
                self.body.add(f"bool found = direction({held}, {rows}, c);")
                if spare:
                    with self.inner("if (!found)"):
                        self.fill_column(held, rows, spare[0])
                        self.body.add(f"found = direction({held}, {rows}, c);")
                with self.inner("if (!found)"):
                    self.fill_column(held, rows, None)
            with self.inner(f"for (i64 c = 0; c < {cols}; ++c)"), self.rows_of(rows):
                self.body.add(f"{self.held(made)}[r * {cols} + c] = (float){held}[c * {rows} + r];")

    def rows_of(self, rows: str) -> AbstractContextManager[None]:
        """A loop over a thread's rows; left as it is, as it takes little of a kernel's time."""
        self.body.add("#pragma unroll 1")
        return self.inner(f"for (i64 r = threadIdx.x; r < {rows}; r += {THREADS})")

    def fill_column(self, held: str, rows: str, source: Expr | None) -> None:
        """Column c of a matrix into the basis; or zeros."""
        with self.rows_of(rows):
            value = self.value(source, Place("matrix", "r", "c")) if source is not None else "0.0"
            self.body.add(f"{held}[c * {rows} + r] = (double){value};")
