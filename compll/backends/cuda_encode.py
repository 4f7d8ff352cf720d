"""From passes to CUDA kernels: one over tiles for each pass, and one over pieces before it for the
tensor-level values. A grouped codec is one kernel.

Tiles leave parts of their reductions in scratch memory; a block per piece adds them up in the
order of [Note: order of sums]. Nothing waits for the host.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from compll.backends.cuda_halves import Kept
from compll.backends.cuda_text import code
from compll.backends.cuda_values import Values, draws, size_text
from compll.ir import WHOLE, Expr, Field, leaves
from compll.layout import header
from compll.program import LIBRARY, Pass, Program, Sink, Unsupported

BASE = (
    "XT* x", "const i64* table", "const i64* first", "const i64* item_at", "int pieces", "u8* out",
    "const i64* at", "const i64* limits", "const double* st", "int statics", "u64 seed",
    "u64 base_step", "const u64* tick", "float scale", "int back", "i64* used",
)  # fmt: skip
BITS = {"float32": "(u32)__float_as_int({})", "float16": "float16_bits({})",
        "bfloat16": "bfloat16_bits({})"}  # fmt: skip


class Encoder(Values):
    """Emits the kernels of an encode; `steps` is the order in which they run."""

    def __init__(self, program: Program, feed: bool, prefix: str, threads: int = 256) -> None:
        super().__init__(program.module, prefix, threads)
        self.prog, self.feed = program, feed
        states = [s for s in program.module.states if feed]
        self.elementwise = [s.name for s in states if s.shape == "n"]
        self.per_tensor = [s.name for s in states if s.shape != "n"]
        self.states = (*self.elementwise, *self.per_tensor)
        self.kept_states = Kept(program.module)
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
                with self.kernel(f"pass{number}", 0, self.shape.threads):
                    self.over_tiles(one)
            self.after_tiles(one)
        self.after_passes()
        if self.module.status:
            with self.kernel("end", -1, 32):
                self.end()

    def leaves_tile(self, sink: Sink) -> bool:
        """Whether a sink of a pass is written by its walk over the tiles."""
        return True

    # selections: Selecting, in cuda_select.py, gives these a body

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

    def starts(self) -> None:
        """Where the fields of fixed size begin."""
        self.add(f"i64 end = at[p] + {4 * sum(map(len, header(self.module)))};")
        for f in self.module.fields:
            if f.shape != "kept":
                self.add(f"const i64 at_{f.name} = end; end += {size_text(f, self.tile)};")

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
        self.add(f"store_{f.access}(out + at_{f.name}, ({cast})({value}));")

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
        with self.block(f"for (int turn = 0; turn < {self.shape.turns}; ++turn)"):
            self.tile_head(loops)
            self.tile_body(one, loops)

    def keys(self, loops: list[Expr]) -> None:
        """The keys of a block's random draws, in shared memory."""
        numbers = draws(*loops)
        if numbers:
            self.add(f"__shared__ u64 keys[{2 * (numbers[-1] + 1)}];")
            at = f"offset + tile_first * {self.tile}"
            self.add(f"block_keys(keys, {numbers[-1] + 1}, seed, step, tensor, {at});")

    def tile_head(self, loops: list[Expr]) -> None:
        """Declarations of a turn, with the keys of its draws."""
        self.each_tile()
        self.add("const i64 begin = offset + o;")
        high = f"(offset + tile_first * {self.tile}) >> 32"
        for number in draws(*loops):
            self.add(f"const u64 r{number} = keys[{2 * number} + (int)((begin >> 32) - ({high}))];")

    def loops(self, one: Pass) -> list[Expr]:
        """The element and group expressions of a pass."""
        found = [e.args[0] for e in one.reductions]
        found += [self.outside(s) for s in one.sinks if self.leaves_tile(s)]
        return found + ([self.prog.gradient] if one.status else [])

    def tile_body(self, one: Pass, loops: list[Expr]) -> None:
        self.leaves = self.leaves_of(loops)
        if self.shape.chunks == 1:
            self.load("0")
        if one.status:
            self.status()
        for expr in one.reductions:
            if self.module.group == 0:
                self.part(expr)
        sinks = [s for s in one.sinks if self.leaves_tile(s)]
        for sink in sinks:
            if sink.kind == "field":
                self.field(sink)
        self.overwrite([s for s in sinks if s.kind != "field"])

    @staticmethod
    def leaves_of(loops: list[Expr]) -> list[str]:
        """Arrays that are read, the gradient first."""
        return sorted(leaves(*loops), key=lambda name: (name != "g", name))

    # a thread's elements

    def load(self, chunk: str) -> None:
        """Declare and fill the arrays of a chunk's elements."""
        held, row = self.shape.held, self.shape.row
        for name in self.leaves:
            source = "xs" if name == "g" else f"s_{name}"
            array = "g_" if name == "g" else f"e_{name}"
            self.add(f"float {array}[{4 * held}];")
            self.add("#pragma unroll")
            with self.block(f"for (int k = 0; k < {held}; ++k)"):
                at = f"({chunk} * {held} + k) * {row} + 4 * u"
                self.add(f"load4({source}, o + {at}, m - ({at}), {array} + 4 * k);")
            if name == "g":
                self.taken(chunk)
                self.add("#pragma unroll")
                self.add(f"for (int e = 0; e < {4 * held}; ++e) g_[e] *= scale;")

    def taken(self, chunk: str) -> None:
        """What is added to gradients as they are loaded."""

    def extra_params(self) -> tuple[str, ...]:
        """Further parameters of the kernels."""
        return ()

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

    @staticmethod
    def outside(sink: Sink) -> Expr:
        """Of `where(selection, a, b)`, what the elements outside the selection become."""
        e = sink.expr
        return e.args[2] if e.op == "where" and e.args[0].op == "in" else e

    def status(self) -> None:
        self.add("u32 bad = 0;")
        with self.each():
            self.add(f"if (i < m && !finite({self.text(self.prog.gradient)})) bad = 1;")
        self.add("if (bad) atomicOr(&flags[p], 1u);")

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
        """A thread's four lanes, in the order of [Note: order of sums]."""
        self.add(f"float {name}[4];")
        with self.each():
            self.add(f"const float y = {self.within()} ? {self.text(arg)} : 0.0f;")
            self.add(f"if (c == 0 && e < 4) {name}[e] = y; else {name}[e % 4] += y;")

    def extreme(self, name: str, expr: Expr) -> str:
        least, op = ("-2147483647", "max") if expr.op == "reduce_max" else ("2147483647", "min")
        self.add(f"i32 {name} = {least};")
        with self.each():
            self.add(
                f"if ({self.within()}) {name} = i_{op}({name}, key({self.text(expr.args[0])}));"
            )
        return f"team_{op}<{self.shape.team}>({name})"

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

    # sinks

    def field(self, sink: Sink) -> None:
        f = sink.field
        assert f is not None
        if sink.expr.type.shape == "group":
            value = self.group(sink.expr)
            if sink.expr.type.dtype != "float" and "int" not in f.storage:
                value = f"(float)({value})"
            cast = "(i64)" if f.storage in WHOLE else ""
            at = f"out + at_{f.name} + t * {f.item_bits // 8}"
            self.add(f"if (m && u == 0) store_{f.access}({at}, {cast}({value}));")
            return
        self.prepare_groups(sink.expr)
        if f.packed:
            self.pack(f, sink.expr)
        else:
            self.items(f, sink.expr)

    def items(self, f: Field, expr: Expr) -> None:
        """Values of 16 or 32 bits, four a store."""
        size = f.item_bits // 8
        value = self.text(expr)
        if f.storage in BITS:
            value = BITS[f.storage].format(
                value if expr.type.dtype == "float" else f"(float)({value})"
            )
        else:
            value = f"(u32)(i64)({value})"
        with self.block(""), self.chunks(), self.each_row():
            self.add("u32 w[4];")
            with self.each_of_row():
                self.add(f"w[j] = {value};")
            self.add(f"put4(out + at_{f.name} + {size} * (o + l), m - l, {size}, w);")

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

    def pack(self, f: Field, expr: Expr) -> None:
        """Codes packed in registers; a short tile goes by way of shared memory."""
        value = code(f.bits, expr, self.text(expr))
        to = f"{self.codes_at(f)} + t * {f.packed_bytes(self.tile)}"
        self.add(f"u8* const w_{f.name} = {to};")
        if self.tile * f.bits < 32 or f.trits:
            with self.block(""):
                self.pack_short(f, value)
            return
        with self.block(f"if (__all_sync(FULL, m == 0 || m == {self.tile}))"):
            self.pack_words(f, value)
        with self.block("else"):
            self.pack_short(f, value)

    def codes_at(self, f: Field) -> str:
        """Where the packed codes of all elements begin."""
        return f"out + at_{f.name}"

    def pack_words(self, f: Field, value: str) -> None:
        """Words of four bytes; see [Note: packing] for bytes and planes."""
        s, b = self.shape, f.bits
        words = max(1, s.rows * b // 8)
        split = max(1, 8 // (s.rows * b))  # planes within one row
        self.add(f"u32 word[{words}] = {{}};")
        plane = f"k / {words}" if split == 1 else f"(k * {split} + u / {s.team // split})"
        place = f"k % {words}" if split == 1 else "0"
        with self.each():
            self.add(f"word[{place}] |= ({value}) << (8 * (e % 4) + {b} * ({plane}));")
        if split == 1:
            self.add("#pragma unroll")
            store = f"store_word(w_{f.name} + q * {s.row} + 4 * u, word[q])"
            self.add(f"for (int q = 0; q < {words}; ++q) if (m) {store};")
            return
        step = s.team // split
        while step < s.team:
            self.add(f"word[0] |= __shfl_xor_sync(FULL, word[0], {step}, {s.team});")
            step *= 2
        self.add(f"if (m && u < {s.team // split}) store_word(w_{f.name} + 4 * u, word[0]);")

    def pack_short(self, f: Field, value: str) -> None:
        teams = self.shape.teams
        self.add(f"__shared__ u8 codes[{teams * self.tile}];")
        self.add(f"u8* const own = codes + team * {self.tile};")
        with self.each():
            self.add(f"if (i < m) own[i] = (u8)({value});")
        self.add("__syncwarp();")
        how = "pack_trits" if f.trits else f"pack_short<{f.bits}>"
        self.add(f"{how}(own, w_{f.name}, m, u, {self.shape.team});")
        self.add("__syncwarp();")

    def overwrite(self, sinks: list[Sink]) -> None:
        """New states, and the gradient when it is written back; all inputs are in registers."""
        states = [
            (s.name, self.outside(s))
            for s in sinks
            if s.kind == "state" and s.expr.type.shape == "n"
        ]
        back = [s.expr for s in sinks if s.kind == "back"]
        self.prepare_groups(*(e for _, e in states), *back)
        if not states and not back:
            return
        head = "" if states else "if (back)"
        with self.block(head), self.chunks(), self.each_row():
            for name, _ in states:
                self.add(f"float y_{name}[4];")
            if back:
                self.add("float z[4];")
            with self.each_of_row():
                for name, expr in states:
                    self.add(f"y_{name}[j] = {self.text(expr)};")
                for expr in back:
                    self.add(f"if (back) z[j] = {self.text(expr)};")
            for name, _ in states:
                self.add(f"keep4(s_{name}, o + l, m - l, y_{name});")
            if back:
                self.add("if (back) store4(xs, o + l, m - l, z);")
