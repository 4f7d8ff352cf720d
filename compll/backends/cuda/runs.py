"""Fields of runs on CUDA: trits in scratch memory, shortened after encode's last walk, lengthened
before decode's only one. See runs.cuh.

Where a byte goes depends on all before it: blocks leave what they find, a block per piece adds that
up, and the blocks look again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compll.backends.cuda.decode import Decoder
from compll.backends.cuda.tables import Tabling
from compll.backends.cuda.values import Values, size_text
from compll.ir.layout import header
from compll.ir.module import Field, Module

BYTES = 2048  # of a block
THREADS = 256


def runs_of(module: Module) -> list[Field]:
    """Fields of runs; they come last in a payload."""
    return [f for f in module.fields if f.storage == "runs"]


def trits(made: Values, f: Field) -> str:
    """Where a piece's trits stand between kernels, as text."""
    grid = made.grid("trits", BYTES, f.name)
    name = made.memory(f"trits_{f.name}", "uint8", str(grid))
    return f"({name} + item_at[{grid} * (pieces + 1) + p])"


@contextmanager
def over_bytes(made: Values, name: str, f: Field) -> Iterator[str]:
    """A kernel with a thread for eight bytes from `i` on; yields what holds a value a block."""
    grid = made.grid("trits", BYTES, f.name)
    with made.kernel(f"{name}{len(made.steps)}", grid, THREADS):
        made.add(f"const i64* const firsts = first + {grid} * (pieces + 1);")
        made.add("const int p = find(firsts, pieces, blockIdx.x);")
        made.piece()
        made.add(f"const i64 i = ((i64)blockIdx.x - firsts[p]) * {BYTES} + threadIdx.x * 8;")
        yield made.memory(f"{name}_{f.name}", "int64", f"{grid}b")


def blocks(made: Values, f: Field) -> tuple[str, str]:
    """Of a piece: the number of its first block, and how many there are, as text."""
    grid = made.grid("trits", BYTES, f.name)
    begin = f"first[{grid} * (pieces + 1) + p"
    return f"{begin}]", f"{begin} + 1] - {begin}]"


class Shortening(Tabling):
    """Encoder with fields of runs."""

    def codes_at(self, f: Field) -> str:
        return trits(self, f) if f.storage == "runs" else super().codes_at(f)

    def after_passes(self) -> None:
        fields = runs_of(self.module)
        for f in fields:
            self.find_breaks(f)
            self.count_bytes(f)
        if fields:
            self.place_runs(fields)
        for number, f in enumerate(fields):
            self.store_runs(f, number)

    def find_breaks(self, f: Field) -> None:
        """For every block, the last byte before it that is not of ones."""
        with over_bytes(self, "breaks", f) as breaks:
            last = f"last_break({trits(self, f)}, {size_text(f, self.tile)}, i)"
            self.add(f"i64 top; block_max_before({last}, -1, &top);")
            self.add(f"if (threadIdx.x == 0) {breaks}[blockIdx.x] = top;")
        begin, count = blocks(self, f)
        with self.once_a_piece("before", THREADS):
            self.add(f"max_before_array({breaks} + {begin}, {count});")

    def count_bytes(self, f: Field) -> None:
        with over_bytes(self, "made", f) as made:
            self.thread_bytes(f)
            self.add(f"if (threadIdx.x == 0) {made}[blockIdx.x] = all;")

    def thread_bytes(self, f: Field) -> None:
        """Declarations: the last break before a thread's bytes, and where its output goes."""
        self.add(f"const u8* const trits = {trits(self, f)};")
        self.add(f"const i64 length = {size_text(f, self.tile)};")
        self.add("i64 top, all;")
        before = f"breaks_{f.name}[blockIdx.x]"
        self.add(
            f"const i64 last = block_max_before(last_break(trits, length, i), {before}, &top);"
        )
        self.add("const int own = shorten(trits, length, i, last, (u8*)0);")
        self.add(f"const i64 to = block_scan<{THREADS}>(own, &all);")

    def place_runs(self, fields: list[Field]) -> None:
        """Lengths in the header, and where the fields stand."""
        places = self.memory("places", "int64", "piece", len(fields) + 1)
        with self.once_a_piece("place", THREADS):
            for f in fields:
                begin, count = blocks(self, f)
                self.add(
                    f"const i64 length_{f.name} = scan_array(made_{f.name} + {begin}, {count});"
                )
            self.add("if (threadIdx.x) return;")
            self.starts()
            self.add(f"end = at_{fields[0].name};")
            names = header(self.module)[1]
            for number, f in enumerate(fields):
                head = f"out + at[p] + {4 * names.index(f.name)}"
                self.add(f"store_uint32({head}, length_{f.name});")
                self.add(f"{places}[p * {len(fields) + 1} + {number}] = end;")
                self.add(f"end += length_{f.name};")
            self.add(f"{places}[p * {len(fields) + 1} + {len(fields)}] = end;")
            self.add(f"used[p] = end - at[p] + {int(self.module.status)};")

    def store_runs(self, f: Field, number: int) -> None:
        count = len(runs_of(self.module)) + 1
        with over_bytes(self, "made", f) as made:
            self.thread_bytes(f)
            to = f"out + places[p * {count} + {number}] + {made}[blockIdx.x] + to"
            self.add(f"shorten(trits, length, i, last, {to});")

    def payload_end(self) -> str:
        count = len(runs_of(self.module))
        return f"places[p * {count + 1} + {count}]" if count else super().payload_end()


class Lengthening(Decoder):
    """Decoder with fields of runs: a piece whose payload is wrong is left as it is."""

    def emit(self) -> None:
        fields = runs_of(self.module)
        if fields:
            self.look_at_runs(fields)
        for number, f in enumerate(fields):
            self.check_runs(f, number)
        for number, f in enumerate(fields):
            self.lengthen(f, number)
        super().emit()

    def look_at_runs(self, fields: list[Field]) -> None:
        """Whether the payload's length fits its header; where the fields stand."""
        self.memory("wrong", "uint32", "piece")
        places = self.memory("places", "int64", "piece", len(fields) + 1)
        names = header(self.module)[1]
        with self.kernel("look", -1, 32):
            self.add("const int p = blockIdx.x;")
            self.piece()
            self.add("if (threadIdx.x) return;")
            self.add("wrong[p] = 0;")
            self.add("if (n == 0 && used[p] == 0) return;")
            self.layout()
            self.add(f"bool good = n > 0 && used[p] >= {4 * len(names)};")
            self.add(f"end = at_{fields[0].name};")
            for number, f in enumerate(fields):
                head = f"data + at[p] + {4 * names.index(f.name)}"
                self.add(f"const i64 length_{f.name} = good ? load_uint32({head}) : 0;")
                self.add(f"{places}[p * {len(fields) + 1} + {number}] = end;")
                self.add(f"end += length_{f.name};")
                self.add(f"good = good && length_{f.name} <= {size_text(f, self.tile)};")
            self.add(f"{places}[p * {len(fields) + 1} + {len(fields)}] = end;")
            self.add(f"good = good && end - at[p] + {int(self.module.status)} == used[p];")
            self.add("if (!good) { wrong[p] = 1; atomicOr(errors, 1u); }")

    @contextmanager
    def stored(self, f: Field, number: int) -> Iterator[str]:
        """A kernel over the bytes of a field, with the sum of what those before stand for."""
        count = len(runs_of(self.module)) + 1
        with over_bytes(self, "stands", f) as stands:
            self.add(f"const i64* const place = places + p * {count} + {number};")
            self.add("const u8* const runs = data + place[0];")
            self.add("const i64 length = wrong[p] ? 0 : place[1] - place[0];")
            self.add("i64 all;")
            own = "lengthened(runs, length, i)"
            self.add(f"const i64 before = block_scan<{THREADS}>({own}, &all);")
            yield stands

    def check_runs(self, f: Field, number: int) -> None:
        """Whether the runs stand for as many trits as there are elements."""
        with self.stored(f, number) as stands:
            self.add(f"if (threadIdx.x == 0) {stands}[blockIdx.x] = all;")
        with self.kernel(f"join{len(self.steps)}", -1, THREADS):
            self.add("const int p = blockIdx.x;")
            self.piece()
            self.add("if (n == 0) return;")
            begin, count = blocks(self, f)
            self.add(f"const i64 all = scan_array({stands} + {begin}, {count});")
            self.add(f"if (threadIdx.x || wrong[p] || all == {size_text(f, self.tile)}) return;")
            self.add("wrong[p] = 1; atomicOr(errors, 1u);")

    def lengthen(self, f: Field, number: int) -> None:
        with self.stored(f, number) as stands:
            to = f"{trits(self, f)} + {stands}[blockIdx.x] + before"
            self.add(f"lengthen(runs, length, i, {to});")

    def codes_at(self, f: Field) -> str:
        return trits(self, f) if f.storage == "runs" else super().codes_at(f)

    def status_byte(self) -> str:
        last = "data[at[p] + used[p] - 1] != 0"
        return last if runs_of(self.module) else super().status_byte()

    def leave(self) -> None:
        if runs_of(self.module):
            self.add("if (wrong[p]) return;")
