"""The part of the encode kernel that selects: library calls, compaction, selected elements."""

from __future__ import annotations

from compll.backends.cpu.search import Searching
from compll.ir.expr import Expr
from compll.ir.layout import header
from compll.ir.module import POSITIONS, Field, Selection
from compll.ir.program import TABLES, Pass, Program, Sink


class Selecting(Searching):
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

    def piece(self) -> None:
        """Arrays in scratch memory belong to one piece."""
        self.arrays: dict[int, str] = {}
        self.buckets.clear()
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
                f"at_{name} = sample_positions(u64(seed), u64(step), u64(tensor), n, {self.scalar(count)})"
            )
            self.fill(name, arg, f"len(at_{name})", f"at_{name}[j]")
        else:
            self.fill(name, expr, "n", "j")
        self.names, self.where = known, before
        self.local.clear()
        return name

    def fill(self, name: str, expr: Expr, turns: str, index: str) -> None:
        self.draw_piece(expr)
        self.prepare(expr)
        whole = expr.op == "bucket" and turns == "n"
        room = f"tiles * {self.tile}" if whole else turns
        self.add(f"{name} = np.empty({room}, np.{'int32' if whole else 'float32'})")
        for stored in self.unstored.values():
            self.prepare(stored)
        with self.block(f"for j in range({turns}):"):
            self.add(f"i = {index}")
            for state, stored in self.unstored.items():
                value = self.kept(state, f"y_{state}", f"s_{state}[i]")
                self.add(f"y_{state} = {self.text(stored, 'i')}")
                self.add(f"w_{state} = {self.held(state, value)}")
            self.add(f"{name}[j] = {self.text(expr, 'i')}")
        if whole:
            self.add(f"{name}[n:] = 0")
            self.buckets[id(expr)] = name

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
        self.kept_states(s, one)
        self.where = "tile"
        self.forget()

    def kept_states(self, s: Selection, one: Pass) -> None:
        """The states that the walk has left to be stored at the selected elements."""
        for sink in one.sinks:
            if self.selects(sink, s) and id(sink) not in self.inside:
                self.kept_state(sink, s.name)

    def kept_field(self, sink: Sink, name: str) -> None:
        f = sink.field
        assert f is not None
        self.prepare(sink.expr)
        self.add(f"at_{f.name} = end")
        self.kept_values(sink, f, name)
        if self.in_turn() != self.wanted():
            self.add(f"stop_{f.name} = end")

    def wanted(self) -> list[str]:
        """The fields of selected elements in the order of the payload."""
        return [f.name for f in self.module.fields if f.shape == "kept"]

    def in_turn(self) -> list[str]:
        """The same in the order in which they are written: a selection's after its walk."""
        sinks = [
            sink
            for one in self.prog.passes
            for s in one.selections
            for sink in one.kept
            if sink.expr.type.of == s.name
        ]
        return [sink.field.name for sink in sinks if sink.field is not None]

    def in_order(self) -> None:
        written = self.in_turn()
        if written == self.wanted():
            return
        self.add(f"start = at_{written[0]}")
        self.add("told = out[start:end].copy()")
        self.add("end = start")
        for name in self.wanted():
            size = f"stop_{name} - at_{name}"
            self.add(f"out[end : end + {size}] = told[at_{name} - start : stop_{name} - start]")
            self.add(f"end += {size}")

    def kept_values(self, sink: Sink, f: Field, name: str) -> None:
        """A field's bytes, from `end` on, which moves behind them."""
        if f.storage in POSITIONS:
            counted, gaps = header(self.module)
            place = 4 * (len(counted) + gaps.index(f.name))
            if self.streamed(self.selection(name)):
                self.flush(name)
                self.add(f"end = end_{name}")
            else:
                start = "-1" if f.storage == "gaps" else "n"
                self.add(f"end = store_{f.storage}(i_{name}, k_{name}, out, end, {start})")
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
            before = self.before(sink, name, f"s_{sink.name}[i]")
            self.add(f"s_{sink.name}[i] = {self.kept(sink.name, 'y', before)}")

    def before(self, sink: Sink, name: str, now: str) -> str:
        """What a selected element of a state was, which is `now`, if it is not captured."""
        if f"c_{sink.name}" in self.captured_names(name):
            return self.word(sink.name, f"c_{sink.name}_{name}[j]")
        return now

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

    def made_here(self, e: Expr) -> bool:
        """What was captured as it is needs nothing any more."""
        if self.where not in ("tile", "piece") and id(e) in self.whole(self.selection(self.where)):
            return False
        return super().made_here(e)

    def drawn(self, expr: Expr, i: str) -> str:
        """The draw of an element wherever it stands, by keys of its own."""
        place = f"first, {i}, {self.tile}"
        return f"drawn(u64(seed), u64(step), u64(tensor), u64({expr.value}), {place})"

    def written(self, expr: Expr, i: str) -> str:
        """Over a selection, element values are computed again from what was captured."""
        if self.where == "piece" and expr.op == "uniform":
            return f"({super().written(expr, i)} if alike else {self.drawn(expr, i)})"
        if self.where in ("tile", "piece"):
            return super().written(expr, i)
        whole = list(self.whole(self.selection(self.where)))
        if id(expr) in whole:
            value = f"v{whole.index(id(expr))}_{self.where}[{i}]"
            return f"({value} != ZERO)" if expr.type.dtype == "bool" else value
        if expr.op == "gather":
            return self.text(expr.args[0], i)
        if expr.op == "indices":
            return f"i_{self.where}[{i}]"
        if expr.op == "uniform":
            return self.drawn(expr, f"i_{self.where}[{i}]")
        if expr.op == "input":
            return f"(cg_{self.where}[{i}] * scale)"
        if expr.op == "state":
            return f"c_{expr.value}_{self.where}[{i}]"
        return super().written(expr, i)
