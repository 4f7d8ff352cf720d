"""Huffman codes of a field: huffman.cuh has the functions.

A thread has a tile. Its stream's place depends on those before it: blocks leave the sum of their
streams' bytes, and a block per piece adds these up.
"""

from __future__ import annotations

from typing import Any

from compll.backends.cuda.body import Body
from compll.ir.module import Field
from compll.ir.storage import HUFFMAN_LONGEST, HUFFMAN_TILE
from compll.ir.tile import ELEMENTS, Array, Call

TILES = 64  # of a block
COUNTED = 1 << 14  # numbers that a block counts
NUMBERS = 256


class Huffman:
    """The kernels of one field. p: the Printer."""

    def __init__(self, p: Any, field: Field, array: Array) -> None:
        self.p, self.field, self.array = p, field, array
        self.grid = p.plan.grid(ELEMENTS, HUFFMAN_TILE * TILES)
        of_blocks, name = p.plan.of_blocks, field.name
        self.sums = of_blocks(f"sums_{name}", "int64", self.grid)
        self.places = of_blocks(f"places_{name}", "int64", self.grid, TILES)

    def codes(self, b: Body) -> str:
        """Memory for the codes of all numbers."""
        return b.memory(f"codes_{self.field.name}", "uint32", -1, NUMBERS)

    def table(self, b: Body) -> str:
        """Memory for the table of all windows."""
        return b.memory(f"table_{self.field.name}", "uint32", -1, 1 << HUFFMAN_LONGEST)

    def tile(self, b: Body) -> None:
        """Declare a thread's tile, its first number, and how many it has."""
        b.add(f"const i64 tile = own * {TILES} + threadIdx.x, begin = tile * {HUFFMAN_TILE};")
        b.add(f"const i64 m = op_min({b.given('n')} - begin, (i64){HUFFMAN_TILE});")

    def head(self, b: Body) -> str:
        """Bytes before the streams."""
        n = b.given("n")
        return f"{(1 << self.field.bits) // 2} + 2 * (({n} + {HUFFMAN_TILE - 1}) / {HUFFMAN_TILE})"

    def size_at(self, data: str) -> str:
        """Pointer to the size of a thread's stream."""
        return f"{data} + {(1 << self.field.bits) // 2} + 2 * tile"

    def leave(self, b: Body, size: str) -> None:
        """Leave the places of a block's streams, by their sizes."""
        b.add("i64 all;")
        place = f"{self.places}[blockIdx.x * {TILES} + threadIdx.x]"
        b.add(f"{place} = block_scan<{TILES}>({size}, &all);")
        b.first(f"{self.sums}[blockIdx.x] = all;")

    def stream_at(self, b: Body, data: str) -> str:
        """Pointer to a thread's stream."""
        before = f"{self.sums}[blockIdx.x] + {self.places}[blockIdx.x * {TILES} + threadIdx.x]"
        return f"{data} + {self.head(b)} + {before}"


def store(p: Any, call: Call) -> None:
    """Store numbers: count them, make codes, find the sizes of streams, store these."""
    f = call.attr
    own = Huffman(p, f, call.views[0].value.attr)

    def counts(b: Body) -> str:
        return b.memory(f"counts_{f.name}", "uint64", -1, NUMBERS)

    with p.kernel("counts", p.plan.grid(ELEMENTS, COUNTED), 256) as b:
        end = f"op_min({b.given('n')}, (own + 1) * {COUNTED})"
        b.call("count_numbers", b.elements(own.array), f"own * {COUNTED}", end, counts(b))
    b = p.open_phase()
    b.call("make_codes", counts(b), f.bits, b.field(f), own.codes(b))
    with p.kernel("sizes", own.grid, TILES) as b:
        own.tile(b)
        b.add(f"const i64 size = stream_bytes({b.elements(own.array)} + begin, m, {own.codes(b)});")
        b.add(f"if (m > 0) store_uint16({own.size_at(b.field(f))}, size);")
        own.leave(b, "size")
    b = p.open_phase()
    b.leave_length(f, f"{own.head(b)} + scan_array({b.of_blocks(own.sums, own.grid)})")
    with p.kernel("streams", own.grid, TILES) as b:
        own.tile(b)
        to = own.stream_at(b, b.field(f))
        b.call("store_stream", f"{b.elements(own.array)} + begin", "m", own.codes(b), to)


def load(p: Any, call: Call) -> None:
    """Load numbers. The payload is bad if the head's sizes or lengths are, or a stream's end."""
    f = call.attr
    own = Huffman(p, f, call.made[0])
    with p.kernel("sizes", own.grid, TILES) as b:
        own.tile(b)
        fits = f"m > 0 && {b.length(f)} >= {own.head(b)}"
        own.leave(b, f"{fits} ? load_uint16({own.size_at(b.field(f))}) : 0")
    b = p.open_phase()
    streams = b.declare("i64", f"scan_array({b.of_blocks(own.sums, own.grid)})")
    whole = f"{b.length(f)} == {own.head(b)} + {streams}"
    filled = f"fill_table({b.field(f)}, {f.bits}, {own.table(b)})"
    good = b.declare("bool", f"{whole} && {filled}")
    b.refuse(f"threadIdx.x == 0 && !{good}")
    with p.kernel("numbers", own.grid, TILES) as b:
        own.tile(b)
        data = b.field(f)
        b.add(f"const int size = m > 0 ? (int)load_uint16({own.size_at(data)}) : 0;")
        to = f"{own.table(b)}, {b.elements(own.array)} + begin"
        b.refuse(f"m > 0 && !load_stream({own.stream_at(b, data)}, size, m, {to})")
