"""From passes to the text of numba kernels.

A kernel loops over the pieces of a batch; a piece over tiles; within a tile every step is a short
loop with a constant number of turns over data in the first-level cache, which LLVM turns into
full-width vector code. A last, shorter tile is copied into padded scratch first, so that one body
serves both. Shared subexpressions live in tile-sized buffers.
"""

from __future__ import annotations

from compll.backends.cpu.pack import Packing
from compll.backends.cpu.states import WORDS
from compll.backends.cpu.text import shared
from compll.backends.cpu.values import draws, size_text
from compll.ir.expr import Expr, leaves, walk
from compll.ir.layout import header
from compll.ir.module import Selection
from compll.ir.program import Pass, Program
from compll.numerics.numbers import lane_count


class Encoder(Packing):
    """Emits the encode kernel of a program."""

    #: further parameters of the kernel
    extra = ""

    def __init__(self, program: Program, feed: bool) -> None:
        super().__init__(program.module, program)
        self.prog, self.feed = program, feed
        self.allocated: set[str] = set()
        self.take([s for s in program.module.states if feed])

    def kernel(self) -> str:
        """The text of `encode`."""
        states = "".join(f", a_{s}" for s in self.elementwise + self.per_tensor)
        given = "x, table, out, at, used, lim, st, seed, step, scale, back"
        with self.block(f"def encode({given}{self.extra}{states}):"):
            self.scratch()
            with self.block("for p in range(table.shape[0]):"):
                self.piece()
        kinds = {"b": "float32", "c": "int32"}
        self.lines[self.scratch_at : self.scratch_at] = [
            f"    {b} = np.empty({self.tile}, np.{kinds[b[0]]})" for b in sorted(self.allocated)
        ]
        return str(self)

    def scratch(self) -> None:
        tile = self.tile
        self.add(f"acc = np.empty({lane_count(tile)}, np.float32)")
        self.add(f"red = np.empty({tile}, np.float32)")
        self.add(f"g_tail = np.empty({tile}, np.float32)")
        for s in self.elementwise:
            self.add(f"{s}_tail = np.empty({tile}, np.{WORDS[s in self.halves]})")
        for f in self.module.fields:
            if f.packed and f.shape == "n":
                self.add(f"q_{f.name} = np.empty({tile + 4 * f.trits}, np.uint8)")
        for one in self.prog.passes:
            for result in self.poured(one):
                self.make_room(result)
        walks = [
            e
            for one in self.prog.passes
            for e in (*self.drawing(one), *(s.expr for s in one.sinks))
        ]
        if draws(*walks):
            self.add(f"spread = np.empty({tile}, np.uint32)")
            with self.block(f"for i in range({tile}):"):
                self.add("spread[i] = weyl(u32(i))")
        self.scratch_at = len(self.lines)

    def piece(self) -> None:
        self.add("n = table[p, 1]")
        with self.block("if n == 0:"):
            self.add("continue")
        self.statics_here()
        self.add("tensor = table[p, 2]")
        self.add("first = table[p, 3]")
        self.add("base = at[p]")
        self.add("xs = x[table[p, 0] : table[p, 0] + n]")
        for s in self.elementwise:
            self.add(f"s_{s} = a_{s}[table[p, 4] : table[p, 4] + n]")
        for s in self.per_tensor:
            self.add(f"s_{s} = a_{s}")
        self.add(f"tiles = (n + {self.tile - 1}) // {self.tile}")
        self.add("bad = i32(0)")
        self.starts()
        for one in self.prog.passes:
            self.one_pass(one)
        for sink in self.prog.scalars:
            self.scalar_sink(sink)
        self.in_order()
        self.shorten()
        if self.module.status:
            self.add("out[end] = np.uint8(1) if bad >= i32(0x7F800000) else np.uint8(0)")
            self.add("end += 1")
        self.add("used[p] = end - base")

    def shorten(self) -> None:
        """Fields of runs, which come last: written in full, they are shortened where they stand."""
        counted, varying = header(self.module)
        runs = [f for f in self.module.fields if f.storage == "runs"]
        for number, f in enumerate(runs):
            self.add(f"end_{f.name} = {f'at_{f.name}' if number == 0 else 'end'}")
            size = size_text(f, self.tile)
            self.add(f"end = shorten_runs(out, at_{f.name}, {size}, end_{f.name})")
            place = 4 * (len(counted) + varying.index(f.name))
            self.add(f"store_uint32(out, base + {place}, end - end_{f.name})")

    def starts(self) -> None:
        """Where the fields of fixed size begin."""
        self.add(f"end = base + {4 * sum(map(len, header(self.module)))}")
        for f in self.module.fields:
            if f.shape != "kept":
                self.add(f"at_{f.name} = end")
                self.add(f"end += {size_text(f, self.tile)}")
                if self.poured_as(f):
                    self.add(f"all_{f.name} = out[at_{f.name} : end]")

    # one walk over the tiles

    def one_pass(self, one: Pass) -> None:
        for expr in one.scalars:
            if (
                expr.op not in ("reduce_sum", "reduce_max", "reduce_min")
                or expr.args[0].type.shape == "kept"
            ):
                self.compute_scalar(expr)
        for s in one.selections:
            self.open_selection(s)
        loops = one.reductions or one.selections or one.status or one.sinks
        if loops:
            self.guarded_tiles(one)
        for expr in one.late:
            self.compute_scalar(expr)
        for s in one.selections:
            self.close_selection(s, one)

    def guarded_tiles(self, one: Pass) -> None:
        """The walk, or nothing where all that it finds is in a branch that is not taken."""
        guard = self.prog.guard(one)
        if guard is None:
            return self.tiles(one)
        condition, wanted = guard
        at = len(self.lines)
        with self.block(f"if {'' if wanted else 'not '}{self.scalar(condition)}:"):
            self.tiles(one)
        zero = [f"{'    ' * len(self.heads)}{self.names[id(e)]} = 0.0" for e in one.reductions]
        self.lines[at:at] = zero
        return None

    def tiles(self, one: Pass) -> None:
        roots = [e.args[0] for e in one.reductions] + [self.walked(s) for s in one.sinks]
        for number in draws(*self.drawing(one)):
            self.draw(number, "first")
        if self.module.group == 0:
            self.prepare(*roots, *(s.key for s in one.selections))
            for expr in one.reductions:
                self.open_reduction(expr)
        with self.pouring(*self.poured(one)), self.block("for t in range(tiles):"):
            self.tile_body(one)
        self.forget()
        if self.module.group == 0:
            for expr in one.reductions:
                self.close_reduction(expr)
            for expr in self.telling(one):
                self.add(f"bad = i_max(bad, abs_bits(unkey(best_{self.names[id(expr)]})))")

    def forget(self) -> None:
        """Names and buffers of a tile do not outlive it."""
        self.buffers.clear()
        self.codes.clear()
        for key in list(self.local):
            self.names.pop(key, None)
        self.local.clear()

    def tile_body(self, one: Pass) -> None:
        tile = self.tile
        self.add(f"o = t * {tile}")
        self.add(f"m = min({tile}, n - o)")
        self.add("e = first + o")
        self.inputs()
        self.now = one
        self.evenly = self.long(one)
        for name in self.buckets.values():
            self.add(f"{name}_ = {name}[o : o + {tile}]")
        self.open_tile(self.poured(one), *self.reads(one))
        loops = self.loops(one)
        for number in draws(*self.drawing(one)):
            with self.block(f"if e >> 32 != r{number}h:"):
                self.draw(number, "e")
            self.add(f"r{number}c = counter(u32(e), r{number}a)")
        self.make_buffers(loops, one)
        if self.module.group == 0:
            self.tile_reductions(one)
        elif one.status:
            self.status_loop()
        self.tile_steps(one)
        self.close_ahead()
        self.write_tail(one)

    def reads(self, one: Pass) -> tuple[str, ...]:
        """The arrays that the walk of a pass reads."""
        roots = [e.args[0] for e in one.reductions] + [s.key for s in one.selections]
        roots += [s.expr for s in one.sinks if s.kind != "state"]
        roots += [e for _, e in self.changed(one.sinks)]
        roots += [self.prog.gradient] if one.status else []
        return tuple(map(self.array_of, leaves(*roots)))

    @staticmethod
    def array_of(leaf: str) -> str:
        """The name of a piece's part of the gradient, or of a state."""
        return "xs" if leaf == "g" else f"s_{leaf}"

    def inputs(self) -> None:
        """Names for the tile's gradients and states; a short tile is copied into padded scratch."""
        with self.block(f"if m == {self.tile}:"):
            self.add(f"g_ = xs[o : o + {self.tile}]")
            self.slices(self.elementwise)
        with self.block("else:"):
            self.copy_tail("g", "xs")
            for s in self.elementwise:
                self.copy_tail(s, f"s_{s}")

    def slices(self, states: list[str]) -> None:
        for s in states:
            self.add(f"{s}_ = s_{s}[o : o + {self.tile}]")

    def copy_tail(self, name: str, source: str) -> None:
        self.add(f"{name}_ = {name}_tail")
        self.add(f"fill_tail({name}_, {source}, o, m)")

    def write_tail(self, one: Pass) -> None:
        states = [name for name, _ in self.changed(one.sinks)]
        back = any(s.kind == "back" for s in one.sinks)
        if not states and not back:
            return
        with self.block(f"if m < {self.tile}:"):
            for s in states:
                self.add(f"keep_tail({s}_, s_{s}, o, m)")
            if back:
                self.add("keep_tail(g_, xs, o, m if back else 0)")

    def loops(self, one: Pass) -> list[Expr]:
        """The element expressions that get a loop each; the write-back is rare and does not count."""
        roots = [e.args[0] for e in one.reductions] + [s.key for s in one.selections]
        sinks = [s for s in one.sinks if s.expr.type.shape == "n" and s.kind != "back"]
        roots += [self.walked(s) for s in sinks]
        return roots + ([self.prog.gradient] if one.status else [])

    def drawing(self, one: Pass) -> list[Expr]:
        """What a walk may draw for: a grouped spec computes selected values, too, within it."""
        back = [self.walked(s) for s in one.sinks if s.kind == "back"]
        return self.loops(one) + back + ([s.expr for s in one.kept] if self.module.group else [])

    def make_buffers(self, loops: list[Expr], one: Pass) -> None:
        """Compute shared values that depend on no reduction of this tile."""
        packed = {s.name for s in one.sinks if s.field is not None and s.field.packed}
        self.pending = shared(loops, 2, lambda e: e.op == "code" and e.value in packed)
        self.available()

    def available(self) -> None:
        """Fill the buffers whose inputs are known by now."""
        for e in list(self.pending):
            if all(
                a.op != "lift" or a.args[0].type.shape != "group" or self.ready(a.args[0])
                for a in walk(e)
            ):
                self.pending.remove(e)
                self.fill_buffer(e)

    def ready(self, expr: Expr) -> bool:
        return all(not e.op.startswith("reduce_") or id(e) in self.names for e in walk(expr))

    def fill_buffer(self, expr: Expr) -> None:
        kind = "c" if expr.type.dtype == "int" else "b"
        taken = sum(v[0] == kind for v in self.buffers.values())
        self.prepare(expr)
        self.ahead()
        with self.block(f"for i in range({self.tile}):"):
            self.add(f"{kind}{taken}[i] = {self.text(expr, 'i')}")
        self.buffers[id(expr)] = f"{kind}{taken}"
        self.allocated.add(f"{kind}{taken}")

    def tile_steps(self, one: Pass) -> None:
        for s in one.selections:
            self.compact(s)
        for sink in one.sinks:
            if sink.kind == "field":
                self.step_field(sink)
        self.overwrite([s for s in one.sinks if s.kind != "field"])

    def ready_for(self, *roots: Expr) -> None:
        """Emit everything that a loop over these expressions needs before it."""
        for root in roots:
            self.prepare_groups(root)
        self.available()
        self.prepare(*roots)

    def prepare_groups(self, expr: Expr) -> None:
        for e in walk(expr):
            if e.op == "lift" and e.args[0].type.shape == "group":
                self.group(e.args[0])

    def leaf(self, expr: Expr, i: str) -> str:
        tile = self.where == "tile"
        if expr.op == "input":
            return f"({'g_' if tile else 'xs'}[{i}] * scale)"
        if expr.op == "state":
            name = str(expr.value)
            return self.held(name, f"{name}_[{i}]" if tile else f"s_{name}[{i}]")
        raise NotImplementedError(expr.op)

    # library calls and selections: Selecting, in cpu/select.py, gives these a body

    def library(self, expr: Expr, name: str) -> None:
        raise NotImplementedError

    def in_order(self) -> None:
        """Put fields of selections, which are written one selection at a time, in their order."""

    def open_selection(self, s: Selection) -> None:
        raise NotImplementedError

    def compact(self, s: Selection) -> None:
        raise NotImplementedError

    def close_selection(self, s: Selection, one: Pass) -> None:
        raise NotImplementedError
