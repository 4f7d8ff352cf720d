"""Fields of varying length: positions as codes of bits, runs of trits, Huffman codes. codes.cuh,
streams.cuh and huffman.cuh have the functions.

The place of a code depends on all codes before it: blocks leave the lengths that they find, a block
per piece adds these up, and the blocks run again.
"""

from __future__ import annotations

from collections.abc import Callable

from compll.backends.cuda.body import Body
from compll.backends.cuda.plans import PLACES
from compll.backends.cuda.printer import Printer
from compll.ir.module import Field
from compll.ir.storage import HUFFMAN_LONGEST, HUFFMAN_TILE
from compll.ir.tile import ELEMENTS, Array, Call, Domain
from compll.routines.huffman import NUMBERS

# ---- huffman ------------------------------------------------------------------------------------
# Huffman codes of a field: huffman.cuh has the functions.
# A thread has a tile. Its stream's place depends on those before it: blocks leave the sum of
# their streams' bytes, and a block per piece adds these up.

TILES = 64  # of a block
COUNTED = 1 << 14  # numbers that a block counts


class Huffman:
    """The kernels of one field."""

    def __init__(self, p: Printer, field: Field, array: Array) -> None:
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


def store(p: Printer, call: Call) -> None:
    """Store numbers: count them, make codes, find the sizes of streams, store these."""
    f = call.attr
    coder = Huffman(p, f, call.views[0].value.attr)

    def counts(b: Body) -> str:
        return b.memory(f"counts_{f.name}", "uint64", -1, NUMBERS, kept=True)

    with p.kernel("counts", p.plan.grid(ELEMENTS, COUNTED), 256) as b:
        end = f"op_min({b.given('n')}, (own + 1) * {COUNTED})"
        b.call("count_numbers", b.elements(coder.array), f"own * {COUNTED}", end, counts(b))
    b = p.open_phase()
    b.call("make_codes", counts(b), f.bits, b.field(f), coder.codes(b))
    with p.kernel("sizes", coder.grid, TILES) as b:
        coder.tile(b)
        b.add(
            f"const i64 size = stream_bytes({b.elements(coder.array)} + begin, m, {coder.codes(b)});"
        )
        b.add(f"if (m > 0) store_uint16({coder.size_at(b.field(f))}, size);")
        coder.leave(b, "size")
    b = p.open_phase()
    b.leave_length(f, f"{coder.head(b)} + scan_array({b.of_blocks(coder.sums, coder.grid)})")
    with p.kernel("streams", coder.grid, TILES) as b:
        coder.tile(b)
        to = coder.stream_at(b, b.field(f))
        b.call("store_stream", f"{b.elements(coder.array)} + begin", "m", coder.codes(b), to)


def load(p: Printer, call: Call) -> None:
    """Load numbers. The payload is bad if the head's sizes or lengths are, or a stream's end."""
    f = call.attr
    coder = Huffman(p, f, call.made[0])
    with p.kernel("sizes", coder.grid, TILES) as b:
        coder.tile(b)
        fits = f"m > 0 && {b.length(f)} >= {coder.head(b)}"
        coder.leave(b, f"{fits} ? load_uint16({coder.size_at(b.field(f))}) : 0")
    b = p.open_phase()
    streams = b.declare("i64", f"scan_array({b.of_blocks(coder.sums, coder.grid)})")
    whole = f"{b.length(f)} == {coder.head(b)} + {streams}"
    filled = f"fill_table({b.field(f)}, {f.bits}, {coder.table(b)})"
    good = b.declare("bool", f"{whole} && {filled}")
    b.refuse(f"threadIdx.x == 0 && !{good}")
    with p.kernel("numbers", coder.grid, TILES) as b:
        coder.tile(b)
        data = b.field(f)
        b.add(f"const int size = m > 0 ? (int)load_uint16({coder.size_at(data)}) : 0;")
        to = f"{coder.table(b)}, {b.elements(coder.array)} + begin"
        b.refuse(f"m > 0 && !load_stream({coder.stream_at(b, data)}, size, m, {to})")


# ---- streams ------------------------------------------------------------------------------------

POSITIONS = 256  # of a block
CHUNKS = 4  # of a block
THREADS = 64
BYTES = 2048  # of trits, of a block


def leave_sum(b: Body, name: str, text: str) -> None:
    """Leave a block's number: `text` sets `all`, of all its threads."""
    b.add(f"i64 all; {text};")
    b.first(f"{name}[blockIdx.x] = all;")


# positions


def place_of(b: Body, f: Field) -> tuple[str, str, str]:
    """A thread's position in a field's array; the numbers of positions, and of elements among which
    they choose."""
    return f"own * {POSITIONS} + threadIdx.x", b.kept(f.of), b.among(f.of)


def store_positions(p: Printer, call: Call) -> None:
    """Store positions, a thread each: first lengths of codes, then places, then the codes."""
    (view,), f, code = call.views, call.attr, f"{call.routine}_code"
    grid = p.plan.grid(Domain("kept", f.of), POSITIONS)
    bits = p.plan.of_blocks(f"bits_{f.name}", "int64", grid)
    # drawn positions are computed on each read
    array = p.array(view.value, view.value.attr.domain)

    def args(b: Body) -> str:
        return ", ".join((b.elements(array), *place_of(b, f)))

    with p.kernel("bits", grid, POSITIONS) as b:
        leave_sum(b, bits, f"bits_before<{code}>({args(b)}, &all)")
    b = p.open_phase()
    total = b.declare("i64", f"scan_array({b.of_blocks(bits, grid)})")
    b.leave_length(f, f"{code}::head + (({total} + 7) >> 3)")
    b.first(f"{code}::begin({b.field(f)}, {b.kept(f.of)}, {b.among(f.of)});")
    with p.kernel("codes", grid, POSITIONS) as b:
        b.add(f"i64 all; const i64 before = bits_before<{code}>({args(b)}, &all);")
        b.call(f"store_code<{code}>", args(b), f"{bits}[blockIdx.x] + before", b.field(f))


def read_positions(p: Printer, call: Call) -> None:
    """Read chunks in parallel for every possible start, then find the real start of each."""
    f, units = call.attr, f"{call.routine}_units"
    chunks = p.plan.grid(Domain("chunks", f.name), CHUNKS)
    groups = p.plan.grid(Domain("groups", f.name), 1)
    reads = p.plan.memory(f"group_reads_{f.name}", "int64", groups, 3 * PLACES)
    entries = p.plan.memory(f"entries_{f.name}", "int64", groups, 3)

    def stream(b: Body) -> str:
        """Declare the stream: its bytes, and memory for the results of its chunks."""
        room = f"{b.first_item(chunks, of='p + 1')} - {b.first_item(chunks)}"
        memory = b.memory(f"chunk_reads_{f.name}", "uint64", chunks, PLACES)
        given = f"{b.field(f)}, {b.length(f)}, {b.kept(f.of)}, {memory}"
        b.add(f"const Stream stream = opened<{units}>({given}, {room});")
        return "stream"

    with p.kernel("chunks", chunks, CHUNKS * PLACES) as b:
        b.call(f"read_chunks<{units}, {CHUNKS}>", stream(b), "own")
    with p.kernel("groups", groups, PLACES) as b:
        to = f"{reads} + blockIdx.x * {3 * PLACES}"
        b.call("join_chunks", stream(b), "own", to)
    with p.kernel("stream", -1, 32) as b:
        blocks = f"{b.first_block(groups)}, {b.first_block(groups, of='p + 1')}"
        blocks = f"{blocks}, {b.among(f.of)}"
        b.first(f"join_groups<{units}>({stream(b)}, {reads}, {entries}, {blocks}, {b.bad()});")
    with p.kernel("positions", groups, THREADS) as b:
        blocks, n = f"own, {entries} + blockIdx.x * 3", b.among(f.of)
        to = f"{b.elements(call.made[0])}, {b.bad()}"
        b.call(f"write_positions<{units}>", stream(b), blocks, n, to)


def ascending(p: Printer, call: Call) -> None:
    """Have a check report positions that do not ascend within the tensor, a thread each."""
    f = call.attr
    with p.kernel("ascending", p.plan.grid(Domain("kept", f.of), POSITIONS), POSITIONS) as b:
        given = ", ".join(place_of(b, f))
        b.refuse(f"!ascends({b.field(f)}, {given})", 2)


# runs of trits


def over_bytes(b: Body, length: str) -> str:
    """Arguments for a thread's eight bytes: the number of all bytes, and the thread's first."""
    return f"{b.hoist('length', f'const i64 length = {length};')}, own * {BYTES} + threadIdx.x * 8"


def shorten(p: Printer, call: Call) -> None:
    """Shorten runs: for every block find the last byte before it that is not of ones; count bytes;
    store them."""
    f, array = call.attr, call.views[0].value.attr
    grid = p.plan.grid(Domain("trits", f.name), BYTES)
    breaks = p.plan.of_blocks(f"breaks_{f.name}", "int64", grid)
    made = p.plan.of_blocks(f"made_{f.name}", "int64", grid)

    def args(b: Body) -> str:
        length = b.value(p.plan.kernel.sizes[array])
        return f"{b.elements(array)}, {over_bytes(b, length)}"

    with p.kernel("breaks", grid, 256) as b:
        leave_sum(b, breaks, f"block_max_before(last_break({args(b)}), -1, &all)")
    b = p.open_phase()
    b.call("max_before_array", b.of_blocks(breaks, grid))
    with p.kernel("made", grid, 256) as b:
        leave_sum(b, made, f"shortened({args(b)}, {breaks}[blockIdx.x], 0, &all)")
    b = p.open_phase()
    b.leave_length(f, f"scan_array({b.of_blocks(made, grid)})")
    with p.kernel("runs", grid, 256) as b:
        to = f"{b.field(f)} + {made}[blockIdx.x]"
        b.add(f"i64 all; shortened({args(b)}, {breaks}[blockIdx.x], {to}, &all);")


def lengthen(p: Printer, call: Call) -> None:
    """Lengthen runs. The payload is bad if they do not stand for as many trits as there are
    elements."""
    f, (array,) = call.attr, call.made
    grid = p.plan.grid(Domain("trits", f.name), BYTES)
    stands = p.plan.of_blocks(f"stands_{f.name}", "int64", grid)

    def args(b: Body) -> str:
        return f"{b.field(f)}, {over_bytes(b, b.length(f))}"

    with p.kernel("stands", grid, 256) as b:
        leave_sum(b, stands, f"block_scan<256>(lengthened({args(b)}), &all)")
    b = p.open_phase()
    trits = b.declare("i64", f"scan_array({b.of_blocks(stands, grid)})")
    size = b.value(p.plan.kernel.sizes[array])
    b.refuse(f"threadIdx.x == 0 && {trits} != {size}")
    with p.kernel("trits", grid, 256) as b:
        b.add(f"i64 all; const i64 before = block_scan<256>(lengthened({args(b)}), &all);")
        b.call("lengthen", args(b), f"{b.elements(array)} + {stands}[blockIdx.x] + before")


#: the routines of payload fields, by their names: to store, and to load
STORES: dict[str, Callable[[Printer, Call], None]] = {
    "gaps": store_positions, "golomb": store_positions, "runs": shorten, "huffman": store,
}  # fmt: skip
LOADS: dict[str, Callable[[Printer, Call], None]] = {
    "gaps": read_positions, "golomb": read_positions, "runs": lengthen, "huffman": load,
    "ascending": ascending,
}  # fmt: skip
