"""Expressions as the text of generated CPU kernels.

Element and group values are float32 or int32 by the primitives of cpu_ops; tensor-level values are
plain float64 arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

from compll.ir.expr import Expr

#: elements of a step of cpu/compress_store.py, and by how many what it writes must be longer
STEP = SLACK = 16
FLOAT = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "div": "({} / {})",
    "neg": "(-{})", "abs": "f_abs({})", "floor": "f_floor({})", "ceil": "f_ceil({})",
    "round": "f_round({})", "sqrt": "f_sqrt({})", "exp": "f32(exp(f64({})))", "log": "f32(log(f64({})))",
    "log2": "f32(log2(f64({})))", "pow": "f32(power(f64({}), f64({})))", "where": "f_where({}, {}, {})",
    "min": "f_min({}, {})", "max": "f_max({}, {})",
    "sign": "f_where({} < ZERO, MINUS_ONE, ONE)", "floordiv": "f_floor({} / {})",
    "mod": "({0} - {1} * f_floor({0} / {1}))", "float16": "float16({})", "bfloat16": "bfloat16({})",
    "bfloat16_up": "bfloat16_up({})", "float32": "{}", "exp2": "power_of_two({})",
    "lookup": "table_at({}, {})",
}  # fmt: skip
INT = {
    "add": "i_add({}, {})", "sub": "i_sub({}, {})", "mul": "i_mul({}, {})", "neg": "i_neg({})",
    "bitand": "i_and({}, {})", "bitor": "i_or({}, {})", "bitxor": "i_xor({}, {})",
    "shl": "i_shl({}, {})", "shr": "i_shr({}, {})", "abs": "i_abs({})", "where": "i_where({}, {}, {})",
    "min": "i_min({}, {})", "max": "i_max({}, {})", "sign": "i_where({} < 0, i32(-1), i32(1))",
    "trunc": "i_trunc({})", "floordiv": "i32({} // {})", "mod": "i32({} % {})", "exponent": "exponent({})", "trit": "trit({})", "bucket": "bucket_of({}, {})",
}  # fmt: skip
BOOL = {
    "lt": "({} < {})", "le": "({} <= {})", "gt": "({} > {})", "ge": "({} >= {})", "eq": "({} == {})",
    "ne": "({} != {})", "and": "b_and({}, {})", "or": "b_or({}, {})", "not": "b_not({})",
    "isfinite": "finite({})", "isnan": "is_nan({})", "where": "b_where({}, {}, {})",
}  # fmt: skip
TENSOR = {
    "add": "({} + {})", "sub": "({} - {})", "mul": "({} * {})", "div": "({} / {})", "neg": "(-{})",
    "pow": "called_power(f64({}), f64({}))", "abs": "abs({})", "floor": "np.floor({})", "ceil": "np.ceil({})",
    "round": "np.rint({})", "sqrt": "np.sqrt({})", "exp": "called_exp(f64({}))", "log": "called_log(f64({}))",
    "log2": "called_log2(f64({}))", "min": "({0} if {0} < {1} else {1})", "max": "({0} if {0} > {1} else {1})",
    "sign": "(-1 if {} < 0 else 1)", "where": "({1} if {0} else {2})", "floordiv": "(i64({}) // i64({}))",
    "mod": "(i64({}) % i64({}))", "lt": "({} < {})", "le": "({} <= {})", "gt": "({} > {})", "ge": "({} >= {})",
    "eq": "({} == {})", "ne": "({} != {})", "and": "b_and({}, {})", "or": "b_or({}, {})", "not": "b_not({})",
    "isfinite": "np.isfinite({})", "isnan": "np.isnan({})", "float": "f64({})", "int": "np.int64({})",
    "float16": "f64(float16(f32({})))", "bfloat16": "f64(bfloat16(f32({})))",
    "bfloat16_up": "f64(bfloat16_up(f32({})))", "float32": "f64(f32({}))", "trunc": "np.int64({})",
    "bitand": "(i64({}) & i64({}))", "bitor": "(i64({}) | i64({}))", "bitxor": "(i64({}) ^ i64({}))",
    "shl": "(i64({0}) << i64({1}) if 0 <= {1} < 64 else i64(0))",
    "shr": "(i64({0}) >> (i64({1}) if 0 <= {1} < 64 else i64(63)))",
    "lift": "{}", "exponent": "i64(exponent(f32({})))",
    "exp2": "f64(power_of_two(i32(min(max({}, -127), 128))))",
    "gamma_above": "gamma_above(f64({}), f64({}))",
}  # fmt: skip
#: without branches, which cost numba most; Python's own // and % round otherwise
TENSOR_FLOAT = TENSOR | {
    "min": "d_min({}, {})", "max": "d_max({}, {})", "where": "d_where({}, {}, {})",
    "choose": "d_where({}, {}, {})", "sign": "d_where({} < 0, -1.0, 1.0)",
    "floordiv": "np.floor({} / {})", "mod": "({0} - {1} * np.floor({0} / {1}))",
}  # fmt: skip
BY_DTYPE = {"float": FLOAT, "int": INT, "bool": BOOL}


def tensor(expr: Expr, args: list[str]) -> str:
    """A tensor-level operator applied to argument texts."""
    if expr.op == "float" and expr.args[0].type.dtype == "int":
        return f"(f64({args[0]}) + 0.0)"  # it may be a float64, which has two zeros
    return (TENSOR_FLOAT if expr.type.dtype == "float" else TENSOR)[expr.op].format(*args)


def element(expr: Expr, args: list[str]) -> str:
    """An element or group operator applied to argument texts."""
    (source,) = [expr.args[0].type.dtype] if expr.args else [""]
    if expr.op == "float":
        return ("f_of_i({})" if source == "int" else "f_of_b({})").format(*args)
    if expr.op == "int":
        return f"i_of_b({args[0]})"
    if expr.op == "mod" and expr.type.dtype == "int" and whole_bits(expr.args[1]):
        return f"i_and({args[0]}, i32({whole_bits(expr.args[1])}))"
    return BY_DTYPE[expr.type.dtype][expr.op].format(*args)


def whole_bits(expr: Expr) -> int:
    """c - 1 for a constant c that is a power of two, whose remainder these bits are; else 0."""
    while expr.op in ("lift", "int") and expr.args:
        expr = expr.args[0]
    value = expr.value if expr.op == "const" else 0
    return value - 1 if isinstance(value, int) and 1 < value & -value == value < 2**31 else 0


def code(bits: int, expr: Expr, text: str) -> str:
    """The packed code of a value, a uint8."""
    kind = expr.type.dtype
    return (
        f"b_code({text})"
        if kind == "bool"
        else f"{'i_' if kind == 'int' else ''}code{bits}({text})"
    )


class Lines:
    """Text under construction, with indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.heads: list[str] = []

    def add(self, text: str) -> None:
        """One line at the present depth."""
        self.lines.append("    " * len(self.heads) + text)

    def within(self, *heads: str) -> bool:
        """Whether the innermost block begins like this."""
        return bool(self.heads) and self.heads[-1].startswith(heads)

    def block(self, head: str) -> _Block:
        """`with lines.block("for ...:")` indents what follows; "" is no block."""
        return _Block(self, head)

    def __str__(self) -> str:
        return "\n".join(self.lines) + "\n"


class _Block:
    def __init__(self, lines: Lines, head: str) -> None:
        self.lines, self.head = lines, head

    def __enter__(self) -> None:
        if self.head:
            self.lines.add(self.head)
            self.lines.heads.append(self.head)
            self.start = len(self.lines.lines)

    def __exit__(self, *error: object) -> None:
        if not self.head:
            return
        if len(self.lines.lines) == self.start and self.head == "else:":
            self.lines.lines.pop()
        elif len(self.lines.lines) == self.start:
            self.lines.add("pass")
        self.lines.heads.pop()


def cost(expr: Expr) -> int:
    """A rough number of instructions, to decide whether a shared value is worth a buffer."""
    if expr.op == "lift":
        return 0
    own = {
        "uniform": 10,
        "div": 4,
        "sqrt": 4,
        "exp": 10,
        "log": 10,
        "pow": 20,
        "state": 0,
    }
    return own.get(expr.op, 1) + sum(cost(a) for a in expr.args)


def shared(loops: list[Expr], limit: int, stored: Callable[[Expr], bool]) -> list[Expr]:
    """The largest element values that occur in more than one loop and cost at least `limit`.

    `stored` tells values that are in a buffer anyway (codes that were just packed).
    """
    users: dict[int, set[int]] = {}
    nodes: dict[int, Expr] = {}

    def visit(e: Expr, loop: int) -> None:
        if e.type.shape != "n" or e.op == "lift" or stored(e):
            return
        known = users.setdefault(id(e), set())
        if loop not in known:
            known.add(loop)
            nodes[id(e)] = e
            for a in e.args:
                visit(a, loop)

    for number, root in enumerate(loops):
        visit(root, number)
    found: list[Expr] = []

    def collect(e: Expr, by: set[int]) -> None:
        here = users.get(id(e), set())
        if stored(e) or not here or e in found:
            return
        # A value whose every use is inside one larger shared value needs no buffer of its own.
        if len(here) > 1 and here != by and cost(e) >= limit and e.type.dtype != "bool":
            for a in e.args:
                collect(a, here)
            found.append(e)
            return
        for a in e.args:
            collect(a, by)

    for root in loops:
        collect(root, set())
    return found
