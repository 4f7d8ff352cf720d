"""Searched thresholds: `adjust` and `bisect` count the elements that reach a threshold.

[Note: tries] A try has only two possible successors, and a walk over memory leaves time to count
for several thresholds. So each walk counts for a tree of them: the next, the two that may come
after it, and the four after those. gaussiank's eleven tries take four walks.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from compll.backends.cpu.builder import F32, F64, I64, Variable, c, number
from compll.backends.cpu.instructions import ROWS
from compll.ir.tile import Search


class Tries:
    """Emits `adjust` or `bisect` within a kernel's loop over pieces, which `printer` builds.

    ends: both ends of the interval that `bisect` halves, or the next threshold of `adjust`.
    """

    def __init__(self, printer: Any, step: Search) -> None:
        self.printer, self.b, self.step = printer, printer.b, step
        self.given = [printer.value(v) for v in step.numbers]
        self.size = len(step.chosen)
        self.halves = step.how == "bisect"
        b = printer.b
        self.tries, self.counts = b.room(F64, self.size), b.room(F64, self.size)
        self.number, self.turn = Variable(b, c(self.size)), Variable(b, c(0))
        self.ends = [Variable(b, x) for x in self.given[: 1 + self.halves]]

    def emit(self) -> None:
        """Compute the step's two values."""
        b, p, step = self.b, self.printer, self.step
        for v in p.calls.functions[id(step.walk)][0].needs.pieces:
            if v not in step.chosen:
                p.value(v)  # before the loop: values within it would not dominate later uses
        b.store(
            self.middle(*self.given[:2]) if self.halves else self.given[0], p.made(step.made[0])
        )
        b.store(number(F64, 0), p.made(step.made[1]))
        most = ROWS["as_count"](b, self.given[-1], c(100))
        # adjust counts before its first try, and once more
        least = c(1 if self.halves else 0)
        with b.if_then(b.icmp_signed(">=", most, least)):
            self.tried(b.sub(most, least))

    def tried(self, last: ir.Value) -> None:
        """Try until the count fits, or until number `last` has been tried."""
        b = self.b
        go, leave = (b.append_basic_block(name) for name in ("try", "tried"))
        b.branch(go)
        b.position_at_end(go)
        with b.if_then(b.icmp_signed(">=", self.number.get(), c(self.size))):
            self.count()
            self.number.set(c(0))
        found, count = (b.get(room, F64, self.number.get()) for room in (self.tries, self.counts))
        b.store(found, self.printer.made(self.step.made[0]))
        b.store(count, self.printer.made(self.step.made[1]))
        fewest, most = self.given[2:4] if self.halves else self.given[1:3]
        few = b.fcmp_ordered("<", count, fewest)
        fits = b.and_(b.fcmp_ordered("<=", fewest, count), b.fcmp_ordered("<=", count, most))
        turn = self.turn.get()
        stop = b.or_(fits, b.icmp_signed(">=", turn, last))
        self.next(found, few)
        self.turn.set(b.add(turn, c(1)))
        b.cbranch(stop, leave, go)
        b.position_at_end(leave)

    def next(self, found: ir.Value, few: ir.Value) -> None:
        """Choose the next threshold. few: too few elements reach the threshold `found`."""
        b = self.b
        twice = b.mul(self.number.get(), c(2))
        self.number.set(b.add(twice, b.select(few, c(1), c(2))))
        if not self.halves:
            down, up = self.given[3:5]
            self.ends[0].set(b.select(few, b.fmul(found, down), b.fmul(found, up)))
            return
        for end, replaced in zip(self.ends, (b.not_(few), few), strict=True):
            end.set(b.select(replaced, found, end.get()))

    def count(self) -> None:
        """Walk once, counting for a tree of thresholds."""
        b, p, step = self.b, self.printer, self.step
        tries = self.tree()
        for v, t in zip(step.chosen, tries, strict=True):
            p.local[id(v)] = b.fptrunc(t, F32)
        p.calls.run(step.walk, p.row["n"])
        for q, (fold, t) in enumerate(zip(step.walk.folds, tries, strict=True)):
            b.put(t, self.tries, c(q))
            total = b.load(p.calls.totals[id(fold)], typ=I64)
            b.put(b.sitofp(total, F64), self.counts, c(q))

    def tree(self) -> list[ir.Value]:
        """The next thresholds: after number q come 2 q + 1, if too few reach it, and 2 q + 2."""
        b, ends = self.b, [end.get() for end in self.ends]
        if not self.halves:
            down, up = self.given[3:5]
            for q in range(self.size // 2):
                ends += [b.fmul(ends[q], down), b.fmul(ends[q], up)]
            return ends
        intervals, found = [tuple(ends)], []
        for q in range(self.size):
            low, high = intervals[q]
            found.append(self.middle(low, high))
            intervals += [(low, found[q]), (found[q], high)]
        return found

    def middle(self, low: ir.Value, high: ir.Value) -> ir.Value:
        """The middle of an interval."""
        b = self.b
        return b.fadd(low, b.fdiv(b.fsub(high, low), number(F64, 2.0)))
