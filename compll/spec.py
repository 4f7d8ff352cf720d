"""Stage 1b: the sections of a spec file, validated for shape, not yet for meaning."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Set
from dataclasses import dataclass
from typing import Any

from compll import syntax
from compll.errors import Problems, Span, closest, nearest
from compll.ir import POSITIONS, WHOLE
from compll.sections import PARAM_KEYS, REQUIRED, SECTIONS
from compll.shapes import SIDES
from compll.source import Entry, Items, Section, Text, Value, number, scalar
from compll.syntax import Syntax

ParamValue = int | float | bool | str
PARAM_TYPES: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}
STORAGE = ("float32", "float16", "bfloat16", *WHOLE, "bool", *POSITIONS, "trit", "runs")
UINT_BITS = (1, 2, 4, 8)
#: what types are called elsewhere
TYPE_SYNONYMS = {
    "float64": "float32", "double": "float32", "half": "float16", "byte": "uint8", "int8": "uint8",
    "int16": "int32", "int64": "int32", "int": "int32", "bit": "bool",
}  # fmt: skip
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
TYPE = re.compile(r"\s*([a-z]+\d*)\s*(?:\[([^\[\]]*)\])?\s*(?:\[([^\[\]]*)\])?\s*\Z")
UINTS = tuple(f"uint{bits}" for bits in UINT_BITS)
#: `A if CONDITION else B`
CONDITIONAL = re.compile(r"(\w+)\s+if\b(.+)\belse\s+(\w+)", re.DOTALL)
ANY = "*"
NULLS = ("", "~", "null")
PARAM_HINT = "like `bits: 2` or `bits: {type: int, default: 2, choices: [1, 2, 4, 8]}`"
NAME_HINT = "letters, digits and underscores, not a digit first"


def as_float(value: Any) -> float:
    """A number as a float, infinite where it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


@dataclass(frozen=True)
class Param:
    """A parameter: its type, default and range (ends included)."""

    name: str
    type: str
    default: ParamValue
    span: Span
    low: float | None = None
    high: float | None = None
    choices: tuple[ParamValue, ...] = ()
    about: str = ""
    #: a key of shapes.SIDES, or "": what a tensor's shape gives where no value is given
    side: str = ""

    def check(self, value: object) -> str | None:
        """Why `value` is not allowed, or None."""
        wanted = PARAM_TYPES[self.type]
        exact = isinstance(value, wanted) and not (wanted is int and isinstance(value, bool))
        if not exact and not (wanted is float and type(value) is int):
            return f"parameter {self.name!r} is {self.type}, not {value!r}"
        if self.choices and value not in self.choices:
            allowed = ", ".join(map(str, self.choices))
            return f"parameter {self.name!r} is one of {allowed}, not {value!r}"
        if isinstance(value, str):
            return None
        low = self.low if self.low is not None else float("-inf")
        high = self.high if self.high is not None else float("inf")
        if not low <= as_float(value) <= high:
            return f"parameter {self.name!r} is from {low:g} to {high:g}, not {value!r}"
        return None


@dataclass(frozen=True)
class Declared:
    """A declared tensor: a payload field or a state. `dim` is None for a scalar.

    second: the columns of a matrix, whose rows are `dim`.
    """

    name: str
    base: str
    bits: Syntax | None
    dim: Syntax | None
    span: Span
    second: Syntax | None = None


@dataclass(frozen=True)
class Binding:
    """`name: expression`."""

    name: str
    value: Syntax
    span: Span


@dataclass(frozen=True)
class Chosen:
    """One of a section's choices; with a condition of parameters, `value` where that holds."""

    value: str
    span: Span
    condition: Syntax | None = None
    other: str = ""


@dataclass(frozen=True)
class Spec:
    """A compressor as it is written."""

    path: str
    name: str
    about: str
    source: str
    params: tuple[Param, ...]
    group: Syntax | None
    state: tuple[Declared, ...]
    encode: tuple[Binding, ...]
    payload: tuple[Declared, ...]
    decode: tuple[Binding, ...]
    update: tuple[Binding, ...]
    feedback: Chosen
    merge: str
    optimizers: str
    unbiased: Chosen
    rounds: tuple[Binding, ...]
    when: Syntax | None
    spans: Mapping[str, Span]
    #: names whose definition could not be read (ANY: unknown ones): using them is no further error
    broken: Set[str]


def read(root: Section, problems: Problems) -> Spec:
    """The Spec in `root`, as far as it can be read; what is wrong goes to `problems`."""
    return _Reader(root, problems).spec()


def _comma(text: str) -> int | None:
    """Where the first comma outside of parentheses stands."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if letter == "," and depth == 0:
            return place
    return None


class _Reader:
    def __init__(self, root: Section, problems: Problems) -> None:
        self.root, self.problems = root, problems
        self.broken: set[str] = set()

    def spec(self) -> Spec:
        self.root = self.mended(self.root, SECTIONS, "section {!r}")
        for name in REQUIRED:
            if self.root.get(name) is None:
                self.problems.add(self.root.span, f"section {name!r} is missing")
        self.require_field(self.root.get("payload"))
        return self.build()

    def require_field(self, payload: Entry | None) -> None:
        if payload is None:
            return
        empty = isinstance(payload.value, Section) and not payload.value.entries
        if empty or (isinstance(payload.value, Text) and payload.value.value in NULLS):
            hint = "like `payload: {q: uint8[n]}`"
            self.problems.add(payload.key.span, "a payload has at least one field", hint)
            self.broken.add(ANY)

    def mended(self, section: Section, known: Collection[str], what: str) -> Section:
        """The section with misspelled keys read as what they were meant to be, and reported."""
        entries = list[Entry]()
        for entry in section.entries:
            name = entry.key.value
            if name not in known:
                self.problems.add(
                    entry.key.span, f"unknown {what.format(name)}", nearest(name, known)
                )
                meant = closest(name, known)
                if meant is None or section.get(meant) is not None:
                    continue
                entry = Entry(Text(meant, entry.key.span), entry.value)
            entries.append(entry)
        return Section(tuple(entries), section.span)

    def build(self) -> Spec:
        return Spec(
            path=self.problems.path,
            name=self.identifier("name"),
            about=self.text("about"),
            source=self.text("source"),
            params=self.each("params", self.param),
            group=self.expression(self.root.get("group")),
            state=self.each("state", self.declared),
            encode=self.each("encode", self.binding),
            payload=self.each("payload", self.declared),
            decode=self.decode(),
            update=self.each("update", self.binding),
            feedback=self.chosen("feedback"),
            merge=self.choice("merge"),
            optimizers=self.choice("optimizers"),
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
        if entry is not None and isinstance(entry.value, Text) and not NAME.match(value):
            self.problems.add(
                entry.value.span,
                f"{value!r} is not a name",
                NAME_HINT,
            )
        return value

    def choice(self, name: str) -> str:
        entry = self.root.get(name)
        value = self.text(name)
        if entry is None or not isinstance(entry.value, Text):
            return SECTIONS[name].choices[0]
        return self.one_of(name, value)

    def one_of(self, name: str, value: str) -> str:
        """`value`, which must be one of a section's choices."""
        known, entry = SECTIONS[name].choices, self.root.get(name)
        if value not in known and entry is not None:
            close = closest(value, known)
            self.problems.add(
                entry.value.span,
                f"{name!r} is one of {', '.join(known)}, not {value!r}",
                f"did you mean {close!r}?" if close else "",
            )
        return value

    def chosen(self, name: str) -> Chosen:
        """A choice, or two of them with a condition."""
        entry, parts = self.root.get(name), CONDITIONAL.fullmatch(self.text(name))
        span = entry.key.span if entry else Span()
        if entry is None or parts is None or not isinstance(entry.value, Text):
            return Chosen(self.choice(name), span)
        condition = self.inner(parts[2], entry.value, parts.start(2))
        return Chosen(self.one_of(name, parts[1]), span, condition, self.one_of(name, parts[3]))

    def each(self, name: str, make: Callable[[Entry], Any]) -> tuple[Any, ...]:
        entry = self.root.get(name)
        if entry is None or (isinstance(entry.value, Text) and entry.value.value in NULLS):
            return ()
        if not isinstance(entry.value, Section):
            self.problems.add(
                entry.value.span, f"section {name!r} is a mapping of names", "like `name: ...`"
            )
            self.broken.add(ANY)
            return ()
        for item in entry.value.entries:
            if not NAME.match(item.key.value):
                self.problems.add(
                    item.key.span,
                    f"{item.key.value!r} is not a name",
                    NAME_HINT,
                )
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
        return syntax.parse(entry.value, self.problems)

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
        """The bindings of decode; where the last could not be read, the one before is no result."""
        last = section.entries[-1].key if section.entries else None
        if last is None or last.value not in self.broken:
            return read
        return (*read, Binding(last.value, syntax.Name(last.value, last.span), last.span))

    def declared(self, entry: Entry) -> Declared | None:
        name, value = entry.key.value, entry.value
        match = TYPE.match(value.value) if isinstance(value, Text) else None
        if match is None or not isinstance(value, Text):
            given = value.value if isinstance(value, Text) else ""
            self.problems.add(
                value.span,
                f"{given!r} is no type" if given else f"{name!r} needs a type",
                'like float32, uint1[n], "uint[bits][n]" or int32[selection]',
            )
            return None
        base, first, second = match.groups()
        sized = base in ("uint", "float")
        bits, dim = (first, second) if sized else (None, first)
        if (sized and first is None) or (not sized and second is not None):
            self.problems.add(value.span, f"{value.value!r} is not a type", "write uint[bits][n]")
            return None
        if base not in (*STORAGE, *UINTS, "uint", "float"):
            near = TYPE_SYNONYMS.get(base, base)
            hint = nearest(near, (*STORAGE, *UINTS))
            if re.fullmatch(r"uint\d+", base):
                hint = f"packed types are {', '.join(UINTS)}"
            self.problems.add(value.span, f"unknown type {base!r}", hint)
            return None
        width = self.inner(bits, value, match.start(2))
        if bits is not None and width is None:
            return None
        rows, cols = self.lengths(dim, value, match.start(3 if sized else 2))
        return Declared(name, base, width, rows, value.span, cols)

    def lengths(
        self, part: str | None, whole: Text, start: int
    ) -> tuple[Syntax | None, Syntax | None]:
        """What stands in brackets: nothing, a length, or the rows and columns of a matrix."""
        comma = _comma(part or "")
        if part is None or comma is None:
            return self.inner(part, whole, start), None
        rows = self.inner(part[:comma], whole, start)
        return rows, self.inner(part[comma + 1 :], whole, start + comma + 1)

    def inner(self, part: str | None, whole: Text, start: int) -> Syntax | None:
        if part is None:
            return None
        return syntax.parse(Text(part, whole.at(start)), self.problems)

    def param(self, entry: Entry) -> Param | None:
        name, value = entry.key.value, entry.value
        if isinstance(value, Text) and not value.value and not value.quoted:
            self.problems.add(entry.key.span, f"parameter {name!r} needs a default", PARAM_HINT)
            return None
        if isinstance(value, Text):
            return self.shorthand(name, value)
        if not isinstance(value, Section):
            self.problems.add(
                value.span,
                f"parameter {name!r} is a value or a mapping",
                PARAM_HINT,
            )
            return None
        return self.full(name, self.mended(value, PARAM_KEYS, "key {!r} of a parameter"))

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
        kind = self.one(section, "type") if section.get("type") else base.type
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
            str(self.one(section, "about") or ""),
            self.side(section, name, kind),
        )
        wrong = param.check(value)
        if wrong:
            self.problems.add(base.span, f"the default is not allowed: {wrong}")
            return None
        return param

    def side(self, section: Section, name: str, kind: object) -> str:
        """The parameter's `from`, "" where it has none."""
        entry = section.get("from")
        if entry is None:
            return ""
        value = str(self.one(section, "from"))
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

    def one(self, section: Section, key: str) -> ParamValue | None:
        entry = section.get(key)
        return scalar(entry.value) if entry and isinstance(entry.value, Text) else None

    def bounds(
        self, section: Section, name: str, kind: object
    ) -> tuple[float | None, float | None, bool]:
        """The parameter's `min` and `max`, and whether they fit its type and each other."""
        low, high = self.bound(section, "min"), self.bound(section, "max")
        found = [e for key in ("min", "max") if (e := section.get(key))]
        if kind in ("str", "bool"):
            for entry in found:
                key = entry.key.value
                self.problems.add(
                    entry.key.span, f"{key!r} is for numbers, parameter {name!r} is {kind}"
                )
            return low, high, not found
        if low is not None and high is not None and low > high:
            span = found[0].value.span
            self.problems.add(span, f"parameter {name!r}: min {low:g} is above max {high:g}")
            return low, high, False
        return low, high, True

    def bound(self, section: Section, key: str) -> float | None:
        entry = section.get(key)
        if entry is None:
            return None
        value = number(entry.value.value) if isinstance(entry.value, Text) else None
        if value is None:
            self.problems.add(entry.value.span, f"{key!r} is a number")
        return value

    def choices(self, section: Section) -> tuple[ParamValue, ...]:
        entry = section.get("choices")
        if entry is None:
            return ()
        values: tuple[Value, ...] = entry.value.values if isinstance(entry.value, Items) else ()
        if not values or not all(isinstance(v, Text) for v in values):
            self.problems.add(entry.value.span, "'choices' is a list of values")
        return tuple(scalar(v) for v in values if isinstance(v, Text))
