"""States in encode kernels: their types, and how elements are read and overwritten."""

from __future__ import annotations

from collections.abc import Sequence

from compll.backends.cpu.nontemporal_tiles import Pouring
from compll.backends.cpu.prefetch import LITTLE
from compll.ir.expr import Expr
from compll.ir.module import HALVES, Field
from compll.ir.program import Pass, Sink

#: what states are arrays of, by whether they have 16 bits
WORDS = ("float32", "uint16")


class Stated(Pouring):
    """Values that may be those of states, by name: with a value per element, or per tensor.

    halves: the storages of those of 16 bits; see [Note: 16-bit states].
    """

    elementwise: list[str]
    per_tensor: list[str]
    halves: dict[str, str]

    def take(self, states: Sequence[Field]) -> None:
        """The states that the kernel is given."""
        self.elementwise = [s.name for s in states if s.shape == "n"]
        self.per_tensor = [s.name for s in states if s.shape != "n"]
        self.halves = {s.name: s.storage for s in states if s.storage in HALVES}

    def state_types(self) -> str:
        """The types of the states that the kernel takes last."""
        types = (WORDS[s in self.halves] for s in self.elementwise + self.per_tensor)
        return "".join(f", {kind}[::1]" for kind in types)

    def held(self, state: str, text: str) -> str:
        """The value of a state's element; see [Note: 16-bit states]."""
        return f"held_{self.halves[state]}({text})" if state in self.halves else text

    def word(self, state: str, text: str) -> str:
        """A state's element that has a value, which is one of its type."""
        return f"word_{self.halves[state]}({text})" if state in self.halves else text

    def kept(self, state: str, value: str, before: str) -> str:
        """What a state's element becomes that was `before` and is given a value."""
        if state in self.halves:
            return f"kept_{self.halves[state]}({value}, {before})"
        return f"kept({value}, {before})"

    def overwrite(self, sinks: list[Sink]) -> None:
        """The tile's new states, and the gradient when it is written back, in one loop: each
        reads what the others overwrite."""
        states = self.changed(sinks)
        back = [s.expr for s in sinks if s.kind == "back"]
        self.ready_for(*(e for _, e in states), *back)
        if back:
            with self.block("if back:"):
                self.overwrite_loop(states, back)
        if states:
            with self.block("if not back:" if back else ""):
                self.overwrite_loop(states, [])

    def changed(self, sinks: Sequence[Sink]) -> list[tuple[str, Expr]]:
        """The states that a walk over all elements overwrites, and what they become."""
        states = [(s.name, self.walked(s)) for s in sinks if s.kind == "state"]
        return [(name, e) for name, e in states if not (e.op == "state" and e.value == name)]

    def long(self, one: Pass) -> bool:
        """Whether a pass overwrites states of 16 bits, by far the longest of its loops."""
        return any(s.kind == "state" and s.name in self.halves for s in one.sinks)

    def overwrite_loop(self, states: list[tuple[str, Expr]], back: list[Expr]) -> None:
        if not self.evenly or not self.streams:
            self.ahead()
            return self.overwrite_part(str(self.tile), states, back)
        with self.block(f"for h in range(0, {self.tile}, {LITTLE}):"):
            self.ahead()
            self.overwrite_part(f"h, h + {LITTLE}", states, back)
        return None

    def overwrite_part(self, turns: str, states: list[tuple[str, Expr]], back: list[Expr]) -> None:
        with self.block(f"for i in range({turns}):"):
            for name, expr in states:
                self.add(f"y_{name} = {self.text(expr, 'i')}")
            for expr in back:
                self.add(f"z = {self.text(expr, 'i')}")
            for name, _ in states:
                place = f"{name}_[i]"
                self.add(f"{place} = {self.kept(name, f'y_{name}', place)}")
            if back:
                self.add("g_[i] = z")

    def ready_for(self, *roots: Expr) -> None:
        """Emit everything that a loop over these expressions needs before it."""
        raise NotImplementedError

    def walked(self, sink: Sink) -> Expr:
        """What a walk over all elements writes of a sink."""
        return self.outside(sink.expr)

    @staticmethod
    def outside(expr: Expr) -> Expr:
        """Of `where(selection, a, b)`, what the elements outside the selection become."""
        return expr.args[2] if expr.op == "where" and expr.args[0].op == "in" else expr
