"""CUDA C++: lines of text, and a tile program's instructions for a number or an element.

One row per instruction; numbers.cuh and instructions.py have the `op_` functions. The compiler
must not contract a * b + c (`--fmad=false`): results are equal to the reference's bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from compll.ir.tile import Value
from compll.numerics import bits, draws
from compll.numerics.bits import IN_NUMPY, MEANINGS
from compll.numerics.numbers import TRIES, Tries, sum_units
from compll.numerics.traced import Number, convert, kind_of
from compll.passes.values import Bounds
from compll.routines import huffman, streams
from compll.routines.language import Routine

C_TYPES = {"f32": "float", "i32": "i32", "bool": "bool", "f64": "double", "i64": "i64"}
#: C types of scratch memory and states; others are floats
MEMORY = {"float16": "Float16", "bfloat16": "Bfloat16", "int32": "i32", "uint8": "u8",
          "uint32": "u32", "int64": "i64", "uint64": "u64", "float64": "double",
          "i32": "i32", "i64": "i64"}  # fmt: skip
#: instructions that are functions, with their number of arguments
CALLED = {"neg": 1, "floor": 1, "ceil": 1, "round": 1, "sqrt": 1, "add": 2, "sub": 2, "mul": 2,
          "as_count": 2, **{name: meaning.arity for name, meaning in MEANINGS.items()}}  # fmt: skip
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


# ---- code tables --------------------------------------------------------------------------------
# Values that follow from one code of few bits: every thread of a warp holds one of them, and
# elements ask for theirs, instead of computing it.

WARP = 32
#: instructions from which a value is asked for
WORTH = 3
KINDS = {"f32": np.float32, "i32": np.int32, "bool": np.bool_}


class CodeTables:
    """The values of a walk that are asked for: their codes and numbers."""

    def __init__(self, values: Iterable[Value], roots: Iterable[Value]) -> None:
        self.codes: dict[Value, Value] = {}
        self.numbers: dict[Value, Any] = {}
        self.costs: dict[Value, int] = {}
        users: dict[Value, bool] = dict.fromkeys(roots, True)
        values = list(values)
        for v in values:
            self._look(v)
        for v in values:
            for a in v.args:
                users[a] = users.get(a, False) or v not in self.codes
        #: those that others than such values need
        self.asked = {
            v: (self.codes[v], self.numbers[v])
            for v in values
            if users.get(v) and v.kind != "bool" and self.costs.get(v, 0) >= WORTH
        }

    def args(self, v: Value) -> tuple[Value, ...]:
        """The values that a value is made of here."""
        return (self.asked[v][0],) if v in self.asked else v.args

    def _look(self, v: Value) -> None:
        """Compute a value for every code, if it follows from one alone."""
        if v.op == "const" and v.kind in KINDS:
            self.numbers[v] = KINDS[v.kind](v.attr)
        if v.level != "element" or v.kind not in KINDS:
            return
        bits = v.attr if v.op == "code" else v.attr.storage.bits if v.op == "unpack" else WARP
        if 1 << bits <= WARP:
            self.codes[v], self.costs[v] = v, 0
            self.numbers[v] = np.arange(1 << bits, dtype=np.int32)
            return
        codes = {self.codes[a] for a in v.args if a in self.codes}
        constant = all(a in self.numbers for a in v.args)
        of = np.asarray if v.op in ("convert", "repeat") else IN_NUMPY.get(v.op)
        if len(codes) != 1 or not constant or of is None:
            return
        with np.errstate(all="ignore"):
            result = of(*(self.numbers[a] for a in v.args))
        (self.codes[v],) = codes
        self.numbers[v] = np.asarray(result).astype(KINDS[v.kind])
        self.costs[v] = 1 + sum(self.costs.get(a, 0) for a in v.args)


# ---- traced functions ---------------------------------------------------------------------------
# Functions of numbers (see numerics/traced.py) as CUDA C++.

UNSIGNED = {"i32": "u32", "i64": "u64"}
#: operators of C++, for floats and for integers
INFIX = {
    "div": "/", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "and": "&", "or": "|", "xor": "^", "right": ">>", "quotient": "/", "remainder": "%",
    "add": "+", "sub": "-", "mul": "*",
}  # fmt: skip
#: operators of unsigned integers, which wrap around
WRAPPING = {
    "add": "+", "sub": "-", "mul": "*", "left": "<<", "unsigned_right": ">>",
    "unsigned_quotient": "/",
}  # fmt: skip
CALLS = {"magnitude": "fabs", "floor": "floor", "ceil": "ceil", "round": "rint", "sqrt": "sqrt"}
BITS = {"i32": "__float_as_int", "f32": "__int_as_float", "i64": "__double_as_longlong",
        "f64": "__longlong_as_double"}  # fmt: skip
#: functions for which a device has instructions of its own: see numbers.cuh
OF_DEVICES = ("float16_bits", "float16_value", "op_code")


class Function:
    """A function in C++: lines, each of which names a value, below those that declare variables."""

    def __init__(self) -> None:
        self.lines, self.variables = Lines(depth=1), Lines(depth=1)

    def const(self, kind: str, number: float, like: str | None) -> str:
        """A constant."""
        if kind == "bool":
            return str(number).lower()
        if kind in UNSIGNED:
            return f"({int(number)}{'ll' * (kind == 'i64')})"
        return double(number) if kind == "f64" else f"(float){double(number)}"

    def emit(self, op: str, kind: str, *args: str) -> str:
        """The name of an instruction's value."""
        if op == "store":
            self.lines.add(f"{element(*args[:3])} = ({MEMORY[args[1]]}){args[3]};")
            return ""
        name = f"v{len(self.lines.lines)}"
        kind = kind or "i64"  # of an element
        self.lines.add(f"const {C_TYPES[kind]} {name} = {written(op, kind, args)};")
        return name

    def variable(self, kind: str, value: str) -> str:
        """A variable, declared at the function's head."""
        name = f"x{len(self.variables.lines)}_"
        self.variables.add(f"{C_TYPES[kind]} {name};")
        self.set(name, value)
        return name

    def get(self, variable: str) -> str:
        """A copy of its present value."""
        name = f"v{len(self.lines.lines)}"
        self.lines.add(f"const auto {name} = {variable};")
        return name

    def set(self, variable: str, value: str) -> None:
        """Assign a value."""
        self.lines.add(f"{variable} = {value};")

    def branch(self, condition: str, then: Callable[[], None], other: Callable[[], None]) -> None:
        """A branch, by a condition."""
        with self.lines.block(f"if ({condition})"):
            then()
        with self.lines.block("else"):
            other()

    def repeat(self, condition: Callable[[], str], body: Callable[[], None]) -> None:
        """A body as long as a condition holds."""
        with self.lines.block("while (true)"):
            self.lines.add(f"if (!{condition()}) break;")
            body()

    def loop(self, start: str, stop: str, step: int, body: Callable[[str], None]) -> None:
        """A body for start, start + step, ... below stop."""
        name = f"i{len(self.lines.lines)}"
        head = f"for (i64 {name} = {start}; {name} < {stop}; {name} += {step})"
        with self.lines.block(head):
            body(name)

    def call(self, routine: Routine, args: list[str], constants: dict[str, Any]) -> str:
        """A call of a routine, whose text comes before."""
        return f"{routine.name}({', '.join(args)})"


def element(array: str, of: str, index: str) -> str:
    """An element of an array."""
    return f"(({MEMORY[of]}*){array})[{index}]"


def routine(of: Routine) -> str:
    """The definition of a routine."""
    made = Function()
    kinds = ["i64" if kind == "int" else f"{MEMORY[kind.lower()]}*" for kind in of.kinds]
    result = of.printed(made, of.params, {})
    if of.result:
        made.lines.add(f"return {result};")
    params = ", ".join(f"{kind} {name}" for kind, name in zip(kinds, of.params, strict=True))
    head = f"D {'i64' if of.result else 'void'} {of.name}({params})"
    return f"{head} {{\n{made.variables}{made.lines}}}\n"


def written(op: str, kind: str, args: tuple[str, ...]) -> str:
    """An instruction."""
    if op == "load":
        return f"({C_TYPES[kind]}){element(*args[:3])}"
    if op == "where":
        return "{} ? {} : {}".format(*args)
    if op == "convert":
        return f"({C_TYPES[kind]}){args[0]}"
    if op == "bits":
        return f"{BITS[kind]}({args[0]})"
    if op == "not":
        return f"!{args[0]}"
    if op in CALLS:
        return f"{CALLS[op]}{'f' * (kind == 'f32')}({args[0]})"
    if kind in UNSIGNED and op in WRAPPING:
        a, b = (f"({UNSIGNED[kind]}){x}" for x in args)
        return f"({C_TYPES[kind]})({a} {WRAPPING[op]} {b})"
    if op == "neg":
        return (
            f"({C_TYPES[kind]})(({UNSIGNED[kind]})0 - ({UNSIGNED[kind]}){args[0]})"
            if (kind in UNSIGNED)
            else f"-{args[0]}"
        )
    return f"{args[0]} {INFIX[op]} {args[1]}"


def function(name: str, of: Callable[..., Any], *kinds: str, head: str = "D") -> str:
    """The definition of a function of arguments of these kinds."""
    made = Function()
    names = [f"x{k}" for k in range(len(kinds))]
    result = of(*(Number(made, *each) for each in zip(names, kinds, strict=True)))
    params = ", ".join(f"{C_TYPES[k]} {x}" for x, k in zip(names, kinds, strict=True))
    text = f"{head} {C_TYPES[result.kind]} {name}({params}) {{\n{made.lines}  return {result.value};\n}}\n"
    return f"#ifndef __CUDA_ARCH__\n{text}#endif\n" if name in OF_DEVICES else text


def of_arrays(name: str, of: Callable[..., list[Number]], *lengths: int) -> str:
    """The definition of a function of arrays of float64 of these lengths. The last argument takes its
    results."""
    made = Function()
    names = [f"x{k}" for k in range(len(lengths))]
    result = of(
        *(
            [Number(made, f"{x}[{i}]", "f64") for i in range(length)]
            for x, length in zip(names, lengths, strict=True)
        )
    )
    for i, each in enumerate(result):
        made.lines.add(f"out[{i}] = {each.value};")
    params = "".join(f"const double* {x}, " for x in names)
    return f"D void {name}({params}double* out) {{\n{made.lines}}}\n"


def searches() -> Iterator[str]:
    """The functions of searched thresholds: they begin a search, and decide after a walk."""
    for op, count in (("adjust", 6), ("bisect", 5)):

        def begin(given: list[Number], op: str = op) -> list[Number]:
            rule = Tries(op, given)
            state = rule.begin()
            return [*state, *rule.tree(*state[:2])]

        def decide(
            given: list[Number], state: list[Number], counts: list[Number], op: str = op
        ) -> list[Number]:
            rule = Tries(op, given)
            result = rule.decide(state, counts)
            return [*result, *rule.tree(*result[2:4])]

        yield of_arrays(f"begin_{op}", begin, count)
        yield of_arrays(f"decide_{op}", decide, count, 3, TRIES)


def _code(x: Any, most: Any) -> Any:
    return bits.code(x, most if kind_of(x) == "bool" else convert(most, kind_of(x)))


def in_payloads() -> str:
    """Functions that store and load each format, with those of prelude.cuh."""
    lines = []
    for name, form in bits.FORMATS.items():
        whole = {8: "byte", 16: "uint16"}[form.width]
        lines += [
            f"template <bool READY = false> D void store_{name}(u8* p, float value) "
            f"{{ store_{whole}<READY>(p, {name}_bits(value)); }}",
            f"template <bool READY = false> D float load_{name}(const u8* p) "
            f"{{ return {name}_value((i32)load_{whole}<READY>(p)); }}",
        ]
    return "\n".join(lines) + "\n"


def traced_functions() -> str:
    """The text of all these functions."""
    made = [
        function(f"op_{name}", meaning.of, *[kind] * meaning.arity)
        for name, meaning in bits.MEANINGS.items()
        for kind in meaning.kinds
    ]
    made += [function("op_code", _code, kind, "i32") for kind in ("f32", "i32", "bool")]
    made += [function("op_as_count", bits.as_count, kind, "i64") for kind in ("f64", "i64")]
    made += [function("op_exp2_inside", bits.exp2_inside, "i32")]
    for name, form in bits.FORMATS.items():
        made += [function(f"{name}_bits", form.bits, "f32")]
        made += [function(f"{name}_value", form.value, "i32")]
    # out of line: two threads of a block need it
    made += [function("stream", draws.keys, *["i64"] * 5, head="SLOW")]
    made += [function("uniform", draws.uniform_of, "i64", "i64")]
    made += [function("sample_position", draws.sampled, "i32", "i64", "i64", "i64")]
    for k, name in enumerate(("sum_up", "sum_down")):
        made += [function(name, lambda *given, k=k: sum_units(*given)[k], "f32", "i64")]
    made += [function("circle_start", draws.circle_start, "i64", "i64")]
    made += [function("on_circle", draws.on_circle, *["i64"] * 5)]
    made += [routine(streams.rice_parameter), routine(huffman.join)]
    return "".join([*made, *searches()])
