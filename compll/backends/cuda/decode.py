"""Payload to gradient: the CUDA kernels of decode, which set or add."""

from __future__ import annotations

from compll.backends.cuda.values import Values, row_ready, size_text
from compll.ir.expr import Expr, walk
from compll.ir.layout import header
from compll.ir.module import WHOLE, Field, Module

PARAMS = (
    "const u8* __restrict__ data", "const i64* table", "const i64* first", "const i64* item_at", "int pieces", "const i64* at",
    "const i64* used", "const i64* limits", "const double* st", "int statics", "u32* errors", "XT* __restrict__ y",
)  # fmt: skip
SHARED = 48 * 1024  # bytes of a block that need no asking for


class Decoder(Values):
    """Emits `decode_set` or `decode_add`."""

    #: how payloads are accessed
    ready = "READY"

    def __init__(
        self, module: Module, add: bool, threads: int = 256, prefix: str | None = None
    ) -> None:
        super().__init__(module, prefix or f"decode_{'add' if add else 'set'}", threads)
        self.adding, self.fixed_params = add, PARAMS
        self.emit()

    def emit(self) -> None:
        with self.kernel("tiles", 0, self.shape.threads):
            self.over_tiles()

    def over_tiles(self) -> None:
        decode = self.module.decode
        self.place()
        self.leave()
        self.layout()
        self.add("XT* const ys = y + table[5 * p];")
        self.scalars()
        self.prepare(decode)
        self.add(f"const bool bad = {self.status_byte() if self.module.status else 'false'};")
        with self.each_tile(row_ready("ys"), *self.fields_ready(self.module.fields)):
            with self.block("if (m)"):
                self.prepare_groups(decode)
                self.tile_body(decode)

    def leave(self) -> None:
        """A return from blocks of a piece whose payload is wrong."""

    def status_byte(self) -> str:
        """Whether the status byte says that something was not finite."""
        return "data[end - 1] != 0"

    def codes_at(self, f: Field) -> str:
        """Where the packed codes of all elements begin."""
        return f"data + at_{f.name}"

    def layout(self) -> None:
        self.add(f"i64 end = at[p] + {4 * sum(map(len, header(self.module)))};")
        for f in self.module.fields:
            if f.shape != "kept":
                self.add(f"const i64 at_{f.name} = end; end += {size_text(f, self.tile)};")
        self.add(f"end += {int(self.module.status)};")

    def scalars(self) -> None:
        for e in walk(self.module.decode):
            if e.type.shape != "scalar":
                continue
            if e.op != "field":
                self.declare(e, "double", "s", f"(double)({self.arithmetic(e)})")
                continue
            f = self.fields[str(e.value)]
            self.declare(e, "double", "s", f"(double)load_{f.storage}(data + at_{f.name})")

    def field_value(self, expr: Expr) -> str:
        f = self.fields[str(expr.value)]
        return f"load_{f.storage}<{self.ready}>(data + at_{f.name} + t * {f.item_bits // 8})"

    def table(self, expr: Expr) -> str:
        return f"data + at_{expr.value}, {expr.type.of}"

    def tile_body(self, decode: Expr) -> None:
        s = self.shape
        self.packed_tiles()
        self.add(f"#pragma unroll (READY ? {s.held} : 1)")
        with self.block(f"for (int k = 0; k < {s.rows}; ++k)"):
            self.add(f"const int l = k * {s.row} + 4 * u;")
            for f in self.elements():
                self.load(f)
            self.add("float v[4];")
            if self.adding:
                self.add("load4<READY>(ys, o + l, m - l, v);")
            self.add("#pragma unroll")
            with self.block("for (int e = 0; e < 4; ++e)"):
                self.add("const int i = l + e;")
                value = self.text(decode)
                how = "+=" if self.adding else "="
                self.add(f"v[e] {how} bad ? NAN_F : {value};")
            self.add("store4<READY>(ys, o + l, m - l, v);")

    def packed_tiles(self) -> None:
        """Where the tile's codes begin."""
        for f in self.elements():
            if f.packed:
                at = f"{self.codes_at(f)} + t * {f.packed_bytes(self.tile)}"
                self.add(f"const u8* const d_{f.name} = {at};")
            if self.by_bytes(f):
                self.unpack_trits(f)

    def by_bytes(self, f: Field) -> bool:
        """Whether ready tiles have a field's codes as bytes in shared memory: neighbours' trits are
        in other bytes each, which a thread would load and divide for every one of its elements."""
        fields = sum(one.trits for one in self.elements())
        fits = 4 * self.words_by_bytes(f) * self.shape.teams * fields <= SHARED
        return f.trits and self.ready == "READY" and fits

    def words_by_bytes(self, f: Field) -> int:
        """Of a tile, with room for five trits of every byte."""
        return -(-5 * f.packed_bytes(self.tile) // 4)

    def unpack_trits(self, f: Field) -> None:
        s, words = self.shape, self.words_by_bytes(f)
        self.add(f"__shared__ u32 w_{f.name}[{s.teams * words}];")
        self.add(f"const u32* const own_{f.name} = w_{f.name} + team * {words};")
        with self.block("if (READY)"):
            self.add("__syncwarp();  // all have read those of the turn before")
            args = f"d_{f.name}, (u8*)own_{f.name}, m, u, {s.team}"
            self.add(f"unpack_trits({args});")
            self.add("__syncwarp();")

    def elements(self) -> list[Field]:
        return [f for f in self.module.fields if f.shape == "n"]

    def load(self, f: Field) -> None:
        """The bits of a field for the four elements of row k, in q_NAME."""
        self.add(f"u32 q_{f.name}[4];")
        if not f.packed:
            size = f.item_bits // 8
            self.add(
                f"get4<{self.ready}>(data + at_{f.name} + {size} * (o + l), m - l, {size}, q_{f.name});"
            )
            return
        how = "trit_at" if f.trits else f"code_at<{f.bits}>"
        short = f"q_{f.name}[e] = l + e < m ? {how}(d_{f.name}, m, l + e) : 0;"
        by_bytes = self.by_bytes(f)
        if (self.tile * f.bits < 32 or f.trits) and not by_bytes:
            self.add(f"for (int e = 0; e < 4; ++e) {short}")
            return
        with self.block("if (READY)" if by_bytes else f"if (READY || m == {self.tile})"):
            if by_bytes:
                self.add(f"const u32 word = own_{f.name}[k * {self.shape.team} + u];")
                self.add(f"for (int e = 0; e < 4; ++e) q_{f.name}[e] = word >> (8 * e) & 255u;")
            else:
                self.load_word(f)
        with self.block("else"):
            self.add(f"for (int e = 0; e < 4; ++e) {short}")

    def load_word(self, f: Field) -> None:
        s, b = self.shape, f.bits
        words = max(1, s.rows * b // 8)
        split = max(1, 8 // (s.rows * b))
        place = f"(k % {words}) * {s.row} + 4 * u" if split == 1 else f"4 * (u % {s.team // split})"
        plane = f"k / {words}" if split == 1 else f"k * {split} + u / {s.team // split}"
        self.add(f"const u32 word = load_word<{self.ready}>(d_{f.name} + {place});")
        self.add("#pragma unroll")
        with self.block("for (int e = 0; e < 4; ++e)"):
            self.add(f"q_{f.name}[e] = word >> (8 * e + {b} * ({plane})) & {(1 << b) - 1}u;")

    def leaf(self, expr: Expr) -> str:
        f = self.fields[str(expr.value)]
        raw = f"q_{f.name}[e]"
        if f.packed or f.storage in WHOLE:
            return f"(i32){raw}"
        return {
            "float32": f"__int_as_float((i32){raw})",
            "float16": f"float16_value((u16){raw})",
            "bfloat16": f"bfloat16_value((u16){raw})",
        }[f.storage]
