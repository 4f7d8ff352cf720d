"""What the selected elements' fields and states need, and which the walk therefore captures.

Fields over a selection are written after the walk, when the tile's states are overwritten and its
groups' values gone; and so are states at its elements that depend on what the walk finds. So the
walk captures the inputs that they are made of; or values, where those depend on a reduction of
their group, or where one value is all that is needed of several inputs.
"""

from __future__ import annotations

from compll.backends.cpu.emit import Encoder
from compll.ir.expr import Expr, walk
from compll.ir.module import Selection
from compll.ir.program import Pass, Program, Sink, of_group

#: dtypes of captured values; a condition is kept as 0 or 1
NUMPY = {"float": "np.float32", "int": "np.int32", "bool": "np.float32"}


class Capturing(Encoder):
    """Encoder that knows what to capture of a selection's elements."""

    def __init__(self, program: Program, feed: bool) -> None:
        super().__init__(program, feed)
        #: sinks of states, by identity, that the walk itself stores at selected elements, too
        self.inside = {id(x) for one in program.passes for x in one.sinks if self.known(x, one)}
        self.joined: dict[str, Expr | None] = {}

    def known(self, sink: Sink, one: Pass) -> bool:
        """Whether a state at selected elements is known in the walk that selects them.

        A walk that would not touch the state leaves it to what follows, which touches less.
        """
        if not any(self.selects(sink, s) for s in one.selections):
            return False
        _, value, rest = sink.expr.args
        late = {id(e) for e in one.late}
        return not (rest.op == "state" and rest.value == sink.name) and not any(
            id(e) in late or e.type.shape == "kept" or e.op == "count_kept" for e in walk(value)
        )

    def walked(self, sink: Sink) -> Expr:
        """The selected elements' values, too, where the walk knows them."""
        return sink.expr if id(sink) in self.inside else super().walked(sink)

    def captured(self, s: Selection) -> list[str]:
        """Which inputs the selected elements need after the walk: "cg" and "c_STATE"."""
        found = {capture(e) for e in inputs(self.needed(s), self.whole(s))}
        # What a state keeps where its new value is not finite.
        found |= {f"c_{x.name}" for x in self.states(s) if of_group(x.expr.args[1])}
        return sorted(found)

    def whole(self, s: Selection) -> dict[int, Expr]:
        """The element values, by identity, that are captured as they are."""
        found = {id(e): e for e in self.needed(s) if of_group(e)}
        if s.name not in self.joined:
            self.joined[s.name] = None if self.states(s) else join(self.needed(s), found)
        joined = self.joined[s.name]
        return found if joined is None else found | {id(joined): joined}

    def needed(self, s: Selection) -> list[Expr]:
        """The element values that fields over the selection, and states at it, are made of."""
        kept = [k.expr for one in self.prog.passes for k in one.kept if k.expr.type.of == s.name]
        kept += [e.args[0] for e in self.reductions_of(s)]
        inner = [e.args[0] for e in walk(*kept) if e.op == "gather"]
        return kept + inner + [x.expr.args[1] for x in self.states(s)]

    def states(self, s: Selection) -> list[Sink]:
        """The states that are stored after the walk at the selection's elements."""
        sinks = [x for one in self.prog.passes for x in one.sinks]
        return [x for x in sinks if self.selects(x, s) and id(x) not in self.inside]

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

    def placed(self, s: Selection) -> bool:
        """Whether the elements' positions are needed."""
        return bool(self.states(s)) or any(
            e.op in ("indices", "uniform") for e in walk(*self.needed(s))
        )


def capture(e: Expr) -> str:
    """The name, without the selection's, of an input's captured values."""
    return "cg" if e.op == "input" else f"c_{e.value}"


def inputs(roots: list[Expr], given: dict[int, Expr]) -> list[Expr]:
    """The gradient's and the states' elements below these, but not below what is given."""
    found = walk(*(e for e in roots if id(e) not in given), into=lambda e: id(e) not in given)
    return [
        e
        for e in found
        if id(e) not in given and e.op in ("input", "state") and e.type.shape == "n"
    ]


def join(roots: list[Expr], given: dict[int, Expr]) -> Expr | None:
    """The least value that stands between these and several inputs, such as g + residual."""
    below = {capture(e) for e in inputs(roots, given)}
    if len(below) < 2:
        return None
    found = []
    for e in walk(*roots):
        parts = list(walk(e))
        if (
            (e.type.shape, e.type.dtype) == ("n", "float")
            and not any(x.op == "uniform" or x.type.shape in ("scalar", "group") for x in parts)
            and {capture(x) for x in inputs([e], {})} == below
            and not inputs(roots, given | {id(e): e})
        ):
            found.append((len(parts), e))
    return min(found, key=lambda one: one[0], default=(0, None))[1]
