"""Stage 1b: the sections of a spec file become a Spec, checked for form, not yet for meaning."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from compll.errors import Problems, Span, closest, nearest
from compll.frontend import spec
from compll.frontend.source import (
    EXAMPLES,
    FEEDBACK_KEYS,
    MEANT,
    PARAM_KEYS,
    REQUIRED,
    SECTIONS,
    Entry,
    Items,
    Section,
    Text,
    Value,
    check_name,
    check_usable,
    mended,
    number,
    scalar,
)
from compll.frontend.spec import (
    ANY,
    PARAM_TYPES,
    SIDES,
    Binding,
    Chosen,
    Declared,
    Param,
    ParamValue,
    Spec,
    Syntax,
    as_float,
)
from compll.ir.storage import STORAGES, WITH_BITS

# ---- spec params --------------------------------------------------------------------------------
# The parameters of a spec: `name: default`, or a mapping with type, limits and choices.

PARAM_HINT = "like `bits: 2` or `bits: {type: int, default: 2, choices: [1, 2, 4, 8]}`"


class ParamReader:
    """Reads one parameter; reports mistakes in `problems`."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems

    def read(self, entry: Entry) -> Param | None:
        name, value = entry.key.value, entry.value
        if isinstance(value, Text) and not value.value and not value.quoted:
            self.problems.add(entry.key.span, f"parameter {name!r} needs a default", PARAM_HINT)
            return None
        if isinstance(value, Text):
            return self.allowed(self.shorthand(name, value))
        if not isinstance(value, Section):
            self.problems.add(value.span, f"parameter {name!r} is a value or a mapping", PARAM_HINT)
            return None
        return self.full(name, mended(value, PARAM_KEYS, "key {!r} of a parameter", self.problems))

    def shorthand(self, name: str, value: Text) -> Param:
        default = scalar(value)
        kind = next(k for k, t in PARAM_TYPES.items() if type(default) is t)
        return Param(name, kind, default, value.span)

    def full(self, name: str, section: Section) -> Param | None:
        default = section.get("default")
        if default is None or not isinstance(default.value, Text):
            self.problems.add(section.span, f"parameter {name!r} needs a default", PARAM_HINT)
            return None
        base = self.shorthand(name, default.value)
        kind = self.value_of(section, "type") if section.get("type") else base.type
        low, high, fits = self.bounds(section, name, kind)
        choices = self.choices(section)
        if kind not in PARAM_TYPES:
            span = entry.value.span if (entry := section.get("type")) else section.span
            self.problems.add(
                span, f"parameter {name!r}: unknown type {kind!r}", nearest(str(kind), PARAM_TYPES)
            )
            return None
        if not fits:
            return None
        value = as_float(base.default) if kind == "float" and base.type == "int" else base.default
        param = Param(
            name,
            str(kind),
            value,
            base.span,
            low,
            high,
            choices,
            str(self.value_of(section, "about") or ""),
            self.side(section, name, kind),
        )
        self.possible(section, param)
        return self.allowed(param)

    def allowed(self, param: Param) -> Param | None:
        """The parameter. If its default is not allowed, it has an allowed value instead."""
        wrong = param.check(param.default)
        if not wrong:
            return param
        self.problems.add(param.span, f"the default is not allowed: {wrong}")
        kind, ends = PARAM_TYPES[param.type], (param.low, param.high, 0)
        finite = [kind(end) for end in ends if end is not None and math.isfinite(as_float(end))]
        others = (replace(param, default=value) for value in (*param.choices, *finite))
        return next((other for other in others if not other.check(other.default)), None)

    def possible(self, section: Section, param: Param) -> None:
        """Report choices that can never be given."""
        entry, free = section.get("choices"), replace(param, choices=())
        for item in entry.value.values if entry and isinstance(entry.value, Items) else ():
            if isinstance(item, Text) and (wrong := free.check(scalar(item))):
                self.problems.add(item.span, f"this choice can never be given: {wrong}")

    def side(self, section: Section, name: str, kind: object) -> str:
        """The parameter's `from`; "" if it has none."""
        entry = section.get("from")
        if entry is None:
            return ""
        value = str(self.value_of(section, "from"))
        if value not in SIDES:
            self.problems.add(
                entry.value.span, f"'from' is one of {', '.join(SIDES)}, not {value!r}",
                nearest(value, SIDES),
            )  # fmt: skip
        elif kind != "int":
            self.problems.add(
                entry.key.span, f"{value} are a whole number, parameter {name!r} is {kind}"
            )
        return value

    def value_of(self, section: Section, key: str) -> ParamValue | None:
        entry = section.get(key)
        return scalar(entry.value) if entry and isinstance(entry.value, Text) else None

    def bounds(
        self, section: Section, name: str, kind: object
    ) -> tuple[float | None, float | None, bool]:
        """The parameter's `min` and `max`; true if they fit its type and each other."""
        low, high = self.bound(section, "min"), self.bound(section, "max")
        bounds_given = [e for key in ("min", "max") if (e := section.get(key))]
        if kind in ("str", "bool"):
            for entry in bounds_given:
                key = entry.key.value
                self.problems.add(
                    entry.key.span, f"{key!r} is for numbers, parameter {name!r} is {kind}"
                )
            return low, high, not bounds_given
        if low is not None and high is not None and low > high:
            span = bounds_given[0].value.span
            self.problems.add(span, f"parameter {name!r}: min {low:g} is above max {high:g}")
            return low, high, False
        return low, high, True

    def bound(self, section: Section, key: str) -> float | None:
        entry = section.get(key)
        if entry is None:
            return None
        value = number(entry.value.value) if isinstance(entry.value, Text) else None
        if value is None or math.isnan(as_float(value)):
            self.problems.add(entry.value.span, f"{key!r} is a number")
            return None
        return value if math.isfinite(as_float(value)) else as_float(value)

    def choices(self, section: Section) -> tuple[ParamValue, ...]:
        entry = section.get("choices")
        if entry is None:
            return ()
        values: tuple[Value, ...] = entry.value.values if isinstance(entry.value, Items) else ()
        if not values or not all(isinstance(v, Text) for v in values):
            self.problems.add(entry.value.span, "'choices' is a list of values", "like [1, 2]")
        return tuple(scalar(v) for v in values if isinstance(v, Text))


# ---- spec types ---------------------------------------------------------------------------------
# Declarations of payload fields and states: `name: type`, like `uint[bits][n]`.

STORAGE = (*STORAGES, "bool")
#: types with their bits in brackets
SIZED = ("float", "bfloat", *WITH_BITS)
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
    width = spec.parse_part(value, bits, match.start(2), problems)
    if bits is not None and width is None:
        return None
    rows, cols = _lengths(dim, value, match.start(3 if sized else 2), problems)
    return Declared(name, base, width, rows, value.span, cols)


def _either(name: str, whole: Text, parts: re.Match[str], problems: Problems) -> Declared | None:
    """The declaration in `A if CONDITION else B`."""
    first, other = (
        declared(name, Text(parts[i], whole.at(parts.start(i))), problems) for i in (1, 3)
    )
    condition = spec.parse_part(whole, parts[2], parts.start(2), problems)
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
        return spec.parse_part(whole, part, start, problems), None
    rows = spec.parse_part(whole, part[:comma], start, problems)
    return rows, spec.parse_part(whole, part[comma + 1 :], start + comma + 1, problems)


def _comma(text: str) -> int | None:
    """Index of the first comma outside of parentheses; None without one."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            return place
    return None


# ---- spec reader --------------------------------------------------------------------------------

#: `A if CONDITION else B`
CONDITIONAL = re.compile(r"(\w+)\s+if\b(.+)\belse\s+(\w+)", re.DOTALL)
NULLS = ("", "~", "null")


def read(root: Section, problems: Problems) -> Spec:
    """The Spec in `root`, as far as it can be read; mistakes are added to `problems`."""
    return _Reader(root, problems).spec()


def _empty(entry: Entry) -> bool:
    return isinstance(entry.value, Text) and entry.value.value in NULLS


class _Reader:
    def __init__(self, root: Section, problems: Problems) -> None:
        self.root, self.problems = root, problems
        self.broken: set[str] = set()

    def spec(self) -> Spec:
        self.root = mended(self.indented(), SECTIONS, "section {!r}", self.problems)
        for name in REQUIRED:
            if self.root.get(name) is None:
                self.problems.add(self.root.span, f"section {name!r} is missing")
        self.require_field(self.root.get("payload"))
        return self.build()

    def indented(self) -> Section:
        """The root, with unindented entries below an empty section moved into that section."""
        entries, empty = list[Entry](), False
        for entry in self.root.entries:
            if entry.key.value in SECTIONS:
                empty = _empty(entry) and entry.key.value in EXAMPLES
            elif empty and isinstance(entry.value, Text):
                above = entries.pop()
                hint = f"indent it, as an entry of `{above.key.value}:`"
                self.problems.add(entry.key.span, f"unknown section {entry.key.value!r}", hint)
                before = above.value.entries if isinstance(above.value, Section) else ()
                entry = Entry(above.key, Section((*before, entry), above.key.span))
            entries.append(entry)
        return Section(tuple(entries), self.root.span)

    def require_field(self, payload: Entry | None) -> None:
        if payload is None:
            return
        none = isinstance(payload.value, Section) and not payload.value.entries
        if none or _empty(payload):
            hint = "like `payload: {q: uint8[n]}`"
            self.problems.add(payload.key.span, "a payload has at least one field", hint)
            self.broken.add(ANY)

    def build(self) -> Spec:
        return Spec(
            path=self.problems.path,
            name=self.identifier("name"),
            about=self.text("about"),
            source=self.text("source"),
            params=self.each("params", ParamReader(self.problems).read),
            group=self.expression(self.root.get("group")),
            state=self.each("state", self.declaration),
            encode=self.each("encode", self.binding),
            payload=self.each("payload", self.declaration),
            decode=self.decode(),
            update=self.each("update", self.binding),
            owed=self.each("owed", self.binding),
            feedback=self.feedback(),
            merge=self.choice("merge"),
            unbiased=self.chosen("unbiased"),
            rounds=self.each("rounds", self.binding),
            when=self.expression(self.root.get("when")),
            spans={e.key.value: e.key.span for e in self.root.entries},
            broken=self.broken,
        )

    def text(self, name: str) -> str:
        entry = self.root.get(name)
        if entry is None:
            return ""
        if not isinstance(entry.value, Text):
            self.problems.add(entry.value.span, f"{name!r} is a text")
            return ""
        return entry.value.value.strip()

    def identifier(self, name: str) -> str:
        value, entry = self.text(name), self.root.get(name)
        if entry is not None and isinstance(entry.value, Text):
            check_name(Text(value, entry.value.span), self.problems)
        return value

    def choice(self, name: str) -> str:
        entry = self.root.get(name)
        value = self.text(name)
        if entry is None or not isinstance(entry.value, Text):
            return SECTIONS[name].choices[0]
        return self.one_of(name, value)

    def one_of(self, name: str, value: str) -> str:
        """`value`; reports an error if it is no choice of the section."""
        choices, entry = SECTIONS[name].choices, self.root.get(name)
        if value not in choices and entry is not None:
            close = MEANT.get(name, {}).get(value.lower()) or closest(value, choices)
            self.problems.add(
                entry.value.span,
                f"{name!r} is one of {', '.join(choices)}, not {value!r}",
                f"did you mean {close!r}?" if close else "",
            )
        return value

    def chosen(self, name: str) -> Chosen:
        """A choice, or two of them with a condition."""
        entry = self.root.get(name)
        if entry is None or not isinstance(entry.value, Text):
            return Chosen(self.choice(name), entry.key.span if entry else Span())
        return self.either(name, entry.value, entry.key.span)

    def either(self, name: str, text: Text, span: Span) -> Chosen:
        """A section's choice, read from a text."""
        parts = CONDITIONAL.fullmatch(text.value.strip())
        if parts is None:
            return Chosen(self.one_of(name, text.value.strip()), span)
        start = parts.start(2) + len(text.value) - len(text.value.lstrip())
        condition = spec.parse_part(text, parts[2], start, self.problems)
        return Chosen(self.one_of(name, parts[1]), span, condition, self.one_of(name, parts[3]))

    def feedback(self) -> Chosen:
        """A choice, or a mapping with a factor."""
        entry = self.root.get("feedback")
        if entry is None or not isinstance(entry.value, Section):
            return self.chosen("feedback")
        section = mended(entry.value, FEEDBACK_KEYS, "{!r} in `feedback`", self.problems)
        decay, of, share = (section.get(key) for key in ("decay", "of", "difference"))
        if decay is None and share is None:
            hint = "like `feedback: {decay: 0.95}` or `feedback: {difference: 0.5}`"
            self.problems.add(entry.value.span, "this feedback has no 'decay'", hint)
        if share is not None:
            for other in (each for each in (decay, of) if each is not None):
                message = f"{other.key.value!r} does not go with 'difference'"
                self.problems.add(other.key.span, message, "leave one of them out")
            kind = Chosen("difference", entry.key.span)
            return replace(kind, factor=self.expression(share))
        kind = Chosen("error", entry.key.span)
        if of is not None and isinstance(of.value, Text):
            kind = self.either("feedback", of.value, entry.key.span)
        return replace(kind, factor=self.expression(decay))

    def each(self, name: str, make: Callable[[Entry], Any]) -> tuple[Any, ...]:
        entry = self.root.get(name)
        if entry is None or _empty(entry):
            return ()
        if not isinstance(entry.value, Section):
            self.problems.add(
                entry.value.span,
                f"section {name!r} is a mapping of names",
                f"like `{EXAMPLES.get(name, 'name: ...')}`",
            )
            self.broken.add(ANY)
            return ()
        for item in entry.value.entries:
            check_usable(item.key, self.problems)
        made = [(item.key.value, make(item)) for item in entry.value.entries]
        self.broken |= {name for name, value in made if value is None}
        return tuple(value for _, value in made if value is not None)

    def expression(self, entry: Entry | None) -> Syntax | None:
        if entry is None:
            return None
        if not isinstance(entry.value, Text):
            self.problems.add(
                entry.value.span,
                f"{entry.key.value!r} is an expression, not a list or mapping",
                "quote it when it begins with a bracket or holds a colon",
            )
            return None
        return spec.parse(entry.value, self.problems)

    def declaration(self, entry: Entry) -> Declared | None:
        return declared(entry.key.value, entry.value, self.problems)

    def binding(self, entry: Entry) -> Binding | None:
        value = self.expression(entry)
        return None if value is None else Binding(entry.key.value, value, entry.key.span)

    def decode(self) -> tuple[Binding, ...]:
        entry = self.root.get("decode")
        if entry is not None and isinstance(entry.value, Section):
            if not entry.value.entries:
                self.problems.add(entry.value.span, "an expression is missing here")
            return self.results(entry.value, self.each("decode", self.binding))
        value = self.expression(entry)
        return () if value is None or entry is None else (Binding("out", value, entry.key.span),)

    def results(self, section: Section, read: tuple[Binding, ...]) -> tuple[Binding, ...]:
        """The bindings of decode. If the last could not be read, a binding to its name replaces it,
        so that the one before is not taken for the result."""
        last = section.entries[-1].key if section.entries else None
        if last is None or last.value not in self.broken:
            return read
        return (*read, Binding(last.value, spec.Name(last.value, last.span), last.span))
