"""The part of the encode kernel that reduces: sums, extremes, and whether the gradient is finite."""

from __future__ import annotations

from compll.backends.cpu import fuse as cpu_fuse
from compll.backends.cpu.states import Stated
from compll.ir.expr import Expr
from compll.ir.program import Pass, Program
from compll.numerics.numbers import lane_count


class Reducing(Stated):
    """Emits reductions: a tile's share of a tensor's, and those of groups."""

    prog: Program

    def telling(self, one: Pass) -> list[Expr]:
        """The reductions from which the status follows."""
        return cpu_fuse.telling(one.reductions, self.prog.gradient) if one.status else []

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
        with self.block("else:" if together else ""):
            if status:
                self.status_loop()
            for expr in together:
                self.step_reduction(expr)
        for expr in one.reductions:
            if expr not in together:
                self.step_reduction(expr)

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
        with self.block("else:" if turns == "m" else ""):
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

    def available(self) -> None:
        """Fill the buffers whose inputs are known by now."""
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


def is_count(expr: Expr) -> bool:
    """Whether an expression is a condition as 0.0 or 1.0."""
    return (
        expr.op == "float"
        and expr.args[0].op == "int"
        and expr.args[0].args[0].type.dtype == "bool"
    )
