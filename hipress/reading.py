"""Files written by users, read with the places of their values: YAML or JSON.

Mistakes are reported together, each as `file:line:column: message`, by the reader of specs, which
limits length, depth and number of values. Results and profiles, which a program wrote, are JSON,
whose first mistake is told by its path in it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from compll.errors import Problems, Span, nearest
from compll.frontend import source
from compll.frontend.source import Items, Section, Text, Value
from compll.frontend.spec import shown
from hipress.errors import ConfigError

__all__ = [
    "BANDWIDTH", "FLOPS", "SHARE", "TIME", "Fields", "Unit", "build", "plain", "read", "read_json",
]  # fmt: skip

T = TypeVar("T")
LONGEST = 1 << 26  # bytes of results
_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_NAMES = {
    str: "a text", int: "a whole number", float: "a number", bool: "true or false",
    list: "a list", tuple: "a list",
}  # fmt: skip
_QUANTITY = re.compile(r"([-+0-9.eE_]*[0-9.])\s*([A-Za-zµ%][A-Za-z/%]*)?")


class Unit:
    """A kind of quantity, with the value of each of its units. A unit "" makes units optional."""

    def __init__(self, what: str, example: str, units: Mapping[str, float]) -> None:
        self.what, self.example, self._units = what, example, units

    def read(self, text: str) -> float | str:
        """The quantity in the base unit, or a message on the mistake."""
        match = _QUANTITY.fullmatch(text.strip())
        value = _finite(match[1]) if match else None
        if match is None or value is None:
            return f"expected {self.what} like {self.example}, found {text!r}"
        unit = match[2] or ""
        close = {name.lower(): name for name in self._units}.get(unit.lower())
        worth = self._units.get(unit, self._units.get(close or "?"))
        if worth is None:
            problem = f"its unit is {unit!r}" if unit else "it has no unit"
            return f"expected {self.what} like {self.example}: {problem}"
        return value * worth


def _finite(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


_BITS = {f"{k}bit/s": 1000**n / 8 for n, k in enumerate(("", "k", "M", "G", "T"))}
_BYTES = {f"{k}B/s": 1000.0**n for n, k in enumerate(("", "k", "M", "G", "T"))}
BANDWIDTH = Unit("a bandwidth", "100 Gbit/s or 12.5 GB/s", _BITS | _BYTES)  # bytes a second
TIME = Unit("a time", "30 us", {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9})
_KINDS = {f"{k}FLOP/s": 1000.0**n for n, k in enumerate(("", "k", "M", "G", "T", "P"))}
FLOPS = Unit("a speed", "989 TFLOP/s", _KINDS)
SHARE = Unit("a share", "0.85 or 85%", {"": 1.0, "%": 1e-2})
_PLAIN = Unit("a number", "2.5", {"": 1.0})


class Fields:
    """A mapping in a file, read key by key. A mistake is added to `problems`, and the returned
    value is then a placeholder: call `refuse` before using any value."""

    def __init__(self, section: Section, problems: Problems, place: str = "") -> None:
        self.span, self._section, self.problems = section.span, section, problems
        self._place = f" in `{place}`" if place else ""

    def only(self, names: Collection[str]) -> None:
        """Report keys outside of `names`."""
        for entry in self._section.entries:
            key = entry.key
            if key.value not in names:
                message = f"unknown key {key.value!r}{self._place}"
                self.problems.add(key.span, message, nearest(key.value, names))

    def __contains__(self, name: str) -> bool:
        return self._section.get(name) is not None

    def names(self) -> Iterator[str]:
        """Keys of the mapping, in the order of the file."""
        for entry in self._section.entries:
            yield entry.key.value

    def value(self, name: str) -> Value:
        """An existing value, as it stands in the file."""
        entry = self._section.get(name)
        assert entry is not None
        return entry.value

    def at(self, name: str) -> Span:
        """The place of a value, or of this mapping if there is no such value."""
        entry = self._section.get(name)
        return self.span if entry is None else entry.value.span

    def is_mapping(self, name: str) -> bool:
        """True if the value is a mapping."""
        entry = self._section.get(name)
        return entry is not None and isinstance(entry.value, Section)

    def unknown(self, kind: str, name: str, known: Collection[str]) -> None:
        """Report that the value `name` of the key `kind` is unknown."""
        message = f"unknown {kind} {name!r}"
        self.problems.add(self.at(kind), message, nearest(name, known))

    def text(self, name: str, default: str | None = None) -> str:
        """A text; required if there is no default."""
        value = self._value(name, default)
        if value is None or isinstance(value, Text):
            return (default or "") if value is None else value.value
        self._wrong(value, name, "expected a text")
        return ""

    def quantity(
        self,
        name: str,
        unit: Unit = _PLAIN,
        default: float | None = None,
        least: float = 0.0,
        most: float = math.inf,
    ) -> float:
        """A number with its unit, within limits; a speed must be above 0."""
        value = self._value(name, default)
        if value is None:
            return math.nan if default is None else default
        return self.measure(value, f"{name!r}{self._place}", unit, least, most)

    def measure(
        self,
        value: Value,
        name: str,
        unit: Unit = _PLAIN,
        least: float = 0.0,
        most: float = math.inf,
    ) -> float:
        """The number of a value of the file."""
        result = unit.read(value.value) if isinstance(value, Text) else f"expected {unit.what}"
        if isinstance(result, str):
            self.problems.add(value.span, f"{name}: {result}")
            return math.nan
        if not least <= result <= most or (unit in (BANDWIDTH, FLOPS) and result == 0):
            limits = f"at least {least:g}" if most == math.inf else f"{least:g} to {most:g}"
            limits = "more than nothing" if unit in (BANDWIDTH, FLOPS) else limits
            assert isinstance(value, Text)
            self.problems.add(value.span, f"{name}: {value.value} is not {limits}")
            return math.nan
        return result

    def count(self, name: str, default: int | None = None, least: int = 1) -> int:
        """A whole number."""
        number = self.quantity(name, _PLAIN, default, least)
        if math.isnan(number):
            return least
        if number != int(number):
            self.problems.add(
                self.at(name), f"{name!r}{self._place}: {number:g} is no whole number"
            )
        return int(number)

    def fields(self, name: str, needed: bool = False) -> Fields | None:
        """A mapping; None if the key is absent."""
        value = self._value(name, None if needed else "")
        if value is None:
            return None
        if not isinstance(value, Section):
            self._wrong(value, name, "expected a mapping")
            return None
        return Fields(value, self.problems, name)

    def items(self, name: str) -> tuple[Value, ...]:
        """A list; () with a report if the key is absent."""
        value = self._value(name, None)
        if isinstance(value, Items):
            return value.values
        if value is not None:
            self._wrong(value, name, "expected a list")
        return ()

    def _value(self, name: str, default: object) -> Value | None:
        """A value as it stands in the file, or None; reports an absent value without a default."""
        entry = self._section.get(name)
        if entry is None and default is None:
            self.problems.add(self.span, f"{name!r} is missing{self._place}")
        return None if entry is None else entry.value

    def _wrong(self, value: Value, name: str, message: str) -> None:
        self.problems.add(value.span, f"{name!r}{self._place}: {message}")


def read(path: Path, what: str, hint: str) -> Fields:
    """Read a file that is a mapping. what: its kind, such as "a cluster file"; hint: its usual
    beginning. Raises ConfigError."""
    problems = _Problems(str(path))
    section = source.load(path, problems, source.Kind(what, hint, most_values=20_000))
    if section is None:
        refuse(problems)
        raise AssertionError("a file that is not read has problems")
    return Fields(section, problems)


def refuse(problems: Problems) -> None:
    """Raise one ConfigError with all problems."""
    problems.raise_if_any()


class _Problems(Problems):
    """Problems that are raised as a ConfigError."""

    def raise_if_any(self) -> None:
        if self.diagnostics:
            raise ConfigError("\n".join(map(str, sorted(set(self.diagnostics)))))


def plain(value: Value) -> Any:
    """A value of a file as Python's: a mapping, a list, a number, a text, true, false or None."""
    if isinstance(value, Section):
        return {entry.key.value: plain(entry.value) for entry in value.entries}
    if isinstance(value, Items):
        return [plain(each) for each in value.values]
    nothing = not value.quoted and value.value.lower() in ("", "~", "null")
    return None if nothing else source.scalar(value)


def read_json(path: Path, what: str, kind: type[T], form: int | None = None) -> T:
    """A dataclass from a JSON file that a program wrote. what: the file's kind, such as "results";
    form: its `format`. Raises ConfigError with the place of a mistake."""
    problems = _Problems(str(path))
    text = source.read(path, problems, source.Kind(what, most_bytes=LONGEST)) or ""
    depth = 0
    for mark in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(mark[0], 0)
        if depth > source.LIMIT_DEPTH:
            line, col = text.count("\n", 0, mark.start()), text.rfind("\n", 0, mark.start())
            span = Span(line + 1, mark.start() - col)
            problems.add(span, f"nested more than {source.LIMIT_DEPTH} deep")
            break
    refuse(problems)
    try:
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ConfigError(f"no {what}: expected a mapping")
        if form is not None and data.get("format") != form:
            raise ConfigError(f"format {shown(data.get('format'))}; this reads {form}")
        return cast("T", build(kind, data))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}:{error.colno}: no JSON: {error.msg}") from error
    except ValueError as error:  # an integer may have thousands of digits
        raise ConfigError(f"{path}: {error}") from error


def build(kind: Any, data: Any, place: str = "") -> Any:
    """The value of a type from its JSON, for a dataclass that of `dataclasses.asdict`, with control
    characters in texts as escapes. Raises ConfigError for what is not of its type."""
    base, inner = get_origin(kind) or kind, get_args(kind)
    if base is UnionType:
        if data is None and NoneType in inner:
            return None
        (kind,) = (each for each in inner if each is not NoneType)
        return build(kind, data, place)
    if is_dataclass(base) and isinstance(data, Mapping):
        return _build(base, data, place)
    if base in (list, tuple) and isinstance(data, list):
        return base(build(inner[0], each, f"{place}[{i}]") for i, each in enumerate(data))
    if base in (dict, Mapping) and isinstance(data, Mapping):
        numbers = inner[0] is int
        if numbers and (odd := [k for k in data if not k.isdecimal()]):
            raise ConfigError(f"{place}.{source.visible(odd[0])}: expected a whole number")
        read_key = int if numbers else source.visible
        return {read_key(k): build(inner[1], v, f"{place}.{k}".strip(".")) for k, v in data.items()}
    if isinstance(data, str) and base is str:
        return source.visible(data)
    if base is float and type(data) is int and abs(data) < 1 << 1023:
        return float(data)
    if base is Any or type(data) is base:
        return data
    expected = _NAMES.get(base, "a mapping")
    raise ConfigError(f"{place or 'the file'}: expected {expected}, found {shown(data)}")


def _build(kind: Any, data: Mapping[str, Any], place: str) -> Any:
    """A dataclass of a mapping by the names of its fields."""
    types = get_type_hints(kind)
    known = {each.name: each for each in fields(kind)}
    if strange := data.keys() - known.keys():
        raise ConfigError(f"{place or 'the file'}: unknown key {source.visible(min(strange))!r}")
    required = (n for n, f in known.items() if f.default is f.default_factory is MISSING)
    for name in required:
        if name not in data:
            raise ConfigError(f"{place or 'the file'}: {name!r} is missing")
    return kind(**{k: build(types[k], v, f"{place}.{k}".strip(".")) for k, v in data.items()})
