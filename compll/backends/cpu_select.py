"""The part of the encode kernel that selects: library calls, compaction, selected elements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compll.backends.cpu_capture import NUMPY, Capturing
from compll.backends.cpu_values import draws
from compll.ir import POSITIONS, Expr, Selection, leaves
from compll.layout import header
from compll.program import TABLES, Pass, Program, Sink

#: elements between the prefetches of a counting walk
COUNTED = 1024


class Selecting(Capturing):
    """Encoder with selections.

    A selection's positions are compacted within the tile loop, and what its elements need is
    captured before the tile's states are overwritten; payload fields over the selection, and the
    states at its elements, are written after the walk.
    """

    def __init__(self, program: Program, feed: bool) -> None:
        super().__init__(program, feed)
        #: arrays that exist only where a guard held
        self.guarded: set[int] = set()
        #: what the first walk will store, while it has not
        self.unstored: dict[str, Expr] = {}

    def library(self, expr: Expr, name: str) -> None:
        """kth_largest or adjust over a whole tensor or a sample."""
        guard = self.prog.guards.get(id(expr))
        if guard is None:
            return self.call(expr, name)
        self.add(f"{name} = 0.0")
        condition, wanted = guard
        self.guarded.add(id(expr.args[0]))
        with self.block(f"if {'' if wanted else 'not '}{self.scalar(condition)}:"):
            self.call(expr, name)
        return None

    def call(self, expr: Expr, name: str) -> None:
        if expr.op in ("adjust", "bisect"):
            return {"adjust": self.adjust, "bisect": self.bisect}[expr.op](expr, name)
        if expr.op in TABLES:
            arrays = ", ".join(self.array(a) for a in expr.args)
            maker = "quantiles_of" if expr.op == "quantiles" else expr.op
            return self.add(f"{name} = {maker}({arrays}, {expr.value})")
        values = self.array(expr.args[0])
        self.add(
            f"found_{name}, larger_{name} = kth_and_larger({values}, {self.scalar(expr.args[1])})"
        )
        self.add(f"{name} = f64(found_{name})")
        return None

    def adjust(self, expr: Expr, name: str) -> None:
        """The tries of `adjust`, each a counting walk; the last count stays in count_NAME."""
        t, low, high, down, up, tries = map(self.scalar, expr.args[1:])
        with self.counting(expr, name):
            self.add(f"{name} = {t}")
            with self.block(f"for turn in range(i64(max(0.0, min({tries}, 100.0))) + 1):"):
                self.count_turn(expr, name)
                with self.block(
                    f"if ({low} <= count_{name} and count_{name} <= {high}) or turn >= {tries}:"
                ):
                    self.add("break")
                self.add(f"{name} = {name} * {down} if count_{name} < {low} else {name} * {up}")

    def bisect(self, expr: Expr, name: str) -> None:
        """The tries of `bisect`, each a counting walk."""
        low, high, fewest, most, tries = map(self.scalar, expr.args[1:])
        with self.counting(expr, name):
            self.add(f"low_{name}, high_{name} = f64({low}), f64({high})")
            middle = f"{name} = low_{name} + (high_{name} - low_{name}) / 2.0"
            self.add(middle)
            with self.block(f"for turn in range(i64(max(0.0, min({tries}, 100.0)))):"):
                self.add(middle)
                self.count_at_least(expr.args[0], name)
                with self.block(f"if {fewest} <= count_{name} and count_{name} <= {most}:"):
                    self.add("break")
                with self.block(f"if count_{name} < {fewest}:"):
                    self.add(f"high_{name} = {name}")
                with self.block("else:"):
                    self.add(f"low_{name} = {name}")

    @contextmanager
    def counting(self, expr: Expr, name: str) -> Iterator[None]:
        """What walks over the whole tensor outside the tiles need."""
        known, self.where = dict(self.names), "piece"
        self.add("e = first")
        for number in draws(expr.args[0]):
            self.draw(number, "first")
        self.prepare(expr.args[0])
        self.add(f"count_{name} = 0")
        yield
        self.names, self.where = known, "tile"
        self.names[id(expr)] = name

    def count_turn(self, expr: Expr, name: str) -> None:
        """Count for one of the tries of `adjust`."""
        self.count_at_least(expr.args[0], name)

    def count_at_least(self, x: Expr, name: str) -> None:
        """Leave in count_NAME how many elements of x are at least NAME."""
        self.add(f"least = f32({name})")
        self.add(f"count_{name} = 0")
        with self.block(f"for o in range(0, n, {COUNTED}):"):
            self.add(f"ahead = o + {COUNTED}")
            self.ask(COUNTED, tuple(map(self.array_of, leaves(x))))
            self.add("z = i32(0)")
            if draws(x):
                with self.block(f"for i in range(o, min(n, o + {COUNTED})):"):
                    self.count_one(x)
            else:
                self.count_slices(x)
            self.add(f"count_{name} += z")

    def count_slices(self, x: Expr) -> None:
        """Count in slices of the arrays, which vectorizes where a walk of the whole does not."""
        self.add(f"m = min({COUNTED}, n - o)")
        for leaf in leaves(x):
            self.add(f"{leaf}_ = {self.array_of(leaf)}[o : o + m]")
        before, self.where = self.where, "tile"
        with self.block("for i in range(m):"):
            self.count_one(x)
        self.where = before

    def count_one(self, x: Expr) -> None:
        self.add(f"z = i_add(z, i_of_b({self.text(x, 'i')} >= least))")

    def scratch(self) -> None:
        """Also a mask of a tile's hits."""
        super().scratch()
        if self.module.selections:
            self.add(f"hit = np.empty({self.tile}, np.uint8)")

    def piece(self) -> None:
        """Arrays in scratch memory belong to one piece."""
        self.arrays: dict[int, str] = {}
        super().piece()

    def array(self, expr: Expr) -> str:
        """The whole tensor's values (or a sample's), in scratch memory."""
        if id(expr) in self.arrays:
            return self.arrays[id(expr)]
        name = self.name("w")
        if id(expr) not in self.guarded:
            self.arrays[id(expr)] = name
        before, self.where = self.where, "piece"
        known = dict(self.names)
        if expr.op == "sample":
            arg, count = expr.args
            self.add(
                f"at_{name} = sample_positions(u64(seed), u64(step), u64(tensor), n, i64({self.scalar(count)}))"
            )
            self.fill(name, arg, f"len(at_{name})", f"at_{name}[j]")
        else:
            self.fill(name, expr, "n", "j")
        self.names, self.where = known, before
        self.local.clear()
        return name

    def fill(self, name: str, expr: Expr, turns: str, index: str) -> None:
        self.add("e = first")
        for number in draws(expr):
            self.draw(number, "first")
        self.prepare(expr)
        self.add(f"{name} = np.empty({turns}, np.float32)")
        for stored in self.unstored.values():
            self.prepare(stored)
        with self.block(f"for j in range({turns}):"):
            self.add(f"i = {index}")
            for state, stored in self.unstored.items():
                value = self.kept(state, f"y_{state}", f"s_{state}[i]")
                self.add(f"y_{state} = {self.text(stored, 'i')}")
                self.add(f"w_{state} = {self.held(state, value)}")
            self.add(f"{name}[j] = {self.text(expr, 'i')}")

    def open_selection(self, s: Selection) -> None:
        number = [x.name for x in self.module.selections].index(s.name)
        self.add(f"limit_{s.name} = lim[p, {number}]")
        self.add(f"i_{s.name} = np.empty(limit_{s.name} + {self.tile + 1}, np.int64)")
        self.add(f"k_{s.name} = 0")
        room = f"limit_{s.name} + {self.tile + 1}"
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
        """Append the tile's selected positions, in order; eight without a hit cost one test."""
        self.ready_for(s.key, *self.whole(s).values())
        name = s.name
        self.add(f"k0 = k_{name}")
        self.ahead()
        with self.block(f"for i in range({self.tile}):"):
            key = self.text(s.key, "i")
            test = key if s.kind == "filter" else f"(key({key}) >= t_{name})"
            self.add(f"hit[i] = b_code({test})")
        with self.block(f"for i in range(m, {self.tile}):"):
            self.add("hit[i] = u8(0)")
        with (
            self.block(f"for w in range({self.tile // 8}):"),
            self.block("if any_of8(hit, 8 * w):"),
            self.block("for i in range(8 * w, 8 * w + 8):"),
        ):
            self.add(f"i_{name}[k_{name}] = o + i")
            if s.kind == "filter":
                self.add(f"k_{name} += i64(hit[i])")
            else:
                self.add(f"tied = i64(hit[i]) * i64(key({self.text(s.key, 'i')}) == t_{name})")
                self.add(f"k_{name} += i64(hit[i]) - tied * i64(ties_{name} <= 0)")
                self.add(f"ties_{name} -= tied")
        self.found(name)
        self.add(f"k_{name} = min(k_{name}, limit_{name})")
        self.capture(s)

    def found(self, name: str) -> None:
        """What else follows from how many a tile has added to k_NAME, before they are cut off."""

    def close_selection(self, s: Selection, one: Pass) -> None:
        """Counts, fields and states of the selected elements."""
        self.where = s.name
        name = s.name
        if s.dynamic:
            number = [x.name for x in self.module.selections if x.dynamic].index(name)
            self.add(f"store_uint32(out, base + {4 * number}, k_{name})")
        for sink in one.kept:
            if sink.expr.type.of == name:
                self.kept_field(sink, name)
        for sink in one.sinks:
            if self.selects(sink, s):
                self.kept_state(sink, name)
        self.where = "tile"
        self.forget()

    def kept_field(self, sink: Sink, name: str) -> None:
        f = sink.field
        assert f is not None
        self.prepare(sink.expr)
        self.add(f"at_{f.name} = end")
        if f.storage in POSITIONS:
            counted, gaps = header(self.module)
            place = 4 * (len(counted) + gaps.index(f.name))
            self.add(f"end = store_{f.storage}(i_{name}, k_{name}, out, end, n)")
            self.add(f"store_uint32(out, base + {place}, end - at_{f.name})")
            return
        if f.packed:
            self.add(f"q_{f.name} = np.empty(k_{name}, np.uint8)")
            with self.block(f"for j in range(k_{name}):"):
                self.add(f"q_{f.name}[j] = {self.coded(f.bits, sink.expr, 'j')}")
            self.add(f"pack_all(q_{f.name}, out, end, k_{name}, {f.bits}, {self.tile})")
            self.add(
                f"end += (k_{name} // {self.tile}) * {self.tile * f.bits // 8} + "
                f"((k_{name} % {self.tile}) * {f.bits} + 7) // 8"
            )
            return
        size = f.item_bits // 8
        with self.block(f"for j in range(k_{name}):"):
            self.add(self.store(f, f"end + {size} * j", self.text(sink.expr, "j"), sink.expr))
        self.add(f"end += {size} * k_{name}")

    def kept_state(self, sink: Sink, name: str) -> None:
        value = sink.expr.args[1]
        self.prepare(value)
        with self.block(f"for j in range(k_{name}):"):
            self.add(f"y = {self.text(value, 'j')}")
            self.add(f"i = i_{name}[j]")
            before = (
                self.word(sink.name, f"c_{sink.name}_{name}[j]")
                if f"c_{sink.name}" in self.captured_names(name)
                else f"s_{sink.name}[i]"
            )
            self.add(f"s_{sink.name}[i] = {self.kept(sink.name, 'y', before)}")

    def captured_names(self, name: str) -> list[str]:
        return self.captured(self.selection(name))

    def selection(self, name: str) -> Selection:
        """The selection as it stands in the module."""
        return next(s for s in self.module.selections if s.name == name)

    def kept_reduction(self, expr: Expr, name: str) -> None:
        """A reduction over selected elements, in the order of a whole tensor's."""
        arg = expr.args[0]
        before, self.where = self.where, arg.type.of
        count = f"k_{arg.type.of}"
        self.prepare(arg)
        self.add(f"red_{name} = np.empty({count}, np.float32)")
        with self.block(f"for j in range({count}):"):
            self.add(f"red_{name}[j] = {self.text(arg, 'j')}")
        self.add(f"{name} = kept_{expr.op[7:]}(red_{name}, {self.tile})")
        self.where = before

    def written(self, expr: Expr, i: str) -> str:
        """Over a selection, element values are computed again from what was captured."""
        if self.where in ("tile", "piece"):
            return super().written(expr, i)
        whole = list(self.whole(self.selection(self.where)))
        if id(expr) in whole:
            return f"v{whole.index(id(expr))}_{self.where}[{i}]"
        if expr.op == "gather":
            return self.text(expr.args[0], i)
        if expr.op == "indices":
            return f"i_{self.where}[{i}]"
        if expr.op == "uniform":
            place = f"first, i_{self.where}[{i}], {self.tile}"
            return f"drawn(u64(seed), u64(step), u64(tensor), u64({expr.value}), {place})"
        if expr.op == "input":
            return f"cg_{self.where}[{i}]"
        if expr.op == "state":
            return f"c_{expr.value}_{self.where}[{i}]"
        return super().written(expr, i)
