"""What the selected elements' fields and states need, and which the walk therefore captures.

Fields over a selection and states at its elements are written after the walk, when the tile's
states are overwritten and its groups' values gone. So the walk captures, beside the positions, the
inputs they are made of; where a value depends on a reduction of its group, the value itself.
"""

from __future__ import annotations

from compll.backends.cpu_emit import Encoder
from compll.ir import Expr, Selection, walk
from compll.program import Sink, of_group

#: dtypes of captured values
NUMPY = {"float": "np.float32", "int": "np.int32", "bool": "np.bool_"}


class Capturing(Encoder):
    """Encoder that knows what to capture of a selection's elements."""

    def captured(self, s: Selection) -> list[str]:
        """Which inputs the selected elements need after the walk: "cg" and "c_STATE"."""
        whole = self.whole(s)
        roots = [e for e in self.needed(s) if id(e) not in whole]
        found = {
            "cg" if e.op == "input" else f"c_{e.value}"
            for e in walk(*roots)
            if e.op in ("input", "state") and e.type.shape == "n"
        }
        # What a state keeps where its new value is not finite.
        states = [x for one in self.prog.passes for x in one.sinks if self.selects(x, s)]
        found |= {f"c_{x.name}" for x in states if id(x.expr.args[1]) in whole}
        return sorted(found)

    def whole(self, s: Selection) -> dict[int, Expr]:
        """The element values, by identity, that are captured as they are."""
        return {id(e): e for e in self.needed(s) if of_group(e)}

    def needed(self, s: Selection) -> list[Expr]:
        """The element values that fields over the selection, and states at it, are made of."""
        kept = [k.expr for one in self.prog.passes for k in one.kept if k.expr.type.of == s.name]
        kept += [e.args[0] for e in self.reductions_of(s)]
        inner = [e.args[0] for e in walk(*kept) if e.op == "gather"]
        outer = [
            x.expr.args[1] for one in self.prog.passes for x in one.sinks if self.selects(x, s)
        ]
        return kept + inner + outer

    def reductions_of(self, s: Selection) -> list[Expr]:
        """The reductions over the selection's elements."""
        return [
            e
            for one in self.prog.passes
            for e in one.late
            if e.op.startswith("reduce_") and e.args[0].type.of == s.name
        ]

    @staticmethod
    def selects(sink: Sink, s: Selection) -> bool:
        """Whether a state gets another value at the selection's elements than elsewhere."""
        e = sink.expr
        return (
            sink.kind == "state"
            and e.op == "where"
            and e.args[0].op == "in"
            and e.args[0].value == s.name
        )

    def capture(self, s: Selection) -> None:
        """Emit what takes over the inputs and values of the tile's hits, k0 up to k_NAME."""
        name = s.name
        sources = {
            f"{leaf}_{name}": "g_[i] * scale"
            if leaf == "cg"
            else self.held(leaf[2:], f"{leaf[2:]}_[i]")
            for leaf in self.captured(s)
        }
        values = list(self.whole(s).values())
        if not sources and not values:
            return
        with self.block(f"for j in range(k0, k_{name}):"):
            self.add(f"i = i_{name}[j] - o")
            for array, source in sources.items():
                self.add(f"{array}[j] = {source}")
            for number, e in enumerate(values):
                self.add(f"v{number}_{name}[j] = {self.text(e, 'i')}")
