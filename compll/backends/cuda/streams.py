"""Fields of varying length: positions as codes of bits, and runs of trits. codes.cuh and
streams.cuh have the functions. huffman.py has Huffman codes.

The place of a code depends on all codes before it: blocks leave the lengths that they find, a block
per piece adds these up, and the blocks run again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compll.backends.cuda import huffman
from compll.backends.cuda.body import Body
from compll.backends.cuda.grids import GROUP
from compll.ir.module import Field
from compll.ir.tile import Call, Domain

POSITIONS = 256  # of a block
PLACES = 64  # of a chunk, where its first unit may begin: as in streams.cuh
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


def store_positions(p: Any, call: Call) -> None:
    """Store positions, a thread each: first lengths of codes, then places, then the codes."""
    (view,), f, code = call.views, call.attr, f"{call.routine}_code"
    grid = p.plan.grid(Domain("kept", f.of), POSITIONS)
    bits = p.plan.of_blocks(f"bits_{f.name}", "int64", grid)
    # drawn positions are computed on each read
    array = p.calls.array(view.value, view.value.attr.domain)

    def own(b: Body) -> str:
        return ", ".join((b.elements(array), *place_of(b, f)))

    with p.kernel("bits", grid, POSITIONS) as b:
        leave_sum(b, bits, f"bits_before<{code}>({own(b)}, &all)")
    b = p.open_phase()
    total = b.declare("i64", f"scan_array({b.of_blocks(bits, grid)})")
    b.leave_length(f, f"{code}::head + (({total} + 7) >> 3)")
    b.first(f"{code}::begin({b.field(f)}, {b.kept(f.of)}, {b.among(f.of)});")
    with p.kernel("codes", grid, POSITIONS) as b:
        b.add(f"i64 all; const i64 before = bits_before<{code}>({own(b)}, &all);")
        b.call(f"store_code<{code}>", own(b), f"{bits}[blockIdx.x] + before", b.field(f))


def read_positions(p: Any, call: Call) -> None:
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
        b.call(f"join_chunks<{GROUP}>", stream(b), "own", to)
    with p.kernel("stream", -1, 32) as b:
        own = f"{b.first_block(groups)}, {b.first_block(groups, of='p + 1')}"
        own = f"{own}, {b.among(f.of)}"
        b.first(f"join_groups<{units}>({stream(b)}, {reads}, {entries}, {own}, {b.bad()});")
    with p.kernel("positions", groups, THREADS) as b:
        own, n = f"own, {entries} + blockIdx.x * 3", b.among(f.of)
        to = f"{b.elements(call.made[0])}, {b.bad()}"
        b.call(f"write_positions<{units}, {GROUP}>", stream(b), own, n, to)


def ascending(p: Any, call: Call) -> None:
    """Have a check report positions that do not ascend within the tensor, a thread each."""
    f = call.attr
    with p.kernel("ascending", p.plan.grid(Domain("kept", f.of), POSITIONS), POSITIONS) as b:
        own = ", ".join(place_of(b, f))
        b.refuse(f"!ascends({b.field(f)}, {own})", 2)


# runs of trits


def over_bytes(b: Body, length: str) -> str:
    """Arguments for a thread's eight bytes: the number of all bytes, and the thread's first."""
    return f"{b.hoist('length', f'const i64 length = {length};')}, own * {BYTES} + threadIdx.x * 8"


def shorten(p: Any, call: Call) -> None:
    """Shorten runs: for every block find the last byte before it that is not of ones; count bytes;
    store them."""
    f, array = call.attr, call.views[0].value.attr
    grid = p.plan.grid(Domain("trits", f.name), BYTES)
    breaks = p.plan.of_blocks(f"breaks_{f.name}", "int64", grid)
    made = p.plan.of_blocks(f"made_{f.name}", "int64", grid)

    def own(b: Body) -> str:
        length = b.value(p.plan.kernel.sizes[array])
        return f"{b.elements(array)}, {over_bytes(b, length)}"

    with p.kernel("breaks", grid, 256) as b:
        leave_sum(b, breaks, f"block_max_before(last_break({own(b)}), -1, &all)")
    b = p.open_phase()
    b.call("max_before_array", b.of_blocks(breaks, grid))
    with p.kernel("made", grid, 256) as b:
        leave_sum(b, made, f"shortened({own(b)}, {breaks}[blockIdx.x], 0, &all)")
    b = p.open_phase()
    b.leave_length(f, f"scan_array({b.of_blocks(made, grid)})")
    with p.kernel("runs", grid, 256) as b:
        to = f"{b.field(f)} + {made}[blockIdx.x]"
        b.add(f"i64 all; shortened({own(b)}, {breaks}[blockIdx.x], {to}, &all);")


def lengthen(p: Any, call: Call) -> None:
    """Lengthen runs. The payload is bad if they do not stand for as many trits as there are
    elements."""
    f, (array,) = call.attr, call.made
    grid = p.plan.grid(Domain("trits", f.name), BYTES)
    stands = p.plan.of_blocks(f"stands_{f.name}", "int64", grid)

    def own(b: Body) -> str:
        return f"{b.field(f)}, {over_bytes(b, b.length(f))}"

    with p.kernel("stands", grid, 256) as b:
        leave_sum(b, stands, f"block_scan<256>(lengthened({own(b)}), &all)")
    b = p.open_phase()
    trits = b.declare("i64", f"scan_array({b.of_blocks(stands, grid)})")
    size = b.value(p.plan.kernel.sizes[array])
    b.refuse(f"threadIdx.x == 0 && {trits} != {size}")
    with p.kernel("trits", grid, 256) as b:
        b.add(f"i64 all; const i64 before = block_scan<256>(lengthened({own(b)}), &all);")
        b.call("lengthen", own(b), f"{b.elements(array)} + {stands}[blockIdx.x] + before")


#: the routines of payload fields, by their names: to store, and to load
STORES: dict[str, Callable[[Any, Call], None]] = {
    "gaps": store_positions, "golomb": store_positions, "runs": shorten, "huffman": huffman.store,
}  # fmt: skip
LOADS: dict[str, Callable[[Any, Call], None]] = {
    "gaps": read_positions, "golomb": read_positions, "runs": lengthen, "huffman": huffman.load,
    "ascending": ascending,
}  # fmt: skip
