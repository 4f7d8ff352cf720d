"""Which elements a selection takes, and where: hits of a walk, compacted to positions in order.

A walk finds the hits of every tile, as bits and counts; the counts are summed up; a second walk
over the tiles that have hits writes positions.
"""

from __future__ import annotations

from compll.backends.cuda.groups import Grouping
from compll.ir.module import Selection

ITEMS = 256  # selected elements of a block


class Hits(Grouping):
    """Encoder that finds the elements of selections."""

    def select(self, s: Selection) -> None:
        """The kernels after which the positions of a selection are known."""
        if self.module.group:
            self.select_in_groups(s)
            return
        self.find_hits(s)
        self.sum_hits(s)
        self.positions(s)

    def threshold(self, s: Selection) -> str:
        return f"key((float)({self.scalar(s.threshold)}))" if s.threshold is not None else ""

    def find_hits(self, s: Selection) -> None:
        """The walk that evaluates the key: bits and counts of every tile."""
        more, tied = f"more_{s.name}", f"tied_{s.name}"
        kinds = [more, tied] if s.kind == "top" else [more]
        for name in kinds:
            self.memory(name, "uint32", "0", 32)
            self.memory(f"{name}_at", "int64", "0")
        with self.kernel(f"hits_{s.name}", 0, self.shape.threads):
            self.of_grid(0)
            self.piece_arrays()
            if s.kind == "top":
                self.add(f"const i32 least = {self.threshold(s)};")
            self.hits_of_tiles(s, kinds)

    def hits_of_tiles(self, s: Selection, kinds: list[str]) -> None:
        with self.of_tiles(s.key):
            for name in kinds:
                self.add(f"Hits h_{name} = {{0, 0}};")
            with self.each():
                if s.kind == "filter":
                    self.add(f"hits_add(h_{kinds[0]}, e, i < m && ({self.text(s.key)}), u);")
                else:
                    self.add(f"const i32 y = {self.key(s.key)};")
                    self.add(f"hits_add(h_{kinds[0]}, e, i < m && y > least, u);")
                    self.add(f"hits_add(h_{kinds[1]}, e, i < m && y == least, u);")
            with self.block("if (m)"):
                for name in kinds:
                    self.add(f"{name}[(items[p] + t) * 32 + u] = h_{name}.own;")
                    self.add(f"if (u == 0) {name}_at[items[p] + t] = h_{name}.count;")

    def sum_hits(self, s: Selection) -> None:
        with self.once_a_piece(f"sum_{s.name}_", 256):
            self.add(f"i64 count = scan_array(more_{s.name}_at + item_at[p], tiles);")
            if s.kind == "top":
                self.add(f"const i64 ties = scan_array(tied_{s.name}_at + item_at[p], tiles);")
                self.add(f"const i64 allowed = {self.allowed(s)};")
                self.add("count += ties < allowed ? ties : allowed;")
            self.add(f"const i64 limit = {self.limit(s.name)};")
            self.add(f"if (threadIdx.x == 0) {self.kept(s.name)} = count < limit ? count : limit;")

    def allowed(self, s: Selection) -> str:
        """How many elements equal to the threshold of a `top` are taken."""
        assert s.threshold is not None
        return f"{self.limit(s.name)} - (i64){self.result(self.larger_slot(s.threshold))}"

    def positions(self, s: Selection) -> None:
        grid = self.grid("kept", ITEMS, s.name)
        idx = self.memory(f"idx_{s.name}", "int64", str(grid))
        with self.kernel(f"positions_{s.name}", 0, self.shape.threads):
            self.of_grid(0)
            self.piece()
            self.add("const int u = threadIdx.x % 32, team = threadIdx.x / 32;")
            self.add(f"const i64 tile_first = own * {self.shape.tiles}, offset = 0;")
            with self.block(f"for (int turn = 0; turn < {self.shape.turns}; ++turn)"):
                self.tile_head()
                self.add("if (m == 0) continue;")
                self.add(f"const u32 a = more_{s.name}[(items[p] + t) * 32 + u];")
                tied = f"tied_{s.name}[(items[p] + t) * 32 + u]" if s.kind == "top" else "0"
                self.add(f"const u32 b = {tied};")
                self.add("if (!__any_sync(FULL, a | b)) continue;")
                ties = f"tied_{s.name}_at[items[p] + t]" if s.kind == "top" else "0"
                allowed = self.allowed(s) if s.kind == "top" else "0"
                to = f"{idx} + item_at[{grid} * (pieces + 1) + p]"
                self.add(
                    f"compact(a, b, more_{s.name}_at[items[p] + t], {ties}, {allowed}, {self.limit(s.name)}, {to}, o, u);"
                )

    def select_in_groups(self, s: Selection) -> None:
        self.hits_in_groups(s)
        self.sum_hits_in_groups(s)
        grid = self.grid("kept", ITEMS, s.name)
        idx = self.memory(f"idx_{s.name}", "int64", str(grid))
        self.positions_in_groups(s, f"{idx} + item_at[{grid} * (pieces + 1) + p]")
