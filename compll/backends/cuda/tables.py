"""Tables of a CUDA encode: exact quantiles and means by index, in scratch memory of a piece."""

from __future__ import annotations

from compll.backends.cuda.search import Searching
from compll.ir.expr import Expr
from compll.ir.program import Sink
from compll.numerics.numbers import MEAN_LANES, MEAN_TILE

BINS = 8192  # of a block's histograms in shared memory, at most
FIRST = 11  # bits of the first round, which has one histogram


def round_bits(ranks: int) -> list[int]:
    """The bits of each round of a radix selection of so many ranks."""
    most = min(FIRST, max(5, (BINS // ranks).bit_length() - 1))
    left = 32 - FIRST
    rounds = -(-left // most)
    return [FIRST, *(left // rounds + (k < left % rounds) for k in range(rounds))]


class Tabling(Searching):
    """Encoder with tables."""

    def library(self, expr: Expr) -> None:
        makers = {"quantiles": self.quantiles, "mean_by": self.mean_by}
        if expr.op not in makers:
            return super().library(expr)
        self.slot(expr)
        return makers[expr.op](expr)

    def table(self, expr: Expr) -> str:
        """Where a piece's table stands, and its size."""
        size = int(expr.type.of)
        name = self.memory(f"table{self.slots[id(expr)]}", "float32", "piece", size)
        return f"{name} + p * {size}, {size}"

    def scalar_sink(self, sink: Sink) -> None:
        if sink.expr.type.shape != "table":
            return super().scalar_sink(sink)
        assert sink.field is not None
        size, to = int(sink.expr.type.of), f"out + at_{sink.field.name}"
        value = f"lookup({self.table(sink.expr)}, j)"
        return self.add(f"for (int j = 0; j < {size}; ++j) store_float32({to} + 4 * j, {value});")

    # quantiles

    def quantiles(self, expr: Expr) -> None:
        """All ranks in shared walks: what has the prefix of a rank is counted by its next bits."""
        count, parts = int(expr.type.of), int(expr.value)
        rounds = round_bits(count)
        bins = max(1 << FIRST, count << max(rounds[1:]))
        self.memory(f"ranks{count}", "int64", "piece", count)
        self.memory(f"known{count}", "uint32", "piece", 2 * count)
        self.memory(f"bins{count}", "uint64", "piece", bins)
        with self.once_a_piece("ranks", 256):
            ranks = f"ranks{count}[p * {count} + j] = (j + 1) * n / {parts};"
            self.add(f"for (i64 j = threadIdx.x; j < {count}; j += blockDim.x) {ranks}")
        shift = 32
        for number, bits in enumerate(rounds):
            shift -= bits
            known = f"known{count} + (2 * p + {number % 2}) * {count}"
            following = f"known{count} + (2 * p + {1 - number % 2}) * {count}"
            self.count_ranked(expr, bits, shift, bins, "" if number == 0 else known)
            with self.once_a_piece("pick", 256):
                self.add(f"u64* const ranked = bins{count} + (i64)p * {bins};")
                self.add(f"u32* const next = {following};")
                ranks, start = f"ranks{count} + p * {count}", str(number == 0).lower()
                self.add(f"pick_ranks<{bits}>(ranked, {known}, next, {ranks}, {count}, {start});")
                self.add("__syncthreads();")
                self.add(f"for (int b = threadIdx.x; b < {bins}; b += blockDim.x) ranked[b] = 0;")
                if shift == 0:
                    self.finish_quantiles(expr)

    def finish_quantiles(self, expr: Expr) -> None:
        table, size = self.table(expr).rsplit(", ", 1)
        value = "unkey((i32)(next[j] ^ 0x80000000u))"
        self.add(f"for (int j = threadIdx.x; j < {size}; j += blockDim.x) ({table})[j] = {value};")

    def count_ranked(self, expr: Expr, bits: int, shift: int, bins: int, known: str) -> None:
        """A walk that counts the next bits of elements by the prefix that they have."""
        count = int(expr.type.of)
        used = count << bits if known else 1 << bits
        shared = used <= BINS
        with self.kernel(f"hist{len(self.steps)}", 0, self.shape.threads):
            self.of_grid(0)
            self.piece_arrays()
            self.add(f"u64* const ranked = bins{count} + (i64)p * {bins};")
            if shared:
                self.add(f"__shared__ u32 counts[{used}];")
                self.add(f"for (int b = threadIdx.x; b < {used}; b += blockDim.x) counts[b] = 0;")
            if known:
                self.add(f"__shared__ u32 wanted[{count}];")
                self.add(f"for (int j = threadIdx.x; j < {count}; j += blockDim.x)")
                self.add(f"  wanted[j] = ({known})[j];")
            self.add("__syncthreads();")
            slot = f"slot_of(wanted, {count}, y >> {shift + bits})" if known else "0"
            to = "&counts[place], 1u" if shared else "&ranked[place], (u64)1"
            place = f"const int place = slot << {bits} | (int)(y >> {shift} & {(1 << bits) - 1}u);"
            count_it = f"if (slot >= 0) {{ {place} atomicAdd({to}); }}"
            body = f"const u32 y = order({{}}); const int slot = {slot}; {count_it}"
            self.each_element(expr.args[0], body.replace("{ ", "{{ ").replace(" }", " }}"))
            if shared:
                self.add("__syncthreads();")
                self.add(f"for (int b = threadIdx.x; b < {used}; b += blockDim.x)")
                self.add("  if (counts[b]) atomicAdd(&ranked[b], (u64)counts[b]);")

    # means by index

    def mean_by(self, expr: Expr) -> None:
        """A warp a lane, so that sums are in the order of elements; then a block a bin."""
        size = int(expr.type.of)
        grid = self.grid("lanes", 1)
        sums = self.memory(f"sums{size}", "float64", str(grid), size)
        counts = self.memory(f"counts{size}", "uint64", "piece", size)
        with self.kernel(f"lanes{len(self.steps)}", grid, 32):
            self.of_grid(grid)
            self.piece_arrays()
            self.add(f"__shared__ double own_sums[{size}];")
            self.add(f"__shared__ u32 own_counts[{size}];")
            with self.block(f"for (int b = threadIdx.x; b < {size}; b += 32)"):
                self.add("own_sums[b] = 0.0; own_counts[b] = 0;")
            self.add("__syncwarp();")
            self.each_in_order(expr, size)
            self.add("__syncwarp();")
            with self.block(f"for (int b = threadIdx.x; b < {size}; b += 32)"):
                self.add(f"{sums}[(items[p] + own) * {size} + b] = own_sums[b];")
                self.add(
                    f"if (own_counts[b]) atomicAdd(&{counts}[p * {size} + b], (u64)own_counts[b]);"
                )
        self.finish_means(expr, grid, sums, counts)

    def each_in_order(self, expr: Expr, size: int) -> None:
        index, x = expr.args
        with self.anywhere():
            self.prepare(index, x)
            step = MEAN_LANES * MEAN_TILE
            with (
                self.block(f"for (i64 o = own * {MEAN_TILE}; o < n; o += {step})"),
                self.block(f"for (i64 at = o; at < o + {MEAN_TILE} && at < n; at += 32)"),
            ):
                self.add("const int left = n - at < 32 ? (int)(n - at) : 32;")
                self.add("const i64 i = (int)threadIdx.x < left ? at + threadIdx.x : n - 1;")
                values = f"{self.text(index)}, {self.text(x)}"
                self.add(f"add_in_order(own_sums, own_counts, {size}, {values}, left);")

    def finish_means(self, expr: Expr, lanes: int, sums: str, counts: str) -> None:
        size = int(expr.type.of)
        grid = self.grid("bins", 1, str(size))
        with self.kernel(f"means{len(self.steps)}", grid, 256):
            self.of_grid(grid)
            begin = f"item_at[{lanes} * (pieces + 1) + p"
            self.add(f"const i64 begin = {begin}], used_lanes = {begin} + 1] - begin;")
            self.add(f"u64* const count = {counts} + p * {size} + own;")
            at = f"{sums} + begin * {size} + own"
            self.add(f"const float mean = mean_of({at}, (int)used_lanes, {size}, *count);")
            table = self.table(expr).rsplit(", ", 1)[0]
            self.add("__syncthreads();")
            self.add(f"if (threadIdx.x == 0) {{ ({table})[own] = mean; *count = 0; }}")
