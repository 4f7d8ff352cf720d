"""Parts of CUDA kernels that walk over a piece outside the walk over tiles of a pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compll.backends.cuda.encode import Encoder
from compll.ir.expr import Expr
from compll.ir.program import Program


class Walking(Encoder):
    """Encoder whose expressions also have a text for elements at any place of the piece."""

    def __init__(self, program: Program, feed: bool, prefix: str, threads: int = 256) -> None:
        self.mode = "tile"
        super().__init__(program, feed, prefix, threads)

    # elements at any place: `i` is an i64 within the piece

    @contextmanager
    def anywhere(self) -> Iterator[None]:
        """Expressions are of the element at place i of the piece."""
        self.mode = "anywhere"
        yield
        self.mode = "tile"

    def written(self, expr: Expr) -> str:
        if self.mode == "tile":
            return super().written(expr)
        if expr.op == "uniform":
            keys = f"stream(seed, step, (u64)tensor, {expr.value}, (u64)((offset + i / {self.tile} * {self.tile}) >> 32))"
            return f"uniform((u32)(offset + i), {keys})"
        if expr.op == "gather":
            return self.text(expr.args[0])
        if expr.op == "indices":
            return "i"
        return super().written(expr)

    def leaf(self, expr: Expr) -> str:
        if self.mode == "tile":
            return super().leaf(expr)
        if expr.op == "input":
            return "(load1(xs, i) * scale)"
        return self.kept_states.read(str(expr.value), f"s_{expr.value}[i]")

    def piece_arrays(self) -> None:
        """Declarations about the piece p: its arrays, and what draws need."""
        self.piece()
        self.add("const i64 offset = table[5 * p + 3], tensor = table[5 * p + 2];")
        self.add("const u64 step = base_step + (tick ? *tick : 0);")
        self.add("XT* const xs = x + table[5 * p];")
        for s in self.elementwise:
            self.add(self.kept_states.view(s))

    def of_grid(self, grid: int) -> None:
        """Declarations of a block over a grid's items: `own` is its number in the piece."""
        self.add(f"const i64* const firsts = first + {grid} * (pieces + 1);")
        self.add(f"const i64* const items = item_at + {grid} * (pieces + 1);")
        self.add("const int p = find(firsts, pieces, blockIdx.x);")
        self.add("const i64 own = (i64)blockIdx.x - firsts[p];")

    def guard(self, expr: Expr) -> None:
        """Nothing to do where a guarded call is not wanted."""
        guard = self.prog.guards.get(id(expr))
        if guard is not None:
            condition, wanted = guard
            self.add(f"if ({'!' if wanted else ''}({self.scalar(condition)})) return;")

    @contextmanager
    def once_a_piece(self, name: str, threads: int = 32) -> Iterator[None]:
        """A kernel with a block per piece."""
        with self.kernel(f"{name}{len(self.steps)}", -1, threads):
            self.add("const int p = blockIdx.x;")
            self.piece()
            self.add("if (n == 0) return;")
            yield

    def result(self, slot: int) -> str:
        return f"sc[p * @SLOTS@ + {slot}]"

    @contextmanager
    def of_tiles(self, *loops: Expr) -> Iterator[None]:
        """A loop over the block's tiles, whose elements' `loops` can be computed within."""
        s = self.shape
        self.add(f"const i64 tile_first = own * {s.tiles};")
        self.add(f"const int u = threadIdx.x % {s.team}, team = threadIdx.x / {s.team};")
        self.keys([*loops])
        self.prepare(*loops)
        self.leaves = self.leaves_of([*loops])
        with self.team_tiles([*loops]):
            if s.chunks == 1:
                self.load("0")
            yield

    def each_element(self, x: Expr, body: str) -> None:
        """`body` with the value of every element of the block's tiles in the place of {}."""
        with self.of_tiles(x), self.each():
            self.add(f"if (i < m) {{ {body.format(self.text(x))} }}")
