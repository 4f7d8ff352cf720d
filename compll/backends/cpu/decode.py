"""The text of decode kernels: payload to gradient, set or added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from compll.backends.cpu.nontemporal_tiles import Poured, Pouring
from compll.backends.cpu.prefetch import PART
from compll.backends.cpu.values import PLANES, size_text
from compll.ir.expr import Expr, walk
from compll.ir.layout import header
from compll.ir.module import POSITIONS, WHOLE, Field, Module

#: selected elements that are placed together: what they stand among stays in the cache
PLACED = 256
RESULT = Poured("ys")


class Decoder(Pouring):
    """Emits `decode`, which writes or adds; `check`, which looks at sizes and indices first."""

    #: names for a plane's part of these arrays: an index that numba holds to be possibly negative
    #: would cost the vector loop
    parts: Mapping[str, str] = MappingProxyType({"part": "o_"})

    def __init__(self, module: Module, add: bool) -> None:
        super().__init__(module, None)
        self.adding = add
        #: by how much a byte is shifted for the codes in hand, where they come from the payload
        self.shift: str | None = None
        self.fields = {f.name: f for f in module.fields}
        self.packed = [f for f in module.fields if f.packed and f.shape == "n"]
        self.spreads: list[Expr] = []

    def kernel(self) -> str:
        """The text of `decode_set` or `decode_add`."""
        with self.block(
            f"def decode_{'add' if self.adding else 'set'}(data, table, at, used, lim, st, y):"
        ):
            self.code_buffers()
            if self.pours:
                self.make_room(RESULT)
            with self.block("for p in range(table.shape[0]):"):
                self.piece()
        return str(self)

    def code_buffers(self) -> None:
        for f in self.packed:
            self.add(f"q_{f.name} = np.empty({self.tile}, np.uint8)")

    def piece(self) -> None:
        self.opening()
        self.add("ys = y[table[p, 0] : table[p, 0] + n]")
        if self.module.status:
            with self.block("if data[base + used[p] - 1] != 0:"):
                with self.block("for i in range(n):"):
                    self.add("ys[i] = NAN")
                self.add("continue")
        self.scalars()
        if self.module.decode.op == "scatter":
            self.scatter()
        else:
            self.tiles()

    def opening(self) -> None:
        self.add("n = table[p, 1]")
        with self.block("if n == 0:"):
            self.add("continue")
        self.statics_here()
        self.add("base = at[p]")
        self.add(f"tiles = (n + {self.tile - 1}) // {self.tile}")
        self.layout()

    def layout(self) -> None:
        """Counts of the selections and where each field begins."""
        dynamic = 0
        for number, s in enumerate(self.module.selections):
            known = f"load_uint32(data, base + {4 * dynamic})" if s.dynamic else f"lim[p, {number}]"
            self.add(f"k_{s.name} = {known}")
            dynamic += s.dynamic
        gaps = header(self.module)[1]
        for number, name in enumerate(gaps, dynamic):
            self.add(f"length_{name} = load_uint32(data, base + {4 * number})")
        self.add(f"end = base + {4 * (dynamic + len(gaps))}")
        for f in self.module.fields:
            self.add(f"at_{f.name} = end")
            self.add(f"end += {self.size(f)}")
        self.add(f"end += {int(self.module.status)}")

    def size(self, f: Field) -> str:
        if f.storage in (*POSITIONS, "runs"):
            return f"length_{f.name}"
        if f.shape != "kept":
            return size_text(f, self.tile)
        if f.packed:
            return (
                f"(k_{f.of} // {self.tile}) * {self.tile * f.bits // 8} + "
                f"((k_{f.of} % {self.tile}) * {f.bits} + 7) // 8"
            )
        return f"k_{f.of} * {f.item_bits // 8}"

    def scalars(self) -> None:
        for e in walk(self.module.decode):
            if e.type.shape == "table":
                self.names[id(e)] = self.name("s")
                self.add(f"{self.names[id(e)]} = load_table(data, at_{e.value}, {e.type.of})")
            elif e.type.shape == "scalar" and e.op == "field":
                self.names[id(e)] = self.name("s")
                self.add(f"{self.names[id(e)]} = {self.scalar_load(self.fields[str(e.value)])}")
            elif e.type.shape == "scalar":
                self.compute_scalar(e)

    def scalar_load(self, f: Field) -> str:
        if f.storage in WHOLE:
            return f"load_{f.storage}(data, at_{f.name})"
        return f"f64(load_{f.storage}(data, at_{f.name}))"

    def unpack_kept(self) -> None:
        """The codes of selected elements."""
        for f in self.module.fields:
            if f.packed and f.shape == "kept":
                codes = f"q_{f.name}, k_{f.of}, {f.bits}, {self.tile}"
                self.add(f"q_{f.name} = np.empty(k_{f.of}, np.uint8)")
                self.add(f"unpack_all(data, at_{f.name}, {codes})")

    def scatter(self) -> None:
        index, value = self.module.decode.args
        of = index.type.of
        self.unpack_kept()
        self.prepare(value)
        self.open_places(index)
        if not self.adding:
            self.add(f"zeroed = zero_past(ys, k_{of})")
        with self.block(f"for start in range(0, k_{of}, {PLACED}):"):
            self.add(f"count = min({PLACED}, k_{of} - start)")
            self.places(index)
            if not self.adding:
                self.add("most = np.int64(0)")
                with self.block("for j in range(count):"):
                    self.add("most = max(most, place[j])")
                self.add("zeroed = zero_to(ys, zeroed, most + 1)")
            with self.block("for i in range(count):"):  # from 0: LLVM unrolls no other
                how = "+=" if self.adding else "="
                self.add("j = start + i")
                self.add(f"ys[place[i]] {how} {self.text(value, 'j')}")
        if not self.adding:
            self.add("zero_to(ys, zeroed, n)")
        self.forget_all()

    def open_places(self, index: Expr) -> None:
        """What stands before a loop over some positions at a time."""
        name, of = index.value, index.type.of
        storage = self.fields[str(name)].storage
        if storage == "gaps":
            self.add(f"last, at_next = np.int64(-1), at_{name}")
        elif storage in POSITIONS:
            self.add(f"places = np.empty(k_{of}, np.int64)")
            self.add(f"load_{storage}(data, at_{name}, length_{name}, k_{of}, n, places)")
        if storage not in POSITIONS or storage == "gaps":
            self.add(f"place = np.empty({PLACED}, np.int64)")

    def places(self, index: Expr) -> None:
        """The positions of elements start : start + count, in `place`."""
        storage = self.fields[str(index.value)].storage
        if storage == "gaps":
            self.add("at_next = load_gaps(data, at_next, last, count, place)")
            self.add("last = place[count - 1]")
        elif storage in POSITIONS:
            self.add("place = places[start : start + count]")
        else:
            with self.block("for j in range(count):"):
                self.add(f"place[j] = load_uint32(data, at_{index.value} + 4 * (start + j))")

    def tiles(self) -> None:
        decode = self.module.decode
        if self.module.group == 0:
            self.prepare(decode)
        self.before_tiles()
        results = [RESULT] if self.pours else []
        with self.pouring(*results), self.over_tiles(decode):
            self.open_tile(results, "ys")
            self.each_tile(decode)
            self.close_ahead()
        self.forget_all()

    def each_tile(self, decode: Expr) -> None:
        with self.block(f"if m == {self.tile}:"):
            with self.full_tile_written():
                self.full_tile(decode)
        with self.block("else:"):
            self.unpack_short()
            self.output(decode, "m", "i")

    @property
    def pours(self) -> bool:
        """Whether tiles may be written past the cache."""
        return self.pourable and not self.adding and self.module.decode.op != "scatter"

    @contextmanager
    def full_tile_written(self) -> Iterator[None]:
        """o_: where a full tile's values go, straight away or past the cache."""
        if not self.pours:
            self.add(f"o_ = ys[o : o + {self.tile}]")
            yield
            return
        self.add(f"o_ = into[o - gone : o - gone + {self.tile}]")
        yield
        self.pour(RESULT)

    @contextmanager
    def over_tiles(self, *roots: Expr) -> Iterator[None]:
        """A loop over tiles, in which everything constant that `roots` need has a name."""
        for f in self.packed:
            if f.storage == "runs":
                self.add(f"u_{f.name} = np.empty({size_text(f, self.tile)}, np.uint8)")
                self.add(f"lengthen_runs(data, at_{f.name}, length_{f.name}, u_{f.name})")
        with self.block("for t in range(tiles):"):
            self.add(f"o = t * {self.tile}")
            self.add(f"m = min({self.tile}, n - o)")
            for f in self.packed:
                self.add(f"w_{f.name} = {self.first(f)} + t * {f.packed_bytes(self.tile)}")
            self.prepare(*roots)
            yield

    def before_tiles(self) -> None:
        """What a subclass needs for all tiles."""

    def unpack_short(self) -> None:
        """The codes of the last tile, where it is shorter."""
        for f in self.packed:
            if f.trits:
                self.unpack(f)
                continue
            self.add(f"unpack_tail(data, w_{f.name}, q_{f.name}, m, {f.bits})")

    @staticmethod
    def first(f: Field) -> str:
        """Where a packed field's tiles begin: in the payload or, if it was lengthened, in u_."""
        return "0" if f.storage == "runs" else f"at_{f.name}"

    def full_tile(self, decode: Expr) -> None:
        """Where all codes have one width, plane after plane straight from the payload."""
        packed = self.packed
        widths = {f.bits for f in packed}
        if len(widths) > 1 or any(f.trits for f in packed):
            for f in packed:
                self.unpack(f)
            self.ahead()
            self.output(decode, str(self.tile), "i", "o_")
            return
        for f in packed:
            self.add(f"d_{f.name} = data[w_{f.name} : w_{f.name} + {self.tile * f.bits // 8}]")
        bits = widths.pop() if widths else 8
        turns = self.tile // PLANES[bits]
        if bits == 8:
            self.shift = "u8(0)" if packed else None
            self.ahead(min(turns, PART))
            self.output(decode, str(turns), "i", "o_")
        else:
            self.shift = "shift"
            with self.block(f"for plane in range({PLANES[bits]}):"):
                self.add(f"shift = u8({bits} * plane)")
                self.add(f"start = {turns} * plane")
                for part, array in self.parts.items():
                    self.add(f"{part} = {array}[start : start + {turns}]")
                self.ahead(min(turns, PART))
                # A short loop of known length is unrolled before it can be vectorized.
                count = f"len(d_{packed[0].name})" if turns < 64 else str(turns)
                self.output(decode, count, "start + i", "part")
        self.shift = None

    def output(self, decode: Expr, turns: str, index: str, tile: str = "") -> None:
        target = f"{tile}[i]" if tile else f"ys[o + {index}]"
        with self.block(f"for i in range({turns}):"):
            how = "+=" if self.adding else "="
            self.add(f"{target} {how} {self.text(decode, index)}")

    def forget_all(self) -> None:
        self.names.clear()
        self.local.clear()

    def unpack(self, f: Field) -> None:
        """The codes of a full tile (of trits, of any tile), in their buffer."""
        if f.trits:
            source = f"u_{f.name}" if f.storage == "runs" else "data"
            self.add(f"unpack_trits({source}, w_{f.name}, q_{f.name}, m)")
            return
        width = self.tile * f.bits // 8
        self.add(f"packed = data[w_{f.name} : w_{f.name} + {width}]")
        with self.block(f"for plane in range({PLANES[f.bits]}):"):
            self.add(f"shift = u8({f.bits} * plane)")
            self.add(f"codes = q_{f.name}[{width} * plane : {width} * plane + {width}]")
            with self.block(f"for i in range({width}):"):
                self.add(f"codes[i] = {self.code_at(f, 'packed[i]', 'shift')}")

    @staticmethod
    def code_at(f: Field, byte: str, shift: str) -> str:
        return byte if f.bits == 8 else f"plane{f.bits}({byte}, {shift})"

    def field_value(self, expr: Expr) -> str:
        f = self.fields[str(expr.value)]
        return f"load_{f.storage}(data, at_{f.name} + t * {f.item_bits // 8})"

    def leaf(self, expr: Expr, i: str) -> str:
        f = self.fields[str(expr.value)]
        if f.packed and self.shift is not None:
            return f"i_of_u({self.code_at(f, f'd_{f.name}[i]', self.shift)})"
        if f.packed:
            return f"i_of_u(q_{f.name}[{i}])"
        index = f"o + {i}" if f.shape == "n" else i
        if f.storage in WHOLE:
            return f"i32(load_{f.storage}(data, at_{f.name} + {f.item_bits // 8} * ({index})))"
        return f"load_{f.storage}(data, at_{f.name} + {f.item_bits // 8} * ({index}))"

    def check(self) -> str:
        """The text of `check`: 0, or 1 + piece of a payload of wrong length, or -1 - piece of one
        with an index outside its tensor."""
        statics = ", st" if self.spreads else ""
        with self.block(f"def check(data, table, at, used, lim{statics}):"):
            with self.block("for p in range(table.shape[0]):"):
                self.add("n = table[p, 1]")
                with self.block("if n == 0:"):
                    with self.block("if used[p] != 0:"):
                        self.add("return 1 + p")
                    self.add("continue")
                self.check_piece()
            self.add("return 0")
        return str(self)

    def check_piece(self) -> None:
        dynamic = [(i, s) for i, s in enumerate(self.module.selections) if s.dynamic]
        self.statics_here()
        self.add("base = at[p]")
        self.add(f"tiles = (n + {self.tile - 1}) // {self.tile}")
        with self.block(f"if used[p] < {4 * sum(map(len, header(self.module)))}:"):
            self.add("return 1 + p")
        for place, (number, _) in enumerate(dynamic):
            with self.block(f"if load_uint32(data, base + {4 * place}) > lim[p, {number}]:"):
                self.add("return 1 + p")
        self.layout()
        with self.block("if end - base != used[p]:"):
            self.add("return 1 + p")
        for f in self.module.fields:
            if f.storage == "runs":
                found = f"runs_length(data, at_{f.name}, length_{f.name})"
                with self.block(f"if {found} != {size_text(f, self.tile)}:"):
                    self.add("return 1 + p")
        if self.module.decode.op == "scatter":
            index = self.module.decode.args[0]
            at, count = f"at_{index.value}", f"k_{index.type.of}"
            storage = self.fields[str(index.value)].storage
            if storage in POSITIONS:
                good = f"check_{storage}(data, {at}, length_{index.value}, {count}, n)"
                with self.block(f"if not {good}:"):
                    self.add("return -1 - p")
                return
            with self.block(f"for j in range({count}):"):
                with self.block(f"if load_uint32(data, {at} + 4 * j) >= n:"):
                    self.add("return -1 - p")
