"""The part of the encode kernel that stores payload fields."""

from __future__ import annotations

from collections.abc import Callable

from compll.backends.cpu.nontemporal_tiles import Poured
from compll.backends.cpu.reduce import Reducing
from compll.backends.cpu.values import PLANES
from compll.ir.expr import Expr, walk
from compll.ir.module import WHOLE, Field
from compll.ir.program import Pass, Sink


class Packing(Reducing):
    """Emits what leaves a tile, and a tensor, for the payload."""

    #: the pass under way
    now: Pass

    def step_field(self, sink: Sink) -> None:
        f = sink.field
        assert f is not None
        if sink.expr.type.shape == "group":
            value = self.group(sink.expr)
            self.available()
            self.add(self.store(f, f"at_{f.name} + t * {f.item_bits // 8}", value, sink.expr))
            return
        self.ready_for(sink.expr)
        self.field_sink(f, sink.expr)

    def field_sink(self, f: Field, expr: Expr) -> None:
        if not f.packed:
            return self.store_tile(f, expr)
        kinds = {s.kind for s in self.now.sinks if uses_code(s.expr, f.name)}
        if self.evenly and not f.trits and self.cheap(expr):
            kinds = set()  # to compare again takes less than to keep the result
        if "state" in kinds or f.trits:
            return self.pack_buffer(f, expr)
        # Codes that nothing reads again are packed as they are computed.
        if kinds:
            with self.block("if back:"):
                self.pack_buffer(f, expr)
        with self.block("if not back:" if kinds else ""):
            self.pack_directly(f, expr)
        return None

    def store_tile(self, f: Field, expr: Expr) -> None:
        """A tile's values of a field that is not packed, past the cache where that is faster."""
        size, value = f.item_bits // 8, self.text(expr, "i")
        found = self.poured_as(f)
        usual = self.store(f, f"at_{f.name} + {size} * (o + i)", value, expr)
        if found is None:
            with self.block("for i in range(m):"):
                self.add(usual)
            return
        with self.block(f"if m == {self.tile}:"):
            self.add(f"o_ = into{found.name}[{size} * o - gone{found.name} :]")
            self.ahead()
            with self.block(f"for i in range({self.tile}):"):
                self.add(self.store(f, f"{size} * i", value, expr, "o_"))
            self.pour(found)
        with self.block("else:"):
            with self.block("for i in range(m):"):
                self.add(usual)

    def poured_as(self, f: Field | None) -> Poured | None:
        """How a field is written past the cache, if it may be."""
        if f is None or f.packed or f.shape != "n" or not self.pourable:
            return None
        return Poured(f"all_{f.name}", f"_{f.name}", f.item_bits // 8, "uint8")

    def poured(self, one: Pass) -> list[Poured]:
        """What a pass may write past the cache."""
        found = (self.poured_as(s.field) for s in one.sinks if s.kind == "field")
        return [x for x in found if x is not None]

    def cheap(self, expr: Expr) -> bool:
        """Whether computing an element anew takes one operator, given what is in buffers."""
        return self.made(expr) or all(map(self.made, expr.args))

    def made(self, expr: Expr) -> bool:
        """Whether an element's value is at hand."""
        return id(expr) in self.buffers or expr.op == "lift"

    def pack_buffer(self, f: Field, expr: Expr) -> None:
        """By way of a buffer, which later loops read."""
        buffer = self.codes[f.name] = f"q_{f.name}"
        self.fill_codes(f, expr)
        if f.trits:
            at = f"at_{f.name} + t * {f.packed_bytes(self.tile)}"
            self.add(f"pack_trits({buffer}, out, {at}, m)")
            return
        width = self.tile * f.bits // 8
        with self.block(f"if m == {self.tile}:"):
            self.pack_full(f, lambda p: f"{buffer}[i + {p * width}]")
        with self.block("else:"):
            self.pack_rest(f)

    def pack_directly(self, f: Field, expr: Expr) -> None:
        width = self.tile * f.bits // 8
        with self.block(f"if m == {self.tile}:"):
            self.pack_full(f, lambda p: self.coded(f.bits, expr, f"i + {p * width}"))
        with self.block("else:"):
            self.fill_codes(f, expr)
            self.pack_rest(f)

    def fill_codes(self, f: Field, expr: Expr) -> None:
        self.ahead()
        with self.block(f"for i in range({self.tile}):"):
            self.add(f"q_{f.name}[i] = {self.coded(f.bits, expr, 'i')}")

    def pack_full(self, f: Field, value: Callable[[int], str]) -> None:
        width, planes = self.tile * f.bits // 8, PLANES[f.bits]
        self.add(f"w = at_{f.name} + t * {width}")
        self.add(f"o_ = out[w : w + {width}]")
        chunks = self.chunks(width)
        with self.block(f"for c in range(0, {width}, {width // chunks}):"):
            self.ahead(self.tile // chunks)
            with self.block(f"for i in range(c, c + {width // chunks}):"):
                parts = ", ".join(value(p) for p in range(planes))
                self.add(f"o_[i] = {f'pack{planes}({parts})' if planes > 1 else parts}")

    def pack_rest(self, f: Field) -> None:
        at = f"at_{f.name} + t * {self.tile * f.bits // 8}"
        self.add(f"pack_tail(q_{f.name}, out, {at}, m, {f.bits})")

    def store(self, f: Field, at: str, value: str, expr: Expr, array: str = "out") -> str:
        if f.storage in WHOLE:
            return f"store_{f.storage}({array}, {at}, i64({value}))"
        if expr.type.dtype != "float":
            value = f"f_of_{'i' if expr.type.dtype == 'int' else 'b'}({value})"
        return f"store_{f.storage}({array}, {at}, {value})"

    def scalar_sink(self, sink: Sink) -> None:
        if sink.kind == "state":
            value = self.scalar(sink.expr)
            with self.block(f"if np.isfinite({value}):"):
                self.add(f"a_{sink.name}[tensor] = f32({value})")
            return
        f = sink.field
        assert f is not None
        value = self.scalar(sink.expr)
        if f.shape == "table":
            self.add(f"store_table(out, at_{f.name}, {value})")
            return
        text = f"i64({value})" if f.storage in WHOLE else f"f32({value})"
        self.add(f"store_{f.storage}(out, at_{f.name}, {text})")


def uses_code(expr: Expr, field: str) -> bool:
    """Whether an expression reads back what a field stores."""
    return any(e.op == "code" and e.value == field for e in walk(expr))
