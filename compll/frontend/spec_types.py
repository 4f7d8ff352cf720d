"""Declarations of payload fields and states: `name: type`, like `uint[bits][n]`."""

from __future__ import annotations

import re
from dataclasses import replace

from compll.errors import Problems, nearest
from compll.frontend import syntax
from compll.frontend.source import Text, Value
from compll.frontend.spec import Declared
from compll.frontend.syntax import Syntax
from compll.ir.storage import STORAGES

STORAGE = (*STORAGES, "bool")
#: types with their bits in brackets
SIZED = ("uint", "float", "bfloat", "huffman")
UINTS = tuple(f"uint{bits}" for bits in range(1, 16))
#: names of types elsewhere
TYPE_SYNONYMS = {
    "float64": "float32", "double": "float32", "half": "float16", "byte": "uint8", "int8": "uint8",
    "int16": "int32", "int64": "int32", "int": "int32", "bit": "uint1",
    "fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "bf16": "bfloat16",
    "float8": "float8_e4m3", "fp8": "float8_e4m3", "float8_e4m3fn": "float8_e4m3",
}  # fmt: skip
TYPE = re.compile(r"\s*([a-z]+\d*(?:_\w+)?)\s*(?:\[([^\[\]]*)\])?\s*(?:\[([^\[\]]*)\])?\s*\Z")
#: `A if CONDITION else B`, of which B may be the like
EITHER = re.compile(r"\s*((?:[^\[\]]|\[[^\[\]]*\])+?)\s+if\b(.+?)\belse\s+(\S.*)", re.DOTALL)


def declared(name: str, value: Value, problems: Problems) -> Declared | None:
    """The declaration of a name; None with the reason in `problems`."""
    match = TYPE.match(value.value) if isinstance(value, Text) else None
    if match is None and isinstance(value, Text) and (parts := EITHER.match(value.value)):
        return _either(name, value, parts, problems)
    if match is None or not isinstance(value, Text):
        text = value.value if isinstance(value, Text) else ""
        problems.add(
            value.span,
            f"{text!r} is no type" if text else f"{name!r} needs a type",
            'like float32, uint1[n], "uint[bits][n]" or int32[selection]',
        )
        return None
    base, first, second = match.groups()
    sized = base in SIZED
    bits, dim = (first, second) if sized else (None, first)
    if (sized and first is None) or (not sized and second is not None):
        hint = f"write {base if sized else 'uint'}[bits][n]"
        problems.add(value.span, f"{value.value!r} is not a type", hint)
        return None
    if not _known(base, value, problems):
        return None
    width = syntax.parse_part(value, bits, match.start(2), problems)
    if bits is not None and width is None:
        return None
    rows, cols = _lengths(dim, value, match.start(3 if sized else 2), problems)
    return Declared(name, base, width, rows, value.span, cols)


def _either(name: str, whole: Text, parts: re.Match[str], problems: Problems) -> Declared | None:
    """The declaration in `A if CONDITION else B`."""
    first, other = (
        declared(name, Text(parts[i], whole.at(parts.start(i))), problems) for i in (1, 3)
    )
    condition = syntax.parse_part(whole, parts[2], parts.start(2), problems)
    if first is None or other is None or condition is None:
        return None
    return replace(first, condition=condition, other=other)


def _known(base: str, value: Text, problems: Problems) -> bool:
    """True if there is a type of that name; else reports it."""
    if base in (*STORAGE, *UINTS, *SIZED):
        return True
    hint = nearest(TYPE_SYNONYMS.get(base, base), (*STORAGE, *UINTS))
    if re.fullmatch(r"uint\d+", base):
        hint = f"packed types are {UINTS[0]} to {UINTS[-1]}"
    if base == "int1":
        hint = "a sign is a bit: `q: x < 0`, as uint1[n], and where(q, -1, 1) in decode"
    if re.fullmatch(r"int[248]", base):
        hint = f"negative numbers are stored shifted: u{base} of q + {2 ** int(base[3:]) // 2}"
    problems.add(value.span, f"unknown type {base!r}", hint)
    return False


def _lengths(
    part: str | None, whole: Text, start: int, problems: Problems
) -> tuple[Syntax | None, Syntax | None]:
    """The content of brackets: nothing, a length, or the rows and columns of a matrix."""
    comma = _comma(part or "")
    if part is None or comma is None:
        return syntax.parse_part(whole, part, start, problems), None
    rows = syntax.parse_part(whole, part[:comma], start, problems)
    return rows, syntax.parse_part(whole, part[comma + 1 :], start + comma + 1, problems)


def _comma(text: str) -> int | None:
    """Index of the first comma outside of parentheses; None without one."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            return place
    return None
