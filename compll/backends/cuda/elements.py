"""Parts of a walk's kernel: arrays that it reads, folds, stores, selected elements.

[Note: packed rows] Byte b of a tile of w bytes has the codes of elements b, w + b, 2 * w + b ...:
one of each plane, from the lowest bits on. A thread's four elements of a row lie in one plane of
four neighbouring bytes, a word. The rows whose elements the planes have:

    4 bits, 4 rows    word 0: 0 | 2    word 1: 1 | 3
    2 bits, 4 rows    word 0: 0 | 1 | 2 | 3
    2 bits, 2 rows    word 0: 0 of u | 0 of u + team / 2 | 1 of u | 1 of u + team / 2

In the last case a row has two planes, and threads u and u + team / 2 have the same word.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from compll.backends.cuda.body import Body
from compll.backends.cuda.plans import Shape
from compll.backends.loops import Loop
from compll.ir.storage import Storage
from compll.ir.tile import Array, Compact, Store, Value, Walk, count_of, order_inside
from compll.numerics.bits import FORMATS
from compll.numerics.numbers import lane_count


@dataclass(frozen=True)
class Region:
    """The tiles of a walk: a grid, and in a kernel the number of elements."""

    grid: int
    size: Callable[[Body], str]


class WalkContext(Protocol):
    """The kernel of a walk, as its arrays, folds, stores and selected elements see it."""

    walk: Walk
    body: Body
    shape: Shape
    region: Region
    arrays: ElementArrays
    #: rows that a thread holds, and if rows are exchanged: see [Note: rows of small tiles]
    held: int
    exchanges: bool
    #: template arguments of functions on rows
    rows: str
    totals: dict[Value, str]
    places: dict[Value, str]
    local: dict[Value, str]

    def named(self, v: Value) -> str: ...
    def order(self, loop: Loop) -> list[Value]: ...
    def each_of_row(self, values: list[Value]) -> AbstractContextManager[None]: ...


# ---- element arrays -----------------------------------------------------------------------------
# Arrays that a walk reads: the gradient, states and scratch arrays, by rows of registers, and
# an incoming payload's fields.

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
        """The number of the thread's word that has its elements of row k."""
        return f"k % {self.words}" if self.words > 1 else "0"

    def begin(self, word: str) -> str:
        """The first byte of the thread's word of this number."""
        if self.planes > 1:
            return f"4 * (u % {self.threads})"
        return f"{self.row} * {word} + 4 * u" if self.words > 1 else "4 * u"

    def shift(self, element: str) -> str:
        """The lowest bit in its word of an element's code of row k."""
        plane = f"(k / {self.words})" if self.words > 1 else "k"
        if self.planes > 1:
            plane = f"({self.planes} * k + u / {self.threads})"
        return f"8 * {element} + {self.bits} * {plane}"


def in_words(storage: Storage, shape: Shape) -> bool:
    """True if codes of whole tiles are read and written by words."""
    return storage.packed and not storage.trits and shape.tile * storage.bits >= 32


class ElementArrays:
    """Arrays that `walk` reads."""

    def __init__(self, walk: WalkContext) -> None:
        self.walk, self.body, self.shape = walk, walk.body, walk.shape
        reads = [v for v in walk.walk.values if v.op in ("load", "unpack") and v.level != "piece"]
        reads = [v for v in reads if v.attr not in self.body.plan.elements]
        elements = [v for v in reads if v.level == "element"]
        #: arrays held in registers, by name; then fields of payloads and bytes of trits
        self.held = {self.of(v.attr): v for v in elements if self.of(v.attr)}
        self.fields = list(dict.fromkeys(v.attr for v in elements if not self.of(v.attr)))
        self.of_groups = [v.attr for v in reads if v.level == "tile"]

    def at(self, v: Value, place: str) -> str:
        """The element at a place."""
        computed = self.body.plan.elements.get(v.attr)
        if computed is not None:
            return str(computed(self.body, place))
        return f"{self.pointer(v.attr)}[{place}]"

    def of(self, a: Array) -> str:
        """The piece's array whose elements a thread holds in registers; "" for other arrays."""
        return "" if a.received or a.storage.packed else self.pointer(a)

    def pointer(self, a: Array) -> str:
        """Pointer to the piece's array, or to bytes of a payload or of trits."""
        payload = a.received or a.role == "payload"
        return str(self.body.payload(a) if payload else self.body.elements(a))

    def aligned(self) -> list[str]:
        """Conditions under which a thread can access four elements at once."""
        names = list(self.held)
        conditions = []
        for s in self.walk.walk.stores:
            if s.in_place and s.place is None:
                names.append(self.body.elements(s.array))
            elif s.array.role == "payload" and not s.array.storage.trits:
                conditions.append(f"aligned({self.pointer(s.array)}, {bytes_at_once(s.array)})")
        for a in (*self.fields, *self.of_groups):
            if not a.storage.trits:
                conditions.append(f"aligned({self.pointer(a)}, {bytes_at_once(a)})")
        for v in self.walk.walk.values:
            if v.kind == "table" and v.op == "load" and v.attr.received:
                conditions.append(f"aligned({self.pointer(v.attr)}, 4)")
        rows = [f"aligned({name}, 4 * sizeof(*{name}))" for name in names]
        return list(dict.fromkeys([*rows, *conditions]))

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
        """Declare the bits of fields for the four elements of row k, as q_NAME."""
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

    def element(self, v: Value) -> str:
        """The value that an element reads."""
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


# ---- element folds ------------------------------------------------------------------------------
# Folds of a tile's elements: a thread's own first, then those of its team.

#: start value of a fold other than a sum
START = {"max": "-2147483647", "min": "2147483647", "count": "0"}
#: functions that fold two numbers
JOIN = {"max": "op_max", "min": "op_min", "count": "op_add"}


class Folds:
    """Folds of the loops of `walk`."""

    def __init__(self, walk: WalkContext) -> None:
        self.walk, self.body, self.shape = walk, walk.body, walk.shape
        #: true if rows are lanes, too, and are folded first: see [Note: order of sums]
        self.few = self.shape.row < lane_count(self.shape.tile)
        self.names: dict[Value, str] = {}
        #: folds whose values the walk itself needs; of others, a block's threads leave one number
        self.needed = {a for v in walk.walk.values for a in v.args}
        self.needed |= {s.value for s in walk.walk.stores} | set(walk.places)
        self.joined = {f: f for f in walk.walk.folds if f.attr != "sum" and f in walk.totals}

    def open(self, folds: list[Value]) -> None:
        """Start values, before the loop."""
        for f in folds:
            name = self.names[f] = self.body.name("a")
            if f.attr == "sum":
                self.body.add(f"float {name}[{4 * self.shape.rows if self.few else 4}];")
            else:
                self.body.add(f"i32 {name} = {START[f.attr]};")

    def take(self, folds: list[Value]) -> None:
        """Fold the current element."""
        for f in folds:
            name, x = self.names[f], self.walk.named(f.args[0])
            if f.attr == "count":
                self.body.add(f"{name} += i < m && {x};")
            elif f.attr != "sum":
                self.body.add(f"if (i < m) {name} = op_{f.attr}({name}, {self.key(f.args[0])});")
            elif self.few:
                self.body.add(f"{name}[4 * k + j] = i < m ? {x} : 0.0f;")
            else:
                masked = f"i < m ? {x} : 0.0f"
                self.body.add(f"{name}[j] = k ? {name}[j] + ({masked}) : {masked};")

    def key(self, v: Value) -> str:
        """An element as an integer that orders as it does."""
        if v.op == "abs" and v.kind == "f32":
            return f"op_magnitude_bits({self.walk.named(v.args[0])})"
        return self.walk.named(v) if v.kind == "i32" else f"op_order_key({self.walk.named(v)})"

    def close(self, folds: list[Value]) -> dict[Value, str]:
        """Finish the folds after the loop: names of their values. Leaves them for totals."""
        values = {}
        for f in folds:
            if f in self.joined:
                self.join(f)
                if f not in self.needed:
                    continue
            values[f] = self.value(f)
            if f.attr == "sum" and f in self.walk.totals:
                to, bits = self.walk.totals[f], f"(u32)__float_as_int({values[f]})"
                self.body.add(f"if (m && u == 0) {to}[t] = {bits};")
            if f in self.walk.places:
                self.body.add(f"found_{self.walk.places[f]} = {values[f]};")
            if f.kind == "f32" and f.attr in ("min", "max"):
                values[f] = self.body.declare("float", f"op_from_key({values[f]})")
        return values

    def value(self, f: Value) -> str:
        b, name, team = self.body, self.names[f], self.shape.team
        if f.attr != "sum":
            return str(b.declare("i32", f"team_{f.attr}<{team}>({name})"))
        half = 2 * self.shape.rows if self.few else 0
        while half >= 4:
            b.add("#pragma unroll")
            b.add(f"for (int e = 0; e < {half}; ++e) {name}[e] += {name}[e + {half}];")
            half //= 2
        four = ", ".join(f"{name}[{j}]" for j in range(4))
        return str(b.declare("float", f"team_sum<{team}>({four})"))

    def begin(self) -> None:
        """Declare the threads' parts of totals that may be joined in any order."""
        for f in self.joined.values():
            self.body.add(f"i32 own_{self.walk.totals[f]} = {START[f.attr]};")

    def join(self, f: Value) -> None:
        """Take the thread's part of a total out of the tile."""
        self.body.add(f"own_{self.walk.totals[f]} = {self.names[f]};")

    def leave(self) -> None:
        """Leave the block's parts of totals, after its tiles."""
        b, warps = self.body, self.shape.threads // 32
        if not self.joined:
            return
        b.add(f"__shared__ i32 parts[{len(self.joined)}][{warps}];")
        for k, f in enumerate(self.joined.values()):
            part = f"own_{self.walk.totals[f]}"
            b.add(f"{part} = team_{f.attr}<32>({part});")
            b.add(f"if (threadIdx.x % 32 == 0) parts[{k}][threadIdx.x / 32] = {part};")
        b.add("__syncthreads();")
        b.add("if (threadIdx.x) return;")
        for k, f in enumerate(self.joined.values()):
            part = f"own_{self.walk.totals[f]}"
            join = f"{part} = {JOIN[f.attr]}({part}, parts[{k}][w]);"
            b.add(f"for (int w = 1; w < {warps}; ++w) {join}")
            b.add(f"{self.walk.totals[f]}[blockIdx.x] = (u32){part};")


# ---- element stores -----------------------------------------------------------------------------
# Stores of a walk: payload fields, states, the gradient, scratch arrays.

BITS = {"float32": "(u32)__float_as_int({})"}
BITS |= {name: f"(u32){name}_bits({{}})" for name in FORMATS}


class Stores:
    """Stores of `walk`."""

    def __init__(self, walk: WalkContext) -> None:
        self.walk, self.body, self.shape = walk, walk.body, walk.shape
        self.stores: list[Store] = walk.walk.stores
        self.packed = [s for s in self.stores if s.packed and s.value.level == "element"]
        self.done: set[Store] = set()

    def share(self) -> None:
        """Declare shared memory for codes of trits, of tiles that are not whole, and for rows."""
        if self.walk.exchanges:
            count = max(1, len(self.of_arrays()))
            size = self.shape.threads * self.shape.rows
            self.body.add(f"__shared__ Quad exchange[{count}][{size}];")
        if self.packed:
            size = self.shape.teams * self.shape.tile
            self.body.add(f"__shared__ u8 codes[{len(self.packed)}][{size}];")

    def open(self) -> None:
        """Declare `whole`: true if codes of all the warp's tiles can be collected in registers."""
        if any(in_words(s.array.storage, self.shape) for s in self.packed):
            whole = f"READY || __all_sync(FULL, m == 0 || m == {self.shape.tile})"
            self.body.add(f"const bool whole = {whole};")

    def of_tiles(self) -> None:
        """Store values of the tile that are known by now."""
        for s in self.stores:
            ready = all(v.op != "fold" or v in self.walk.local for v in order_inside([s.value]))
            if s.value.level == "element" or not ready or s in self.done:
                continue
            self.done.add(s)
            storage, value = s.array.storage, self.walk.named(s.value)
            cast = "i64" if storage.whole else "float"
            at = f"{self.walk.arrays.pointer(s.array)} + t * {storage.bits // 8}"
            self.body.add(f"if (m && u == 0) store_{storage.name}<READY>({at}, ({cast}){value});")

    # packed codes

    def open_codes(self, stores: list[Store]) -> None:
        """Declare registers for codes, before a loop."""
        for s in stores:
            if in_words(s.array.storage, self.shape):
                words = PackedRow(self.shape, s.array.storage.bits).words
                self.body.add(f"u32 w_{s.array.name}[{words}] = {{}};")

    def take_code(self, s: Store) -> None:
        """Keep the current element's code: in registers if the tile is whole, else in shared
        memory."""
        b, code = self.body, self.walk.named(s.value)
        byte = f"codes[{self.packed.index(s)}][team * {self.shape.tile} + i]"
        keep = f"if (i < m) {byte} = (u8){code};"
        if in_words(s.array.storage, self.shape):
            row = PackedRow(self.shape, s.array.storage.bits)
            word = f"w_{s.array.name}[{row.word}]"
            b.add(f"if (whole) {word} |= (u32){code} << ({row.shift('j')});")
            keep = f"else {keep}"
        b.add(keep)

    def codes(self, stores: list[Store]) -> None:
        """Write packed codes, after a loop."""
        b, tile = self.body, self.shape.tile
        for s in stores:
            storage = s.array.storage
            if not s.packed:
                continue
            to = f"{self.walk.arrays.pointer(s.array)} + t * {storage.tile_bytes(tile)}"
            if in_words(storage, self.shape):
                with b.block("if (whole)"):
                    self.store_words(s, to)
                b.add("else")
            with b.block(""):
                codes = f"codes[{self.packed.index(s)}] + team * {tile}"
                b.add("__syncwarp();")
                how = "pack_trits" if storage.trits else f"pack_short<{storage.bits}>"
                b.call(how, codes, to, "m", "u", self.shape.team)

    def store_words(self, s: Store, to: str) -> None:
        """Store a thread's words, once the threads that share one have joined their codes."""
        b, team, name = self.body, self.shape.team, f"w_{s.array.name}"
        row = PackedRow(self.shape, s.array.storage.bits)
        step = row.threads
        while step < team:
            b.add(f"{name}[0] |= __shfl_xor_sync(FULL, {name}[0], {step}, {team});")
            step *= 2
        b.add("#pragma unroll")
        owner = "m" if row.threads == team else f"m && u < {row.threads}"
        store = f"store_codes<READY>({to} + {row.begin('q')}, {name}[q]);"
        b.add(f"for (int q = 0; q < {row.words}; ++q) if ({owner}) {store}")

    # rows

    def of_rows(self, stores: list[Store]) -> list[Store]:
        """Stores of elements in order."""
        return [s for s in stores if s.place is None and not s.packed]

    def of_arrays(self) -> list[Store]:
        """Stores to arrays with an element for each of the walk's."""
        return [s for s in self.of_rows(self.stores) if s.array.role != "payload"]

    def exchange(self, s: Store) -> str:
        """Shared memory that a store exchanges rows in; "" if it does not."""
        if not self.walk.exchanges or s.array.role == "payload":
            return ""
        return f"exchange[{self.of_arrays().index(s)}]"

    def open_sums(self, stores: list[Store]) -> None:
        """Declare a sum of what each state takes up."""
        for s in self.of_rows(stores):
            if s.array.role == "state" and self.exchange(s):
                self.body.add(f"float sum_{self.label(s)} = 0.0f;")

    def open_row(self, stores: list[Store]) -> None:
        """Declare registers for the four elements of a row."""
        for s in self.of_rows(stores):
            self.body.add(f"{self.kind(s)} y_{self.label(s)}[4];")

    def kind(self, s: Store) -> str:
        if s.array.role == "payload":
            return "u32"
        return "i32" if s.value.kind == "i32" else "float"

    def label(self, s: Store) -> str:
        """A store's number, for names."""
        return str(self.stores.index(s))

    def take(self, stores: list[Store]) -> None:
        """Store the current element."""
        for s in stores:
            value = self.walk.named(s.value)
            if s.place is not None:
                self.place(s, value, self.walk.named(s.place))
            elif s.packed:
                self.take_code(s)
            else:
                if s.array.role == "payload":
                    value = BITS.get(s.array.storage.name, "(u32){}").format(value)
                self.body.add(f"y_{self.label(s)}[j] = {value};")

    def place(self, s: Store, value: str, at: str) -> None:
        """Store an element's value at a place of its own."""
        b, array = self.body, self.walk.arrays.pointer(s.array)
        if s.array.role == "scratch":
            b.add(f"if (i < m) {array}[(u32){at}] = {value};")
        elif s.array.role == "state":
            b.add(f"if (i < m) keep1({array}, {at}, {value});")
        else:
            to, back = f"{array}[{at}]", "back && " if s.back else ""
            value = f"{to} + {value}" if s.adds else value
            b.add(f"if ({back}i < m) {to} = (XT)({value});")

    def row(self, stores: list[Store]) -> None:
        """Write the four elements of a row, or hand them over."""
        b = self.body
        for s in self.of_rows(stores):
            four, back = f"m - l, y_{self.label(s)}", "if (back) " if s.back else ""
            bits, array = s.array.storage.bits, self.walk.arrays.pointer(s.array)
            if s.array.role == "payload":
                b.call(f"put4<READY, u{bits}>", f"{array} + {bits // 8} * (o + l)", four)
            elif shared := self.exchange(s):
                given = f"{array}, o, m, k, y_{self.label(s)}"
                kept = s.array.role == "state"
                given += f", sum_{self.label(s)}, {shared}" if kept else f", {shared}"
                b.add(f"{back}put_{'kept' if kept else 'row'}<{self.walk.rows}>({given});")
            else:
                how = "keep4" if s.array.role == "state" else "store4"
                b.add(f"{back}{how}<READY>({array}, o + l, {four});")

    def rows(self, stores: list[Store]) -> None:
        """Write the rows that were handed over, after a loop."""
        for s in self.of_rows(stores):
            if not (shared := self.exchange(s)):
                continue
            back, array = "if (back) " if s.back else "", self.walk.arrays.pointer(s.array)
            if s.array.role == "state":
                given = f"{array}, o, m, sum_{self.label(s)}, {shared}"
                self.body.add(f"keep_rows<{self.walk.rows}>({given});")
            else:
                self.body.add(f"{back}store_rows<{self.walk.rows}>({array}, o, {shared});")


# ---- selected elements --------------------------------------------------------------------------
# Selected elements of a walk, and elements that take the next element of a spread array.
# An element's place is the number of selected elements before it: before its tile, which an earlier
# kernel counted, and within the tile, by ballots of the team.


def counted(walk: Walk) -> dict[str, Value]:
    """Conditions whose elements must be counted before a walk, by their names."""
    selected = {
        f"{kind}_{compact.selection}": condition
        for compact in walk.compacts
        for kind, condition in (("always", compact.always), ("first", compact.first))
        if condition is not None
    }
    return selected | {f"spread{k}": v.args[0] for k, v in enumerate(walk.spreads)}


class SelectedElements:
    """Selected elements of `walk`."""

    def __init__(self, walk: WalkContext) -> None:
        self.walk, self.body, self.shape = walk, walk.body, walk.shape
        self.counted = counted(walk.walk)
        self.spreads = walk.walk.spreads

    def open(self) -> None:
        """Declarations before all loops."""
        for name in self.counted:
            self.body.add(f"i64 next_{name};")

    def begin(self) -> None:
        """Set the number of selected elements before the tile."""
        grid = self.walk.region.grid
        for name in self.counted:
            before = self.body.memory(f"before_{name}", "uint32", grid)
            blocks = f"(i64)blocks_{name}[blockIdx.x]"
            self.body.add(f"next_{name} = m ? {blocks} + {before}[t] : 0;")

    def row(self, loop: Loop) -> None:
        """Find the places of a row's selected elements."""
        for compact in loop.compacts:
            self.compact_row(compact)
        needed = set(self.walk.order(loop))
        for k, v in enumerate(self.spreads):
            if v in needed:
                self.hits(f"spread{k}", v.args[0])
                self.ranks(f"spread{k}")

    def hits(self, name: str, condition: Value) -> None:
        """Declare, for four elements, if a condition holds for each."""
        self.body.add(f"bool is_{name}[4];")
        with self.walk.each_of_row(self.walk.order(Loop(0, 0, folds=[count_of(condition)]))):
            self.body.add(f"is_{name}[j] = i < m && {self.walk.named(condition)};")

    def ranks(self, name: str) -> None:
        """Declare the places of four elements' hits."""
        self.body.add(f"i64 rank_{name}[4];")
        self.body.add(f"ranks<{self.shape.team}>(is_{name}, next_{name}, rank_{name});")

    def compact_row(self, compact: Compact) -> None:
        """Append a row's selected elements. Most rows of a sparse selection have none."""
        b, s = self.body, compact.selection
        names = []
        for name, condition in ((f"always_{s}", compact.always), (f"first_{s}", compact.first)):
            if condition is not None:
                self.hits(name, condition)
                names.append(name)
        b.add(f"bool is_{s}[4] = {{}};")
        some = " || ".join(f"is_{name}[{j}]" for name in names for j in range(4))
        with b.block(f"if (__any_sync(FULL, {some}))"):
            for name in names:
                self.ranks(name)
            with self.walk.each_of_row(self.walk.order(Loop(0, 0, compacts=[compact]))):
                self.append(compact)

    def append(self, compact: Compact) -> None:
        """Append the current element if it is selected."""
        b, s = self.body, compact.selection
        taken, place = [], []
        if compact.always is not None:
            taken, place = [f"is_always_{s}[j]"], [f"rank_always_{s}[j]"]
        if compact.first is not None and compact.limit is not None:
            limit = b.value(compact.limit)
            taken.append(f"(is_first_{s}[j] && rank_first_{s}[j] < {limit})")
            place.append(f"op_min(rank_first_{s}[j], {limit})")
        b.add(f"is_{s}[j] = {' || '.join(taken)};")
        b.add(f"const i64 rank = {' + '.join(place)};")
        for array, value in compact.parts:
            to = f"{self.walk.arrays.pointer(array)}[rank]"
            b.add(f"if (is_{s}[j]) {to} = {self.walk.named(value)};")

    def element(self, v: Value) -> str:
        """True for a selected element; for a spread, the value that it takes."""
        if v.op == "selected":
            return f"is_{v.attr}[j]"
        k = self.spreads.index(v)
        return f"is_spread{k}[j] ? {self.taken(v, f'rank_spread{k}[j]')} : 0.0f"

    def taken(self, v: Value, place: str) -> str:
        """An element of the spread array."""
        array = self.walk.arrays.pointer(v.attr)
        if v.attr.received:
            return f"load_float32({array} + 4 * {place})"
        return f"{array}[{place}]"
