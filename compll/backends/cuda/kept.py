"""What a payload holds of selected elements: a thread computes one, at its place in order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compll.backends.cuda.selection_compaction import ITEMS, Hits
from compll.backends.cuda.sinks import BITS
from compll.backends.cuda.text import code
from compll.ir.expr import Expr
from compll.ir.layout import header
from compll.ir.module import POSITIONS, WHOLE, Field
from compll.ir.program import Pass, Sink, Unsupported


class KeptFields(Hits):
    """Encoder that writes the payload's part over selections."""

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

    # where fields begin

    def kept_fields(self) -> list[Field]:
        return [f for f in self.module.fields if f.shape == "kept"]

    def place_of(self, f: Field | None) -> str:
        """Where a field over a selection begins; after the last one, with None."""
        fields = self.kept_fields()
        count = len(fields) + 1
        number = fields.index(f) if f is not None else len(fields)
        return f"{self.memory('place', 'int64', 'piece', count)}[p * {count} + {number}]"

    def payload_end(self) -> str:
        return self.place_of(None) if self.kept_fields() else super().payload_end()

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

    # positions

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

    # the fields

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
            self.add(f"store_{f.storage}({to}, {cast}({value}));")

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
