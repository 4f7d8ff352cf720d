"""A generated CUDA source: its text, and the launches that make an encode or a decode."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compll.backends.cuda.instructions import MEMORY, in_payloads, traced_functions
from compll.ir.expr import Expr
from compll.ir.layout import field_bytes, limits, tile_of
from compll.ir.module import Module
from compll.ir.static import Number, as_count, evaluate, extent, extents
from compll.ir.storage import HUFFMAN_LONGEST
from compll.ir.tile import ELEMENTS, Array, Domain, Kernel, Value
from compll.numerics import matrices
from compll.numerics.bits import HUGE
from compll.numerics.numbers import MOST_TRIES, walks_of_tries
from compll.routines import huffman, streams

# ---- grids --------------------------------------------------------------------------------------
# Work sharing of CUDA kernels: sets of items, threads per tile, blocks of a launch, scratch
# memory of a batch.

HELD = 8  # rows of a tile that a thread holds at a time: 32 elements
#: bits of a stream that a thread reads, its places where a code may begin, chunks of a group
CHUNK, PLACES, GROUP = 2048, 64, 64
#: rows and columns of a product that a block computes
ROWS, COLUMNS = 32, 64
#: most bins of the histograms of several ranks in a block's shared memory
BINS = 8192
#: numbers that functions of include/ share with the rest
SHARED = {
    "CHUNK": CHUNK, "PLACES": PLACES, "GROUP": GROUP, "ROWS": ROWS, "COLUMNS": COLUMNS,
    "BINS": BINS, "LONGEST": HUFFMAN_LONGEST, "NUMBERS": huffman.NUMBERS, "ONES": streams.ONES,
    "FIRST_RUN": streams.FIRST, "LONGEST_RUN": streams.LONGEST,
}  # fmt: skip


def items(domain: Domain, module: Module, params: Mapping[str, Number], n: int) -> int:
    """Items of a domain of a piece of n elements. Raises UsageError if a matrix is too large.

    kinds beside those of arrays: sample (as many as `dims` says); trits (the packed bytes of field
    `of`); chunks and groups of chunks (of the most bits of field `of`); of a product with rows,
    columns and an inner dimension, products (blocks of ROWS x COLUMNS elements, for each chunk), and
    if there are several chunks, parts (the chunks' elements) and joined (elements).
    """
    if n == 0 or domain.kind == "n":
        return n
    if domain.kind in ("trits", "chunks", "groups"):
        return _of_field(domain, module, params, n)
    if domain.kind == "kept":
        return limits(module, n, params)[domain.of]
    if domain.kind == "sample":
        return max(1, as_count(host_number(domain.dims[0], params, n), n))
    rows, cols = extents(domain.dims[:2], n)
    if domain.kind == "matrix":
        return rows * cols
    chunks = -(-extent(domain.dims[2], n) // matrices.CHUNK)
    if domain.kind == "products":
        return blocks(rows, cols) * chunks
    return rows * cols * (chunks if domain.kind == "parts" else 1) if chunks > 1 else 0


def _of_field(domain: Domain, module: Module, params: Mapping[str, Number], n: int) -> int:
    """Bytes of a field of trits, or chunks of a stream of positions."""
    f = next(f for f in module.fields if f.name == domain.of)
    if domain.kind == "trits":
        return f.layout.most_bytes(n, n, tile_of(module))
    bits = 8 * field_bytes(f, module, n, limits(module, n, params))
    return -(-bits // (CHUNK if domain.kind == "chunks" else CHUNK * GROUP))


def host_number(number: object, params: Mapping[str, Number], n: int) -> float:
    """A number of a spec that does not depend on the step."""
    if isinstance(number, Expr):
        return float(evaluate(number, dict(params) | {"n": n, "step": 0}))
    return float(str(number))


def blocks(rows: int, cols: int) -> int:
    """The number of blocks of ROWS x COLUMNS elements."""
    return -(-rows // ROWS) * -(-cols // COLUMNS)


@dataclass(frozen=True)
class Shape:
    """Sharing of tiles by threads. See prelude.cuh for team and row.

    team: threads per tile. rows: rows of 4 * team elements in a tile. held: rows in registers at a
    time. threads: threads of a block.
    """

    tile: int
    team: int
    rows: int
    threads: int

    @property
    def held(self) -> int:
        return min(self.rows, HELD)

    @property
    def teams(self) -> int:
        """Teams of a block."""
        return self.threads // self.team

    @property
    def row(self) -> int:
        """Elements of a row."""
        return 4 * self.team


def shape_of(tile: int, threads: int = 256, packed: int = 1) -> Shape:
    """The shape for tiles of `tile` elements. A block's codes of `packed` fields take at most 32
    KiB of shared memory.

    Threads of small tiles hold four rows, of a line of memory in tiles of 128, so that work per
    tile is done by a fourth of the threads. Lanes of [Note: order of sums] are folded in halves,
    rows first.
    """
    team = max(1, min(32, tile // 16))
    rows = tile // (4 * team)
    most = max(32, (1 << 15) // (tile * max(1, packed)) * team)
    return Shape(tile, team, rows, min(threads, most))


@dataclass(frozen=True)
class Grid:
    """Work of a launch's blocks: items of a domain, or tiles of items; a block has `per_block` of
    them."""

    domain: Domain
    per_block: int
    tiles: bool = False


@dataclass(frozen=True)
class Scratch:
    """Device memory of a batch: `factor` numbers for each item of a grid, or for each of its blocks
    (`of`); grid -1: for each piece. kept: they are zeros before a call and after it; others are
    anything before it."""

    name: str
    dtype: str
    grid: int
    factor: int = 1
    of: str = "items"
    kept: bool = False

    @property
    def declaration(self) -> str:
        return f"{MEMORY.get(self.dtype, 'float')}* {self.name}"


@dataclass(frozen=True)
class Launch:
    """A launch. grid: the number of a grid, or -1 for a block per piece.

    repeat: the number of tries from which rounds follow (see threshold_search); neighbouring steps
    with the same number repeat together.
    """

    kernel: str
    grid: int
    threads: int
    repeat: Expr | int | None = None


class Items:
    """Numbers of items of grids, from the length of a piece."""

    def __init__(self, module: Module, params: Mapping[str, Number], tile: int) -> None:
        self.module, self.params, self.tile = module, params, tile

    def count(self, grid: Grid, n: int) -> int:
        """Items of a grid for a piece of n elements. Raises UsageError if a matrix is too large."""
        count = items(grid.domain, self.module, self.params, n)
        return -(-count // self.tile) if grid.tiles else count

    def rounds(self, tries: Expr | int, lengths: Iterable[int]) -> int:
        """Rounds of a search for a threshold, a walk each."""
        result = [host_number(tries, self.params, n) for n in lengths]
        return walks_of_tries(
            max((int(max(0.0, min(v, MOST_TRIES))) for v in result if v == v), default=0)
        )


# ---- arenas -------------------------------------------------------------------------------------
# Places of a plan's scratch arrays in memory that they share.

#: bytes of which offsets are multiples
ALIGNED = 256
#: the first and the last turn of a plan's launches in which an array is used
Life = tuple[int, int]
#: types and lengths of arrays
Wanted = tuple[tuple[str, int], ...]


class Place(NamedTuple):
    """An array's place: the number of its zone, the offset there in bytes, its type and length."""

    zone: int
    at: int
    dtype: str
    length: int


class Arena(NamedTuple):
    """Memory of a plan for one table. zones: bytes of the allocations that hold its arrays."""

    zones: tuple[int, ...]
    places: tuple[Place, ...]


def offsets(sizes: Sequence[int], lives: Sequence[Life]) -> tuple[list[int], int]:
    """Offsets of arrays of these sizes in bytes, and the bytes of all. Those that live in one turn
    do not overlap. The largest is placed first, and each at the lowest offset that is free."""
    result, end = [0] * len(sizes), 0
    placed: list[int] = []
    for k in sorted(range(len(sizes)), key=lambda k: -sizes[k]):
        first, last = lives[k]
        beside = [j for j in placed if lives[j][0] <= last and first <= lives[j][1]]
        for j in sorted(beside, key=result.__getitem__):
            if result[k] + sizes[k] <= result[j]:
                break
            result[k] = max(result[k], aligned(result[j] + sizes[j]))
        placed.append(k)
        end = max(end, result[k] + sizes[k])
    return result, end


def arranged(arrays: Wanted, lives: Sequence[Life], kept: Sequence[bool]) -> Arena:
    """Places of arrays. Those that are kept zero between calls have a zone of their own, and all of
    it is zero between calls of any tables."""
    sizes = [bytes_of(*each) for each in arrays]
    always = [(0, 0)] * len(sizes)
    apart, first = offsets([s if k else 0 for s, k in zip(sizes, kept, strict=True)], always)
    shared, second = offsets([0 if k else s for s, k in zip(sizes, kept, strict=True)], lives)
    places = (
        Place(0, apart[i], *each) if kept[i] else Place(1, shared[i], *each)
        for i, each in enumerate(arrays)
    )
    return Arena((first, second), tuple(places))


def separate(arrays: Wanted) -> Arena:
    """Places of arrays that have a zone each."""
    zones = tuple(bytes_of(*each) for each in arrays)
    return Arena(zones, tuple(Place(k, 0, *each) for k, each in enumerate(arrays)))


def within(zone: Any, place: Place) -> Any:
    """The array at a place of a zone."""
    size = bytes_of(place.dtype, place.length)
    return zone[place.at : place.at + size].view(place.dtype)


def bytes_of(dtype: str, length: int) -> int:
    """Bytes of an array."""
    return np.dtype(dtype).itemsize * length


def aligned(size: int) -> int:
    """The next multiple of ALIGNED."""
    return -(-size // ALIGNED) * ALIGNED


# ---- plans --------------------------------------------------------------------------------------

#: C types of gradients
GRADIENTS = {"float32": "float", "float16": "Float16", "bfloat16": "Bfloat16"}


@dataclass(frozen=True)
class Plan:
    """The launches of an encode or a decode, in order.

    Plans: "encode" (no state), "feed" (with states), "set" and "add" (decode), and those of rounds.
    params: of every kernel, as C declarations. statics: host-computed values, a row per piece.
    lives: the turns in which each scratch array is used, from first to last. writes_back: encode
    itself overwrites the gradient with its decoded value. matrices: kind ("matrix", "flat" or "")
    and dimensions of matrices; see check_matrices.
    """

    steps: tuple[Launch, ...]
    params: tuple[str, ...]
    statics: tuple[Expr, ...]
    grids: tuple[Grid, ...]
    scratch: tuple[Scratch, ...]
    lives: tuple[Life, ...]
    states: tuple[str, ...] = ()
    writes_back: bool = False
    matrices: tuple[tuple[str, tuple[Expr, ...]], ...] = ()


@dataclass
class Source:
    """The generated text (without the prelude) and its plans by name.

    merges: the plan "add" adds several payloads of each piece in one launch. hops: the encodes that
    take in a payload, for a source of their own.
    """

    text: str
    shape: Shape
    plans: dict[str, Plan] = field(default_factory=dict)
    merges: bool = False
    hops: list[Kernel] = field(default_factory=list)

    def full(self, gradient: str = "float32") -> str:
        """The whole text for a compiler, for gradients of this dtype."""
        return f"{prelude()}\ntypedef {GRADIENTS[gradient]} XT;\n{self.text}"


@cache
def prelude() -> str:
    """The functions that all kernels share."""
    others = ("searches", "codes", "streams", "huffman")
    shared = [f"constexpr int {name} = {value};\n" for name, value in SHARED.items()]
    shared.append(f"constexpr float HUGE_STATE = {HUGE!r}f;\n")
    first = (numbers(), *shared, header("prelude"), in_payloads())
    return "".join([*first, *map(header, others)])


@cache
def numbers() -> str:
    """The functions of single numbers."""
    return header("numbers") + traced_functions()


@cache
def header(name: str) -> str:
    """A file of functions that kernels call."""
    return (Path(__file__).parent / "include" / f"{name}.cuh").read_text()


# ---- plan builder -------------------------------------------------------------------------------
# A plan under construction: its kernels' texts, launches, grids and scratch memory.

#: parameters of every kernel; states and scratch memory follow
ENCODE = (
    "XT* __restrict__ x", "const i64* table", "const i64* first", "const i64* item_at", "int pieces",
    "u8* __restrict__ out", "const i64* at", "const double* st", "u64 seed", "u64 base_step",
    "const u64* tick", "float scale", "int back", "i64* used",
)  # fmt: skip
TAKEN = ("const u8* __restrict__ data", "const i64* at_in")  # of an encode that takes a payload in
DECODE = (
    "XT* __restrict__ x", "const i64* table", "const i64* first", "const i64* item_at", "int pieces",
    "const u8* __restrict__ data", "const i64* at_in", "const i64* used_in", "const double* st",
    "u64 base_step", "const u64* tick", "u32* errors", "int payloads",
)  # fmt: skip


class PlanBuilder:
    """Collects what kernels need while they are made. left: numbers of a piece that one kernel
    leaves for others, by identity; slots: places of those that others read."""

    def __init__(
        self, name: str, kernel: Kernel, shape: Shape, params: tuple[str, ...], *,
        decodes: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.kernel, self.shape, self.given = name, kernel, shape, params
        self.module, self.decodes = kernel.module, decodes
        self.statics = [*kernel.statics]
        #: true if a check marked bad payloads
        self.checks = False
        #: true if its kernel adds several payloads of each piece
        self.merges = False
        #: launches, their bounds, and their kernels' Bodies
        self.kernels: list[tuple[Launch, str, object]] = []
        self.grids: list[Grid] = [Grid(ELEMENTS, shape.teams, tiles=True)]
        self.scratch: dict[str, Scratch] = {}
        #: names of scratch arrays' memory
        self.owned: dict[Array, str] = {}
        self.left: set[Hashable] = set()
        self.slots: dict[Hashable, int] = {}
        #: pointers to sums over the ranks, by the field
        self.sums: dict[str, str] = {}
        #: texts of elements that are computed on each read, from a kernel and an index
        self.elements: dict[Array, Callable[[Any, str], str]] = {}
        self.names = 0
        #: values that are in memory of their own, and the texts of their places
        self.elsewhere: dict[Value, str] = {}

    def fresh(self, prefix: str) -> str:
        """A new name."""
        self.names += 1
        return f"{prefix}{self.names}"

    def static(self, expr: Expr) -> int:
        """The index of a value that the host computes."""
        index = next((i for i, e in enumerate(self.statics) if e is expr), None)
        if index is None:
            self.statics.append(expr)
        return len(self.statics) - 1 if index is None else index

    def grid(self, domain: Domain, per_block: int, *, tiles: bool = False) -> int:
        """The number of a grid."""
        wanted = Grid(domain, per_block, tiles)
        if wanted not in self.grids:
            self.grids.append(wanted)
        return self.grids.index(wanted)

    def tiles(self, domain: Domain) -> int:
        """The grid of a domain's tiles; 0 for those of the piece."""
        return self.grid(domain, self.shape.teams, tiles=True)

    def memory(
        self, name: str, dtype: str, grid: int, factor: int = 1, *, of: str = "items",
        kept: bool = False,
    ) -> str:  # fmt: skip
        """Scratch memory (see Scratch); its name in kernels."""
        wanted = Scratch(name, dtype, grid, factor, of, kept)
        assert self.scratch.setdefault(name, wanted) == wanted, wanted
        return name

    def memory_of(self, array: Array) -> str:
        """The name of a scratch array's memory. Numbers tell apart arrays of equal names."""
        text = "".join(ch if ch.isalnum() else "_" for ch in array.name)
        return self.owned.setdefault(array, f"own{len(self.owned)}_{text}")

    def of_blocks(self, name: str, dtype: str, grid: int, factor: int = 1) -> str:
        """Scratch memory for each block of a grid."""
        return self.memory(name, dtype, grid, factor, of="blocks")

    def place(self, key: Hashable) -> str:
        """The place of a number of a piece that is kept between kernels."""
        self.left.add(key)
        return f"sc[p * {self.name}_slots + {self.slots.setdefault(key, len(self.slots))}]"

    def host_scalar(self, number: int) -> str:
        """A number that the host computes for each piece."""
        return f"st[p * {self.name}_statics + {number}]"

    def launch(
        self, what: str, grid: int, threads: int, body: object, repeat: Expr | int | None = None,
        resident: int = 0,
    ) -> None:  # fmt: skip
        """Add the next step: a kernel, by its Body."""
        name = f"{self.name}_{what}{len(self.kernels)}"
        bounds = f"{threads}, {resident}" if resident else str(threads)
        self.kernels.append((Launch(name, grid, threads, repeat), bounds, body))

    def text(self) -> str:
        """The text of all kernels, once all of them are known."""
        counts = {"statics": len(self.statics), "slots": len(self.slots)}
        result = [
            f"constexpr int {self.name}_{k} = {count};\n" for k, count in counts.items() if count
        ]
        params = ", ".join(self.params())
        for step, bounds, body in self.kernels:
            head = f'extern "C" __global__ void __launch_bounds__({bounds}) {step.kernel}({params})'
            result.append(f"{head} {{\n{body}}}\n")
        return "".join(result)

    def params(self) -> tuple[str, ...]:
        """Parameters of every kernel."""
        return (*self.given, *(s.declaration for s in self.memories()))

    def memories(self) -> tuple[Scratch, ...]:
        """All scratch memory."""
        slots = [Scratch("sc", "uint64", -1, len(self.slots))] if self.slots else []
        return (*self.scratch.values(), *slots)

    def lives(self) -> tuple[Life, ...]:
        """The lives of all scratch memory: kernels that mention it use it, and launches that repeat
        together are one turn."""
        turns: dict[str, list[int]] = {s.name: [] for s in self.memories()}
        turn, last = 0, None
        for step, _, body in self.kernels:
            turn += step.repeat is None or step.repeat != last
            last = step.repeat
            for name in turns.keys() & set(re.findall(r"\w+", str(body))):
                turns[name].append(turn)
        return tuple((min(each, default=0), max(each, default=0)) for each in turns.values())

    def plan(self, writes_back: bool) -> Plan:
        """The plan, for the host."""
        states = tuple(s.name for s in self.kernel.states)
        return Plan(
            tuple(step for step, _, _ in self.kernels), self.params(), tuple(self.statics),
            tuple(self.grids), self.memories(), self.lives(), states, writes_back,
            tuple(self.kernel.matrices),
        )  # fmt: skip
