"""Functions of numbers (see numerics/traced.py) as CUDA C++."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from compll.backends.cuda.instructions import C_TYPES, Lines, double
from compll.numerics import bits, draws
from compll.numerics.numbers import sum_units
from compll.numerics.traced import Number, convert, kind_of
from compll.numerics.tries import SIZE, Tries

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
    """A function in C++: lines, each of which names a value."""

    def __init__(self) -> None:
        self.lines = Lines(depth=1)

    def const(self, kind: str, number: float, like: str) -> str:
        """A constant."""
        if kind in UNSIGNED:
            return f"({int(number)}{'ll' * (kind == 'i64')})"
        return double(number) if kind == "f64" else f"(float){double(number)}"

    def emit(self, op: str, kind: str, *args: str) -> str:
        """The name of an instruction's value."""
        name = f"v{len(self.lines.lines)}"
        self.lines.add(f"const {C_TYPES[kind]} {name} = {written(op, kind, args)};")
        return name


def written(op: str, kind: str, args: tuple[str, ...]) -> str:
    """An instruction."""
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
    found = of(*(Number(made, *each) for each in zip(names, kinds, strict=True)))
    params = ", ".join(f"{C_TYPES[k]} {x}" for x, k in zip(names, kinds, strict=True))
    text = f"{head} {C_TYPES[found.kind]} {name}({params}) {{\n{made.lines}  return {found.value};\n}}\n"
    return f"#ifndef __CUDA_ARCH__\n{text}#endif\n" if name in OF_DEVICES else text


def of_arrays(name: str, of: Callable[..., list[Number]], *lengths: int) -> str:
    """The definition of a function of arrays of float64 of these lengths. The last argument takes its
    results."""
    made = Function()
    names = [f"x{k}" for k in range(len(lengths))]
    found = of(
        *(
            [Number(made, f"{x}[{i}]", "f64") for i in range(length)]
            for x, length in zip(names, lengths, strict=True)
        )
    )
    for i, each in enumerate(found):
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
            found = rule.decide(state, counts)
            return [*found, *rule.tree(*found[2:4])]

        yield of_arrays(f"begin_{op}", begin, count)
        yield of_arrays(f"decide_{op}", decide, count, 3, SIZE)


def _code(x: Any, most: Any) -> Any:
    return bits.code(x, most if kind_of(x) == "bool" else convert(most, kind_of(x)))


def in_payloads() -> str:
    """Functions that store and load each format, with those of prelude.cuh."""
    lines = []
    for name, one in bits.FORMATS.items():
        whole = {8: "byte", 16: "uint16"}[one.width]
        lines += [
            f"template <bool READY = false> D void store_{name}(u8* p, float value) "
            f"{{ store_{whole}<READY>(p, {name}_bits(value)); }}",
            f"template <bool READY = false> D float load_{name}(const u8* p) "
            f"{{ return {name}_value((i32)load_{whole}<READY>(p)); }}",
        ]
    return "\n".join(lines) + "\n"


def text() -> str:
    """The text of all these functions."""
    made = [
        function(f"op_{name}", meaning.of, *[kind] * meaning.arity)
        for name, meaning in bits.MEANINGS.items()
        for kind in meaning.kinds
    ]
    made += [function("op_code", _code, kind, "i32") for kind in ("f32", "i32", "bool")]
    made += [function("op_as_count", bits.as_count, kind, "i64") for kind in ("f64", "i64")]
    made += [function("op_exp2_inside", bits.exp2_inside, "i32")]
    for name, one in bits.FORMATS.items():
        made += [function(f"{name}_bits", one.bits, "f32")]
        made += [function(f"{name}_value", one.value, "i32")]
    # out of line: two threads of a block need it
    made += [function("stream", draws.keys, *["i64"] * 5, head="SLOW")]
    made += [function("uniform", draws.uniform_of, "i64", "i64")]
    made += [function("sample_position", draws.sampled, "i32", "i64", "i64", "i64")]
    for k, name in enumerate(("sum_up", "sum_down")):
        made += [function(name, lambda *given, k=k: sum_units(*given)[k], "f32", "i64")]
    made += [function("circle_start", draws.circle_start, "i64", "i64")]
    made += [function("on_circle", draws.on_circle, *["i64"] * 5)]
    return "".join([*made, *searches()])
