"""Library calls of a CUDA encode that search a number: kth_largest, adjust, bisect.

Each is a few counting walks over all elements (or a sample); what is found stays on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compll.backends.cuda.walks import Walking
from compll.ir.expr import Expr, Type
from compll.ir.program import Unsupported
from compll.ir.static import depends

ITEMS = 256  # sampled elements of a block
ROUNDS = ((11, 21), (11, 10), (10, 0))  # bits and shift of a radix selection


class Searching(Walking):
    """Encoder with searches."""

    def library(self, expr: Expr) -> None:
        calls = {"kth_largest": self.kth_largest, "adjust": self.adjust, "bisect": self.bisect}
        call = calls.get(expr.op)
        if call is None:
            raise Unsupported(expr.op)
        self.slot(expr)
        call(expr)

    def larger_slot(self, expr: Expr) -> int:
        """Where kth_largest leaves how many elements are larger, adjust how many it counts."""
        return self.slots.setdefault(-id(expr), len(self.slots))

    def kth_largest(self, expr: Expr) -> None:
        """Radix selection: three histograms of the keys, from the upper bits to the lower."""
        self.memory("hist", "uint64", "piece", 2048)
        self.memory("radix_prefix", "uint32", "piece")
        self.memory("radix_rank", "int64", "piece")
        x, k = expr.args
        length = "n" if x.op != "sample" else self.sample_size(x)
        wanted = f"as_count((double)({{}}), {length})"
        with self.once_a_piece("begin"):
            self.add("if (threadIdx.x) return;")
            self.add(f"const i64 rank = {wanted.format(self.scalar(k))};")
            self.add("radix_rank[p] = rank > 1 ? rank : 1; radix_prefix[p] = 0;")
            self.add(f"{self.result(self.slot(expr))} = 0.0;")
        for number, (bits, shift) in enumerate(ROUNDS):
            self.histogram(expr, bits, shift, first=number == 0)
            with self.once_a_piece("pick", 256):
                self.guard(expr)
                self.add(f"pick<{bits}>(hist + p * 2048, radix_prefix + p, radix_rank + p);")
                if shift == 0:
                    self.radix_result(expr, wanted.format(self.scalar(k)))

    def radix_result(self, expr: Expr, wanted: str) -> None:
        self.add("__syncthreads();")
        self.add("if (threadIdx.x) return;")
        value = "(double)unkey((i32)(radix_prefix[p] ^ 0x80000000u))"
        self.add(f"{self.result(self.slot(expr))} = {value};")
        self.add(f"const i64 rank = {wanted};")
        larger = self.result(self.larger_slot(expr))
        self.add(f"{larger} = (double)((rank > 1 ? rank : 1) - radix_rank[p]);")

    def sample_size(self, x: Expr) -> str:
        return f"i_count(as_count({self.static(x.args[1])}, n))"

    def histogram(self, expr: Expr, bits: int, shift: int, *, first: bool) -> None:
        x = expr.args[0]
        sampled = x.op == "sample"
        grid = self.grid("sample", ITEMS, x.args[1]) if sampled else 0
        with self.kernel(f"hist{len(self.steps)}", grid, 256 if sampled else self.shape.threads):
            self.of_grid(grid)
            self.piece_arrays()
            self.guard(expr)
            self.add(f"__shared__ u32 bins[{1 << bits}];")
            self.add(f"for (int b = threadIdx.x; b < {1 << bits}; b += blockDim.x) bins[b] = 0;")
            self.add("__syncthreads();")
            self.add("const u32 prefix = radix_prefix[p];")
            inside = "true" if first else f"y >> {shift + bits} == prefix"
            count = f"if ({inside}) atomicAdd(&bins[y >> {shift} & {(1 << bits) - 1}u], 1u);"
            if sampled:
                self.each_sampled(x, count)
            else:
                self.each_element(x, f"const u32 y = order({{}}); {count}")
            self.add("__syncthreads();")
            self.add(f"for (int b = threadIdx.x; b < {1 << bits}; b += blockDim.x)")
            self.add("  if (bins[b]) atomicAdd(&hist[p * 2048 + b], (u64)bins[b]);")

    def each_sampled(self, x: Expr, body: str) -> None:
        self.add(f"const i64 count = {self.sample_size(x)};")
        with self.anywhere():
            self.prepare(x.args[0])
            step = f"(firsts[p + 1] - firsts[p]) * {ITEMS}"
            with self.block(f"for (i64 j = own * {ITEMS} + threadIdx.x; j < count; j += {step})"):
                self.add("const i64 i = sample_position(seed, step, tensor, n, count, j);")
                self.add(f"const u32 y = order({self.text(x.args[0])}); {body}")

    # thresholds that are tried

    def adjust(self, expr: Expr) -> None:
        """The tries of `adjust`, each a counting walk; what is found early ends the others."""
        x, start, low, high, down, up, tries = expr.args
        value, counted = self.result(self.slot(expr)), self.result(self.larger_slot(expr))
        with self.beginning(expr):
            self.add(f"{value} = {self.scalar(start)};")
        self.count_at_least(x, value, self.turns(tries))
        with self.deciding(tries):
            self.add(f"{counted} = c;")
            ends = f"({self.scalar(low)} <= c && c <= {self.scalar(high)})"
            turns = f"tries[p] >= as_count({self.scalar(tries)}, 100)"
            self.add(f"if ({ends} || {turns}) {{ tries[p] = -1; return; }}")
            self.add("++tries[p];")
            self.add(
                f"{value} = {value} * (c < {self.scalar(low)} ? {self.scalar(down)} : {self.scalar(up)});"
            )

    def bisect(self, expr: Expr) -> None:
        """The tries of `bisect`, each a counting walk, like those of `adjust`."""
        self.memory("interval", "float64", "piece", 2)
        x, low, high, fewest, most, tries = expr.args
        value = self.result(self.slot(expr))
        middle = f"{value} = ends[0] + (ends[1] - ends[0]) / 2.0;"
        with self.beginning(expr):
            self.add("double* const ends = interval + 2 * p;")
            self.add(f"ends[0] = {self.scalar(low)}; ends[1] = {self.scalar(high)};")
            self.add(middle)
            self.add(f"if (as_count({self.scalar(tries)}, 100) == 0) tries[p] = -1;")
        self.count_at_least(x, value, self.turns(tries))
        with self.deciding(tries):
            self.add("double* const ends = interval + 2 * p;")
            few = self.scalar(fewest)
            done = f"{few} <= c && c <= {self.scalar(most)}"
            self.add(f"if ({done}) {{ tries[p] = -1; return; }}")
            self.add(f"ends[c < {few} ? 1 : 0] = {value};")
            turns = f"++tries[p] >= as_count({self.scalar(tries)}, 100)"
            self.add(f"if ({turns}) {{ tries[p] = -1; return; }}")
            self.add(middle)

    def turns(self, tries: Expr) -> Expr:
        """How often to launch: as often as tried, or the most where the host cannot know."""
        if tries.type.shape == "static" and "step" not in depends(tries):
            return tries
        return self.module.pool.make("const", (), Type("int", "static"), 100)

    @contextmanager
    def beginning(self, expr: Expr) -> Iterator[None]:
        """A kernel that starts the tries of a call; tries is -1 where none is wanted."""
        self.memory("tries", "int64", "piece")
        self.memory("counted", "uint64", "piece")
        with self.once_a_piece("begin"):
            self.add("if (threadIdx.x) return;")
            self.add("tries[p] = 0; counted[p] = 0;")
            yield
            if id(expr) in self.prog.guards:
                condition, wanted = self.prog.guards[id(expr)]
                self.add(f"if ({'!' if wanted else ''}({self.scalar(condition)})) tries[p] = -1;")

    def count_at_least(self, x: Expr, value: str, turns: Expr) -> None:
        """A walk that counts the elements that are at least the threshold tried."""
        with self.kernel(f"count{len(self.steps)}", 0, self.shape.threads, turns):
            self.of_grid(0)
            self.add("if (tries[p] < 0) return;")
            self.piece_arrays()
            self.add(f"const float least = (float){value};")
            self.add("u32 z = 0;")
            self.each_element(x, "if ({} >= least) ++z;")
            self.add("z = (u32)team_total<32>((i32)z);")
            self.add("if (z && threadIdx.x % 32 == 0) atomicAdd(&counted[p], (u64)z);")

    @contextmanager
    def deciding(self, tries: Expr) -> Iterator[None]:
        """A kernel that looks at the count c of a try."""
        with self.kernel(f"decide{len(self.steps)}", -1, 32, self.turns(tries)):
            self.add("const int p = blockIdx.x;")
            self.add("if (threadIdx.x || table[5 * p + 1] == 0 || tries[p] < 0) return;")
            self.add("const double c = (double)counted[p]; counted[p] = 0;")
            yield
