"""Fields of varying length: positions as codes of bits, and runs of trits. codes.cuh, streams.cuh
and runs.cuh have the functions. huffman.py has Huffman codes.

The place of a code depends on all codes before it: blocks leave the lengths that they find, a block
per piece adds these up, and the blocks run again.
"""

from __future__ import annotations

from typing import Any

from compll.backends.cuda import huffman
from compll.backends.cuda.body import Body
from compll.backends.cuda.domains import GROUP, Domain
from compll.backends.cuda.lane_arrays import own_name
from compll.ir.module import Field
from compll.ir.tile import Ascending, Stream

POSITIONS = 256  # of a block
PLACES = 64  # of a chunk, where its first unit may begin: as in streams.cuh
CHUNKS = 4  # of a block
THREADS = 64
BYTES = 2048  # of trits, of a block


def stream(p: Any, step: Stream) -> None:
    """Store values of varying length in the payload, or load them from it. p: the Printer."""
    if step.field.storage == "huffman":
        return huffman.load(p, step) if p.plan.decodes else huffman.store(p, step, leave_length)
    runs = step.field.storage == "runs"
    if p.plan.decodes:
        (lengthen if runs else read_positions)(p, step)
    else:
        (shorten if runs else store_positions)(p, step)
    return None


def array(b: Body, f: Field) -> str:
    """An array of positions, or of bytes of trits."""
    grid, tile = b.plan.grid_of(f), b.plan.shape.tile
    if f.packed:
        return b.memory(own_name(f), "uint8", grid, f.packed_bytes(tile))
    return b.memory(own_name(f), "int32", grid, tile)


def leave_length(b: Body, f: Field, length: str) -> None:
    """Store a field's length."""
    b.leave(("length", f.name), b.declare("i64", length))
    place = b.fields["out"].place(f.name, length=True)
    b.add(f"if (threadIdx.x == 0) store_uint32({place}, {b.named['length', f.name]});")


# positions


def store_positions(p: Any, step: Stream) -> None:
    """Store positions, a thread each: first lengths of codes, then places, then the codes."""
    f, code = step.field, step.field.storage
    grid = p.plan.grid(Domain("kept", f.of), POSITIONS)

    bits = p.plan.memory(f"bits_{f.name}", "int64", f"{grid}b")

    def before(b: Body) -> str:
        """The codes of a block, and the number of bits before each."""
        count = b.fields["out"].kept(f.of)
        own = f"{array(b, step.array)}, own * {POSITIONS} + threadIdx.x, {count}, {b.fields['out'].among(f.of)}"
        b.add("i64 all;")
        b.add(f"const i64 before = bits_before<{code}_code>({own}, &all);")
        return own

    with p.kernel("bits", grid, POSITIONS) as b:
        before(b)
        b.add(f"if (threadIdx.x == 0) {bits}[blockIdx.x] = all;")
    b = p.open_phase()
    total = b.declare("i64", f"scan_array({bits} + {b.blocks(grid)})")
    leave_length(b, f, f"{code}_code::head + (({total} + 7) >> 3)")
    fields = b.fields["out"]
    given = f"{fields.pointer(f)}, {fields.kept(f.of)}, {fields.among(f.of)}"
    b.add(f"if (threadIdx.x == 0) {code}_code::begin({given});")
    with p.kernel("codes", grid, POSITIONS) as b:
        own = before(b)
        out = b.fields["out"].pointer(f)
        b.add(f"store_code<{code}_code>({own}, {bits}[blockIdx.x] + before, {out});")


def read_positions(p: Any, step: Stream) -> None:
    """Read chunks in parallel for every possible start, then find the real start of each.

    A single thread reads a stream that is longer than any that encode makes.
    """
    f = step.field
    chunks = p.plan.grid(Domain("chunks", f.name), CHUNKS)
    groups = p.plan.grid(Domain("groups", f.name), 1)
    p.plan.memory("group_reads", "int64", str(groups), 3 * PLACES)
    p.plan.memory("entries", "int64", str(groups), 3)
    units = f"{f.storage}_units"
    with p.kernel("chunks", chunks, CHUNKS * PLACES) as b:
        b.add(f"read_chunks<{units}, {CHUNKS}>({opened(b, f, chunks)}, own);")
    with p.kernel("groups", groups, PLACES) as b:
        b.add(
            f"join_chunks<{GROUP}>({opened(b, f, chunks)}, own, group_reads + (firsts[p] + own) * {3 * PLACES});"
        )
    with p.kernel("stream", -1, 32) as b:
        given = f"{opened(b, f, chunks)}, group_reads, entries, {ends(b, groups)}, {b.fields['in'].among(f.of)}"
        b.add("if (threadIdx.x) return;")
        b.add(f"join_groups<{units}>({given}, {array(b, step.array)}, wrong + p, errors);")
    with p.kernel("positions", groups, THREADS) as b:
        given = f"{opened(b, f, chunks)}, own, entries + (firsts[p] + own) * 3, {b.fields['in'].among(f.of)}"
        b.add(
            f"write_positions<{units}, {GROUP}>({given}, {array(b, step.array)}, wrong + p, errors);"
        )


def ascending(p: Any, step: Ascending) -> None:
    """Have a check report positions that do not ascend within the tensor, a thread each."""
    f = step.field
    with p.kernel("ascending", p.plan.grid(Domain("kept", f.of), POSITIONS), POSITIONS) as b:
        own = f"own * {POSITIONS} + threadIdx.x, {b.fields['in'].kept(f.of)}, {b.fields['in'].among(f.of)}"
        b.add(f"if (!ascends({b.fields['in'].pointer(f)}, {own})) {{")
        b.add("  wrong[p] = 2; atomicOr(errors, 2u);")
        b.add("}")


def ends(b: Body, grid: int) -> str:
    """The first and the last of the piece's blocks of a grid, as text."""
    begin = f"first[{grid} * (pieces + 1) + p"
    return f"{begin}], {begin} + 1]"


def opened(b: Body, f: Field, chunks: int) -> str:
    """Declare a stream: its bytes, and memory for the results of its chunks."""
    fields = b.fields["in"]
    reads = b.memory("chunk_reads", "uint64", chunks, PLACES)
    room = f"item_at[{chunks} * (pieces + 1) + p"
    given = f"{fields.pointer(f)}, {fields.length(f)}, {fields.kept(f.of)}, {reads}, {room} + 1] - {room}]"
    b.add(f"const Stream stream = opened<{f.storage}_units>({given});")
    return "stream"


# runs of trits


def over_bytes(b: Body, f: Field, length: str) -> str:
    """Arguments for a thread's eight bytes: the number of all bytes, and the thread's first."""
    b.hoist("length", f"const i64 length = {length};")
    return f"length, own * {BYTES} + threadIdx.x * 8"


def shorten(p: Any, step: Stream) -> None:
    """Shorten runs: for every block find the last byte before it that is not of ones; count bytes;
    store them."""
    f, grid = step.field, p.plan.grid(Domain("trits", step.field.name), BYTES)
    breaks, made = (
        p.plan.memory(f"{what}_{f.name}", "int64", f"{grid}b") for what in ("breaks", "made")
    )

    def given(b: Body) -> str:
        own = over_bytes(b, f, b.fields["out"].bytes(step.array, b.given("n")))
        return f"{array(b, step.array)}, {own}"

    with p.kernel("breaks", grid, 256) as b:
        b.add(f"i64 top; block_max_before(last_break({given(b)}), -1, &top);")
        b.add(f"if (threadIdx.x == 0) {breaks}[blockIdx.x] = top;")
    b = p.open_phase()
    b.add(f"max_before_array({breaks} + {b.blocks(grid)});")
    with p.kernel("made", grid, 256) as b:
        b.add(f"i64 all; shortened({given(b)}, {breaks}[blockIdx.x], 0, &all);")
        b.add(f"if (threadIdx.x == 0) {made}[blockIdx.x] = all;")
    b = p.open_phase()
    leave_length(b, f, f"scan_array({made} + {b.blocks(grid)})")
    with p.kernel("runs", grid, 256) as b:
        to = f"{b.fields['out'].pointer(f)} + {made}[blockIdx.x]"
        b.add(f"i64 all; shortened({given(b)}, {breaks}[blockIdx.x], {to}, &all);")


def lengthen(p: Any, step: Stream) -> None:
    """Lengthen runs. The payload is bad if they do not stand for as many trits as there are
    elements."""
    f, grid = step.field, p.plan.grid(Domain("trits", step.field.name), BYTES)
    stands = p.plan.memory(f"stands_{f.name}", "int64", f"{grid}b")

    def given(b: Body) -> str:
        own = over_bytes(b, f, b.fields["in"].length(f))
        b.add("i64 all;")
        data = f"{b.fields['in'].pointer(f)}, {own}"
        b.add(f"const i64 before = block_scan<256>(lengthened({data}), &all);")
        return data

    with p.kernel("stands", grid, 256) as b:
        given(b)
        b.add(f"if (threadIdx.x == 0) {stands}[blockIdx.x] = all;")
    b = p.open_phase()
    all_ = b.declare("i64", f"scan_array({stands} + {b.blocks(grid)})")
    size = b.fields["in"].bytes(step.array, b.given("n"))
    b.add(f"if (threadIdx.x == 0 && {all_} != {size}) {{ wrong[p] = 1; atomicOr(errors, 1u); }}")
    with p.kernel("trits", grid, 256) as b:
        data = given(b)
        b.add(f"lengthen({data}, {array(b, step.array)} + {stands}[blockIdx.x] + before);")
