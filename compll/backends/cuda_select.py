"""The part of a CUDA encode that selects: library calls, compaction, selected elements.

A walk finds the hits of every tile, as bits and counts; the counts are summed up; a second walk
over the tiles that have hits writes positions, in order. What the payload and the states need of
the selected elements is then computed by a thread each, before the states are overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from compll.backends.cuda_encode import BITS, Encoder
from compll.backends.cuda_text import code
from compll.ir import POSITIONS, Expr, Field, Selection
from compll.layout import header
from compll.program import Pass, Program, Sink, Unsupported

ITEMS = 256  # selected elements of a block
ROUNDS = ((11, 21), (11, 10), (10, 0))  # bits and shift of a radix selection


class Selecting(Encoder):
    """Encoder with selections."""

    def __init__(self, program: Program, feed: bool, prefix: str, threads: int = 256) -> None:
        self.mode = "tile"
        self.kept_part_of: dict[int, tuple[str, int]] = {}
        super().__init__(program, feed, prefix, threads)

    # elements at any place: `i` is an i64 within the piece

    @contextmanager
    def anywhere(self) -> Iterator[None]:
        """Expressions are of the element at place i of the piece."""
        self.mode = "anywhere"
        yield
        self.mode = "tile"

    def text(self, expr: Expr) -> str:
        if self.mode == "tile":
            return super().text(expr)
        if expr.op == "uniform":
            keys = f"stream(seed, step, (u64)tensor, {expr.value}, (u64)((offset + i / {self.tile} * {self.tile}) >> 32))"
            return f"uniform((u32)(offset + i), {keys})"
        if expr.op == "gather":
            return self.text(expr.args[0])
        if expr.op == "indices":
            return "i"
        return super().text(expr)

    def leaf(self, expr: Expr) -> str:
        if self.mode == "tile":
            return super().leaf(expr)
        return "(load1(xs, i) * scale)" if expr.op == "input" else f"s_{expr.value}[i]"

    def piece_arrays(self) -> None:
        """Declarations about the piece p: its arrays, and what draws need."""
        self.piece()
        self.add("const i64 offset = table[5 * p + 3], tensor = table[5 * p + 2];")
        self.add("const u64 step = base_step + (tick ? *tick : 0);")
        self.add("XT* const xs = x + table[5 * p];")
        for s in self.elementwise:
            self.add(f"float* const s_{s} = a_{s} + table[5 * p + 4];")

    def of_grid(self, grid: int) -> None:
        """Declarations of a block over a grid's items: `own` is its number in the piece."""
        self.add(f"const i64* const firsts = first + {grid} * (pieces + 1);")
        self.add(f"const i64* const items = item_at + {grid} * (pieces + 1);")
        self.add("const int p = find(firsts, pieces, blockIdx.x);")
        self.add("const i64 own = (i64)blockIdx.x - firsts[p];")

    # library calls

    def library(self, expr: Expr) -> None:
        call = {"kth_largest": self.kth_largest, "adjust": self.adjust}.get(expr.op)
        if call is None:
            raise Unsupported(expr.op)
        self.slot(expr)
        call(expr)

    def guard(self, expr: Expr) -> None:
        """Nothing to do where a guarded call is not wanted."""
        guard = self.prog.guards.get(id(expr))
        if guard is not None:
            condition, wanted = guard
            self.add(f"if ({'!' if wanted else ''}({self.scalar(condition)})) return;")

    @contextmanager
    def once_a_piece(self, name: str, threads: int = 32) -> Iterator[None]:
        """A kernel with a block per piece."""
        with self.kernel(f"{name}{len(self.steps)}", -1, threads):
            self.add("const int p = blockIdx.x;")
            self.piece()
            self.add("if (n == 0) return;")
            yield

    def result(self, slot: int) -> str:
        return f"sc[p * @SLOTS@ + {slot}]"

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

    def each_element(self, x: Expr, body: str) -> None:
        """`body` with the value of every element of the block's tiles in the place of {}."""
        s = self.shape
        self.add(f"const i64 tile_first = own * {s.tiles};")
        self.add(f"const int u = threadIdx.x % {s.team}, team = threadIdx.x / {s.team};")
        self.keys([x])
        self.prepare(x)
        self.leaves = self.leaves_of([x])
        with self.block(f"for (int turn = 0; turn < {s.turns}; ++turn)"):
            self.tile_head([x])
            if s.chunks == 1:
                self.load("0")
            with self.each():
                self.add(f"if (i < m) {{ {body.format(self.text(x))} }}")

    def adjust(self, expr: Expr) -> None:
        """The tries of `adjust`, each a counting walk; what is found early ends the others."""
        self.memory("tries", "int64", "piece")
        self.memory("counted", "uint64", "piece")
        x, start, low, high, down, up, tries = expr.args
        if tries.type.shape != "static":
            raise Unsupported("adjust with a number of tries that depends on data")
        value, counted = self.result(self.slot(expr)), self.result(self.larger_slot(expr))
        with self.once_a_piece("begin"):
            self.add("if (threadIdx.x) return;")
            self.add(f"{value} = {self.scalar(start)}; tries[p] = 0; counted[p] = 0;")
            if id(expr) in self.prog.guards:
                condition, wanted = self.prog.guards[id(expr)]
                self.add(f"if ({'!' if wanted else ''}({self.scalar(condition)})) tries[p] = -1;")
        with self.kernel(f"count{len(self.steps)}", 0, self.shape.threads, tries):
            self.of_grid(0)
            self.add("if (tries[p] < 0) return;")
            self.piece_arrays()
            self.add(f"const float least = (float){value};")
            self.add("u32 z = 0;")
            self.each_element(x, "if ({} >= least) ++z;")
            self.add("z = (u32)team_total<32>((i32)z);")
            self.add("if (z && threadIdx.x % 32 == 0) atomicAdd(&counted[p], (u64)z);")
        with self.kernel(f"decide{len(self.steps)}", -1, 32, tries):
            self.add("const int p = blockIdx.x;")
            self.add("if (threadIdx.x || table[5 * p + 1] == 0 || tries[p] < 0) return;")
            self.add("const double c = (double)counted[p]; counted[p] = 0;")
            self.add(f"{counted} = c;")
            ends = f"({self.scalar(low)} <= c && c <= {self.scalar(high)})"
            turns = f"tries[p] >= as_count({self.scalar(tries)}, 100)"
            self.add(f"if ({ends} || {turns}) {{ tries[p] = -1; return; }}")
            self.add("++tries[p];")
            self.add(
                f"{value} = {value} * (c < {self.scalar(low)} ? {self.scalar(down)} : {self.scalar(up)});"
            )

    def special(self, expr: Expr) -> str | None:
        if expr.op == "adjusted_count":
            return self.result(self.larger_slot(expr.args[0]))
        if expr.op == "count_kept":
            return f"(double){self.kept(str(expr.value or expr.type.of))}"
        if expr.op.startswith("reduce_") and expr.args[0].type.shape == "kept":
            return self.kept_closing(expr)
        return None

    # selections

    def number(self, name: str) -> int:
        return [s.name for s in self.module.selections].index(name)

    def kept(self, name: str) -> str:
        """How many elements a selection has."""
        count = len(self.module.selections)
        return f"{self.memory('kept', 'int64', 'piece', count)}[p * {count} + {self.number(name)}]"

    def limit(self, name: str) -> str:
        return f"limits[p * {len(self.module.selections)} + {self.number(name)}]"

    def before_tiles(self, one: Pass, sinks: Sequence[Sink]) -> None:
        if one.selections and self.module.group:
            raise Unsupported("a selection in a grouped spec")
        for s in one.selections:
            self.find_hits(s)
            self.sum_hits(s)
            self.positions(s)
            for expr in self.reductions_of(s.name):
                self.kept_parts(expr)
        self.values_kernel(one.late, sinks)
        if one.selections:
            self.places(one)
        for sink in one.kept:
            self.kept_field(sink)
        chosen = [s for s in one.sinks if self.inside(s) is not None]
        for sink in chosen:
            if len(chosen) > 1 or not self.mends(sink):
                self.selected_state(sink, "keep")

    def after_tiles(self, one: Pass) -> None:
        chosen = [s for s in one.sinks if self.inside(s) is not None]
        for sink in chosen:
            alone = len(chosen) == 1 and self.mends(sink)
            self.selected_state(sink, "mend" if alone else "put")

    @staticmethod
    def inside(sink: Sink) -> Expr | None:
        """Of a state's update `where(selection, a, b)`, what selected elements become."""
        e = sink.expr
        chosen = sink.kind == "state" and e.op == "where" and e.args[0].op == "in"
        return e.args[1] if chosen else None

    def mends(self, sink: Sink) -> bool:
        """Whether elements outside the selection keep the state that they have."""
        rest = self.outside(sink)
        return self.inside(sink) is not None and rest.op == "state" and rest.value == sink.name

    def leaves_tile(self, sink: Sink) -> bool:
        return not self.mends(sink)

    def threshold(self, s: Selection) -> str:
        return f"key((float)({self.scalar(s.threshold)}))" if s.threshold is not None else ""

    def find_hits(self, s: Selection) -> None:
        """The walk that evaluates the key: bits and counts of every tile."""
        more, tied = f"more_{s.name}", f"tied_{s.name}"
        kinds = [more, tied] if s.kind == "top" else [more]
        for name in kinds:
            self.memory(name, "uint32", "0", 32)
            self.memory(f"{name}_at", "int64", "0")
        with self.kernel(f"hits_{s.name}", 0, self.shape.threads):
            self.of_grid(0)
            self.piece_arrays()
            if s.kind == "top":
                self.add(f"const i32 least = {self.threshold(s)};")
            self.hits_of_tiles(s, kinds)

    def hits_of_tiles(self, s: Selection, kinds: list[str]) -> None:
        shape = self.shape
        self.add(f"const i64 tile_first = own * {shape.tiles};")
        self.add("const int u = threadIdx.x % 32, team = threadIdx.x / 32;")
        self.keys([s.key])
        self.prepare(s.key)
        self.leaves = self.leaves_of([s.key])
        with self.block(f"for (int turn = 0; turn < {shape.turns}; ++turn)"):
            self.tile_head([s.key])
            self.load("0")
            for name in kinds:
                self.add(f"Hits h_{name} = {{0, 0}};")
            with self.each():
                if s.kind == "filter":
                    self.add(f"hits_add(h_{kinds[0]}, e, i < m && ({self.text(s.key)}), u);")
                else:
                    self.add(f"const i32 y = key({self.text(s.key)});")
                    self.add(f"hits_add(h_{kinds[0]}, e, i < m && y > least, u);")
                    self.add(f"hits_add(h_{kinds[1]}, e, i < m && y == least, u);")
            with self.block("if (m)"):
                for name in kinds:
                    self.add(f"{name}[(items[p] + t) * 32 + u] = h_{name}.own;")
                    self.add(f"if (u == 0) {name}_at[items[p] + t] = h_{name}.count;")

    def sum_hits(self, s: Selection) -> None:
        with self.once_a_piece(f"sum_{s.name}_", 256):
            self.add(f"i64 count = scan_array(more_{s.name}_at + item_at[p], tiles);")
            if s.kind == "top":
                self.add(f"const i64 ties = scan_array(tied_{s.name}_at + item_at[p], tiles);")
                self.add(f"const i64 allowed = {self.allowed(s)};")
                self.add("count += ties < allowed ? ties : allowed;")
            self.add(f"const i64 limit = {self.limit(s.name)};")
            self.add(f"if (threadIdx.x == 0) {self.kept(s.name)} = count < limit ? count : limit;")

    def allowed(self, s: Selection) -> str:
        """How many elements equal to the threshold of a `top` are taken."""
        assert s.threshold is not None
        return f"{self.limit(s.name)} - (i64){self.result(self.larger_slot(s.threshold))}"

    def positions(self, s: Selection) -> None:
        grid = self.grid("kept", ITEMS, s.name)
        idx = self.memory(f"idx_{s.name}", "int64", str(grid))
        with self.kernel(f"positions_{s.name}", 0, self.shape.threads):
            self.of_grid(0)
            self.piece()
            self.add("const int u = threadIdx.x % 32, team = threadIdx.x / 32;")
            self.add(f"const i64 tile_first = own * {self.shape.tiles}, offset = 0;")
            with self.block(f"for (int turn = 0; turn < {self.shape.turns}; ++turn)"):
                self.each_tile()
                self.add("if (m == 0) continue;")
                self.add(f"const u32 a = more_{s.name}[(items[p] + t) * 32 + u];")
                tied = f"tied_{s.name}[(items[p] + t) * 32 + u]" if s.kind == "top" else "0"
                self.add(f"const u32 b = {tied};")
                self.add("if (!__any_sync(FULL, a | b)) continue;")
                ties = f"tied_{s.name}_at[items[p] + t]" if s.kind == "top" else "0"
                allowed = self.allowed(s) if s.kind == "top" else "0"
                to = f"{idx} + item_at[{grid} * (pieces + 1) + p]"
                self.add(
                    f"compact(a, b, more_{s.name}_at[items[p] + t], {ties}, {allowed}, {self.limit(s.name)}, {to}, o, u);"
                )

    # the payload's part over a selection

    def kept_fields(self) -> list[Field]:
        return [f for f in self.module.fields if f.shape == "kept"]

    def place_of(self, f: Field | None) -> str:
        """Where a field over a selection begins; after the last one, with None."""
        fields = self.kept_fields()
        count = len(fields) + 1
        number = fields.index(f) if f is not None else len(fields)
        return f"{self.memory('place', 'int64', 'piece', count)}[p * {count} + {number}]"

    @contextmanager
    def over_kept(self, name: str, of: str) -> Iterator[int]:
        """A kernel with a thread for selected element j, at place i."""
        grid = self.grid("kept", ITEMS, of)
        with self.kernel(f"{name}{len(self.steps)}", grid, ITEMS):
            self.of_grid(grid)
            self.piece_arrays()
            self.add(f"const i64 count = {self.kept(of)}, j = own * {ITEMS} + threadIdx.x;")
            self.add(f"const i64* const idx = idx_{of} + items[p];")
            yield grid

    def places(self, one: Pass) -> None:
        """Lengths of gaps, then where the fields begin, and the payload's header."""
        done = {s.name for s in one.selections}
        fields = [f for f in self.kept_fields() if f.of in done]
        if len(done) < len(self.module.selections):
            raise Unsupported("selections in different passes")
        for f in fields:
            if f.storage == "gaps":
                self.gap_sizes(f)
            elif f.storage in POSITIONS:
                self.stream_size(f)
        counted, gaps = header(self.module)
        with self.once_a_piece("places", 256):
            for f in fields:
                if f.storage == "gaps":
                    grid = self.grid("kept", ITEMS, f.of)
                    blocks = f"first[{grid} * (pieces + 1) + p"
                    self.add(
                        f"const i64 length_{f.name} = scan_array(gaps_{f.name} + {blocks}], {blocks} + 1] - {blocks}]);"
                    )
                elif f.storage in POSITIONS:
                    self.add(f"const i64 length_{f.name} = stream_{f.name}[p];")
            self.add("if (threadIdx.x) return;")
            self.starts()
            for number, name in enumerate(counted):
                self.add(f"store_uint32(out + at[p] + {4 * number}, {self.kept(name)});")
            for f in fields:
                self.add(f"{self.place_of(f)} = end;")
                self.add(f"end += {self.kept_size(f)};")
                if f.storage in POSITIONS:
                    place = 4 * (len(counted) + gaps.index(f.name))
                    self.add(f"store_uint32(out + at[p] + {place}, length_{f.name});")
            self.add(f"{self.place_of(None)} = end;")
            self.add(f"used[p] = end - at[p] + {int(self.module.status)};")

    def kept_size(self, f: Field) -> str:
        count = self.kept(f.of)
        if f.storage in POSITIONS:
            return f"length_{f.name}"
        if not f.packed:
            return f"{count} * {f.item_bits // 8}"
        full, bits = self.tile * f.bits // 8, f.bits
        return f"({count} / {self.tile}) * {full} + (({count} % {self.tile}) * {bits} + 7) / 8"

    def payload_end(self) -> str:
        return self.place_of(None) if self.kept_fields() else "end"

    def gap_sizes(self, f: Field) -> None:
        grid = self.grid("kept", ITEMS, f.of)
        sums = self.memory(f"gaps_{f.name}", "int64", f"{grid}b")
        with self.over_kept("sizes", f.of):
            self.add("i64 all;")
            self.add("block_scan<256>(j < count ? gap_size(idx, j) : 0, &all);")
            self.add(f"if (threadIdx.x == 0) {sums}[blockIdx.x] = all;")

    def stream_size(self, f: Field) -> None:
        """Bytes of a bit stream, by one thread a piece."""
        grid = self.grid("kept", ITEMS, f.of)
        sizes = self.memory(f"stream_{f.name}", "int64", "piece")
        with self.once_a_piece("stream"):
            self.add("if (threadIdx.x) return;")
            at = f"idx_{f.of} + item_at[{grid} * (pieces + 1) + p]"
            self.add(f"{sizes}[p] = {f.storage}_size({at}, {self.kept(f.of)}, n);")

    def kept_field(self, sink: Sink) -> None:
        f = sink.field
        assert f is not None
        with self.over_kept("field", f.of), self.anywhere():
            if f.storage == "gaps":
                self.add("i64 all;")
                self.add(
                    "const i64 before = block_scan<256>(j < count ? gap_size(idx, j) : 0, &all);"
                )
                to = f"out + {self.place_of(f)} + gaps_{f.name}[blockIdx.x] + before"
                self.add(f"if (j < count) store_gap({to}, idx, j);")
                return
            if f.storage in POSITIONS:
                to = f"out + {self.place_of(f)}"
                self.add(
                    f"if (own == 0 && threadIdx.x == 0) store_{f.storage}(idx, count, {to}, n);"
                )
                return
            self.prepare(sink.expr)
            if f.packed:
                self.kept_codes(f, sink.expr)
                return
            self.add("if (j >= count) return;")
            self.add("const i64 i = idx[j];")
            size = f.item_bits // 8
            to = f"out + {self.place_of(f)} + j * {size}"
            value = self.text(sink.expr)
            if f.storage in BITS and sink.expr.type.dtype != "float":
                value = f"(float)({value})"
            kind, cast = ("uint32", "(i64)") if "int" in f.storage else (f.storage, "")
            self.add(f"store_{kind}({to}, {cast}({value}));")

    def kept_codes(self, f: Field, expr: Expr) -> None:
        """A byte of codes a thread: the first of its codes decides which thread that is."""
        full = self.tile * f.bits // 8
        self.add(f"const i64 tile = j / {self.tile};")
        self.add(f"const int slot = (int)(j % {self.tile});")
        self.add(f"const i64 left = count - tile * {self.tile};")
        self.add(f"const int size = left < {self.tile} ? (int)left : {self.tile};")
        self.add(f"const int width = (size * {f.bits} + 7) / 8;")
        self.add("if (j >= count || slot >= width) return;")
        self.add("u32 byte = 0;")
        with self.block(f"for (int q = 0; q < {8 // f.bits}; ++q)"):
            self.add("if (slot + q * width >= size) break;")
            self.add(f"const i64 i = idx[tile * {self.tile} + slot + q * width];")
            self.add(f"byte |= ({code(f.bits, expr, self.text(expr))}) << (q * {f.bits});")
        self.add(f"out[{self.place_of(f)} + tile * {full} + slot] = (u8)byte;")

    # states of selected elements

    def selected_state(self, sink: Sink, how: str) -> None:
        """mend: overwrite now. keep: compute now, into scratch; put: from there, after the walk.

        A value must see neither what the walk stores nor another state's new values.
        """
        value = self.inside(sink)
        assert value is not None
        of = str(sink.expr.args[0].value)
        kept = f"kept_{sink.name}"
        with self.over_kept(how, of), self.anywhere():
            if how != "mend":
                self.memory(kept, "float32", str(self.grid("kept", ITEMS, of)))
            self.prepare(value)
            self.add("if (j >= count) return;")
            self.add("const i64 i = idx[j];")
            if how == "put":
                self.add(f"s_{sink.name}[i] = {kept}[items[p] + j];")
                return
            self.add(f"const float y = {self.text(value)};")
            if how == "keep":
                self.add(f"{kept}[items[p] + j] = finite(y) ? y : s_{sink.name}[i];")
            else:
                self.add(f"if (finite(y)) s_{sink.name}[i] = y;")

    # reductions over a selection

    def reductions_of(self, name: str) -> list[Expr]:
        return [
            e
            for one in self.prog.passes
            for e in one.late
            if e.op.startswith("reduce_") and e.args[0].type.of == name
        ]

    def kept_parts(self, expr: Expr) -> None:
        """Parts of a reduction over selected elements, tile by tile of them."""
        (arg,) = expr.args
        of = arg.type.of
        s = self.shape
        grid = self.grid("kept_tiles", s.tiles, of)
        parts = self.memory(f"kept_part{len(self.kept_part_of)}_{of}", "uint32", str(grid))
        self.kept_part_of[id(expr)] = (parts, grid)
        with self.kernel(f"parts{len(self.steps)}", grid, s.threads):
            self.of_grid(grid)
            self.piece_arrays()
            self.add(f"const i64 count = {self.kept(of)};")
            at = self.grid("kept", ITEMS, of)
            self.add(f"const i64* const idx = idx_{of} + item_at[{at} * (pieces + 1) + p];")
            self.add("const int u = threadIdx.x % 32, team = threadIdx.x / 32;")
            self.prepare(arg)
            with self.block(f"for (int turn = 0; turn < {s.turns}; ++turn)"):
                self.add(
                    f"const i64 t = own * {s.tiles} + turn * {s.teams} + team, o = t * {self.tile};"
                )
                self.add(
                    f"const int m = count - o >= {self.tile} ? {self.tile} : count > o ? (int)(count - o) : 0;"
                )
                with self.anywhere():
                    value = self.kept_reduction(expr)
                self.add(f"if (m && u == 0) {parts}[items[p] + t] = {value};")

    def kept_reduction(self, expr: Expr) -> str:
        self.mode = "kept"
        name = self.name("a")
        if expr.op == "reduce_sum":
            self.lane_sums(name, expr.args[0])
            value = f"(u32)__float_as_int(team_sum<32>({name}[0], {name}[1], {name}[2], {name}[3]))"
        else:
            value = f"(u32)({self.extreme(name, expr)})"
        result = self.name("w")
        self.add(f"const u32 {result} = {value};")
        return result

    @contextmanager
    def each(self) -> Iterator[None]:
        if self.mode != "kept":
            with super().each():
                yield
            return
        self.add("#pragma unroll 4")
        with self.block("for (int e = 0; e < 32; ++e)"):
            self.add("const int c = 0, place = e / 4 * 128 + 4 * u + e % 4;")
            self.add("const bool in = place < m;")
            self.add("const i64 i = in ? idx[o + place] : 0;")
            yield

    def within(self) -> str:
        return "in" if self.mode == "kept" else super().within()

    def kept_closing(self, expr: Expr) -> str:
        parts, grid = self.kept_part_of[id(expr)]
        of = expr.args[0].type.of
        tiles = f"({self.kept(of)} + {self.tile - 1}) / {self.tile}"
        where = f"{parts} + item_at[{grid} * (pieces + 1) + p], {tiles}"
        if expr.op == "reduce_sum":
            return f"block_total({where})"
        largest = "true" if expr.op == "reduce_max" else "false"
        return f"({self.kept(of)} ? (double)unkey(block_extreme({where}, {largest})) : 0.0)"
