"""A JSON Schema (draft 7) of spec files, made from the tables of sections, types and operators.

Editors use it to complete and check spec files. It covers form (sections, names, types, parameters,
operators' names); `compll check` reports mistakes of types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compll.frontend.operators import OPERATORS, Operator
from compll.frontend.reader import SIZED, STORAGE, UINTS
from compll.frontend.source import FEEDBACK_KEYS, PARAM_KEYS, SECTIONS, SectionRow
from compll.frontend.spec import PARAM_TYPES, SIDES

Schema = dict[str, Any]
NAME = "^[A-Za-z_][A-Za-z0-9_]*$"
LENGTH = r"\[[^\[\]]+\]"
#: YAML 1.1 readers take `1e-3` for a text
NUMBER = r"^[+-]?(\d[\d_]*\.?\d*|\.\d+)([eE][+-]?\d+)?$|^[+-]?\.?(inf|nan)$"
KEYWORDS = ("and", "or", "not", "if", "else")


def schema() -> Schema:
    """The schema, as JSON."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "compll spec",
        "description": "A gradient compressor for `compll` and `hipress.wrap`.",
        "type": "object",
        "required": [row.name for row in SECTIONS.values() if row.required],
        "additionalProperties": False,
        "properties": {row.name: section(row) for row in SECTIONS.values()},
        "definitions": {
            "expression": expression(),
            "type": type_(),
            "number": {"type": ["number", "string"], "pattern": NUMBER},
            "scalar": {"type": ["number", "boolean", "string"]},
            "parameter": parameter(),
        },
    }


def section(row: SectionRow) -> Schema:
    """The schema of a section, by the form of its row."""
    makers: dict[str, Callable[[], Schema]] = {
        "text": lambda: {"type": ["string", "number"]},
        "name": lambda: {"type": "string", "pattern": NAME},
        "expression": lambda: ref("expression"),
        "choice": lambda: {"enum": list(row.choices), "default": row.choices[0]},
        "chosen": lambda: chosen(row.choices),
        "feedback": lambda: feedback(row.choices),
        "params": lambda: mapping("parameter", empty=True),
        "declarations": lambda: mapping("type", empty=not row.required),
        "bindings": lambda: mapping("expression", empty=True),
        "expression or bindings": lambda: {
            "anyOf": [ref("expression"), mapping("expression", empty=False)]
        },
    }
    return described(makers[row.form](), row.about)


def ref(name: str) -> Schema:
    """A reference to a definition of the schema."""
    return {"$ref": f"#/definitions/{name}"}


def described(item: Schema, about: str) -> Schema:
    """`item` with a description (draft 7 ignores keys beside a $ref)."""
    return {"description": about, **({"allOf": [item]} if "$ref" in item else item)}


def mapping(values: str, *, empty: bool) -> Schema:
    """Names with values of one definition; `empty`: the section may be empty."""
    return {
        "type": ["object", "null"] if empty else "object",
        "propertyNames": {"pattern": NAME},
        "additionalProperties": ref(values),
        "minProperties": 0 if empty else 1,
    }


def chosen(choices: tuple[str, ...]) -> Schema:
    """Any of the choices, or two of them with a condition."""
    plain = [False, True, *choices] if "true" in choices else list(choices)
    either = rf"\s*({'|'.join(choices)})\s*"
    return {
        "default": plain[0],
        "anyOf": [
            {"enum": plain},
            {"type": "string", "pattern": rf"^{either}\bif\b.+\belse\b{either}$"},
        ],
    }


def feedback(choices: tuple[str, ...]) -> Schema:
    """A choice, or a mapping with a factor."""
    plain = chosen(choices)
    number = ref("expression")
    forms = {"decay": number, "of": {"anyOf": plain["anyOf"]}, "difference": number}
    full = {
        "type": "object",
        "oneOf": [{"required": ["decay"]}, {"required": ["difference"]}],
        "properties": {k: described(forms[k], about) for k, about in FEEDBACK_KEYS.items()},
        "additionalProperties": False,
    }
    return {**plain, "anyOf": [*plain["anyOf"], full]}


def type_() -> Schema:
    """The type of a payload field or a state: the common types as choices, all types by pattern."""
    fixed = (*(name for name in STORAGE if name not in SIZED), *UINTS)
    common = ["float32", "float32[n]", "float16", "bfloat16", *(f"{u}[n]" for u in UINTS)]
    return {
        "type": "string",
        "description": "a type, and a length in brackets: [n], [groups] or the name of a selection",
        "anyOf": [
            {"enum": common},
            {"pattern": rf"^\s*({'|'.join(fixed)})\s*({LENGTH})?\s*$"},
            {"pattern": rf"^\s*({'|'.join(SIZED)})\s*{LENGTH}\s*({LENGTH})?\s*$"},
            {"pattern": r"\s+if\b.+\belse\s+\S"},
        ],
    }


def parameter() -> Schema:
    """A default alone, or the full form."""
    forms: dict[str, Schema] = {
        "type": {"enum": list(PARAM_TYPES)},
        "default": ref("scalar"),
        "min": ref("number"),
        "max": ref("number"),
        "choices": {"type": "array", "items": ref("scalar"), "minItems": 1},
        "from": {"enum": list(SIDES)},
        "about": ref("scalar"),
    }
    full = {
        "type": "object",
        "required": ["default"],
        "additionalProperties": False,
        "properties": {key: described(forms[key], about) for key, about in PARAM_KEYS.items()},
    }
    return {"anyOf": [ref("scalar"), full]}


def expression() -> Schema:
    """An expression; its pattern admits calls of known operators only."""
    names = "|".join((*OPERATORS, *KEYWORDS))
    unknown = rf"[^#]*\b(?!(?:{names})\b)[A-Za-z_][A-Za-z0-9_]*\s*\("
    return {
        "type": ["string", "number", "boolean"],
        "pattern": rf"^(?!{unknown})[\s\S]*\S[\s\S]*$",
        "patternErrorMessage": f"no operator is called so; known: {', '.join(OPERATORS)}",
        "description": "\n".join(["In Python's syntax:", *map(line, OPERATORS.values())]),
    }


def line(row: Operator) -> str:
    """An operator in one line."""
    return f"- `{row.infix or row.name}`: {row.about}"
