"""Selections in grouped specs on CUDA: a walk over the groups leaves a byte for every element.

Groups come in all sizes, so hits are compacted from those bytes, in blocks of equally many. What
selected elements need of their group is left by the same walk, at their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compll.backends.cuda.runs import Shortening
from compll.backends.cuda.text import C_TYPE
from compll.ir.expr import Expr, walk
from compll.ir.module import Selection
from compll.ir.program import Program, of_group

HITS = 2048  # elements of a block, eight a thread
THREADS = 256


class Grouping(Shortening):
    """Encoder with selections in groups."""

    def __init__(self, program: Program, feed: bool, prefix: str, threads: int = 256) -> None:
        #: element values that depend on their group, by identity: where they stand
        self.of_groups: dict[int, str] = {}
        super().__init__(program, feed, prefix, threads)

    def given(self, e: Expr) -> bool:
        return super().given(e) or (self.mode == "anywhere" and id(e) in self.of_groups)

    def written(self, expr: Expr) -> str:
        if self.mode == "anywhere" and id(expr) in self.of_groups:
            cast = "" if expr.type.dtype == "float" else f"({C_TYPE[expr.type.dtype]})"
            return f"({cast}{self.of_groups[id(expr)]}[{self.elements_of_piece()} + i])"
        return super().written(expr)

    def elements_of_piece(self) -> str:
        """Where a piece's elements begin in scratch memory, as text."""
        return f"item_at[{self.grid('elements', HITS)} * (pieces + 1) + p]"

    def group_values(self, s: Selection) -> list[Expr]:
        """The element values of groups that fields over the selection and states at it need."""
        kept = [k.expr for one in self.prog.passes for k in one.kept if k.expr.type.of == s.name]
        found = [e.args[0] for e in walk(*kept) if e.op == "gather"]
        states = [x.expr for one in self.prog.passes for x in one.sinks if x.kind == "state"]
        chosen = [e for e in states if e.op == "where" and e.args[0].op == "in"]
        found += [e.args[1] for e in chosen if e.args[0].value == s.name]
        return list({id(e): e for e in found if of_group(e)}.values())

    def hits_in_groups(self, s: Selection) -> None:
        """Bytes that tell which elements are selected, and how many are before each block's."""
        values = self.group_values(s)
        grid = self.grid("elements", HITS)
        mask = self.memory(f"mask_{s.name}", "uint8", str(grid))
        for e in values:
            kind = "float32" if e.type.dtype == "float" else "uint32"
            name = self.memory(f"value{len(self.of_groups)}_{s.name}", kind, str(grid))
            self.of_groups[id(e)] = name
        with self.kernel(f"hits_{s.name}", 0, self.shape.threads):
            self.of_grid(0)
            self.piece_arrays()
            self.mask_tiles(s.key, values, f"{mask} + {self.elements_of_piece()}")
        with self.over_hits(f"counts_{s.name}", s):
            self.add(f"if (threadIdx.x == 0) hits_{s.name}[blockIdx.x] = all;")

    def mask_tiles(self, key: Expr, values: list[Expr], mask: str) -> None:
        loops = [key, *values]
        self.add(f"u8* const mask = {mask};")
        with self.of_tiles(*loops):
            self.prepare_groups(*loops)
            with self.each():
                self.add("if (i >= m) continue;")
                self.add(f"const bool hit = {self.text(key)};")
                self.add("mask[o + i] = hit;")
                for e in values:
                    cast = "" if e.type.dtype == "float" else "(u32)(i32)"
                    to = f"{self.of_groups[id(e)]}[{self.elements_of_piece()} + o + i]"
                    self.add(f"if (hit) {to} = {cast}({self.text(e)});")

    @contextmanager
    def over_hits(self, name: str, s: Selection) -> Iterator[None]:
        """A kernel with a thread for eight elements from `i` on; `before` of its block's are hits."""
        grid = self.grid("elements", HITS)
        self.memory(f"hits_{s.name}", "int64", f"{grid}b")
        with self.kernel(name, grid, THREADS):
            self.of_grid(grid)
            self.piece()
            self.add(f"const u8* const mask = mask_{s.name} + items[p];")
            self.add(f"const i64 i = own * {HITS} + 8 * threadIdx.x;")
            self.add("int hits = 0;")
            self.add("for (int k = 0; k < 8; ++k) hits += i + k < n ? mask[i + k] : 0;")
            self.add("i64 all;")
            self.add(f"const i64 before = block_scan<{THREADS}>(hits, &all);")
            yield

    def sum_hits_in_groups(self, s: Selection) -> None:
        begin = f"first[{self.grid('elements', HITS)} * (pieces + 1) + p"
        with self.once_a_piece(f"sum_{s.name}_", THREADS):
            blocks = f"hits_{s.name} + {begin}], {begin} + 1] - {begin}]"
            self.add(f"const i64 count = scan_array({blocks});")
            self.add(f"const i64 limit = {self.limit(s.name)};")
            self.add(f"if (threadIdx.x == 0) {self.kept(s.name)} = count < limit ? count : limit;")

    def positions_in_groups(self, s: Selection, idx: str) -> None:
        with self.over_hits(f"positions_{s.name}", s):
            self.add(f"i64 rank = hits_{s.name}[blockIdx.x] + before;")
            self.add(f"const i64 limit = {self.limit(s.name)};")
            self.add(f"i64* const to = {idx};")
            with self.block("for (int k = 0; k < 8; ++k)"):
                self.add("if (i + k >= n || !mask[i + k]) continue;")
                self.add("if (rank < limit) to[rank] = i + k;")
                self.add("++rank;")

    # how many are selected

    def number(self, name: str) -> int:
        """Of a selection."""
        return [s.name for s in self.module.selections].index(name)

    def kept(self, name: str) -> str:
        """How many elements a selection has."""
        count = len(self.module.selections)
        return f"{self.memory('kept', 'int64', 'piece', count)}[p * {count} + {self.number(name)}]"

    def limit(self, name: str) -> str:
        """How many elements a selection may have."""
        return f"limits[p * {len(self.module.selections)} + {self.number(name)}]"
