"""Expressions of specs that are computed an array at a time as the text of CUDA C++; what they call
stands in prelude.cuh.

Element and group values are float or i32, tensor-level values double. The compiler must not
contract a * b + c (`--fmad=false`), or payloads would differ between backends.
"""

from __future__ import annotations

from compll.ir.expr import Expr
from compll.ir.program import Unsupported
from compll.ir.static import depends, evaluate

FLOAT = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "div": "({} / {})",
    "neg": "(-{})", "abs": "fabsf({})", "floor": "floorf({})", "ceil": "ceilf({})",
    "round": "rintf({})", "sqrt": "sqrtf({})", "exp": "(float)d_exp({})", "log": "(float)d_log({})",
    "log2": "(float)d_log2({})", "pow": "(float)d_power({}, {})", "exp2": "power_of_two({})", "where": "f_where({}, {}, {})",
    "min": "f_min({}, {})", "max": "f_max({}, {})", "sign": "f_sign({})",
    "floordiv": "floorf({} / {})", "mod": "f_mod({}, {})", "float16": "float16({})",
    "bfloat16": "bfloat16({})", "bfloat16_up": "bfloat16_up({})", "float32": "{}",
    "lookup": "lookup({}, {})",
}  # fmt: skip
INT = {
    "add": "i_add({}, {})", "sub": "i_sub({}, {})", "mul": "i_mul({}, {})", "neg": "i_neg({})",
    "bitand": "({} & {})", "bitor": "({} | {})", "bitxor": "({} ^ {})", "shl": "i_shl({}, {})",
    "shr": "i_shr({}, {})", "abs": "i_abs({})", "where": "({} ? {} : {})", "min": "i_min({}, {})",
    "max": "i_max({}, {})", "sign": "({} < 0 ? -1 : 1)", "trunc": "i_trunc({})",
    "floordiv": "i_floordiv({}, {})", "mod": "i_mod({}, {})", "exponent": "exponent({})",
    "trit": "trit({})", "bucket": "bucket(key({}), {})",
}  # fmt: skip
BOOL = {
    "lt": "({} < {})", "le": "({} <= {})", "gt": "({} > {})", "ge": "({} >= {})",
    "eq": "({} == {})", "ne": "({} != {})", "and": "({} && {})", "or": "({} || {})",
    "not": "(!{})", "isfinite": "finite({})", "isnan": "is_nan({})", "isinf": "isinf({})", "where": "({} ? {} : {})",
}  # fmt: skip
TENSOR = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "div": "({} / {})", "neg": "(-{})",
    "pow": "d_power({}, {})", "abs": "fabs((double){})", "floor": "floor((double){})",
    "ceil": "ceil((double){})", "round": "rint((double){})", "sqrt": "sqrt((double){})",
    "exp": "d_exp({})", "log": "d_log({})", "log2": "d_log2({})",
    "min": "d_min({}, {})", "max": "d_max({}, {})", "sign": "({} < 0 ? -1.0 : 1.0)",
    "where": "({} ? {} : {})", "choose": "({} ? {} : {})", "floordiv": "floor({} / {})",
    "mod": "d_mod({}, {})", "lt": "({} < {})", "le": "({} <= {})", "gt": "({} > {})",
    "ge": "({} >= {})", "eq": "({} == {})", "ne": "({} != {})", "and": "({} && {})",
    "or": "({} || {})", "not": "(!{})", "isfinite": "isfinite((double){})",
    "isnan": "isnan((double){})", "isinf": "isinf((double){})", "float": "((double){})", "int": "((double)(i64){})",
    "float16": "((double)float16((float){}))", "bfloat16": "((double)bfloat16((float){}))",
    "bfloat16_up": "((double)bfloat16_up((float){}))", "float32": "((double)(float){})",
    "trunc": "((double)(i64){})", "bitand": "((double)((i64){} & (i64){}))",
    "bitor": "((double)((i64){} | (i64){}))", "bitxor": "((double)((i64){} ^ (i64){}))",
    "shl": "w_shl({}, {})", "shr": "w_shr({}, {})", "lift": "{}",
    "exponent": "((double)exponent((float){}))", "exp2": "((double)power_of_two(as_i32({})))",
    "gamma_above": "gamma_above({}, {})",
}  # fmt: skip
TENSOR_INT = TENSOR | {"floordiv": "w_floordiv({}, {})", "mod": "w_mod({}, {})"}
BY_DTYPE = {"float": FLOAT, "int": INT, "bool": BOOL}
C_TYPE = {"float": "float", "int": "i32", "bool": "bool"}


def tensor(expr: Expr, args: list[str]) -> str:
    """A tensor-level operator applied to argument texts. Raises Unsupported."""
    if expr.op not in TENSOR:
        raise Unsupported(expr.op)
    if expr.op == "float" and expr.args[0].type.dtype == "int":
        return f"((double){args[0]} + 0.0)"  # a double has two zeros, a whole number one
    return (TENSOR_INT if expr.type.dtype == "int" else TENSOR)[expr.op].format(*args)


def element(expr: Expr, args: list[str]) -> str:
    """An element or group operator applied to argument texts. Raises Unsupported."""
    if expr.op == "float":
        return f"(float)({args[0]})"
    if expr.op == "int":
        return f"(i32)({args[0]})"
    texts = BY_DTYPE[expr.type.dtype]
    if expr.op not in texts:
        raise Unsupported(expr.op)
    return texts[expr.op].format(*args)


def code(bits: int, expr: Expr, text: str) -> str:
    """The packed code of a value, a u32."""
    top = (1 << bits) - 1
    if expr.type.dtype == "bool":
        return f"(u32)({text})"
    if expr.type.dtype == "float":
        return f"f_code({text}, {top}u)"
    return f"i_code({text}, {top})"


def constant(expr: Expr) -> float | int | None:
    """The number that an expression is for all parameters, or nothing."""
    while expr.op in ("float", "int", "lift") and expr.args:
        expr = expr.args[0]
    if expr.type.shape != "static" or expr.type.dtype not in ("float", "int") or depends(expr):
        return None
    value = evaluate(expr, {})
    return value if isinstance(value, int | float) and abs(value) < 1e30 else None


def literal(expr: Expr, dtype: str) -> str:
    """A constant of the spec as a typed literal, or nothing."""
    value = constant(expr)
    if value is None or dtype not in ("float", "int"):
        return ""
    return f"((float){float(value)!r})" if dtype == "float" else f"({int(value)})"


class Lines:
    """Text under construction, with indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def add(self, text: str) -> None:
        """One line at the present depth."""
        self.lines.append("  " * self.depth + text)

    def block(self, head: str) -> Block:
        """`with lines.block("for (...)"):` puts braces around what follows."""
        return Block(self, head)

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"


class Block:
    """A pair of braces."""

    def __init__(self, lines: Lines, head: str) -> None:
        self.lines, self.head = lines, head

    def __enter__(self) -> None:
        self.lines.add(f"{self.head} {{".lstrip())
        self.lines.depth += 1

    def __exit__(self, *error: object) -> None:
        self.lines.depth -= 1
        self.lines.add("}")
