"""Stores of a walk: payload fields, states, the gradient, scratch arrays."""

from __future__ import annotations

from typing import Any

from compll.backends.cuda.lane_arrays import PackedRow, in_words
from compll.ir.module import WHOLE, Field
from compll.ir.tile import SCRATCH, Store, order_inside
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
            count = max(1, len([s for s in self.of_rows(self.stores) if s.target != "payload"]))
            size = self.shape.threads * self.shape.rows
            self.body.add(f"__shared__ Quad exchange[{count}][{size}];")
        if self.packed:
            size = self.shape.teams * self.shape.tile
            self.body.add(f"__shared__ u8 codes[{len(self.packed)}][{size}];")

    def open(self) -> None:
        """Declare `whole`: true if codes of all the warp's tiles can be collected in registers."""
        if any(s.field is not None and in_words(s.field, self.shape) for s in self.packed):
            whole = f"READY || __all_sync(FULL, m == 0 || m == {self.shape.tile})"
            self.body.add(f"const bool whole = {whole};")

    def of_tiles(self) -> None:
        """Store values of the tile that are known by now."""
        for s in self.stores:
            ready = all(v.op != "fold" or id(v) in self.walk.local for v in order_inside([s.value]))
            if s.value.level == "lane" or not ready or id(s) in self.done:
                continue
            self.done.add(id(s))
            f, value = s.field, self.walk.named(s.value)
            assert f is not None
            cast = "i64" if f.storage in WHOLE else "float"
            at = f"{self.walk.arrays.written(s)} + t * {f.item_bits // 8}"
            self.body.add(f"if (m && u == 0) store_{f.storage}<READY>({at}, ({cast}){value});")

    # packed codes

    def open_codes(self, stores: list[Store]) -> None:
        """Declare registers for codes, before a loop."""
        for s in stores:
            if s.packed and s.field is not None and in_words(s.field, self.shape):
                words = PackedRow(self.shape, s.field.bits).words
                self.body.add(f"u32 w_{s.name}[{words}] = {{}};")

    def take_code(self, s: Store) -> None:
        """Keep the current lane's code: in registers if the tile is whole, else in shared
        memory."""
        b, f, code = self.body, s.field, self.walk.named(s.value)
        assert f is not None
        own = f"codes[{self.packed.index(s)}][team * {self.shape.tile} + i]"
        keep = f"if (i < m) {own} = (u8){code};"
        if in_words(f, self.shape):
            row = PackedRow(self.shape, f.bits)
            word = f"w_{s.name}[{row.word}]"
            b.add(f"if (whole) {word} |= (u32){code} << ({row.shift('j')});")
            keep = f"else {keep}"
        b.add(keep)

    def codes(self, stores: list[Store]) -> None:
        """Write packed codes, after a loop."""
        b, tile = self.body, self.shape.tile
        for s in stores:
            f = s.field
            if not s.packed or f is None:
                continue
            to = f"{self.walk.arrays.written(s)} + t * {f.packed_bytes(tile)}"
            if in_words(f, self.shape):
                with b.block("if (whole)"):
                    self.store_words(s, f, to)
                b.add("else")
            with b.block(""):
                own = f"codes[{self.packed.index(s)}] + team * {tile}"
                b.add("__syncwarp();")
                how = "pack_trits" if f.trits else f"pack_short<{f.bits}>"
                b.call(how, own, to, "m", "u", self.shape.team)

    def store_words(self, s: Store, f: Field, to: str) -> None:
        """Store a thread's words, once the threads that share one have joined their codes."""
        b, team, name = self.body, self.shape.team, f"w_{s.name}"
        row = PackedRow(self.shape, f.bits)
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

    def exchange(self, s: Store) -> str:
        """Shared memory that a store exchanges rows in; "" if it does not."""
        if not self.walk.exchanges or s.target == "payload":
            return ""
        number = [one for one in self.of_rows(self.stores) if one.target != "payload"].index(s)
        return f"exchange[{number}]"

    def open_sums(self, stores: list[Store]) -> None:
        """Declare a sum of what each state takes up."""
        for s in self.of_rows(stores):
            if s.target == "state" and self.exchange(s):
                self.body.add(f"float sum_{self.label(s)} = 0.0f;")

    def open_row(self, stores: list[Store]) -> None:
        """Declare registers for the four lanes of a row."""
        for s in self.of_rows(stores):
            self.body.add(f"{self.kind(s)} y_{self.label(s)}[4];")

    def kind(self, s: Store) -> str:
        if s.target == "payload":
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
                if s.target == "payload" and s.field is not None:
                    value = BITS.get(s.field.storage, "(u32){}").format(value)
                self.body.add(f"y_{self.label(s)}[j] = {value};")

    def place(self, s: Store, value: str) -> None:
        """Store a lane's value at a place of its own."""
        b, at = self.body, self.walk.named(s.place)
        if s.target == SCRATCH:
            assert s.field is not None
            b.add(f"if (i < m) {self.walk.arrays.own(s.field)}[(u32){at}] = {value};")
        elif s.target == "state":
            assert s.field is not None
            b.add(f"if (i < m) keep1({b.state(s.field)}, {at}, {value});")
        else:
            to, back = f"{b.given('xs')}[{at}]", "back && " if s.back else ""
            value = f"{to} + {value}" if s.target == "scatter_add" else value
            b.add(f"if ({back}i < m) {to} = (XT)({value});")

    def row(self, stores: list[Store]) -> None:
        """Write the four lanes of a row, or hand them over."""
        b = self.body
        for s in self.of_rows(stores):
            four, back = f"m - l, y_{self.label(s)}", "if (back) " if s.back else ""
            if s.target == "payload":
                assert s.field is not None
                at = f"{self.walk.arrays.written(s)} + {s.field.item_bits // 8} * (o + l)"
                b.call(f"put4<READY, u{s.field.item_bits}>", at, four)
            elif shared := self.exchange(s):
                own = f"{self.walk.arrays.array(s)}, o, m, k, y_{self.label(s)}"
                kept = s.target == "state"
                own += f", sum_{self.label(s)}, {shared}" if kept else f", {shared}"
                b.add(f"{back}put_{'kept' if kept else 'row'}<{self.walk.rows}>({own});")
            else:
                how = "keep4" if s.target == "state" else "store4"
                b.add(f"{back}{how}<READY>({self.walk.arrays.array(s)}, o + l, {four});")

    def rows(self, stores: list[Store]) -> None:
        """Write the rows that were handed over, after a loop."""
        for s in self.of_rows(stores):
            if not (shared := self.exchange(s)):
                continue
            back, array = "if (back) " if s.back else "", self.walk.arrays.array(s)
            if s.target == "state":
                own = f"{array}, o, m, sum_{self.label(s)}, {shared}"
                self.body.add(f"keep_rows<{self.walk.rows}>({own});")
            else:
                self.body.add(f"{back}store_rows<{self.walk.rows}>({array}, o, {shared});")
