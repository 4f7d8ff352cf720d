"""CUDA decode of payloads over selections: checked as a whole before anything is written.

A piece whose header, gaps or indices are wrong is left as it is, and told by a bit in `errors`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compll.backends.cuda.runs import Lengthening
from compll.backends.cuda.streams import Stream, read_stream
from compll.backends.cuda.values import row_ready
from compll.ir.expr import Expr
from compll.ir.layout import header
from compll.ir.module import POSITIONS, WHOLE, Field
from compll.ir.program import Unsupported

ITEMS = 256


class Scattering(Lengthening):
    """Decoder with selections."""

    def emit(self) -> None:
        decode = self.module.decode
        if not self.module.selections:
            return super().emit()
        if decode.op != "scatter":
            raise Unsupported("a decode over selections other than a scatter", "decode")
        index, value = decode.args
        f = self.fields[str(index.value)]
        self.count = f"kept[p * {len(self.module.selections)} + {self.number(f.of)}]"
        self.look()
        if f.storage == "gaps":
            self.gaps(f)
        elif f.storage in POSITIONS:
            self.stream(f)
        else:
            self.indices(f)
        with self.kernel("fill", 0, self.shape.threads):
            self.fill()
        with self.over_kept("scatter", f.of):
            self.scatter(f, value)
        return None

    def number(self, name: str) -> int:
        return [s.name for s in self.module.selections].index(name)

    def look(self) -> None:
        """Whether header and length fit; where each field over a selection begins."""
        count = len(self.module.selections)
        self.memory("bad", "uint32", "piece")
        self.memory("kept", "int64", "piece", count)
        self.memory("place", "int64", "piece", len(self.kept_fields()) + 2)
        counted, gaps = header(self.module)
        with self.kernel("look", -1, 32):
            self.add("const int p = blockIdx.x;")
            self.piece()
            self.add("if (threadIdx.x) return;")
            self.add("bad[p] = 0;")
            self.add("if (n == 0 && used[p] == 0) return;")
            self.add(f"const i64 size = used[p], head = {4 * len(counted + gaps)};")
            self.add("bool good = n > 0 && size >= head;")
            for number, s in enumerate(self.module.selections):
                limit = f"limits[p * {count} + {number}]"
                known = limit
                if s.dynamic:
                    at = 4 * counted.index(s.name)
                    known = f"(good ? load_uint32(data + at[p] + {at}) : 0)"
                self.add(f"const i64 k_{s.name} = {known};")
                self.add(f"kept[p * {count} + {number}] = k_{s.name};")
                self.add(f"good = good && k_{s.name} <= {limit};")
            self.starts_of_all(gaps)
            self.add("good = good && end - at[p] == size;")
            self.add("if (!good) { bad[p] = 1; atomicOr(errors, 1u); }")

    def starts_of_all(self, gaps: list[str]) -> None:
        self.fixed_fields()
        first = 4 * (len(header(self.module)[0]))
        for number, f in enumerate(self.kept_fields()):
            self.add(f"{self.place_of(number)} = end;")
            if f.storage in POSITIONS:
                where = f"data + at[p] + {first + 4 * gaps.index(f.name)}"
                self.add(f"const i64 length_{f.name} = good ? load_uint32({where}) : 0;")
            self.add(f"end += {self.kept_size(f)};")
        self.add(f"{self.place_of(len(self.kept_fields()))} = end;")
        self.add(f"end += {int(self.module.status)};")

    def fixed_fields(self) -> None:
        super().layout()
        self.add(f"end -= {int(self.module.status)};")

    def kept_fields(self) -> list[Field]:
        return [f for f in self.module.fields if f.shape == "kept"]

    def place_of(self, number: int) -> str:
        return f"place[p * {len(self.kept_fields()) + 2} + {number}]"

    def kept_size(self, f: Field) -> str:
        if f.storage in POSITIONS:
            return f"length_{f.name}"
        if not f.packed:
            return f"k_{f.of} * {f.item_bits // 8}"
        full, bits = self.tile * f.bits // 8, f.bits
        return f"(k_{f.of} / {self.tile}) * {full} + ((k_{f.of} % {self.tile}) * {bits} + 7) / 8"

    @contextmanager
    def over(self, name: str, kind: str, of: str) -> Iterator[int]:
        grid = self.grid(kind, ITEMS, of)
        with self.kernel(f"{name}{len(self.steps)}", grid, ITEMS):
            self.add(f"const i64* const firsts = first + {grid} * (pieces + 1);")
            self.add(f"const i64* const items = item_at + {grid} * (pieces + 1);")
            self.add("const int p = find(firsts, pieces, blockIdx.x);")
            self.add(f"const i64 j = ((i64)blockIdx.x - firsts[p]) * {ITEMS} + threadIdx.x;")
            self.piece()
            yield grid

    @contextmanager
    def over_kept(self, name: str, of: str) -> Iterator[None]:
        """A kernel with a thread for selected element j of a good piece."""
        with self.over(name, "kept", of):
            self.add(f"const i64 count = {self.count};")
            self.add("if (bad[p] || j >= count) return;")
            yield

    # positions

    def indices(self, f: Field) -> None:
        with self.over_kept("check", f.of):
            place = self.place_of(self.kept_fields().index(f))
            self.add(f"if (load_uint32(data + {place} + 4 * j) < n) return;")
            self.add("atomicOr(&bad[p], 2u); atomicOr(errors, 2u);")

    def stream(self, f: Field) -> None:
        """Positions of a bit stream."""
        number = self.kept_fields().index(f)
        kept = self.grid("kept", ITEMS, f.of)
        self.memory("idx", "int64", str(kept))
        to = f"(idx + item_at[{kept} * (pieces + 1) + p])"
        where = self.place_of(number), self.place_of(number + 1)
        read_stream(self, Stream(f, *where, self.count, to))

    def gaps(self, f: Field) -> None:
        """Bytes to positions by prefix sums: of what each adds, and of how many gaps have ended."""
        number = self.kept_fields().index(f)
        kept = self.grid("kept", ITEMS, f.of)
        self.memory("idx", "int64", str(kept))
        grid = self.grid("gap_bytes", ITEMS, f.of)
        for name in ("added", "ended"):
            self.memory(name, "int64", f"{grid}b")
        with self.gap_bytes("sums", f, number):
            self.add("if (threadIdx.x == 0) { added[blockIdx.x] = all; ended[blockIdx.x] = ends; }")
        with self.kernel("join", -1, 256):
            self.join(f, number, grid)
        with self.gap_bytes("write", f, number):
            self.add("const i64 rank = ended[blockIdx.x] + end_before;")
            place = "added[blockIdx.x] + before + value + rank"
            self.add(
                f"if (end && rank < count) idx[item_at[{kept} * (pieces + 1) + p] + rank] = {place};"
            )

    @contextmanager
    def gap_bytes(self, name: str, f: Field, number: int) -> Iterator[None]:
        """A kernel with a thread for byte j of the gaps."""
        with self.over(name, "gap_bytes", f.of):
            self.add(f"const u8* const d = data + {self.place_of(number)};")
            self.add(f"const i64 count = {self.count};")
            following = self.place_of(number + 1)
            self.add(f"const i64 length = bad[p] ? 0 : {following} - {self.place_of(number)};")
            self.add("i64 value = 0, all, ends;")
            self.add("const bool end = j < length && d[j] < 128;")
            with self.block("if (j < length)"):
                self.add("int turn = 0;")
                self.add("while (turn < 6 && j - turn > 0 && d[j - turn - 1] >= 128) ++turn;")
                self.add("const bool overlong = turn > 5 || (turn > 0 && d[j] == 0);")
                self.add("if (overlong) { atomicOr(&bad[p], 1u); atomicOr(errors, 1u); }")
                self.add("value = (i64)(d[j] & 127) << (7 * turn);")
            self.add("const i64 before = block_scan<256>(value, &all);")
            self.add("const i64 end_before = block_scan<256>(end, &ends);")
            yield

    def join(self, f: Field, number: int, grid: int) -> None:
        self.add("const int p = blockIdx.x;")
        self.piece()
        self.add("if (n == 0 || bad[p]) return;")
        blocks = f"first[{grid} * (pieces + 1) + p"
        for name in ("added", "ended"):
            self.add(
                f"const i64 all_{name} = scan_array({name} + {blocks}], {blocks} + 1] - {blocks}]);"
            )
        self.add("if (threadIdx.x) return;")
        start, stop = self.place_of(number), self.place_of(number + 1)
        self.add(f"const i64 length = {stop} - {start}, count = {self.count};")
        self.add(f"const bool open = length > 0 && data[{stop} - 1] >= 128;")
        most = f"{grid} * (pieces + 1) + p"
        self.add(f"const bool long_ = length > item_at[{most} + 1] - item_at[{most}];")
        self.add("if (all_ended != count || open || long_) { bad[p] = 1; atomicOr(errors, 1u); }")
        self.add("else if (count && all_added + count > n) { bad[p] = 2; atomicOr(errors, 2u); }")

    # values

    def fill(self) -> None:
        """Zeros everywhere, or NaN where the status byte says so."""
        self.place()
        self.add("XT* const ys = y + table[5 * p];")
        self.add("if (bad[p]) return;")
        status = "data[at[p] + used[p] - 1] != 0" if self.module.status else "false"
        self.add(f"const bool nan = {status};")
        if self.adding:
            self.add("if (!nan) return;")
        self.add(
            "const float v[4] = {nan ? NAN_F : 0.0f, nan ? NAN_F : 0.0f, nan ? NAN_F : 0.0f, nan ? NAN_F : 0.0f};"
        )
        with self.each_tile(row_ready("ys")):
            with self.block(f"for (int k = 0; k < {self.shape.rows}; ++k)"):
                self.add(f"const int l = k * {self.shape.row} + 4 * u;")
                self.add("store4<READY>(ys, o + l, m - l, v);")

    def scatter(self, f: Field, value: Expr) -> None:
        self.add("XT* const ys = y + table[5 * p];")
        if self.module.status:
            self.add("if (data[at[p] + used[p] - 1]) return;")
        self.fixed_fields()
        self.scalars()
        self.prepare(value)
        for number, field in enumerate(self.kept_fields()):
            self.add(f"const i64 at_{field.name} = {self.place_of(number)};")
        place = (
            "idx[items[p] + j]"
            if f.storage in POSITIONS
            else f"load_uint32(data + at_{f.name} + 4 * j)"
        )
        self.add(f"const i64 i = {place};")
        self.add(f"const float v = {self.text(value)};")
        self.add(f"store1(ys, i, {'load1(ys, i) + v' if self.adding else 'v'});")

    def leaf(self, expr: Expr) -> str:
        f = self.fields[str(expr.value)]
        if f.shape != "kept":
            return super().leaf(expr)
        if f.packed:
            full = self.tile * f.bits // 8
            tile = f"j / {self.tile} * {full}"
            left = f"(count - j / {self.tile} * {self.tile})"
            size = f"({left} < {self.tile} ? (int){left} : {self.tile})"
            return f"(i32)code_at<{f.bits}>(data + at_{f.name} + {tile}, {size}, (int)(j % {self.tile}))"
        if f.storage in WHOLE:
            return f"(i32)load_{f.storage}(data + at_{f.name} + {f.item_bits // 8} * j)"
        return f"load_{f.storage}(data + at_{f.name} + {f.item_bits // 8} * j)"
