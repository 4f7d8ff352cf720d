"""exp, log, log2, powers and gamma quantiles as CUDA C++, with the operations of `numerics`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compll.backends.cuda.instructions import ROWS, double
from compll.backends.cuda.text import Lines
from compll.numerics import traced
from compll.numerics.traced import Number


class Primitives(traced.Primitives):
    """Lines within a function, each of which names a value."""

    def __init__(self) -> None:
        self.lines, self.names = Lines(), 0
        self.lines.depth = 1

    def declare(self, kind: str, value: str = "") -> str:
        """A new variable."""
        self.names += 1
        self.lines.add(f"{kind} v{self.names}{' = ' * bool(value)}{value};")
        return f"v{self.names}"

    def emit(self, op: str, *args: Any) -> str:
        return self.declare("const auto", ROWS[op].format(*map(shown, args)))

    def called(self, function: str) -> Callable[[Number], Number]:
        """A function of C++."""
        return lambda x: self.number(self.declare("const double", f"{function}({x.value})"))

    def split(self, v: Number) -> tuple[Number, Number]:
        return self.called("mantissa")(v), self.called("exponent")(v)

    def power_of_two(self, k: Number) -> Number:
        return self.called("power_of_two")(k)

    def choose(
        self, c: Number, then: Callable[[], Number], otherwise: Callable[[], Number]
    ) -> Number:
        found = self.declare("double")
        for head, make in ((f"if ({c.value})", then), ("else", otherwise)):
            with self.lines.block(head):
                self.lines.add(f"{found} = {make().value};")
        return self.number(found)

    def repeat(
        self, times: int, state: tuple[Any, ...], step: Callable[..., Any]
    ) -> tuple[Number, ...]:
        held = [self.number(self.declare("double", shown(x))) for x in state]
        with self.lines.block(f"for (int k = 1; k <= {times}; ++k)"):
            turn = self.number(self.declare("const double", "(double)k"))
            found, last = step(turn, *held)
            for variable, x in zip(held, found, strict=True):
                self.lines.add(f"{variable.value} = {shown(x)};")
            self.lines.add(f"if ({last.value}) break;")
        return tuple(held)


def shown(x: Any) -> str:
    """A Number's name, or a constant."""
    return str(x.value) if isinstance(x, Number) else double(float(x))


def function(head: str, params: str, of: Callable[[Primitives], Any]) -> str:
    """A function of float64. params: names, separated by spaces."""
    made, names = Primitives(), params.split()
    found = of(made)(*map(made.number, names)).value
    given = ", ".join(f"double {name}" for name in names)
    return f"{head}({given}) {{\n{made.lines}  return {found};\n}}\n"


def text() -> str:
    """The text of all these functions."""
    return "".join([
        function("D double op_exp", "x", lambda p: p.elementary().exp),
        function("D double op_log", "x", lambda p: p.elementary().log),
        function("D double op_log2", "x", lambda p: p.elementary().log2),
        function("D double op_pow", "a b", lambda p: p.elementary().power),
        *(f"D float {op}(float x) {{ return (float){op}((double)x); }}\n"
          for op in ("op_exp", "op_log", "op_log2")),
        "D float op_pow(float a, float b) { return (float)op_pow((double)a, (double)b); }\n",
        function("SLOW double gamma_above", "shape p",
                 lambda p: p.gamma(p.called("op_exp"), p.called("op_log")).above),
    ])  # fmt: skip
