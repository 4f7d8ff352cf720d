"""Arrays that a walk reads: the gradient, states and scratch arrays, by rows of registers, and an
incoming payload's fields.

[Note: packed rows] Byte b of a tile of w bytes has the codes of lanes b, w + b, 2 * w + b ...: one
of each plane, from the lowest bits on. A thread's four lanes of a row lie in one plane of four
neighbouring bytes, a word. The rows whose lanes the planes have:

    4 bits, 4 rows    word 0: 0 | 2    word 1: 1 | 3
    2 bits, 4 rows    word 0: 0 | 1 | 2 | 3
    2 bits, 2 rows    word 0: 0 of u | 0 of u + team / 2 | 1 of u | 1 of u + team / 2

In the last case a row has two planes, and threads u and u + team / 2 have the same word.
"""

from __future__ import annotations

from typing import Any

from compll.backends.cuda.grids import Shape
from compll.ir.module import WHOLE, Field
from compll.ir.tile import SCRATCH, Store, Value
from compll.numerics.bits import FORMATS

#: expression that turns a payload's bits into a value, by storage
OF_BITS = {"float32": "__int_as_float((i32){})"}
OF_BITS |= {name: f"{name}_value((i32){{}})" for name in FORMATS}


def own_name(f: Field) -> str:
    """The name of a scratch array's memory."""
    return "own_" + "".join(ch if ch.isalnum() else "_" for ch in f.name)


class PackedRow:
    """Places of codes of `bits` bits in a whole tile: see [Note: packed rows].

    words: of a thread. planes: of a row. threads: those that have words of their own.
    """

    def __init__(self, shape: Shape, bits: int) -> None:
        self.row, self.bits = shape.row, bits
        self.words = max(1, shape.rows * bits // 8)
        self.planes = max(1, 8 // (shape.rows * bits))
        self.threads = shape.team // self.planes

    @property
    def word(self) -> str:
        """The number of the thread's word that has its lanes of row k."""
        return f"k % {self.words}" if self.words > 1 else "0"

    def begin(self, word: str) -> str:
        """The first byte of the thread's word of this number."""
        if self.planes > 1:
            return f"4 * (u % {self.threads})"
        return f"{self.row} * {word} + 4 * u" if self.words > 1 else "4 * u"

    def shift(self, lane: str) -> str:
        """The lowest bit in its word of a lane's code of row k."""
        plane = f"(k / {self.words})" if self.words > 1 else "k"
        if self.planes > 1:
            plane = f"({self.planes} * k + u / {self.threads})"
        return f"8 * {lane} + {self.bits} * {plane}"


def in_words(f: Field, shape: Shape) -> bool:
    """True if codes of whole tiles are read and written by words."""
    return f.packed and not f.trits and shape.tile * f.bits >= 32


class LaneArrays:
    """Arrays that `walk` (a WalkKernel) reads."""

    def __init__(self, walk: Any) -> None:
        self.walk, self.body, self.shape = walk, walk.body, walk.shape
        reads = [v for v in walk.walk.values if v.op in ("load", "unpack") and v.level != "piece"]
        reads = [v for v in reads if not self.made(v.attr)]
        lanes = [v for v in reads if v.level == "lane"]
        #: arrays held in registers, by name; then fields of payloads and bytes of trits
        self.held = {self.of(v.attr): v for v in lanes if self.of(v.attr)}
        self.fields = {v.attr.name: v.attr for v in lanes if not self.of(v.attr)}
        self.of_groups = [v.attr for v in reads if v.level == "tile"]

    def made(self, a: Any) -> Any:
        """The function that computes elements of an array on each read; None for other arrays."""
        own = isinstance(a, Field) and a.shape == SCRATCH
        return self.body.plan.elements.get(a.name) if own else None

    def at(self, v: Value, place: str) -> str:
        """The element at a place."""
        made = self.made(v.attr)
        if made is not None:
            return str(made(self.body, place))
        return f"{self.of(v.attr)}[{place}]"

    def of(self, a: Any) -> str:
        """The piece's array whose lanes a thread holds in registers; "" for other arrays."""
        remade = self.walk.remade
        if isinstance(a, str):
            return str(remade.get("g") or self.body.given("xs"))
        if a.expr is not None or a.packed:
            return ""
        if a.shape == "kept" or a.shape == SCRATCH:
            return self.own(a)
        return str(remade.get(f"state {a.name}") or self.body.state(a))

    def own(self, f: Field) -> str:
        """A scratch array, by lanes of tiles; for trits, their bytes."""
        plan, tile = self.body.plan, self.shape.tile
        grid = plan.grid_of(f)
        name = own_name(f)
        if name in self.walk.remade:
            return str(self.walk.remade[name])
        if f.packed:
            return str(self.body.memory(name, "uint8", grid, f.packed_bytes(tile)))
        kind = "int32" if f.storage == "int32" else "float32"
        return str(self.body.memory(name, kind, grid, tile))

    def codes(self, f: Field) -> str:
        """Pointer to an incoming field, or to bytes of trits."""
        if f.shape == SCRATCH:
            return self.own(f)
        return str(self.body.source(f))

    def written(self, s: Store) -> str:
        """Pointer to the array that a store of lanes writes."""
        assert s.field is not None
        if s.target == "payload":
            return str(self.body.target(s.field))
        return self.own(s.field)

    def array(self, s: Store) -> str:
        """The piece's array, of its elements or its own, that a store of lanes writes."""
        if s.target == "gradient":
            return str(self.body.given("xs"))
        return str(self.body.state(s.field)) if s.target == "state" else self.written(s)

    def aligned(self) -> list[str]:
        """Conditions under which a thread can access four lanes at once."""
        names = list(self.held)
        found = []
        for s in self.walk.walk.stores:
            if s.target == "gradient":
                names.append(self.body.given("xs"))
            elif s.target == "state" and not s.placed:
                names.append(self.body.state(s.field))
            elif s.target == "payload" and s.field is not None and not s.field.trits:
                found.append(f"aligned({self.written(s)}, {bytes_at_once(s.field)})")
        for f in (*self.fields.values(), *self.of_groups):
            if not f.trits:
                found.append(f"aligned({self.codes(f)}, {bytes_at_once(f)})")
        rows = [f"aligned({name}, 4 * sizeof(*{name}))" for name in names]
        return list(dict.fromkeys([*rows, *found]))

    # by rows

    def load(self) -> None:
        """Declare and fill the registers of a chunk."""
        s, b, held = self.shape, self.body, self.walk.held
        for name, v in self.held.items():
            kind = "i32" if v.kind == "i32" else "float"
            b.add(f"{kind} r_{name}[{4 * held}];")
            if self.walk.exchanges:
                b.add(f"load_rows<{self.walk.rows}>({name}, o, m, r_{name}, exchange[0]);")
                continue
            b.add("#pragma unroll")
            at = f"(c * {held} + k) * {s.row} + 4 * u"
            b.add(
                f"for (int k = 0; k < {held}; ++k) "
                f"load4<READY>({name}, o + {at}, m - ({at}), r_{name} + 4 * k);"
            )

    def load_row(self, values: list[Value]) -> None:
        """Declare the bits of fields for the four lanes of row k, as q_NAME."""
        needed = {v.attr.name: v.attr for v in values if v.op in ("load", "unpack")
                  and isinstance(v.attr, Field) and v.attr.name in self.fields}  # fmt: skip
        for f in needed.values():
            self.body.add(f"u32 q_{f.name}[4];")
            if f.packed:
                self.unpack_row(f)
            else:
                at = f"{self.codes(f)} + {f.item_bits // 8} * (o + l)"
                self.body.call(f"get4<READY, u{f.item_bits}>", at, "m - l", f"q_{f.name}")

    def unpack_row(self, f: Field) -> None:
        """Unpack the codes of row k."""
        b, tile, name = self.body, self.shape.tile, f"q_{f.name}"
        codes = f"{self.codes(f)} + t * {f.packed_bytes(tile)}"
        each = "for (int e = 0; e < 4; ++e)"
        if in_words(f, self.shape):
            row = PackedRow(self.shape, f.bits)
            with b.block(f"if (READY || m == {tile})"):
                at = f"{codes} + {row.begin(f'({row.word})')}"
                b.add(f"const u32 word = load_codes<READY>({at});")
                b.add(f"{each} {name}[e] = word >> ({row.shift('e')}) & {(1 << f.bits) - 1}u;")
            b.add("else")
        how = "trit_at" if f.trits else f"code_at<{f.bits}>"
        b.add(f"{each} {name}[e] = l + e < m ? {how}({codes}, m, l + e) : 0;")

    def lane(self, v: Value) -> str:
        """The value that a lane reads."""
        if self.made(v.attr) is not None:
            return self.at(v, "(i < m ? o + i : 0)")
        array = self.of(v.attr)
        if array:
            return f"r_{array}[4 * row + j]"
        bits = f"q_{v.attr.name}[j]"
        if v.op == "unpack" or v.attr.storage in WHOLE:
            return f"(i32){bits}"
        return OF_BITS[v.attr.storage].format(bits)

    def of_tile(self, v: Value) -> str:
        """The value that a tile reads."""
        f = v.attr
        at = f"{self.codes(f)} + t * {f.item_bits // 8}"
        kind = "i32" if v.kind == "i32" else "float"
        return f"m ? ({kind})load_{f.storage}<READY>({at}) : ({kind})0"


def bytes_at_once(f: Field) -> int:
    """Bytes that one thread accesses at once in a payload field."""
    if f.shape == "group":
        return f.item_bits // 8
    return 2 if f.packed else f.item_bits // 2
