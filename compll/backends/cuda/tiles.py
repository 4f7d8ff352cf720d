"""A walk over the tiles of a piece: a thread's elements in registers, and reductions of a tile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compll.backends.cuda.halves import Kept
from compll.backends.cuda.values import Values, draws, row_ready
from compll.ir.expr import Expr, leaves
from compll.ir.program import Program
from compll.numerics.numbers import lane_count


class Tiles(Values):
    """Emits what threads do with the elements of a tile.

    feed: whether there are states, by element (`elementwise`) and by tensor (`per_tensor`).
    """

    def __init__(self, program: Program, feed: bool, prefix: str, threads: int = 256) -> None:
        super().__init__(program.module, prefix, threads)
        self.prog, self.feed = program, feed
        states = [s for s in program.module.states if feed]
        self.elementwise = [s.name for s in states if s.shape == "n"]
        self.per_tensor = [s.name for s in states if s.shape != "n"]
        self.states = (*self.elementwise, *self.per_tensor)
        self.kept_states = Kept(program.module)
        #: arrays that the walk at hand reads, the gradient first
        self.leaves: list[str] = []

    def keys(self, loops: list[Expr]) -> None:
        """The keys of a block's random draws, in shared memory."""
        numbers = draws(*loops)
        if numbers:
            self.add(f"__shared__ u64 keys[{2 * (numbers[-1] + 1)}];")
            at = f"offset + tile_first * {self.tile}"
            self.add(f"block_keys(keys, {numbers[-1] + 1}, seed, step, tensor, {at});")

    @contextmanager
    def team_tiles(self, loops: list[Expr], *arrays: str, leaves: bool = False) -> Iterator[None]:
        """A loop over a team's tiles, with the keys of their draws; see `each_tile`."""
        held = ["xs", *(f"s_{name}" for name in self.elementwise)]
        high = f"(offset + tile_first * {self.tile}) >> 32"
        last = f"(offset + tile_first * {self.tile} + {self.shape.tiles * self.tile - 1}) >> 32"
        near = [f"({high}) == ({last})"] if draws(*loops) else []
        with self.each_tile(
            *map(row_ready, held), *arrays, *near, ahead=self.sources(), leaves=leaves
        ):
            self.add("const i64 begin = offset + o;")
            for number in draws(*loops):
                at = f"{2 * number} + (int)((begin >> 32) - ({high}))"
                self.add(f"const u64 r{number} = keys[READY ? {2 * number} : {at}];")
            yield

    @staticmethod
    def leaves_of(loops: list[Expr]) -> list[str]:
        """Arrays that are read, the gradient first."""
        return sorted(leaves(*loops), key=lambda name: (name != "g", name))

    def resident(self, loops: list[Expr]) -> int:
        """Blocks of 256 threads that a multiprocessor is to hold, so that loads of some are under way
        while others compute. The registers that this leaves a thread suffice for ready tiles; what
        others need beyond goes to local memory.
        """
        return 3 if len(self.leaves_of(loops)) < 3 else 2

    # a thread's elements

    def load(self, chunk: str) -> None:
        """Declare and fill the arrays of a chunk's elements."""
        held = self.shape.held
        for name, source in self.sources().items():
            array = "g_" if name == "g" else f"e_{name}"
            self.take_rows(name, source, array, f"{chunk} * {held}")
            if name == "g":
                self.taken(chunk)
                self.add("#pragma unroll")
                self.add(f"for (int e = 0; e < {4 * held}; ++e) g_[e] *= scale;")

    def sources(self) -> dict[str, str]:
        """Arrays that the walk at hand reads, with the piece's part of each."""
        return {name: "xs" if name == "g" else f"s_{name}" for name in self.leaves}

    def taken(self, chunk: str) -> None:
        """What is added to gradients as they are loaded."""

    @contextmanager
    def chunks(self) -> Iterator[None]:
        """Around a loop over elements: a tile too large for registers is read chunk by chunk."""
        if self.shape.chunks == 1:
            self.add("const int c = 0;")
            yield
            return
        with self.block(f"for (int c = 0; c < {self.shape.chunks}; ++c)"):
            self.load("c")
            yield

    @contextmanager
    def each(self) -> Iterator[None]:
        """A loop over elements e of a thread, at places i of the tile."""
        with self.block(""), self.chunks():
            self.add("#pragma unroll")
            with self.block(f"for (int e = 0; e < {4 * self.shape.held}; ++e)"):
                self.add(f"const int k = c * {self.shape.held} + e / 4;")
                self.add(f"const int i = k * {self.shape.row} + 4 * u + e % 4;")
                yield

    def within(self) -> str:
        """Whether an element of `each` is there, as text."""
        return "i < m"

    def leaf(self, expr: Expr) -> str:
        return "g_[e]" if expr.op == "input" else f"e_{expr.value}[e]"

    @contextmanager
    def each_row(self) -> Iterator[None]:
        """A loop over rows; this thread's elements of one begin at l."""
        held = self.shape.held
        self.add("#pragma unroll")
        with self.block(f"for (int row = 0; row < {held}; ++row)"):
            self.add(f"const int l = (c * {held} + row) * {self.shape.row} + 4 * u;")
            yield

    @contextmanager
    def each_of_row(self) -> Iterator[None]:
        """A loop over the four elements of a row."""
        self.add("#pragma unroll")
        with self.block("for (int j = 0; j < 4; ++j)"):
            self.add("const int e = 4 * row + j, i = l + j;")
            yield

    # reductions

    def reduction(self, expr: Expr) -> str:
        """A group's reduction: emits the loop, returns the text of the value."""
        (arg,) = expr.args
        self.prepare_groups(arg)
        name = self.name("a")
        if expr.op == "reduce_sum":
            self.lane_sums(name, arg)
            sums = ", ".join(f"{name}[{j}]" for j in range(4))
            return f"team_sum<{self.shape.team}>({sums})"
        return f"unkey({self.extreme(name, expr)})"

    def lane_sums(self, name: str, arg: Expr) -> None:
        """A thread's four lanes, in the order of [Note: order of sums]: of small tiles, rows are lanes
        too, the first to be folded."""
        self.add(f"float {name}[4];")
        if self.shape.row < lane_count(self.tile):
            self.folded_rows(name, arg)
            return
        with self.each():
            self.add(f"const float y = {self.within()} ? {self.text(arg)} : 0.0f;")
            self.add(f"if (c == 0 && e < 4) {name}[e] = y; else {name}[e % 4] += y;")

    def folded_rows(self, name: str, arg: Expr) -> None:
        s = self.shape
        self.add(f"float rows_{name}[{4 * s.rows}];")
        with self.each():
            self.add(f"rows_{name}[e] = {self.within()} ? {self.text(arg)} : 0.0f;")
        half = 2 * s.rows
        while half >= 4:
            self.add("#pragma unroll")
            fold = f"rows_{name}[e] += rows_{name}[e + {half}]"
            self.add(f"for (int e = 0; e < {half}; ++e) {fold};")
            half //= 2
        self.add(f"for (int j = 0; j < 4; ++j) {name}[j] = rows_{name}[j];")

    def key(self, expr: Expr) -> str:
        """An int32 that orders as a float does."""
        if expr.op == "abs":
            return f"key_of_abs({self.text(expr.args[0])})"
        return f"key({self.text(expr)})"

    def extreme(self, name: str, expr: Expr) -> str:
        (arg,) = expr.args
        if expr.op == "reduce_max" and arg.op == "abs":
            # Shifting the sign out is a multiplication, which is cheaper than a logical operation.
            self.add(f"u32 {name} = 0;")
            with self.each():
                doubled = f"(u32)__float_as_int({self.text(arg.args[0])}) << 1"
                self.add(f"if ({self.within()}) {name} = u_max({name}, {doubled});")
            return f"team_max<{self.shape.team}>((i32)({name} >> 1))"
        least, op = ("-2147483647", "max") if expr.op == "reduce_max" else ("2147483647", "min")
        self.add(f"i32 {name} = {least};")
        with self.each():
            self.add(f"if ({self.within()}) {name} = i_{op}({name}, {self.key(expr.args[0])});")
        return f"team_{op}<{self.shape.team}>({name})"
