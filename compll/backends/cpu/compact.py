"""Selected elements of a tile, put together in order: their positions and what is captured."""

from __future__ import annotations

from compll.backends.cpu.capture import NUMPY, Capturing
from compll.backends.cpu.text import SLACK, STEP
from compll.ir.expr import Expr, walk
from compll.ir.module import Selection

#: elements that are looked at together, where a tile has as many; arrays that one call squeezes
PASSED, ARRAYS = 64, 4
#: positions that are held before they are written
HELD = 2048


class Compacting(Capturing):
    """Encoder that compacts: hit_NAME tells a tile's selected elements, k_NAME counts all."""

    def scratch(self) -> None:
        """Also a mask of a tile's hits for each selection."""
        super().scratch()
        for s in self.module.selections:
            self.add(f"hit_{s.name} = np.empty({self.tile}, np.uint8)")
        for name in sorted(self.widened()):
            self.add(f"full_{name} = np.empty({self.tile}, np.float32)")

    def widened(self) -> set[str]:
        """The states of 16 bits that are captured."""
        captured = {leaf[2:] for s in self.module.selections for leaf in self.captured(s)}
        return captured & self.halves.keys()

    def open_selection(self, s: Selection) -> None:
        number = [x.name for x in self.module.selections].index(s.name)
        room = f"limit_{s.name} + {self.tile + SLACK}"
        self.add(f"limit_{s.name} = lim[p, {number}]")
        self.add(f"k_{s.name} = 0")
        if self.streamed(s):
            self.add(f"i_{s.name} = np.empty({HELD + self.tile + SLACK}, np.int64)")
            self.add(f"end_{s.name}, last_{s.name}, gone_{s.name} = end, np.int64(-1), 0")
        elif self.placed(s):
            self.add(f"i_{s.name} = np.empty({room}, np.int64)")
        for leaf in self.captured(s):
            self.add(f"{leaf}_{s.name} = np.empty({room}, np.float32)")
        for number, e in enumerate(self.whole(s).values()):
            self.add(f"v{number}_{s.name} = np.empty({room}, {NUMPY[e.type.dtype]})")
        if s.kind == "top" and s.threshold is not None:
            # A `top` has its threshold from a kth_largest of its own, which is never guarded.
            threshold = self.scalar(s.threshold)
            self.add(f"t_{s.name} = key(f32({threshold}))")
            self.add(f"ties_{s.name} = limit_{s.name} - larger_{threshold}")

    def compact(self, s: Selection) -> None:
        """Append what is selected of the tile; see [Note: squeezing]."""
        values = list(self.whole(s).values())
        self.ready_for(s.key, *values)
        name, hit = s.name, f"hit_{s.name}"
        self.ahead()
        with self.block(f"for i in range({self.tile}):"):
            key = self.text(s.key, "i")
            test = key if s.kind == "filter" else f"(key({key}) >= t_{name})"
            self.add(f"{hit}[i] = b_code({test})")
        with self.block(f"for i in range(m, {self.tile}):"):
            self.add(f"{hit}[i] = u8(0)")
        if s.kind == "top":
            self.ties(s)
        sources = self.sources(s, values)
        if self.tile < STEP:
            self.one_by_one(s, sources)
        else:
            self.squeeze(s, sources)
        self.found(name)
        with self.block(f"if k_{name} > limit_{name}:"):
            self.add(f"cut_hits({hit}, k_{name} - limit_{name})")
            self.add(f"k_{name} = limit_{name}")
        if self.streamed(s):
            with self.block(f"if k_{name} - gone_{name} > {HELD}:"):
                self.flush(name)
                self.add(f"last_{name} = i_{name}[k_{name} - gone_{name} - 1]")
                self.add(f"gone_{name} = k_{name}")

    def flush(self, name: str) -> None:
        """Write the positions that are held."""
        given = f"i_{name}, k_{name} - gone_{name}, out, end_{name}, last_{name}"
        self.add(f"end_{name} = store_gaps({given})")

    def streamed(self, s: Selection) -> bool:
        """Whether positions go straight to the payload: into its first field of unknown size, as
        gaps, and nowhere else."""
        one = next((one for one in self.prog.passes if one.selections), None)
        if one is None or one.selections[0].name != s.name or self.states(s):
            return False
        field = next((k.field for k in one.kept if k.expr.type.of == s.name), None)
        if field is None or field is not one.kept[0].field or field.storage != "gaps":
            return False
        positions = [e for e in walk(*self.needed(s)) if e.op in ("indices", "uniform")]
        uses = [x for x in walk(*self.needed(s)) if positions and positions[0] in x.args]
        return len(positions) == 1 and not uses

    def ties(self, s: Selection) -> None:
        """Of elements as large as the threshold only the first are selected, as many as fit."""
        key, name = self.text(s.key, "i"), s.name
        self.add("z = i32(0)")
        with self.block("for i in range(m):"):
            self.add(f"z = i_add(z, i_of_b(key({key}) == t_{name}))")
        with self.block(f"if i64(z) > ties_{name}:"):
            with self.block("for i in range(m):"):
                with self.block(f"if key({key}) == t_{name}:"):
                    self.add(f"hit_{name}[i] = u8(ties_{name} > 0)")
                    self.add(f"ties_{name} -= i64(ties_{name} > 0)")
        with self.block("else:"):
            self.add(f"ties_{name} -= i64(z)")

    def sources(self, s: Selection, values: list[Expr]) -> dict[str, str]:
        """Arrays of a tile's elements, by the array that their selected ones go to."""
        found = {}
        for leaf in self.captured(s):
            state = leaf[2:]
            found[leaf] = "g_" if leaf == "cg" else f"{state}_"
            if leaf != "cg" and state in self.halves:
                found[leaf] = f"full_{state}"
                with self.block(f"for i in range({self.tile}):"):
                    self.add(f"full_{state}[i] = {self.held(state, f'{state}_[i]')}")
        for number, e in enumerate(values):
            found[f"v{number}"] = self.buffer(e, f"bool{number}_{s.name}")
        return {f"{array}_{s.name}": source for array, source in found.items()}

    def buffer(self, e: Expr, flags: str) -> str:
        """An array of the tile's values; `flags` is the name for one of conditions."""
        if e.type.dtype != "bool":
            if id(e) not in self.buffers:
                self.fill_buffer(e)
            return self.buffers[id(e)]
        self.allocated.add(flags)
        with self.block(f"for i in range({self.tile}):"):
            self.add(f"{flags}[i] = f_of_b({self.text(e, 'i')})")
        return flags

    def squeeze(self, s: Selection, sources: dict[str, str]) -> None:
        name, pairs = s.name, list(sources.items())
        step = PASSED if self.tile >= PASSED else STEP
        self.add(f"taken = k_{name}")
        for first in range(0, max(1, len(pairs)), ARRAYS):
            some = [x for out, source in pairs[first : first + ARRAYS] for x in (source, out)]
            call, given = "squeeze", [f"hit_{name}", "o", "taken"]
            if first == 0 and self.placed(s):
                call, before = "place", f"gone_{name}" if self.streamed(s) else "0"
                given += [f"i_{name}", before]
            self.add(f"k_{name} = {call}{step}_{len(some) // 2}({', '.join(given + some)})")

    def one_by_one(self, s: Selection, sources: dict[str, str]) -> None:
        """The same for tiles that are shorter than a step."""
        name = s.name
        with self.block(f"for i in range({self.tile}):"):
            if self.placed(s):
                gone = f" - gone_{name}" if self.streamed(s) else ""
                self.add(f"i_{name}[k_{name}{gone}] = o + i")
            for array, source in sources.items():
                self.add(f"{array}[k_{name}] = {source}[i]")
            self.add(f"k_{name} += i64(hit_{name}[i])")

    def found(self, name: str) -> None:
        """What else follows from how many a tile has added to k_NAME, before they are cut off."""

    def leaf(self, expr: Expr, i: str) -> str:
        """Within the walk that selects, whether an element was selected is in the mask."""
        if expr.op == "in":
            return f"is_hit(hit_{expr.value}[{i}])"
        return super().leaf(expr, i)
