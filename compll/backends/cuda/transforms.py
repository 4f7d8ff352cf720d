"""The Walsh-Hadamard transform on CUDA: that of numerics/matrices.py, bit for bit.

A block mixes what lies near in shared memory; then threads mix elements that lie further apart, RADIX
of them at a time. All distances are powers of two, in rising order.
"""

from __future__ import annotations

from collections.abc import Iterator

from compll.backends.cuda.domains import ELEMENTS, Memory
from compll.backends.cuda.elements import Place
from compll.backends.cuda.products import Products
from compll.ir.expr import Expr

RADIX = 16


def rounds(first: int, end: int) -> Iterator[tuple[int, int]]:
    """Distances, and how many elements so far apart are mixed, from one power of two to another."""
    while first < end:
        radix = min(RADIX, end // first)
        yield first, radix
        first *= radix


class Transforms(Products):
    """Makes transforms."""

    def make_hadamard(self, e: Expr) -> None:
        block, made = int(e.value), self.new_array(e)
        near = RADIX * self.threads
        far = list(rounds(near, block))
        factor = f" * run_factor({{}}, n, {block.bit_length() - 1})"
        self.mix_near(e.args[0], made, near, min(near, block), "" if far else factor)
        for h, radix in far:
            self.mix_far(made, h, radix, factor if (h, radix) == far[-1] else "")

    def mix_near(self, x: Expr, made: Memory, near: int, end: int, factor: str) -> None:
        """Distances below `end`, for `near` elements of a block; a gap after every 32 of them
        keeps threads off each other's banks."""
        with self.kernel("near", ELEMENTS, near):
            self.head.add(f"__shared__ float part[{near + near // 32}];")
            self.head.add(f"const i64 begin = own * {near};")
            with self.inner(f"for (int e = threadIdx.x; e < {near}; e += {self.threads})"):
                self.body.add("const i64 i = begin + e < n ? begin + e : 0;")
                value = self.value(x, Place("n", "i"))
                self.body.add(f"part[e + e / 32] = begin + e < n ? {value} : 0.0f;")
            for h, radix in rounds(1, end):
                self.body.add("__syncthreads();")
                with self.inner(
                    f"for (int t = threadIdx.x; t < {near // radix}; t += {self.threads})"
                ):
                    self.mix_shared(h, radix)
            self.body.add("__syncthreads();")
            with self.inner(f"for (int e = threadIdx.x; e < {near}; e += {self.threads})"):
                self.body.add("const i64 i = begin + e;")
                to = f"{self.held(made)}[i]"
                self.body.add(f"if (i < n) {to} = part[e + e / 32]{factor.format('i')};")

    def mix_shared(self, h: int, radix: int) -> None:
        """A thread's elements, in shared memory."""
        self.body.add(f"const int b = t / {h} * {h * radix} + t % {h};")
        self.body.add(f"float v[{radix}];")
        each = f"for (int k = 0; k < {radix}; ++k) {{ const int e = b + k * {h};"
        self.body.add("#pragma unroll")
        self.body.add(f"{each} v[k] = part[e + e / 32]; }}")
        self.body.add(f"mixed<{radix}>(v, begin + b, {h}, n);")
        self.body.add("#pragma unroll")
        self.body.add(f"{each} part[e + e / 32] = v[k]; }}")

    def mix_far(self, made: Memory, h: int, radix: int, factor: str) -> None:
        """Elements `h` apart, and multiples of that."""
        with self.kernel("far", ELEMENTS, self.threads * radix):
            at = self.held(made)
            self.head.add("const i64 blocks = firsts[p + 1] - firsts[p];")
            self.head.add(f"const i64 groups = (n + {h * radix - 1}) / {h * radix} * {h};")
            first, step = f"own * {self.threads} + threadIdx.x", f"blocks * {self.threads}"
            with self.inner(f"for (i64 t = {first}; t < groups; t += {step})"):
                self.body.add(f"const i64 b = t / {h} * {h * radix} + t % {h};")
                self.body.add(f"float v[{radix}];")
                each = f"for (int k = 0; k < {radix}; ++k) {{ const i64 e = b + (i64)k * {h};"
                self.body.add("#pragma unroll")
                self.body.add(f"{each} v[k] = e < n ? {at}[e] : 0.0f; }}")
                self.body.add(f"mixed<{radix}>(v, b, {h}, n);")
                self.body.add("#pragma unroll")
                self.body.add(f"{each} if (e < n) {at}[e] = v[k]{factor.format('e')}; }}")
