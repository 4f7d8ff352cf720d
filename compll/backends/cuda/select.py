"""The part of a CUDA encode that selects: the order of its kernels, and states of what is selected.

Once positions are known, what the payload and the states need of the selected elements is computed
by a thread each, before the states are overwritten.
"""

from __future__ import annotations

from collections.abc import Sequence

from compll.backends.cuda.kept_sums import KeptSums
from compll.backends.cuda.selection_compaction import ITEMS
from compll.ir.expr import Expr
from compll.ir.program import Pass, Sink


class Selecting(KeptSums):
    """Encoder with selections."""

    def special(self, expr: Expr) -> str | None:
        if expr.op == "adjusted_count":
            return self.result(self.larger_slot(expr.args[0]))
        if expr.op == "count_kept":
            return f"(double){self.kept(str(expr.value or expr.type.of))}"
        if expr.op.startswith("reduce_") and expr.args[0].type.shape == "kept":
            return self.kept_closing(expr)
        return None

    def before_tiles(self, one: Pass, sinks: Sequence[Sink]) -> None:
        for s in one.selections:
            self.select(s)
            for expr in self.reductions_of(s.name):
                self.kept_parts(expr)
        self.values_kernel(one.late, sinks)
        if one.selections:
            self.places(one)
        for sink in one.kept:
            self.kept_field(sink)
        chosen = [s for s in one.sinks if self.inside(s) is not None]
        for sink in chosen:
            if len(chosen) > 1 or not self.mends(sink):
                self.selected_state(sink, "keep")

    def after_tiles(self, one: Pass) -> None:
        chosen = [s for s in one.sinks if self.inside(s) is not None]
        for sink in chosen:
            alone = len(chosen) == 1 and self.mends(sink)
            self.selected_state(sink, "mend" if alone else "put")

    # states of selected elements

    @staticmethod
    def inside(sink: Sink) -> Expr | None:
        """Of a state's update `where(selection, a, b)`, what selected elements become."""
        e = sink.expr
        chosen = sink.kind == "state" and e.op == "where" and e.args[0].op == "in"
        return e.args[1] if chosen else None

    def mends(self, sink: Sink) -> bool:
        """Whether elements outside the selection keep the state that they have."""
        rest = self.outside(sink)
        return self.inside(sink) is not None and rest.op == "state" and rest.value == sink.name

    def leaves_tile(self, sink: Sink) -> bool:
        return not self.mends(sink)

    def selected_state(self, sink: Sink, how: str) -> None:
        """mend: overwrite now. keep: compute now, into scratch; put: from there, after the walk.

        A value must see neither what the walk stores nor another state's new values.
        """
        value = self.inside(sink)
        assert value is not None
        of = str(sink.expr.args[0].value)
        kept = f"kept_{sink.name}"
        with self.over_kept(how, of), self.anywhere():
            if how != "mend":
                self.memory(kept, "float32", str(self.grid("kept", ITEMS, of)))
            self.prepare(value)
            self.add("if (j >= count) return;")
            self.add("const i64 i = idx[j];")
            if how == "put":
                made = f"{kept}[items[p] + j]"
                self.add(self.kept_states.put(sink.name, f"s_{sink.name}", "i", made))
                return
            self.add(f"const float y = {self.text(value)};")
            if how == "keep":
                new = self.kept_states.value(sink.name, "y", f"s_{sink.name}[i]")
                self.add(f"{kept}[items[p] + j] = {new};")
            else:
                self.add(self.kept_states.keep(sink.name, f"s_{sink.name}", "i", "y"))
