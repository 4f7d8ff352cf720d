"""From passes to CUDA kernels: one over tiles for each pass, and one over pieces before it for the
tensor-level values. A grouped codec is one kernel.

Tiles leave parts of their reductions in scratch memory; a block per piece adds them up in the
order of [Note: order of sums]. Nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Sequence

from compll.backends.cuda.sinks import Sinks
from compll.ir.expr import Expr
from compll.ir.module import WHOLE
from compll.ir.program import LIBRARY, Pass, Program, Sink, Unsupported

BASE = (
    "XT* __restrict__ x", "const i64* table", "const i64* first", "const i64* item_at", "int pieces", "u8* __restrict__ out",
    "const i64* at", "const i64* limits", "const double* st", "int statics", "u64 seed",
    "u64 base_step", "const u64* tick", "float scale", "int back", "i64* used",
)  # fmt: skip


class Encoder(Sinks):
    """Emits the kernels of an encode; `steps` is the order in which they run."""

    def __init__(self, program: Program, feed: bool, prefix: str, threads: int = 256) -> None:
        super().__init__(program, feed, prefix, threads)
        states_given = self.kept_states.params(self.states)
        self.fixed_params = (*BASE, *self.extra_params(), *states_given)
        self.parts: dict[int, int] = {}
        self.emit()
        self.memory("sc", "float64", "piece", max(1, len(self.slots)))
        self.memory("part", "uint32", "0", max(1, len(self.parts)))

    def emit(self) -> None:
        if self.module.status:
            self.memory("flags", "uint32", "piece")
        for number, one in enumerate(self.prog.passes):
            sinks = self.prog.scalars if number == len(self.prog.passes) - 1 else ()
            self.values(number, one, () if one.late else sinks)
            self.before_tiles(one, sinks if one.late else ())
            if one.reductions or one.status or any(map(self.leaves_tile, one.sinks)):
                resident = self.resident(self.loops(one))
                with self.kernel(f"pass{number}", 0, self.shape.threads, resident=resident):
                    self.over_tiles(one)
            self.after_tiles(one)
        self.after_passes()
        if self.module.status:
            with self.kernel("end", -1, 32):
                self.end()

    def extra_params(self) -> tuple[str, ...]:
        """Further parameters of the kernels."""
        return ()

    def leaves_tile(self, sink: Sink) -> bool:
        """Whether a sink of a pass is written by its walk over the tiles."""
        return True

    # selections: Selecting, in cuda/select.py, gives these a body

    def before_tiles(self, one: Pass, sinks: Sequence[Sink]) -> None:
        if one.selections:
            raise Unsupported("a selection")

    def after_tiles(self, one: Pass) -> None:
        pass

    def after_passes(self) -> None:
        """What follows the last walk."""

    def library(self, expr: Expr) -> None:
        raise Unsupported(expr.op)

    def special(self, expr: Expr) -> str | None:
        """The text of a tensor-level value that comes from a selection, or nothing."""
        if expr.op.startswith("reduce_") and expr.args[0].type.shape == "kept":
            raise Unsupported("a reduction over a selection")
        return None

    # tensor-level values

    def values(self, number: int, one: Pass, sinks: Sequence[Sink]) -> None:
        """The kernels over pieces before a pass: reductions end, scalars and their fields."""
        ended = self.prog.passes[number - 1].reductions if number else []
        ended = [] if self.module.group else ended
        some: list[Expr] = []
        for expr in (*ended, *one.scalars):
            if id(expr) in self.slots:
                continue
            if expr.op in LIBRARY:
                self.values_kernel(some)
                self.library(expr)
                some = []
            else:
                some.append(expr)
        self.values_kernel(some, sinks)

    def values_kernel(self, wanted: list[Expr], sinks: Sequence[Sink] = ()) -> None:
        if not wanted and not sinks:
            return
        with self.kernel(f"values{len(self.steps)}", -1, 128):
            self.add("const int p = blockIdx.x;")
            self.piece()
            self.add("if (n == 0) return;")
            for expr in wanted:
                self.compute(expr)
            with self.block("if (threadIdx.x == 0)"):
                for expr in wanted:
                    self.add(f"sc[p * @SLOTS@ + {self.slots[id(expr)]}] = {self.names[id(expr)]};")
                self.starts()
                for sink in sinks:
                    self.scalar_sink(sink)

    def slot(self, expr: Expr) -> int:
        """Where an expression's value is kept between kernels."""
        return self.slots.setdefault(id(expr), len(self.slots))

    def compute(self, expr: Expr) -> None:
        """One tensor-level value; its arguments are there already."""
        special = self.special(expr)
        if special is not None:
            text = special
        elif expr.op.startswith("reduce_"):
            text = self.closing(expr)
        elif expr.op == "state":
            text = f"(double)a_{expr.value}[table[5 * p + 2]]"
        else:
            text = f"(double)({self.arithmetic(expr)})"
        self.declare(expr, "double", "s", text)
        self.slot(expr)

    def finished(self) -> str:
        """The text of all kernels."""
        return super().finished().replace("@SLOTS@", str(max(1, len(self.slots))))

    def closing(self, expr: Expr) -> str:
        parts = f"part + {self.parts[id(expr)]} * item_at[pieces] + item_at[p], tiles"
        if expr.op == "reduce_sum":
            return f"block_total({parts})"
        largest = "true" if expr.op == "reduce_max" else "false"
        return f"(double)unkey(block_extreme({parts}, {largest}))"

    def scalar_sink(self, sink: Sink) -> None:
        value = self.scalar(sink.expr)
        if sink.kind == "state":
            name = f"y_{sink.name}"
            self.add(f"const double {name} = {value};")
            self.add(f"if (isfinite({name})) a_{sink.name}[table[5 * p + 2]] = (float){name};")
            return
        assert sink.field is not None
        f = sink.field
        cast = "i64" if f.storage in WHOLE else "float"
        self.add(f"store_{f.storage}(out + at_{f.name}, ({cast})({value}));")

    def end(self) -> None:
        """The status byte; the flag is cleared for the next call."""
        self.add("const int p = blockIdx.x;")
        self.piece()
        self.add("if (n == 0 || threadIdx.x != 0) return;")
        self.starts()
        self.add(f"out[{self.payload_end()}] = flags[p] ? 1 : 0;")
        self.add("flags[p] = 0;")

    def payload_end(self) -> str:
        """Where the status byte stands."""
        return "end"

    # one walk over the tiles

    def over_tiles(self, one: Pass) -> None:
        loops = self.loops(one)
        self.place()
        self.add("const i64 offset = table[5 * p + 3], tensor = table[5 * p + 2];")
        self.add("const u64 step = base_step + (tick ? *tick : 0);")
        self.add("XT* const xs = x + table[5 * p];")
        for s in self.elementwise:
            self.add(self.kept_states.view(s))
        self.starts()
        self.keys(loops)
        self.prepare(*loops)
        self.leaves = self.leaves_of(loops)
        written = [s.field for s in one.sinks if s.field is not None and self.leaves_tile(s)]
        self.room_for_codes(written)
        self.find_divisions(loops)
        leaves = bool(self.hard_divisions())
        with self.team_tiles(loops, *self.fields_ready(written), leaves=leaves):
            self.tile_body(one, loops)
        self.forget_divisions()

    def loops(self, one: Pass) -> list[Expr]:
        """The element and group expressions of a pass."""
        found = [e.args[0] for e in one.reductions]
        found += [self.outside(s) for s in one.sinks if self.leaves_tile(s)]
        return found + ([self.prog.gradient] if one.status else [])

    def tile_body(self, one: Pass, loops: list[Expr]) -> None:
        if self.shape.chunks == 1:
            self.load("0")
        if one.status:
            self.status()
        for expr in one.reductions:
            if self.module.group == 0:
                self.part(expr)
        if self.hard_divisions():
            self.leave_hard(loops)
        sinks = [s for s in one.sinks if self.leaves_tile(s)]
        for sink in sinks:
            if sink.kind == "field":
                self.field(sink)
        self.overwrite([s for s in sinks if s.kind != "field"])

    def status(self) -> None:
        self.add("float none = 0.0f;")
        with self.each():
            value = self.text(self.prog.gradient)
            self.add(
                f"if (i < m) none = __fmaf_rn({value}, 0.0f, none);  // NaN of what is not finite"
            )
        self.add("if (is_nan(none)) atomicOr(&flags[p], 1u);")

    def part(self, expr: Expr) -> None:
        """A tile's part of a tensor-level reduction."""
        number = self.parts.setdefault(id(expr), len(self.parts))
        value = self.reduction(expr)
        bits = f"(u32)__float_as_int({value})"
        if expr.op != "reduce_sum":
            bits = f"(u32)key({value})"
        name = self.name("w")
        self.add(f"const u32 {name} = {bits};")
        self.add(f"if (m && u == 0) part[{number} * item_at[pieces] + item_at[p] + t] = {name};")
