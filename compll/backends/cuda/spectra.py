"""Singular values and vectors on CUDA, and choosing among them.

[Note: CUDA singular vectors] The vectors of a matrix's shorter side are the eigenvectors of its Gram
matrix, found by Jacobi's method in float64, a block for each piece; products of the matrix with them
have the singular values as lengths, and divided by those are the vectors of the longer side. A
product is computed where it is read. So values below 1e-8 of the largest, and their vectors of the
longer side, have no true digits, whatever the shape: see [Note: singular vectors] in spectra.py. The
last bits, and the vectors' signs, are not those of the other backends.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from compll.backends.cuda.domains import COLUMNS, LONG, PIECE, ROWS, TALL, Domain, Memory
from compll.backends.cuda.elements import Place
from compll.backends.cuda.products import DEPTH
from compll.backends.cuda.transforms import Transforms
from compll.ir.expr import Expr


@dataclass(frozen=True)
class Spectrum:
    """Of a matrix with a shorter side of r: vectors float64 [r, r], a row each; lengths float64 [r];
    order int32 [r], the longest first."""

    vectors: Memory
    lengths: Memory
    order: Memory


class Spectra(Transforms):
    """Makes singular values and vectors."""

    def __init__(self, *args: object, **more: object) -> None:
        self.spectra: dict[int, Spectrum] = {}
        super().__init__(*args, **more)

    def known(self, e: Expr) -> bool:
        return id(e.args[0]) in self.spectra if e.op in VECTORS else super().known(e)

    def make(self, e: Expr) -> None:
        if e.op in VECTORS:
            self.make_spectrum(e.args[0])
        else:
            super().make(e)

    def make_spectrum(self, m: Expr) -> None:
        """The Gram matrix, its eigenvectors, their products' lengths."""
        dims = m.type.dims
        gram = self.memory(self.name("gram"), "float64", Domain("square", "", dims))
        one = Spectrum(
            self.memory(self.name("vectors"), "float64", gram.domain),
            self.memory(self.name("lengths"), "float64", Domain("short", "", dims)),
            self.memory(self.name("order"), "int32", Domain("short", "", dims)),
        )
        self.make_gram(m, gram)
        angles = self.memory(self.name("angles"), "float64", Domain("short", "", dims), factor=2)
        with self.kernel("eigenvectors", PIECE, 1):
            given = ", ".join(map(self.held, (gram, one.vectors, angles)))
            self.body.add(f"eigenvectors({given}, {self.sides(m)[0]});")
        self.make_lengths(m, one)
        self.spectra[id(m)] = one

    def sides(self, m: Expr) -> tuple[str, str, str]:
        """The shorter and the longer side, and whether rows are the longer one."""
        rows, cols = map(self.dim, m.type.dims)
        tall, short, long = (f"{kind}_{rows}_{cols}" for kind in ("tall", "short", "long"))
        self.hoist(tall, f"const bool {tall} = {rows} >= {cols};")
        self.hoist(short, f"const i64 {short} = {tall} ? {cols} : {rows};")
        self.hoist(long, f"const i64 {long} = {tall} ? {rows} : {cols};")
        return short, long, tall

    def across(self, m: Expr, long: str, short: str) -> str:
        """The element at these places of the longer and the shorter side."""
        tall = self.sides(m)[2]
        r = self.declare("i64", f"{tall} ? {long} : {short}")
        c = self.declare("i64", f"{tall} ? {short} : {long}")
        return self.value(m, Place("matrix", r, c))

    # the Gram matrix

    def make_gram(self, m: Expr, gram: Memory) -> None:
        """Blocks add up LONG of the longer side; then their parts are added."""
        dims = m.type.dims
        parts = self.memory(self.name("parts"), "float64", Domain("grams", "", dims))
        with self.kernel("gram", Domain("gram", "", dims), 1):
            short, long, _ = self.sides(m)
            down = f"(({short} + {ROWS - 1}) / {ROWS} * (({short} + {COLUMNS - 1}) / {COLUMNS}))"
            self.head.add(f"const i64 parts = {down}, part = own / parts, begin = part * {LONG};")
            self.head.add(f"const i64 end = {long} - begin < {LONG} ? {long} : begin + {LONG};")
            self.block_of("(own % parts)", short, short)
            self.accumulate(
                "begin", "end", "float",
                partial(self.load_side, m, "left", ROWS, f"{short} - row0", "row0"),
                partial(self.load_side, m, "right", COLUMNS, "width", "col0"),
            )  # fmt: skip
            with self.each_total():
                to = f"{self.held(parts)}[(part * {short} + row0 + r) * {short} + col0 + c]"
                self.body.add(f"if (row0 + r < {short}) {to} = total[s];")
        with self.over("gram", gram.domain) as i:
            short, long, _ = self.sides(m)
            self.body.add("double sum = 0.0;")
            with self.inner(f"for (i64 k = 0; k * {LONG} < {long}; ++k)"):
                self.body.add(f"sum += {self.held(parts)}[k * {short} * {short} + {i}];")
            self.body.add(f"{self.held(gram)}[{i}] = sum;")

    def load_side(self, m: Expr, name: str, most: int, width: str, first: str) -> None:
        """DEPTH of the longer side by up to `most` of the shorter one, from `first` on."""
        with self.inner(f"for (int e = threadIdx.x; e < {DEPTH * most}; e += {self.threads})"):
            self.body.add(f"const int k = e / {most}, j = e % {most};")
            self.body.add(f"const bool inside = k0 + k < end && j < {width};")
            self.body.add(
                f"const i64 long_ = inside ? k0 + k : 0, short_ = inside ? {first} + j : 0;"
            )
            value = self.across(m, "long_", "short_")
            to = f"{name}[j][k]" if name == "left" else f"{name}[k][j]"
            self.body.add(f"{to} = inside ? {value} : 0.0f;")

    # lengths

    def make_lengths(self, m: Expr, one: Spectrum) -> None:
        """The products' squares, added up by blocks of TALL of the longer side; then their roots."""
        dims = m.type.dims
        parts = self.memory(self.name("parts"), "float64", Domain("squares", "", dims))
        with self.kernel("squares", Domain("lengths", "", dims), 1):
            short, long, _ = self.sides(m)
            self.head.add(f"const i64 across = ({short} + {COLUMNS - 1}) / {COLUMNS};")
            self.head.add(f"const i64 begin = own / across * {TALL};")
            self.head.add(f"const i64 last = {long} - begin < {TALL} ? {long} : begin + {TALL};")
            self.block_columns("own % across", short)
            per_thread = -(-COLUMNS // self.threads)
            self.body.add(f"double squares[{per_thread}] = {{0.0}};")
            with self.inner(f"for (i64 row0 = begin; row0 < last; row0 += {ROWS})"):
                self.products_of_rows(m, one, short)
                with self.own_columns():
                    with self.inner(f"for (int r = 0; r < {ROWS} && row0 + r < last; ++r)"):
                        self.body.add("squares[s] += right[r][c] * right[r][c];")
                self.body.add("__syncthreads();")
            with self.own_columns():
                to = f"{self.held(parts)}[own / across * {short} + col0 + c]"
                self.body.add(f"{to} = squares[s];")
        with self.kernel("lengths", PIECE, 1):
            short, long, _ = self.sides(m)
            count = f"({long} + {TALL - 1}) / {TALL}"
            lengths, order = self.held(one.lengths), self.held(one.order)
            self.body.add(f"by_length({self.held(parts)}, {count}, {short}, {lengths}, {order});")

    def products_of_rows(self, m: Expr, one: Spectrum, short: str) -> None:
        """Products of ROWS of the longer side with the block's vectors, into `right`."""

        def rows() -> None:
            with self.inner(f"for (int e = threadIdx.x; e < {ROWS * DEPTH}; e += {self.threads})"):
                self.body.add(f"const int r = e / {DEPTH}, k = e % {DEPTH};")
                self.body.add(f"const bool inside = row0 + r < last && k0 + k < {short};")
                self.body.add("const i64 rl = inside ? row0 + r : 0, kl = inside ? k0 + k : 0;")
                value = self.across(m, "rl", "kl")
                self.body.add(f"left[r][k] = inside ? {value} : 0.0f;")

        def vectors() -> None:
            each = f"for (int e = threadIdx.x; e < {DEPTH} * width; e += {self.threads})"
            with self.inner(each):
                self.body.add(f"const int c = e / {DEPTH}, k = e % {DEPTH};")
                at = f"{self.held(one.vectors)}[(col0 + c) * {short} + k0 + k]"
                self.body.add(f"right[k][c] = k0 + k < {short} ? {at} : 0.0;")

        self.accumulate("0", short, "double", rows, vectors)
        with self.each_total():
            self.body.add("right[r][c] = total[s];")
        self.body.add("__syncthreads();")

    def own_columns(self) -> AbstractContextManager[None]:
        """A loop over a thread's columns."""
        each = -(-COLUMNS // self.threads)
        c = f"c = threadIdx.x + s * {self.threads}"
        return self.inner(f"for (int s = 0, {c}; s < {each} && c < width; ++s, {c})")

    # where they are read

    def stored_at(self, e: Expr, place: Place) -> str:
        if e.op not in VECTORS:
            return super().stored_at(e, place)
        (m,) = e.args
        one = self.spectra[id(m)]
        row, col = (
            "0" if d.op == "const" and d.value == 1 else at
            for d, at in zip(e.type.dims, (place.a, place.b), strict=True)
        )
        o = self.declare("i64", f"{self.held(one.order)}[{col}]")
        if e.op == "singular_values":
            return f"(float){self.held(one.lengths)}[{o}]"
        return self.vector_at(m, one, o, row, e.op == "left_vectors")

    def vector_at(self, m: Expr, one: Spectrum, o: str, row: str, left: bool) -> str:
        """An element of a vector: of the shorter side, or of a product with such a one."""
        short, _, tall = self.sides(m)
        vector = self.declare("double*", f"{self.held(one.vectors)} + {o} * {short}")
        found, j = self.name("w"), self.name("j")
        self.body.add(f"double {found} = 0.0;")
        with self.inner(f"if ({tall} != {'true' if left else 'false'})"):
            self.body.add(f"{found} = {vector}[{row}];")
        with self.inner("else"):
            with self.inner(f"for (i64 {j} = 0; {j} < {short}; ++{j})"):
                value = self.across(m, row, j)
                self.body.add(f"{found} += (double){value} * {vector}[{j}];")
            length = f"{self.held(one.lengths)}[{o}]"
            self.body.add(f"{found} /= {length} > 0.0 ? {length} : 1.0;")
        return f"(float){found}"

    def make_chosen(self, e: Expr) -> None:
        """One thread goes along the chances."""
        (p,) = e.args
        made = self.new_array(e)
        with self.kernel("choose", PIECE, 1, 32):
            keys = self.stream(int(e.value), f"{self.offset()} >> 32", seeded=True)
            u = self.hoist("u", f"const float u = uniform((u32){self.offset()}, {keys});")
            most, count = self.dim(e.type.dims[1]), self.dim(p.type.dims[1])
            out = self.held(made)
            self.body.add("if (threadIdx.x) return;")
            self.body.add(f"for (i64 i = 0; i < {most}; ++i) {out}[i] = -1;")
            self.body.add(f"Sampler s = sampler({u});")
            with self.inner(f"for (i64 i = 0; i < {count}; ++i)"):
                chance = self.value(p, Place("matrix", "0", "i"))
                self.body.add(f"sample_next(&s, {chance}, {u}, i, {most}, {out});")


#: what singular values and vectors are asked by
VECTORS = ("left_vectors", "right_vectors", "singular_values")
