"""CUDA decode of payloads with `spread`: values in order, where a condition holds.

Blocks count for how many of their elements each condition holds; a block per piece adds that up and
compares it with the header, before anything is written; then each thread knows the place of its
first value, and decodes eight elements one after the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compll.backends.cuda.scatter import Scattering
from compll.ir.expr import Expr, walk

ELEMENTS = 2048  # of a block, eight a thread
THREADS = 256


class Spreading(Scattering):
    """Decoder with spreads."""

    def emit(self) -> None:
        self.spreads = [e for e in walk(self.module.decode) if e.op == "spread"]
        if not self.spreads:
            return super().emit()
        self.ready = "false"
        self.look()
        for k, _ in enumerate(self.spreads):
            self.memory(f"hits{k}", "int64", f"{self.elements_grid()}b")
        with self.over_elements("count"):
            self.ranks()
            for k, _ in enumerate(self.spreads):
                self.add(f"if (threadIdx.x == 0) hits{k}[blockIdx.x] = all{k};")
        with self.kernel("compare", -1, THREADS):
            self.compare()
        with self.over_elements("spread"):
            self.add("XT* const ys = y + table[5 * p];")
            self.ranks()
            self.decoded()
        return None

    def elements_grid(self) -> int:
        return self.grid("elements", ELEMENTS)

    @contextmanager
    def over_elements(self, name: str) -> Iterator[None]:
        """A kernel with a thread for eight elements, from `begin` on, of a good piece."""
        grid = self.elements_grid()
        with self.kernel(name, grid, THREADS):
            self.add(f"const i64* const firsts = first + {grid} * (pieces + 1);")
            self.add("const int p = find(firsts, pieces, blockIdx.x);")
            self.piece()
            self.add("if (bad[p]) return;")
            own = f"((i64)blockIdx.x - firsts[p]) * {ELEMENTS}"
            self.add(f"const i64 begin = {own} + 8 * threadIdx.x;")
            self.fixed_fields()
            self.scalars()
            for number, f in enumerate(self.kept_fields()):
                self.add(f"const i64 at_{f.name} = {self.place_of(number)};")
            self.prepare(self.module.decode)
            yield

    @contextmanager
    def each_element(self, *roots: Expr) -> Iterator[None]:
        """A loop over the thread's elements: i of the piece, l of tile t, which has m."""
        known = dict(self.names)
        with self.block("for (i64 i = begin; i < begin + 8 && i < n; ++i)"):
            self.add(f"const i64 t = i / {self.tile}, o = t * {self.tile};")
            self.add(f"const int m = n - o >= {self.tile} ? {self.tile} : (int)(n - o);")
            self.add("const int l = (int)(i - o);")
            self.prepare_groups(*roots)
            yield
        self.names = known

    def ranks(self) -> None:
        """Declarations: how many of the block's elements before a thread's a condition holds for."""
        conditions = [e.args[0] for e in self.spreads]
        for k, _ in enumerate(conditions):
            self.add(f"int own{k} = 0;")
        with self.each_element(*conditions):
            for k, c in enumerate(conditions):
                self.add(f"own{k} += ({self.text(c)}) ? 1 : 0;")
        for k, _ in enumerate(conditions):
            self.add(f"i64 all{k};")
            self.add(f"i64 rank{k} = block_scan<{THREADS}>(own{k}, &all{k});")

    def compare(self) -> None:
        """Whether there are as many values as elements; the blocks' counts become what is before."""
        self.add("const int p = blockIdx.x;")
        self.piece()
        self.add("if (n == 0 || bad[p]) return;")
        begin = f"first[{self.elements_grid()} * (pieces + 1) + p"
        self.add("bool good = true;")
        for k, e in enumerate(self.spreads):
            blocks = f"{begin}], {begin} + 1] - {begin}]"
            self.add(f"const i64 found{k} = scan_array(hits{k} + {blocks});")
            self.add(f"good = good && found{k} == {self.size(e)};")
        self.add("if (threadIdx.x == 0 && !good) { bad[p] = 1; atomicOr(errors, 1u); }")

    def size(self, spread: Expr) -> str:
        """How many values a spread has, as text."""
        return f"kept[p * {len(self.module.selections)} + {self.number(str(spread.value))}]"

    def decoded(self) -> None:
        for k, _ in enumerate(self.spreads):
            self.add(f"rank{k} += hits{k}[blockIdx.x];")
        status = "data[at[p] + used[p] - 1] != 0" if self.module.status else "false"
        self.add(f"const bool nan = {status};")
        decode = self.module.decode
        with self.each_element(decode):
            for k, e in enumerate(self.spreads):
                condition, values = e.args
                self.add(f"float v{k}_ = 0.0f;")
                with self.block(f"if ({self.text(condition)})"):
                    self.add(f"const i64 j = rank{k}++, count = {self.size(e)};")
                    self.add(f"v{k}_ = {self.text(values)};")
            self.add(f"const float v = nan ? NAN_F : {self.text(decode)};")
            self.add(f"store1(ys, i, {'load1(ys, i) + v' if self.adding else 'v'});")

    def given(self, e: Expr) -> bool:
        return super().given(e) or e.op == "spread"

    def written(self, expr: Expr) -> str:
        if expr.op == "spread":
            place = next(k for k, e in enumerate(self.spreads) if e is expr)
            return f"v{place}_"
        return super().written(expr)

    def leaf(self, expr: Expr) -> str:
        """A field's value at element i, straight from the payload."""
        f = self.fields[str(expr.value)]
        if not self.spreads or f.shape != "n":
            return super().leaf(expr)
        if f.packed:
            how = "trit_at" if f.trits else f"code_at<{f.bits}>"
            return f"(i32){how}(data + at_{f.name} + t * {f.packed_bytes(self.tile)}, m, l)"
        cast = "(i32)" if expr.type.dtype == "int" else ""
        return f"{cast}load_{f.storage}(data + at_{f.name} + {f.item_bits // 8} * i)"
