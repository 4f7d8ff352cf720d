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
from compll.ir.storage import Storage
from compll.ir.tile import Array, Value
from compll.numerics.bits import FORMATS

#: expression that turns a payload's bits into a value, by storage
OF_BITS = {"float32": "__int_as_float((i32){})"}
OF_BITS |= {name: f"{name}_value((i32){{}})" for name in FORMATS}


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


def in_words(storage: Storage, shape: Shape) -> bool:
    """True if codes of whole tiles are read and written by words."""
    return storage.packed and not storage.trits and shape.tile * storage.bits >= 32


class LaneArrays:
    """Arrays that `walk` (a WalkKernel) reads."""

    def __init__(self, walk: Any) -> None:
        self.walk, self.body, self.shape = walk, walk.body, walk.shape
        reads = [v for v in walk.walk.values if v.op in ("load", "unpack") and v.level != "piece"]
        reads = [v for v in reads if v.attr not in self.body.plan.elements]
        lanes = [v for v in reads if v.level == "lane"]
        #: arrays held in registers, by name; then fields of payloads and bytes of trits
        self.held = {self.of(v.attr): v for v in lanes if self.of(v.attr)}
        self.fields = list(dict.fromkeys(v.attr for v in lanes if not self.of(v.attr)))
        self.of_groups = [v.attr for v in reads if v.level == "tile"]

    def at(self, v: Value, place: str) -> str:
        """The element at a place."""
        computed = self.body.plan.elements.get(v.attr)
        if computed is not None:
            return str(computed(self.body, place))
        return f"{self.pointer(v.attr)}[{place}]"

    def of(self, a: Array) -> str:
        """The piece's array whose lanes a thread holds in registers; "" for other arrays."""
        return "" if a.received or a.storage.packed else self.pointer(a)

    def pointer(self, a: Array) -> str:
        """Pointer to the piece's array, or to bytes of a payload or of trits."""
        if a in self.walk.remade:
            return str(self.walk.remade[a])
        payload = a.received or a.role == "payload"
        return str(self.body.payload(a) if payload else self.body.elements(a))

    def aligned(self) -> list[str]:
        """Conditions under which a thread can access four lanes at once."""
        names = list(self.held)
        found = []
        for s in self.walk.walk.stores:
            if s.in_place and s.place is None:
                names.append(self.body.elements(s.array))
            elif s.array.role == "payload" and not s.array.storage.trits:
                found.append(f"aligned({self.pointer(s.array)}, {bytes_at_once(s.array)})")
        for a in (*self.fields, *self.of_groups):
            if not a.storage.trits:
                found.append(f"aligned({self.pointer(a)}, {bytes_at_once(a)})")
        for v in self.walk.walk.values:
            if v.kind == "table" and v.op == "load" and v.attr.received:
                found.append(f"aligned({self.pointer(v.attr)}, 4)")
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
        read = (v.attr for v in values if v.op in ("load", "unpack"))
        for a in dict.fromkeys(a for a in read if a in self.fields):
            self.body.add(f"u32 q_{a.name}[4];")
            if a.storage.packed:
                self.unpack_row(a)
            else:
                at = f"{self.pointer(a)} + {a.storage.bits // 8} * (o + l)"
                self.body.call(f"get4<READY, u{a.storage.bits}>", at, "m - l", f"q_{a.name}")

    def unpack_row(self, a: Array) -> None:
        """Unpack the codes of row k."""
        b, tile, name, bits = self.body, self.shape.tile, f"q_{a.name}", a.storage.bits
        codes = f"{self.pointer(a)} + t * {a.storage.tile_bytes(tile)}"
        each = "for (int e = 0; e < 4; ++e)"
        if in_words(a.storage, self.shape):
            row = PackedRow(self.shape, bits)
            with b.block(f"if (READY || m == {tile})"):
                at = f"{codes} + {row.begin(f'({row.word})')}"
                b.add(f"const u32 word = load_codes<READY>({at});")
                b.add(f"{each} {name}[e] = word >> ({row.shift('e')}) & {(1 << bits) - 1}u;")
            b.add("else")
        how = "trit_at" if a.storage.trits else f"code_at<{bits}>"
        b.add(f"{each} {name}[e] = l + e < m ? {how}({codes}, m, l + e) : 0;")

    def lane(self, v: Value) -> str:
        """The value that a lane reads."""
        if v.attr in self.body.plan.elements:
            return self.at(v, "(i < m ? o + i : 0)")
        array = self.of(v.attr)
        if array:
            return f"r_{array}[4 * row + j]"
        bits = f"q_{v.attr.name}[j]"
        if v.op == "unpack" or v.attr.storage.whole:
            return f"(i32){bits}"
        return OF_BITS[v.attr.storage.name].format(bits)

    def of_tile(self, v: Value) -> str:
        """The value that a tile reads."""
        at = f"{self.pointer(v.attr)} + t * {v.attr.storage.bits // 8}"
        kind = "i32" if v.kind == "i32" else "float"
        return f"m ? ({kind})load_{v.attr.storage.name}<READY>({at}) : ({kind})0"


def bytes_at_once(a: Array) -> int:
    """Bytes that one thread accesses at once in a payload field."""
    if a.domain.kind == "group":
        return a.storage.bits // 8
    return 2 if a.storage.packed else a.storage.bits // 2
