"""Thresholds that are searched for: `adjust` and `bisect`, by counting how many elements reach them.

[Note: tries] A try decides only between two next ones, and a walk over memory leaves time to count
for several thresholds. So each walk counts for a tree of them: the next, the two that may come
after it, and the four after those. gaussiank's eleven tries take four walks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compll.backends.cpu.compact import Compacting
from compll.backends.cpu.values import draws
from compll.ir.expr import Expr, leaves

#: elements between the prefetches of a counting walk
COUNTED = 1024
#: thresholds that a walk counts for: after number q come 2 q + 1, where too few elements reach it,
#: and 2 q + 2
TREE = 7


class Searching(Compacting):
    """Encoder with searches; see [Note: tries]."""

    def adjust(self, expr: Expr, name: str) -> None:
        """The tries of `adjust`; the last count stays in count_NAME."""
        t, low, high, down, up, tries = map(self.scalar, expr.args[1:])
        with self.counting(expr, name):
            self.add(f"{name} = {t}")
            self.open_search(name)
            with self.block("while True:"):
                with self.block(f"if number >= known_{name}:"):
                    self.add(f"try_{name}[0] = {name}")
                    with self.block(f"for j in range({TREE // 2}):"):
                        self.add(f"try_{name}[2 * j + 1] = try_{name}[j] * {down}")
                        self.add(f"try_{name}[2 * j + 2] = try_{name}[j] * {up}")
                    self.count_tries(expr, name)
                self.add(f"{name}, count_{name} = try_{name}[number], found_{name}[number]")
                with self.block(
                    f"if ({low} <= count_{name} and count_{name} <= {high}) "
                    f"or turn >= i64(max(0.0, min({tries}, 100.0))):"
                ):
                    self.add("break")
                self.add(f"few = count_{name} < {low}")
                self.add(f"{name} = {name} * {down} if few else {name} * {up}")
                self.next_try()

    def bisect(self, expr: Expr, name: str) -> None:
        """The tries of `bisect`."""
        low, high, fewest, most, tries = map(self.scalar, expr.args[1:])
        with self.counting(expr, name):
            self.add(f"low_{name}, high_{name} = f64({low}), f64({high})")
            middle = f"low_{name} + (high_{name} - low_{name}) / 2.0"
            self.add(f"{name} = {middle}")
            self.add(f"least_{name}, most_{name} = np.empty({TREE}), np.empty({TREE})")
            self.open_search(name)
            with self.block(f"while turn < i64(max(0.0, min({tries}, 100.0))):"):
                self.add(f"{name} = {middle}")
                with self.block(f"if number >= known_{name}:"):
                    self.middles(name)
                    self.count_tries(expr, name)
                self.add(f"count_{name} = found_{name}[number]")
                with self.block(f"if {fewest} <= count_{name} and count_{name} <= {most}:"):
                    self.add("break")
                self.add(f"few = count_{name} < {fewest}")
                with self.block("if few:"):
                    self.add(f"high_{name} = {name}")
                with self.block("else:"):
                    self.add(f"low_{name} = {name}")
                self.next_try()

    def middles(self, name: str) -> None:
        """The middles of the interval, of its halves and of theirs."""
        least, most, middle = f"least_{name}", f"most_{name}", f"try_{name}"
        self.add(f"{least}[0], {most}[0] = low_{name}, high_{name}")
        with self.block(f"for j in range({TREE}):"):
            self.add(f"{middle}[j] = {least}[j] + ({most}[j] - {least}[j]) / 2.0")
            with self.block(f"if 2 * j + 2 < {TREE}:"):
                self.add(f"{least}[2 * j + 1], {most}[2 * j + 1] = {least}[j], {middle}[j]")
                self.add(f"{least}[2 * j + 2], {most}[2 * j + 2] = {middle}[j], {most}[j]")

    def open_search(self, name: str) -> None:
        """Before the tries: `known_NAME` of found_NAME are counts for those of try_NAME."""
        self.add(f"try_{name}, found_{name} = np.empty({TREE}), np.zeros({TREE}, np.int64)")
        self.add(f"turn, number, known_{name} = 0, 0, 0")

    def next_try(self) -> None:
        self.add("number = 2 * number + (1 if few else 2)")
        self.add("turn += 1")

    @contextmanager
    def counting(self, expr: Expr, name: str) -> Iterator[None]:
        """What walks over the whole tensor outside the tiles need."""
        known, self.where = dict(self.names), "piece"
        self.draw_piece(expr.args[0])
        self.prepare(expr.args[0])
        self.add(f"count_{name} = 0")
        yield
        self.names, self.where = known, "tile"
        self.names[id(expr)] = name

    def count_tries(self, expr: Expr, name: str) -> None:
        """One walk, which leaves in found_NAME how many elements are at least as large as each."""
        x = expr.args[0]
        self.add(f"number, known_{name} = 0, {TREE}")
        for q in range(TREE):
            self.add(f"least{q}, above{q} = f32(try_{name}[{q}]), 0")
        with self.block(f"for o in range(0, n, {COUNTED}):"):
            self.add(f"ahead = o + {COUNTED}")
            self.ask(COUNTED, tuple(map(self.array_of, leaves(x))))
            for q in range(TREE):
                self.add(f"z{q} = i32(0)")
            if draws(x):
                with self.block(f"for i in range(o, min(n, o + {COUNTED})):"):
                    self.count_one(x)
            else:
                self.count_slices(x)
            for q in range(TREE):
                self.add(f"above{q} += z{q}")
        for q in range(TREE):
            self.add(f"found_{name}[{q}] = above{q}")

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
        self.add(f"reached = {self.text(x, 'i')}")
        for q in range(TREE):
            self.add(f"z{q} = i_add(z{q}, i_of_b(reached >= least{q}))")
