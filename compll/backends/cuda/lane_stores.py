"""Stores of a walk: payload fields, states, the gradient, scratch arrays."""

from __future__ import annotations

from typing import Any

from compll.backends.cuda.lane_arrays import PackedRow, in_words
from compll.ir.tile import Store, order_inside
from compll.numerics.bits import FORMATS

BITS = {"float32": "(u32)__float_as_int({})"}
BITS |= {name: f"(u32){name}_bits({{}})" for name in FORMATS}


class Stores:
    """Stores of `walk` (a WalkKernel)."""

    def __init__(self, walk: Any) -> None:
        self.walk, self.body, self.shape = walk, walk.body, walk.shape
        self.stores: list[Store] = walk.walk.stores
        self.packed = [s for s in self.stores if s.packed and s.value.level == "lane"]
        self.done: set[int] = set()

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
            ready = all(v.op != "fold" or id(v) in self.walk.local for v in order_inside([s.value]))
            if s.value.level == "lane" or not ready or id(s) in self.done:
                continue
            self.done.add(id(s))
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
        """Keep the current lane's code: in registers if the tile is whole, else in shared
        memory."""
        b, code = self.body, self.walk.named(s.value)
        own = f"codes[{self.packed.index(s)}][team * {self.shape.tile} + i]"
        keep = f"if (i < m) {own} = (u8){code};"
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
                own = f"codes[{self.packed.index(s)}] + team * {tile}"
                b.add("__syncwarp();")
                how = "pack_trits" if storage.trits else f"pack_short<{storage.bits}>"
                b.call(how, own, to, "m", "u", self.shape.team)

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
        """Stores of lanes in order."""
        return [s for s in stores if s.place is None and not s.packed]

    def of_arrays(self) -> list[Store]:
        """Stores to arrays with an element for each lane."""
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
        """Declare registers for the four lanes of a row."""
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
        """Store the current lane."""
        for s in stores:
            value = self.walk.named(s.value)
            if s.place is not None:
                self.place(s, value)
            elif s.packed:
                self.take_code(s)
            else:
                if s.array.role == "payload":
                    value = BITS.get(s.array.storage.name, "(u32){}").format(value)
                self.body.add(f"y_{self.label(s)}[j] = {value};")

    def place(self, s: Store, value: str) -> None:
        """Store a lane's value at a place of its own."""
        b, at, array = self.body, self.walk.named(s.place), self.walk.arrays.pointer(s.array)
        if s.array.role == "scratch":
            b.add(f"if (i < m) {array}[(u32){at}] = {value};")
        elif s.array.role == "state":
            b.add(f"if (i < m) keep1({array}, {at}, {value});")
        else:
            to, back = f"{array}[{at}]", "back && " if s.back else ""
            value = f"{to} + {value}" if s.adds else value
            b.add(f"if ({back}i < m) {to} = (XT)({value});")

    def row(self, stores: list[Store]) -> None:
        """Write the four lanes of a row, or hand them over."""
        b = self.body
        for s in self.of_rows(stores):
            four, back = f"m - l, y_{self.label(s)}", "if (back) " if s.back else ""
            bits, array = s.array.storage.bits, self.walk.arrays.pointer(s.array)
            if s.array.role == "payload":
                b.call(f"put4<READY, u{bits}>", f"{array} + {bits // 8} * (o + l)", four)
            elif shared := self.exchange(s):
                own = f"{array}, o, m, k, y_{self.label(s)}"
                kept = s.array.role == "state"
                own += f", sum_{self.label(s)}, {shared}" if kept else f", {shared}"
                b.add(f"{back}put_{'kept' if kept else 'row'}<{self.walk.rows}>({own});")
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
                own = f"{array}, o, m, sum_{self.label(s)}, {shared}"
                self.body.add(f"keep_rows<{self.walk.rows}>({own});")
            else:
                self.body.add(f"{back}store_rows<{self.walk.rows}>({array}, o, {shared});")
