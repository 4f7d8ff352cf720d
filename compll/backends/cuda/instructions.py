"""CUDA C++: lines of text, and a tile program's instructions for a number or a lane.

One row per instruction; numbers.cuh and traced_functions.py have the `op_` functions. The compiler
must not contract a * b + c (`--fmad=false`): results are equal to the reference's bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from compll.ir.tile import Value
from compll.numerics.bits import MEANINGS
from compll.passes.bounds import Bounds

C_TYPES = {"f32": "float", "i32": "i32", "bool": "bool", "f64": "double", "i64": "i64"}
#: C types of scratch memory and states; others are floats
MEMORY = {"float16": "Float16", "bfloat16": "Bfloat16", "int32": "i32", "uint8": "u8",
          "uint32": "u32", "int64": "i64", "uint64": "u64", "float64": "double"}  # fmt: skip
#: instructions that are functions, with their number of arguments
CALLED = {"neg": 1, "floor": 1, "ceil": 1, "round": 1, "sqrt": 1, "add": 2, "sub": 2, "mul": 2,
          "as_count": 2, **{name: one.arity for name, one in MEANINGS.items()}}  # fmt: skip
ROWS = {
    **{op: f"op_{op}({', '.join(['{}'] * arity)})" for op, arity in CALLED.items()},
    "div": "{} / {}", "where": "op_where({}, {}, {})", "lt": "{} < {}", "le": "{} <= {}",
    "gt": "{} > {}", "ge": "{} >= {}", "eq": "{} == {}", "ne": "{} != {}", "and": "{} && {}",
    "or": "{} || {}", "not": "!{}", "bitand": "{} & {}", "bitor": "{} | {}",
    "bitxor": "{} ^ {}", "quotient": "{} / {}", "remainder": "{} % {}", "repeat": "{}",
    "buckets": "{}",
}  # fmt: skip


def text(v: Value, args: list[str], bounds: Bounds | None = None) -> str:
    """An instruction applied to the names of its arguments, in a simpler form if their bounds allow
    it."""
    if v.op == "convert":
        return f"({C_TYPES[v.kind]}){args[0]}"
    if v.op == "code":
        most = (1 << v.attr) - 1
        if v.args[0].kind == "f32" and bounds and bounds.of(v.args[0])[1] <= most:
            return f"(i32)__float2uint_rz({args[0]})"  # 0 for NaN and below 0
        return f"op_code({args[0]}, {most})"
    if v.op == "exp2" and v.kind == "f32" and bounds and bounds.within(v.args[0], -127, 128):
        return f"op_exp2_inside({args[0]})"
    if v.op == "bucket":
        return f"bucket({args[0]}, {args[1]}, {v.attr})"
    if v.op == "lookup":
        return f"lookup({args[0]}, {v.attr}, {args[1]})"
    return ROWS[v.op].format(*args)


def literal(v: Value) -> str:
    """A constant in C++."""
    if v.kind == "bool":
        return str(bool(v.attr)).lower()
    if v.kind in ("i32", "i64"):
        return f"{int(v.attr)}ll" if v.kind == "i64" else str(int(v.attr))
    shown = double(float(v.attr))
    return f"(float){shown}" if v.kind == "f32" else shown


def double(number: float) -> str:
    """A float64 constant in C++."""
    if math.isfinite(number):
        return repr(number)
    return "D_NAN" if number != number else "D_INF" if number > 0 else "-D_INF"


class Lines:
    """Text under construction, with indentation."""

    def __init__(self, depth: int = 0) -> None:
        #: functions give lines that are known when all is printed; "": none
        self.lines: list[str | Callable[[], str]] = []
        self.depth = depth

    def add(self, text: str) -> None:
        """Add a line at the present depth."""
        self.lines.append("  " * self.depth + text)

    @contextmanager
    def block(self, head: str, end: str = "}") -> Iterator[None]:
        """`with lines.block("for (...)"):` puts braces around the lines added within it."""
        self.add(f"{head} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self.add(end)

    def __str__(self) -> str:
        texts = (line if isinstance(line, str) else line() for line in self.lines)
        return "".join(f"{text}\n" for text in texts if text)
