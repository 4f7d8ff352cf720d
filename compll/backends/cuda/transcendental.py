"""exp, log, log2 and powers as CUDA C++, with the operations of `numerics`."""

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
    ])  # fmt: skip
