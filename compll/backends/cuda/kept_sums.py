"""Reductions over selected elements, tile by tile of them, in the order of [Note: order of sums]."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compll.backends.cuda.kept import KeptFields
from compll.backends.cuda.selection_compaction import ITEMS
from compll.ir.expr import Expr
from compll.ir.program import Program


class KeptSums(KeptFields):
    """Encoder that reduces over selections."""

    def __init__(self, program: Program, feed: bool, prefix: str, threads: int = 256) -> None:
        self.kept_part_of: dict[int, tuple[str, int]] = {}
        super().__init__(program, feed, prefix, threads)

    def reductions_of(self, name: str) -> list[Expr]:
        return [
            e
            for one in self.prog.passes
            for e in one.late
            if e.op.startswith("reduce_") and e.args[0].type.of == name
        ]

    def kept_parts(self, expr: Expr) -> None:
        """Parts of a reduction over selected elements, tile by tile of them."""
        (arg,) = expr.args
        of = arg.type.of
        s = self.shape
        grid = self.grid("kept_tiles", s.tiles, of)
        parts = self.memory(f"kept_part{len(self.kept_part_of)}_{of}", "uint32", str(grid))
        self.kept_part_of[id(expr)] = (parts, grid)
        with self.kernel(f"parts{len(self.steps)}", grid, s.threads):
            self.of_grid(grid)
            self.piece_arrays()
            self.add(f"const i64 count = {self.kept(of)};")
            at = self.grid("kept", ITEMS, of)
            self.add(f"const i64* const idx = idx_{of} + item_at[{at} * (pieces + 1) + p];")
            self.add("const int u = threadIdx.x % 32, team = threadIdx.x / 32;")
            self.prepare(arg)
            with self.block(f"for (int turn = 0; turn < {s.turns}; ++turn)"):
                self.add(
                    f"const i64 t = own * {s.tiles} + turn * {s.teams} + team, o = t * {self.tile};"
                )
                self.add(
                    f"const int m = count - o >= {self.tile} ? {self.tile} : count > o ? (int)(count - o) : 0;"
                )
                with self.anywhere():
                    value = self.kept_reduction(expr)
                self.add(f"if (m && u == 0) {parts}[items[p] + t] = {value};")

    def kept_reduction(self, expr: Expr) -> str:
        self.mode = "kept"
        name = self.name("a")
        if expr.op == "reduce_sum":
            self.lane_sums(name, expr.args[0])
            value = f"(u32)__float_as_int(team_sum<32>({name}[0], {name}[1], {name}[2], {name}[3]))"
        else:
            value = f"(u32)({self.extreme(name, expr)})"
        result = self.name("w")
        self.add(f"const u32 {result} = {value};")
        return result

    @contextmanager
    def each(self) -> Iterator[None]:
        if self.mode != "kept":
            with super().each():
                yield
            return
        self.add("#pragma unroll 4")
        with self.block("for (int e = 0; e < 32; ++e)"):
            self.add("const int c = 0, place = e / 4 * 128 + 4 * u + e % 4;")
            self.add("const bool in = place < m;")
            self.add("const i64 i = in ? idx[o + place] : 0;")
            yield

    def within(self) -> str:
        return "in" if self.mode == "kept" else super().within()

    def kept_closing(self, expr: Expr) -> str:
        parts, grid = self.kept_part_of[id(expr)]
        of = expr.args[0].type.of
        tiles = f"({self.kept(of)} + {self.tile - 1}) / {self.tile}"
        where = f"{parts} + item_at[{grid} * (pieces + 1) + p], {tiles}"
        if expr.op == "reduce_sum":
            return f"block_total({where})"
        largest = "true" if expr.op == "reduce_max" else "false"
        return f"({self.kept(of)} ? (double)unkey(block_extreme({where}, {largest})) : 0.0)"
