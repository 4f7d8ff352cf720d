"""CUDA decode of golomb and elias streams: chunks in parallel, wherever their first unit may begin.

See streams.cuh. A stream longer than encode ever makes one is left to a single thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from compll.backends.cuda.values import Values
from compll.ir.module import Field

CHUNK, PLACES = 2048, 64  # as in streams.cuh
CHUNKS = 4  # of a block
GROUP = 64  # chunks
THREADS = 64


@dataclass(frozen=True)
class Stream:
    """A field of positions, as texts: where it starts and stops, how many, and where they go."""

    field: Field
    start: str
    stop: str
    count: str
    idx: str

    @property
    def kind(self) -> str:
        """golomb or elias."""
        return self.field.storage


def read_stream(made: Values, s: Stream) -> None:
    """The kernels that leave a stream's positions in scratch memory, or set bad[p]."""
    chunks = made.grid("chunks", CHUNKS, s.field.name)
    groups = made.grid("groups", 1, s.field.name)
    made.memory("chunk_reads", "uint64", str(chunks), PLACES)
    made.memory("group_reads", "int64", str(groups), 3 * PLACES)
    made.memory("entries", "int64", str(groups), 3)
    with made.kernel(f"chunks{len(made.steps)}", chunks, CHUNKS * PLACES):
        _read_chunks(made, s, chunks)
    with made.kernel(f"groups{len(made.steps)}", groups, PLACES):
        _join_chunks(made, s, chunks, groups)
    with made.kernel(f"stream{len(made.steps)}", -1, 32):
        _join_groups(made, s, chunks, groups)
    with made.kernel(f"positions{len(made.steps)}", groups, THREADS):
        _write_positions(made, s, chunks, groups)


def _place(made: Values, grid: int) -> None:
    """Declarations of a block: its piece, its number in it."""
    made.add(f"const i64* const firsts = first + {grid} * (pieces + 1);")
    made.add("const int p = find(firsts, pieces, blockIdx.x);")
    made.add("const i64 own = (i64)blockIdx.x - firsts[p];")
    made.piece()


def _stream(made: Values, s: Stream, chunks: int, bad: str = "bad[p]") -> None:
    """Declarations: the codes, their bits (0 where the stream is not read here), and chunks."""
    made.add(f"const u8* const stream = data + {s.start};")
    made.add(f"const i64 length = {bad} ? 0 : {s.stop} - {s.start}, head = {s.kind}_head();")
    room = f"item_at[{chunks} * (pieces + 1) + p"
    made.add(f"const bool fits = length - head <= {CHUNK // 8} * ({room} + 1] - {room}]);")
    good = "fits && length >= head"
    if s.kind == "golomb":
        good += " && stream[0] <= 40"
    made.add(f"const bool good = {good};")
    made.add("const i64 bits = good ? 8 * (length - head) : 0;")
    made.add(f"const int b = {'good ? stream[0] : 0' if s.kind == 'golomb' else '0'};")
    made.add(f"const i64 chunks = (bits + {CHUNK - 1}) / {CHUNK};")
    made.add(f"const u64* const reads = chunk_reads + {room}] * {PLACES};")


def _staged(made: Values, chunks: int) -> None:
    """A block's chunks in shared memory, with what the last unit needs beyond them."""
    size = chunks * CHUNK // 8 + 16
    made.add(f"__shared__ u32 words[{size // 4}];")
    made.add(f"const i64 from = own * {chunks * CHUNK // 8};")
    made.add(f"stage(words, {size}, stream + head, from, bits / 8);")


def _read_chunks(made: Values, s: Stream, chunks: int) -> None:
    """Every chunk from every place."""
    _place(made, chunks)
    _stream(made, s, chunks)
    made.add(f"if (own * {CHUNKS} >= chunks) return;")
    _staged(made, CHUNKS)
    made.add(f"const int q = threadIdx.x / {PLACES}, start = threadIdx.x % {PLACES};")
    made.add(f"const i64 chunk = own * {CHUNKS} + q;")
    made.add("if (chunk >= chunks) return;")
    made.add("Read read = {0, 0, start};")
    left = f"bits - chunk * {CHUNK}"
    every = "[](Unit, int) { return true; }"
    made.add(f"read_chunk<{s.kind}_units>(words, q * {CHUNK}, {left}, b, read, {every});")
    made.add(f"((u64*)reads)[chunk * {PLACES} + start] = packed_read(read);")


@contextmanager
def _each_chunk(made: Values) -> Iterator[None]:
    """A walk along the chunks of group `own`."""
    begin, end = f"own * {GROUP}", f"own * {GROUP} + {GROUP}"
    head = f"for (i64 c = {begin}; c < chunks && c < {end} && read.place != STOPPED; ++c)"
    with made.block(head):
        yield


def _join_chunks(made: Values, s: Stream, chunks: int, groups: int) -> None:
    """Every group from every place."""
    _place(made, groups)
    _stream(made, s, chunks)
    made.add("Read read = {0, 0, (int)threadIdx.x};")
    with _each_chunk(made):
        made.add(f"then_chunk(read, reads + c * {PLACES});")
    made.add(f"i64* const to = group_reads + ((firsts[p] + own) * {PLACES} + threadIdx.x) * 3;")
    made.add("to[0] = read.codes; to[1] = read.sum; to[2] = read.place;")


def _join_groups(made: Values, s: Stream, chunks: int, groups: int) -> None:
    """By one thread: where every group really begins, and whether there are codes enough."""
    made.add("const int p = blockIdx.x;")
    made.piece()
    made.add("if (n == 0 || bad[p] || threadIdx.x) return;")
    _stream(made, s, chunks)
    made.add(f"const i64 count = {s.count};")
    fail = "bad[p] = 1; atomicOr(errors, 1u);"
    base = f"first[{groups} * (pieces + 1) + p"
    made.add("Read read = {0, 0, 0};")
    with made.block(f"for (i64 g = {base}]; g < {base} + 1]; ++g)"):
        made.add("i64* const entry = entries + g * 3;")
        made.add("entry[0] = read.codes; entry[1] = read.sum; entry[2] = read.place;")
        made.add("if (read.place == STOPPED) continue;")
        made.add(f"const i64* const group = group_reads + (g * {PLACES} + read.place) * 3;")
        made.add("then(read, (u64)group[1], group[0], (int)group[2]);")
    with made.block("if (!fits)"):
        call = f"load_{s.kind}(stream, length, count, n, {s.idx})"
        made.add(f"if (!{call}) {{ {fail} }}")
        made.add("return;")
    ended = "count > 0 || stream_ended(stream + head, 0, bits)"
    made.add(f"if (!good || read.codes < count || !({ended})) {{ {fail} }}")


def _write_positions(made: Values, s: Stream, chunks: int, groups: int) -> None:
    """A thread a chunk, from where it really begins; the last code must end the stream."""
    _place(made, groups)
    made.add("__shared__ u32 wrong;  // other blocks set bad[p]: all threads must see the same")
    made.add("if (threadIdx.x == 0) wrong = bad[p];")
    made.add("__syncthreads();")
    _stream(made, s, chunks, "wrong")
    made.add(f"if (own * {GROUP} >= chunks) return;")
    _staged(made, GROUP)
    made.add(f"__shared__ Read begins[{GROUP}];")
    with made.block("if (threadIdx.x == 0)"):
        made.add("const i64* const entry = entries + (firsts[p] + own) * 3;")
        made.add("Read read = {entry[0], entry[1], (int)entry[2]};")
        made.add(f"for (int c = 0; c < {GROUP}; ++c) begins[c].place = STOPPED;")
        with _each_chunk(made):
            made.add(f"begins[c - own * {GROUP}] = read;")
            made.add(f"then_chunk(read, reads + c * {PLACES});")
    made.add("__syncthreads();")
    made.add("Read read = begins[threadIdx.x];")
    made.add(f"const i64 count = {s.count};")
    made.add("if (read.place == STOPPED || read.codes >= count) return;")
    made.add(f"i64* const idx_ = {s.idx};")
    begin, left = f"threadIdx.x * {CHUNK}", f"bits - (own * {GROUP} + threadIdx.x) * {CHUNK}"
    with made.block("const auto take = [&](Unit unit, int bit)"):
        made.add("if (!unit.ends) return true;")
        made.add("idx_[read.codes - 1] = read.sum - 1;")
        made.add("if (read.codes < count) return true;")
        made.add(f"const i64 end = bits - ({left}) + bit;")
        made.add("const bool done = read.sum <= n && stream_ended(stream + head, end, bits);")
        made.add("if (!done) { bad[p] = 1; atomicOr(errors, 1u); }")
        made.add("return false;")
    made.lines[-1] += ";"
    made.add(f"read_chunk<{s.kind}_units>(words, {begin}, {left}, b, read, take);")
