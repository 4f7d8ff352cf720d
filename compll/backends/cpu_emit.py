"""From passes to the text of numba kernels.

A kernel loops over the pieces of a batch; a piece over tiles; within a tile every step is a short
loop with a constant number of turns over data in the first-level cache, which LLVM turns into
full-width vector code. A last, shorter tile is copied into padded scratch first, so that one body
serves both. Shared subexpressions live in tile-sized buffers.
"""

from __future__ import annotations

from collections.abc import Callable

from compll.backends import cpu_fuse
from compll.backends.cpu_states import WORDS, Stated
from compll.backends.cpu_text import code, shared
from compll.backends.cpu_values import PLANES, draws, size_text
from compll.backends.numbers import lane_count
from compll.ir import WHOLE, Expr, Field, Selection, leaves, walk
from compll.layout import header
from compll.program import Pass, Program, Sink


class Encoder(Stated):
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
        self.add(f"g_tail = np.zeros({tile}, np.float32)")
        for s in self.elementwise:
            self.add(f"{s}_tail = np.zeros({tile}, np.{WORDS[s in self.halves]})")
        for f in self.module.fields:
            if f.packed and f.shape == "n":
                self.add(f"q_{f.name} = np.empty({tile + 4 * f.trits}, np.uint8)")
        walks = [
            e for one in self.prog.passes for e in (*self.loops(one), *(s.expr for s in one.sinks))
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
        roots = [e.args[0] for e in one.reductions] + [self.outside(s.expr) for s in one.sinks]
        for number in draws(*self.loops(one)):
            self.draw(number, "first")
        if self.module.group == 0:
            self.prepare(*roots, *(s.key for s in one.selections))
            for expr in one.reductions:
                self.open_reduction(expr)
        with self.block("for t in range(tiles):"):
            self.tile_body(one)
        self.forget()
        if self.module.group == 0:
            for expr in one.reductions:
                self.close_reduction(expr)
            for expr in self.telling(one):
                self.add(f"bad = i_max(bad, abs_bits(unkey(best_{self.names[id(expr)]})))")

    def telling(self, one: Pass) -> list[Expr]:
        """The reductions from which the status follows."""
        return cpu_fuse.telling(one.reductions, self.prog.gradient) if one.status else []

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
        self.open_ahead(*self.reads(one))
        loops = self.loops(one)
        for number in draws(*loops):
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
        roots += [s.expr for s in one.sinks] + ([self.prog.gradient] if one.status else [])
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
        with self.block("for i in range(m):"):
            self.add(f"{name}_[i] = {source}[o + i]")
        with self.block(f"for i in range(m, {self.tile}):"):
            self.add(f"{name}_[i] = {'u16(0)' if name in self.halves else 'ZERO'}")

    def write_tail(self, one: Pass) -> None:
        states = [s.name for s in one.sinks if s.kind == "state"]
        with self.block(f"if m < {self.tile}:"):
            self.add("pass")
            for s in states:
                with self.block("for i in range(m):"):
                    self.add(f"s_{s}[o + i] = {s}_[i]")
            if any(s.kind == "back" for s in one.sinks):
                with self.block("for i in range(m if back else 0):"):
                    self.add("xs[o + i] = g_[i]")

    def loops(self, one: Pass) -> list[Expr]:
        """The element expressions that get a loop each; the write-back is rare and does not count."""
        roots = [e.args[0] for e in one.reductions] + [s.key for s in one.selections]
        sinks = [s for s in one.sinks if s.expr.type.shape == "n" and s.kind != "back"]
        roots += [self.outside(s.expr) for s in sinks]
        return roots + ([self.prog.gradient] if one.status else [])

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

    def status_loop(self) -> None:
        self.ahead()
        with self.block(f"for i in range({self.tile}):"):
            self.add(f"bad = i_max(bad, abs_bits({self.text(self.prog.gradient, 'i')}))")

    def tile_reductions(self, one: Pass) -> None:
        """The tile's share of the tensor's reductions and of the status."""
        status = one.status and not self.telling(one)
        together = cpu_fuse.fused(one.reductions, status)
        self.prepare(*(e.args[0] for e in one.reductions), self.prog.gradient)
        if together:
            with self.block(f"if m == {self.tile}:"):
                cpu_fuse.emit(self, together, status)
        with self.block("else:" if together else "if True:"):
            self.add("pass")
            if status:
                self.status_loop()
            for expr in together:
                self.step_reduction(expr)
        for expr in one.reductions:
            if expr not in together:
                self.step_reduction(expr)

    def tile_steps(self, one: Pass) -> None:
        for s in one.selections:
            self.compact(s)
        for sink in one.sinks:
            if sink.kind == "field":
                self.step_field(sink)
        self.overwrite([s for s in one.sinks if s.kind != "field"])

    # reductions

    def reduction(self, expr: Expr) -> str:
        """A group's reduction: emits the loops, returns the text of the value."""
        return self.tile_reduction(expr.op, expr.args[0])

    def tile_reduction(self, op: str, arg: Expr) -> str:
        self.prepare(arg)
        self.available()
        if op == "reduce_sum":
            self.lane_sum(arg)
            return "acc[0]"
        return f"unkey({self.extreme(op, arg)})"

    def lane_sum(self, arg: Expr) -> None:
        """Sum in the order of [Note: order of sums], into acc[0]."""
        lanes, tile = lane_count(self.tile), self.tile
        self.ahead()
        if is_count(arg):
            self.count(arg.args[0].args[0])
            return
        if not zero_at_zero(arg):
            with self.block(f"for i in range({tile}):"):
                self.add(f"red[i] = {self.text(arg, 'i')}")
            with self.block(f"for i in range(m, {tile}):"):
                self.add("red[i] = ZERO")

        def value(i: str) -> str:
            return self.text(arg, i) if zero_at_zero(arg) else f"red[{i}]"

        with self.block(f"for i in range({lanes}):"):
            self.add(f"acc[i] = {value('i')}")
        if tile > lanes:
            with (
                self.block(f"for k in range({lanes}, {tile}, {lanes}):"),
                self.block(f"for i in range({lanes}):"),
            ):
                self.add(f"acc[i] += {value('k + i')}")
        self.add("fold(acc)")

    def count(self, condition: Expr) -> None:
        """A sum of ones and zeros is exact in any order."""
        self.add("z = i32(0)")
        with self.block("for i in range(m):"):
            self.add(f"z = i_add(z, i_of_b({self.text(condition, 'i')}))")
        self.add("acc[0] = f32(z)")

    def extreme(self, op: str, arg: Expr) -> str:
        """The largest or smallest order key of a tile, in a local name."""
        name = self.name("x")
        best = "i_max" if op == "reduce_max" else "i_min"
        start, turns, term = "i32(-2147483647)", "m", arg
        if op == "reduce_min":
            start = "i32(2147483647)"
        elif arg.op == "abs" and arg.args[0].type.dtype == "float":
            start, term = "i32(0)", arg.args[0]
            turns = str(self.tile) if zero_at_zero(arg) else "m"
        order = "key" if term is arg else "abs_bits"

        def step(turns: str) -> None:
            with self.block(f"for i in range({turns}):"):
                self.add(f"{name} = {best}({name}, {order}({self.text(term, 'i')}))")

        self.ahead()
        self.add(f"{name} = {start}")
        if turns == "m":
            with self.block(f"if m < {self.tile}:"):
                step("m")
        with self.block("else:" if turns == "m" else "if True:"):
            step(str(self.tile))
        return name

    def open_reduction(self, expr: Expr) -> None:
        name = self.names[id(expr)] = self.name("s")
        if expr.op == "reduce_sum":
            self.add(f"part_{name} = np.empty(tiles, np.float32)")
        else:
            self.add(
                f"best_{name} = i32({'-2147483647' if expr.op == 'reduce_max' else '2147483647'})"
            )

    def step_reduction(self, expr: Expr) -> None:
        name = self.names[id(expr)]
        if expr.op == "reduce_sum":
            self.tile_reduction(expr.op, expr.args[0])
            self.add(f"part_{name}[t] = acc[0]")
        else:
            self.prepare(expr.args[0])
            found = self.extreme(expr.op, expr.args[0])
            self.add(
                f"best_{name} = {'i_max' if expr.op == 'reduce_max' else 'i_min'}(best_{name}, {found})"
            )

    def close_reduction(self, expr: Expr) -> None:
        name = self.names[id(expr)]
        done = f"total(part_{name})" if expr.op == "reduce_sum" else f"f64(unkey(best_{name}))"
        self.add(f"{name} = {done}")

    # sinks

    def step_field(self, sink: Sink) -> None:
        f = sink.field
        assert f is not None
        if sink.expr.type.shape == "group":
            value = self.group(sink.expr)
            self.available()
            self.add(self.store(f, f"at_{f.name} + t * {f.item_bits // 8}", value, sink.expr))
            return
        self.ready_for(sink.expr)
        self.field_sink(f, sink.expr)

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

    def field_sink(self, f: Field, expr: Expr) -> None:
        if not f.packed:
            with self.block("for i in range(m):"):
                size = f.item_bits // 8
                self.add(
                    self.store(f, f"at_{f.name} + {size} * (o + i)", self.text(expr, "i"), expr)
                )
            return
        kinds = {s.kind for s in self.now.sinks if uses_code(s.expr, f.name)}
        if self.evenly and not f.trits and self.cheap(expr):
            kinds = set()  # to compare again takes less than to keep the result
        if "state" in kinds or f.trits:
            self.pack_buffer(f, expr)
            return
        # Codes that nothing reads again are packed as they are computed.
        if kinds:
            with self.block("if back:"):
                self.pack_buffer(f, expr)
        with self.block("if not back:" if kinds else "if True:"):
            self.pack_directly(f, expr)

    def cheap(self, expr: Expr) -> bool:
        """Whether computing an element anew takes one operator, given what is in buffers."""
        return self.made(expr) or all(map(self.made, expr.args))

    def made(self, expr: Expr) -> bool:
        """Whether an element's value is at hand."""
        return id(expr) in self.buffers or expr.op == "lift"

    def pack_buffer(self, f: Field, expr: Expr) -> None:
        """By way of a buffer, which later loops read."""
        buffer = self.codes[f.name] = f"q_{f.name}"
        self.fill_codes(f, expr)
        if f.trits:
            at = f"at_{f.name} + t * {f.packed_bytes(self.tile)}"
            self.add(f"pack_trits({buffer}, out, {at}, m)")
            return
        width = self.tile * f.bits // 8
        with self.block(f"if m == {self.tile}:"):
            self.pack_full(f, lambda p: f"{buffer}[i + {p * width}]")
        with self.block("else:"):
            self.pack_rest(f)

    def pack_directly(self, f: Field, expr: Expr) -> None:
        width = self.tile * f.bits // 8
        with self.block(f"if m == {self.tile}:"):
            self.pack_full(f, lambda p: code(f.bits, expr, self.text(expr, f"i + {p * width}")))
        with self.block("else:"):
            self.fill_codes(f, expr)
            self.pack_rest(f)

    def fill_codes(self, f: Field, expr: Expr) -> None:
        self.ahead()
        with self.block(f"for i in range({self.tile}):"):
            self.add(f"q_{f.name}[i] = {code(f.bits, expr, self.text(expr, 'i'))}")

    def pack_full(self, f: Field, value: Callable[[int], str]) -> None:
        width, planes = self.tile * f.bits // 8, PLANES[f.bits]
        self.add(f"w = at_{f.name} + t * {width}")
        self.add(f"o_ = out[w : w + {width}]")
        chunks = self.chunks(width)
        with self.block(f"for c in range(0, {width}, {width // chunks}):"):
            self.ahead(self.tile // chunks)
            with self.block(f"for i in range(c, c + {width // chunks}):"):
                parts = ", ".join(value(p) for p in range(planes))
                self.add(f"o_[i] = {f'pack{planes}({parts})' if planes > 1 else parts}")

    def pack_rest(self, f: Field) -> None:
        at = f"at_{f.name} + t * {self.tile * f.bits // 8}"
        self.add(f"pack_tail(q_{f.name}, out, {at}, m, {f.bits})")

    def store(self, f: Field, at: str, value: str, expr: Expr) -> str:
        if f.storage in WHOLE:
            return f"store_{f.access}(out, {at}, i64({value}))"
        if expr.type.dtype != "float":
            value = f"f_of_{'i' if expr.type.dtype == 'int' else 'b'}({value})"
        return f"store_{f.storage}(out, {at}, {value})"

    def scalar_sink(self, sink: Sink) -> None:
        if sink.kind == "state":
            value = self.scalar(sink.expr)
            with self.block(f"if np.isfinite({value}):"):
                self.add(f"a_{sink.name}[tensor] = f32({value})")
            return
        f = sink.field
        assert f is not None
        value = self.scalar(sink.expr)
        if f.shape == "table":
            self.add(f"store_table(out, at_{f.name}, {value})")
            return
        text = f"i64({value})" if f.storage in WHOLE else f"f32({value})"
        self.add(f"store_{f.access}(out, at_{f.name}, {text})")

    def leaf(self, expr: Expr, i: str) -> str:
        tile = self.where == "tile"
        if expr.op == "input":
            return f"({'g_' if tile else 'xs'}[{i}] * scale)"
        if expr.op == "state":
            name = str(expr.value)
            return self.held(name, f"{name}_[{i}]" if tile else f"s_{name}[{i}]")
        raise NotImplementedError(expr.op)

    # library calls and selections: Selecting, in cpu_select.py, gives these a body

    def library(self, expr: Expr, name: str) -> None:
        raise NotImplementedError

    def open_selection(self, s: Selection) -> None:
        raise NotImplementedError

    def compact(self, s: Selection) -> None:
        raise NotImplementedError

    def close_selection(self, s: Selection, one: Pass) -> None:
        raise NotImplementedError


def zero_at_zero(expr: Expr) -> bool:
    """Whether an element expression is zero where the gradient and the states are zero."""
    if expr.op in ("input", "state"):
        return True
    if expr.op in ("add", "sub"):
        return all(map(zero_at_zero, expr.args))
    if expr.op in ("neg", "abs", "floor", "ceil", "round", "sqrt", "float", "float16", "bfloat16"):
        return zero_at_zero(expr.args[0])
    # Not mul: zero times an infinite scalar is NaN; the square of a zero is safe.
    return expr.op == "mul" and expr.args[0] is expr.args[1] and zero_at_zero(expr.args[0])


def uses_code(expr: Expr, field: str) -> bool:
    """Whether an expression reads back what a field stores."""
    return any(e.op == "code" and e.value == field for e in walk(expr))


def is_count(expr: Expr) -> bool:
    """Whether an expression is a condition as 0.0 or 1.0."""
    return (
        expr.op == "float"
        and expr.args[0].op == "int"
        and expr.args[0].args[0].type.dtype == "bool"
    )
