"""The parameters of a spec: `name: default`, or a mapping with type, limits and choices."""

from __future__ import annotations

import math
from dataclasses import replace

from compll.errors import Problems, nearest
from compll.frontend.sections import PARAM_KEYS, mended
from compll.frontend.source import Entry, Items, Section, Text, Value, number, scalar
from compll.frontend.spec import PARAM_TYPES, SIDES, Param, ParamValue, as_float

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
