"""What a walk over tiles writes: payload fields, new states, the gradient written back."""

from __future__ import annotations

from compll.backends.cuda.quotients import Quotients
from compll.backends.cuda.text import code
from compll.backends.cuda.values import size_text
from compll.ir.expr import Expr
from compll.ir.layout import header
from compll.ir.module import WHOLE, Field
from compll.ir.program import Sink

BITS = {"float32": "(u32)__float_as_int({})", "float16": "float16_bits({})",
        "bfloat16": "bfloat16_bits({})"}  # fmt: skip


class Sinks(Quotients):
    """Emits the stores of a tile's elements."""

    def starts(self) -> None:
        """Where the fields of fixed size begin."""
        self.add(f"i64 end = at[p] + {4 * sum(map(len, header(self.module)))};")
        for f in self.module.fields:
            if f.shape != "kept":
                self.add(f"const i64 at_{f.name} = end; end += {size_text(f, self.tile)};")

    # payload fields

    def field(self, sink: Sink) -> None:
        f = sink.field
        assert f is not None
        if sink.expr.type.shape == "group":
            value = self.group(sink.expr)
            if sink.expr.type.dtype != "float" and "int" not in f.storage:
                value = f"(float)({value})"
            cast = "(i64)" if f.storage in WHOLE else ""
            at = f"out + at_{f.name} + t * {f.item_bits // 8}"
            self.add(f"if (m && u == 0) store_{f.storage}<READY>({at}, {cast}({value}));")
            return
        self.prepare_groups(sink.expr)
        if f.packed:
            self.pack(f, sink.expr)
        else:
            self.items(f, sink.expr)

    def items(self, f: Field, expr: Expr) -> None:
        """Values of 16 or 32 bits, four a store."""
        size = f.item_bits // 8
        value = self.text(expr)
        if f.storage in BITS:
            value = BITS[f.storage].format(
                value if expr.type.dtype == "float" else f"(float)({value})"
            )
        else:
            value = f"(u32)(i64)({value})"
        with self.block(""), self.chunks(), self.each_row():
            self.add("u32 w[4];")
            with self.each_of_row():
                self.add(f"w[j] = {value};")
            self.add(f"put4<READY>(out + at_{f.name} + {size} * (o + l), m - l, {size}, w);")

    def pack(self, f: Field, expr: Expr) -> None:
        """Codes packed in registers; a short tile goes by way of shared memory."""
        value = code(f.bits, expr, self.text(expr))
        to = f"{self.codes_at(f)} + t * {f.packed_bytes(self.tile)}"
        self.add(f"u8* const w_{f.name} = {to};")
        if self.tile * f.bits < 32 or f.trits:
            with self.block(""):
                self.pack_short(f, value)
            return
        with self.block(f"if (READY || __all_sync(FULL, m == 0 || m == {self.tile}))"):
            self.pack_words(f, value)
        with self.block("else"):
            self.pack_short(f, value)

    def codes_at(self, f: Field) -> str:
        """Where the packed codes of all elements begin."""
        return f"out + at_{f.name}"

    def pack_words(self, f: Field, value: str) -> None:
        """Words of four bytes; see [Note: packing] for bytes and planes."""
        s, b = self.shape, f.bits
        words = max(1, s.rows * b // 8)
        split = max(1, 8 // (s.rows * b))  # planes within one row
        self.add(f"u32 word[{words}] = {{}};")
        plane = f"k / {words}" if split == 1 else f"(k * {split} + u / {s.team // split})"
        place = f"k % {words}" if split == 1 else "0"
        if b == 8 and split == 1:
            with self.block(""), self.chunks(), self.each_row():
                self.add("u32 code[4];")
                with self.each_of_row():
                    self.add(f"code[j] = {value};")
                self.add(f"word[c * {s.held} + row] = four_bytes(code);")
        else:
            with self.each():
                self.add(f"word[{place}] |= ({value}) << (8 * (e % 4) + {b} * ({plane}));")
        if split == 1:
            self.add("#pragma unroll")
            store = f"store_word<READY>(w_{f.name} + q * {s.row} + 4 * u, word[q])"
            self.add(f"for (int q = 0; q < {words}; ++q) if (m) {store};")
            return
        step = s.team // split
        while step < s.team:
            self.add(f"word[0] |= __shfl_xor_sync(FULL, word[0], {step}, {s.team});")
            step *= 2
        self.add(f"if (m && u < {s.team // split}) store_word<READY>(w_{f.name} + 4 * u, word[0]);")

    def room_for_codes(self, fields: list[Field]) -> None:
        """Shared memory of `pack_short`: one for all fields, and for ready and other tiles."""
        if any(f.packed for f in fields):
            self.add(f"__shared__ u8 codes[{self.shape.teams * self.tile}];")

    def pack_short(self, f: Field, value: str) -> None:
        self.add(f"u8* const own = codes + team * {self.tile};")
        with self.each():
            self.add(f"if (i < m) own[i] = (u8)({value});")
        self.add("__syncwarp();")
        how = "pack_trits" if f.trits else f"pack_short<{f.bits}>"
        self.add(f"{how}(own, w_{f.name}, m, u, {self.shape.team});")
        self.add("__syncwarp();")

    # states, and the gradient

    @staticmethod
    def outside(sink: Sink) -> Expr:
        """Of `where(selection, a, b)`, what the elements outside the selection become."""
        e = sink.expr
        return e.args[2] if e.op == "where" and e.args[0].op == "in" else e

    def overwrite(self, sinks: list[Sink]) -> None:
        """New states, and the gradient when it is written back; all inputs are in registers."""
        states = [
            (s.name, self.outside(s))
            for s in sinks
            if s.kind == "state" and s.expr.type.shape == "n"
        ]
        back = [s.expr for s in sinks if s.kind == "back"]
        self.prepare_groups(*(e for _, e in states), *back)
        if not states and not back:
            return
        head = "" if states else "if (back)"
        with self.block(head), self.chunks(), self.each_row():
            for name, _ in states:
                self.add(f"float y_{name}[4];")
            if back:
                self.add("float z[4];")
            with self.each_of_row():
                for name, expr in states:
                    self.add(f"y_{name}[j] = {self.text(expr)};")
                for expr in back:
                    self.add(f"if (back) z[j] = {self.text(expr)};")
            for name, _ in states:
                self.add(f"keep4<READY>(s_{name}, o + l, m - l, y_{name});")
            if back:
                self.add("if (back) store4<READY>(xs, o + l, m - l, z);")
