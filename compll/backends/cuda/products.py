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
        """A warp finds the largest element of a row, or the smallest."""
        (x,), made, domain = e.args, self.new_array(e), domain_of(e.type)
        largest, warps = e.op == "row_max", self.threads // 32
        how = "max" if largest else "min"
        with self.kernel("extremes", domain, warps):
            rows, cols = map(self.dim, x.type.dims)
            self.head.add(f"const i64 t = own * {warps} + threadIdx.x / 32;")
            self.head.add(f"const i64 r = t < {rows} ? t : {rows} - 1;")
            self.body.add(f"i32 best = {-2147483647 if largest else 2147483647};")
            with self.inner(f"for (i64 c = threadIdx.x % 32; c < {cols}; c += 32)"):
                value = self.value(x, Place("matrix", "r", "c"))
                self.body.add(f"best = i_{how}(best, key({value}));")
            self.body.add(f"best = team_{how}<32>(best);")
            to = f"{self.held(made)}[t]"
            self.body.add(f"if (threadIdx.x % 32 == 0 && t < {rows}) {to} = unkey(best);")

    make_row_min = make_row_max

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
