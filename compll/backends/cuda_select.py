"""The part of a CUDA encode that selects: compaction, selected elements.

A walk finds the hits of every tile, as bits and counts; the counts are summed up; a second walk
over the tiles that have hits writes positions, in order. What the payload and the states need of
the selected elements is then computed by a thread each, before the states are overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from compll.backends.cuda_encode import BITS
from compll.backends.cuda_groups import Grouping
from compll.backends.cuda_text import code
from compll.ir import POSITIONS, WHOLE, Expr, Field, Selection
from compll.layout import header
from compll.program import Pass, Program, Sink, Unsupported

ITEMS = 256  # selected elements of a block


class Selecting(Grouping):
    """Encoder with selections."""

    def __init__(self, program: Program, feed: bool, prefix: str, threads: int = 256) -> None:
        self.kept_part_of: dict[int, tuple[str, int]] = {}
        self.of_groups = {}
        super().__init__(program, feed, prefix, threads)

    def special(self, expr: Expr) -> str | None:
        if expr.op == "adjusted_count":
            return self.result(self.larger_slot(expr.args[0]))
        if expr.op == "count_kept":
            return f"(double){self.kept(str(expr.value or expr.type.of))}"
        if expr.op.startswith("reduce_") and expr.args[0].type.shape == "kept":
            return self.kept_closing(expr)
        return None

    # selections

    def before_tiles(self, one: Pass, sinks: Sequence[Sink]) -> None:
        for s in one.selections:
            if self.module.group:
                self.select_in_groups(s)
                continue
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

    def select_in_groups(self, s: Selection) -> None:
        self.hits_in_groups(s)
        self.sum_hits_in_groups(s)
        grid = self.grid("kept", ITEMS, s.name)
        idx = self.memory(f"idx_{s.name}", "int64", str(grid))
        self.positions_in_groups(s, f"{idx} + item_at[{grid} * (pieces + 1) + p]")

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
            other = next(s.name for s in self.module.selections if s.name not in done)
            hint = "make the keys and bounds of all selections from the same reductions"
            raise Unsupported("selections in different passes", other, hint=hint)
        for f in fields:
            if f.storage == "gaps":
                self.gap_sizes(f)
            elif f.storage in POSITIONS:
                self.stream_size(f)
        counted, gaps = header(self.module)
        with self.once_a_piece("places", 256):
            for f in fields:
                if f.storage in POSITIONS:
                    self.add(f"const i64 length_{f.name} = {self.stored_length(f)};")
            self.add("if (threadIdx.x) return;")
            self.starts()
            for number, name in enumerate(counted):
                self.add(f"store_uint32(out + at[p] + {4 * number}, {self.kept(name)});")
            for f in fields:
                self.add(f"{self.place_of(f)} = end;")
                if f.storage == "golomb":
                    self.add(f"out[end] = (u8)rice_parameter({self.kept(f.of)}, n);")
                self.add(f"end += {self.kept_size(f)};")
                if f.storage in POSITIONS:
                    place = 4 * (len(counted) + gaps.index(f.name))
                    self.add(f"store_uint32(out + at[p] + {place}, length_{f.name});")
            self.add(f"{self.place_of(None)} = end;")
            self.add(f"used[p] = end - at[p] + {int(self.module.status)};")

    def stored_length(self, f: Field) -> str:
        """Bytes of positions; the blocks' sizes become what stands before them."""
        begin = f"first[{self.grid('kept', ITEMS, f.of)} * (pieces + 1) + p"
        name = "gaps" if f.storage == "gaps" else "stream"
        total = f"scan_array({name}_{f.name} + {begin}], {begin} + 1] - {begin}])"
        return total if f.storage == "gaps" else f"{f.storage}_head() + (({total} + 7) >> 3)"

    def kept_size(self, f: Field) -> str:
        count = self.kept(f.of)
        if f.storage in POSITIONS:
            return f"length_{f.name}"
        if not f.packed:
            return f"{count} * {f.item_bits // 8}"
        full, bits = self.tile * f.bits // 8, f.bits
        return f"({count} / {self.tile}) * {full} + (({count} % {self.tile}) * {bits} + 7) / 8"

    def payload_end(self) -> str:
        return self.place_of(None) if self.kept_fields() else super().payload_end()

    def gap_sizes(self, f: Field) -> None:
        grid = self.grid("kept", ITEMS, f.of)
        sums = self.memory(f"gaps_{f.name}", "int64", f"{grid}b")
        with self.over_kept("sizes", f.of):
            self.add("i64 all;")
            self.add("block_scan<256>(j < count ? gap_size(idx, j) : 0, &all);")
            self.add(f"if (threadIdx.x == 0) {sums}[blockIdx.x] = all;")

    def stream_size(self, f: Field) -> None:
        """Bits of a stream's codes, block by block."""
        grid = self.grid("kept", ITEMS, f.of)
        sums = self.memory(f"stream_{f.name}", "int64", f"{grid}b")
        with self.over_kept("bits", f.of):
            self.add("i64 all;")
            self.code_bits(f)
            self.add(f"if (threadIdx.x == 0) {sums}[blockIdx.x] = all;")

    def code_bits(self, f: Field) -> None:
        """Declarations: the codes' parameter, and the bits of the block's codes before j."""
        self.add(f"const int parameter = {f.storage}_parameter(count, n);")
        own = f"{f.storage}_code(gap_of(idx, j), parameter).length()"
        self.add(f"const i64 before = block_scan<{ITEMS}>(j < count ? {own} : 0, &all);")

    def kept_stream(self, f: Field) -> None:
        """A stream of bits, a thread a code."""
        self.add("i64 all;")
        self.code_bits(f)
        self.add(f"u8* const to = out + {self.place_of(f)};")
        self.add(f"const i64 bit = 8 * {f.storage}_head() + stream_{f.name}[blockIdx.x] + before;")
        self.add(f"if (j < count) store_code<{f.storage}_code>(idx, j, count, bit, parameter, to);")

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
                self.kept_stream(f)
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
            cast = "(i64)" if f.storage in WHOLE else ""
            self.add(f"store_{f.access}({to}, {cast}({value}));")

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
                made = f"{kept}[items[p] + j]"
                self.add(self.kept_states.put(sink.name, f"s_{sink.name}", "i", made))
                return
            self.add(f"const float y = {self.text(value)};")
            if how == "keep":
                new = self.kept_states.value(sink.name, "y", f"s_{sink.name}[i]")
                self.add(f"{kept}[items[p] + j] = {new};")
            else:
                self.add(self.kept_states.keep(sink.name, f"s_{sink.name}", "i", "y"))

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
