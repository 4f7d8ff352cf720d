"""Stores of a walk: payload fields, states, the gradient, scratch arrays."""

from __future__ import annotations

from typing import Any

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
        if any(s.field is not None and self.in_words(s.field) for s in self.packed):
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

    def words(self, f: Field) -> tuple[int, int]:
        """Words of a thread's codes in a whole tile, and planes within a row of them."""
        rows = self.shape.rows
        return max(1, rows * f.bits // 8), max(1, 8 // (rows * f.bits))

    def in_words(self, f: Field) -> bool:
        """True if registers collect the codes of whole tiles."""
        return not f.trits and self.shape.tile * f.bits >= 32

    def open_codes(self, stores: list[Store]) -> None:
        """Declare registers for codes, before a loop."""
        for s in stores:
            if s.packed and s.field is not None and self.in_words(s.field):
                self.body.add(f"u32 w_{s.name}[{self.words(s.field)[0]}] = {{}};")

    def take_code(self, s: Store) -> None:
        f, code = s.field, self.walk.named(s.value)
        assert f is not None
        own = f"codes[{self.packed.index(s)}][team * {self.shape.tile} + i]"
        keep = f"if (i < m) {own} = (u8){code};"
        if not self.in_words(f):
            self.body.add(keep)
            return
        words, split = self.words(f)
        plane = f"k / {words}"
        if split > 1:
            plane = f"(k * {split} + u / {self.shape.team // split})"
        word = f"w_{s.name}[{f'k % {words}' if split == 1 else 0}]"
        self.body.add(f"if (whole) {word} |= (u32){code} << (8 * j + {f.bits} * ({plane}));")
        self.body.add(f"else {keep}")

    def codes(self, stores: list[Store]) -> None:
        """Write packed codes, after a loop."""
        b, tile = self.body, self.shape.tile
        for s in stores:
            f = s.field
            if not s.packed or f is None:
                continue
            to = f"{self.walk.arrays.written(s)} + t * {f.packed_bytes(tile)}"
            if self.in_words(f):
                with b.block("if (whole)"):
                    self.store_words(s, f, to)
                b.add("else")
            with b.block(""):
                own = f"codes[{self.packed.index(s)}] + team * {tile}"
                b.add("__syncwarp();")
                how = "pack_trits" if f.trits else f"pack_short<{f.bits}>"
                b.add(f"{how}({own}, {to}, m, u, {self.shape.team});")

    def store_words(self, s: Store, f: Field, to: str) -> None:
        b, team = self.body, self.shape.team
        words, split = self.words(f)
        if split == 1:
            b.add("#pragma unroll")
            store = f"store_codes<READY>({to} + q * {self.shape.row} + 4 * u, w_{s.name}[q]);"
            b.add(f"for (int q = 0; q < {words}; ++q) if (m) {store}")
            return
        step = team // split
        while step < team:
            b.add(f"w_{s.name}[0] |= __shfl_xor_sync(FULL, w_{s.name}[0], {step}, {team});")
            step *= 2
        b.add(f"if (m && u < {team // split}) store_codes<READY>({to} + 4 * u, w_{s.name}[0]);")

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
            xs = b.given("xs")
            value = f"load1({xs}, {at}) + {value}" if s.target == "scatter_add" else value
            back = "back && " if s.back else ""
            b.add(f"if ({back}i < m) store1({xs}, {at}, {value});")

    def row(self, stores: list[Store]) -> None:
        """Write the four lanes of a row, or hand them over."""
        b = self.body
        for s in self.of_rows(stores):
            four, back = f"m - l, y_{self.label(s)}", "if (back) " if s.back else ""
            if s.target == "payload":
                assert s.field is not None
                size = s.field.item_bits // 8
                at = f"{self.walk.arrays.written(s)} + {size} * (o + l), m - l, {size}"
                b.add(f"put4<READY>({at}, y_{self.label(s)});")
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
