"""Stage 5: the typed tree becomes passes over memory.

Goals: a read of the gradient computes every value that it can; states are written in the last pass,
along with the payload. Non-goals: how a loop is vectorized or mapped to threads (the backends), and
any algebra beyond feedback.py's.
"""

from __future__ import annotations

from compll.ir.expr import Expr, Type, rebuild, walk
from compll.ir.module import Module, Selection
from compll.ir.program import LIBRARY, Pass, Program, Sink, Unsupported
from compll.passes import feedback
from compll.passes.phases import Phases, even

#: hint for specs in which a walk over all elements needs a result of a selection
AFTER = (
    "compute what that walk needs by a condition: count(c) and mean(x, c), not count(selection) "
    "and mean(x[selection])"
)


def schedule(module: Module, *, feed: bool) -> Program:
    """The passes of encode; `feed` encodes the input of feedback, and updates the states."""
    try:
        return _Scheduler(module, feed).program()
    except Unsupported as why:
        # Values of selected elements may need a later walk than the selections do.
        try:
            return _Scheduler(module, feed, _Scheduler(module, feed).last_walk()).program()
        except Unsupported:
            raise why from None


def hops(module: Module) -> bool:
    """True if decode-add-encode can be one kernel: decode is elementwise, and encode needs no
    search over all elements."""
    if module.selections or module.decoded is None:
        return False
    program = schedule(module, feed=bool(module.states))
    return not any(e.op in LIBRARY for one in program.passes for e in one.scalars)


class _Scheduler(Phases):
    def __init__(self, module: Module, feed: bool, first: int = 0) -> None:
        super().__init__(first)
        self.module, self.feed, self.pool = module, feed, module.pool
        leaf = self.pool.make("input", (), Type("float", "n"), "g")
        self.gradient = leaf
        if feed and module.feedback:
            self.gradient = feedback.source(module, leaf)
        self.selections = {s.name: self.fed_selection(s) for s in module.selections}

    def fed(self, expr: Expr) -> Expr:
        """expr with the gradient replaced by the input of feedback."""
        if self.gradient.op == "input":
            return expr
        return rebuild(self.pool, expr, lambda e: self.gradient if e.op == "input" else None)

    def fed_selection(self, s: Selection) -> Selection:
        threshold = None if s.threshold is None else self.fed(s.threshold)
        return Selection(s.name, s.kind, self.fed(s.key), s.limit, threshold)

    def sinks(self) -> list[Sink]:
        """All values that leave the passes."""
        fields = [
            Sink("field", f.name, self.fed(f.expr), f)
            for f in self.module.fields
            if f.expr is not None
        ]
        back = self.back()
        found = fields + (self.state_sinks() if self.feed else []) + ([back] if back else [])
        self.find_guards(found)
        return found

    def last_walk(self) -> int:
        """The number of the last walk that any value needs."""
        return max([self.walk_of(s) for s in self.sinks()] + [0])

    def program(self) -> Program:
        sinks = self.sinks()
        passes = tuple(Pass() for _ in range(1 + max([self.walk_of(s) for s in sinks] + [0])))
        for sink in sinks:
            self.place(passes, sink)
        self.place_values(passes, sinks)
        passes[0].status = self.module.status
        scalars = tuple(s for s in sinks if s.expr.type.shape in ("scalar", "static", "table"))
        named = {name: self.fed(e) for name, e in self.module.bindings.items()}
        return Program(
            self.module, passes, scalars, self.guards, self.gradient, self.back() is not None, named
        )

    def state_sinks(self) -> list[Sink]:
        found = [Sink("state", name, self.fed(e)) for name, e in self.module.updates.items()]
        if self.module.feedback:
            assert self.module.decoded is not None
            value = feedback.update(self.module, self.gradient, self.fed(self.module.decoded))
            found.append(Sink("state", self.module.fed_state, value))
        return found

    def back(self) -> Sink | None:
        """The write-back if decode is elementwise; else None, and the backend decodes the
        payload."""
        value = self.module.decoded
        if value is None or self.module.selections:
            return None
        return Sink("back", "g", self.fed(value))

    # placement

    def place(self, passes: tuple[Pass, ...], sink: Sink) -> None:
        shape, number = sink.expr.type.shape, self.walk_of(sink)
        if shape == "kept":
            passes[number].kept.append(sink)
        elif shape in ("n", "group"):
            final = sink.kind in ("state", "back")
            passes[len(passes) - 1 if final else number].sinks.append(sink)

    def place_values(self, passes: tuple[Pass, ...], sinks: list[Sink]) -> None:
        """Put reductions, selections and tensor-level values each into its pass."""
        used = {
            str(e.value or e.type.of)
            for s in sinks
            for e in walk(s.expr)
            if e.op in ("in", "gather", "indices", "count_kept")
        }
        roots = [s.expr for s in sinks]
        for name in [s.name for s in self.module.selections if s.name in used]:
            s = self.selections[name]
            passes[self.selection_phase(name) // 2].selections.append(s)
            roots += [s.key] + ([s.threshold] if s.threshold is not None else [])
        for e in walk(*roots):
            if e.op.startswith("reduce_") and e.args[0].type.shape == "n":
                passes[even(self.phase(e.args[0])) // 2].reductions.append(e)
            elif e.type.shape in ("scalar", "table") and self.phase(e) // 2 < len(passes):
                one = passes[self.phase(e) // 2]
                (one.late if self.phase(e) % 2 else one.scalars).append(e)
        self.refuse(passes)

    def refuse(self, passes: tuple[Pass, ...]) -> None:
        for number, one in enumerate(passes):
            for sink in one.sinks:
                for e in walk(sink.expr):
                    if e.op == "in":
                        self.refuse_condition(sink, e, number)
            made = {s.name for s in one.selections}
            for sink in one.kept:
                if sink.expr.type.of not in made:
                    raise Unsupported(
                        "values of selected elements that need another walk over all elements",
                        sink.name,
                        hint=AFTER,
                    )

    def refuse_condition(self, sink: Sink, inside: Expr, number: int) -> None:
        """Raise Unsupported for a selection as a condition, except in where(selection, a, b) in the
        pass that selects."""
        e = sink.expr
        whole = sink.kind == "state" and e.op == "where" and e.args[0] is inside
        if not whole or any(x.op == "in" for x in walk(e.args[1], e.args[2])):
            raise Unsupported(
                "a selection used as a condition, other than "
                "`where(selection, a, b)` as the whole of a state's update",
                sink.name,
                inside,
                "write where(selection, a, b) around all of it",
            )
        if self.selection_phase(str(inside.value)) != 2 * number:
            raise Unsupported(
                f"a state that depends on {inside.value!r}, after which another walk over all "
                "elements is needed",
                sink.name,
                hint=AFTER,
            )
