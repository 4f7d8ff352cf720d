"""published.yaml: numbers with their kinds, each read with its place in the file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compll.errors import Problems
from compll.frontend.source import Items, Section, Text, Value
from hipress import reading
from hipress.reading import BANDWIDTH, TIME, Fields, Unit

__all__ = ["KINDS", "Cell", "Data", "Number", "load"]

FOLDER = Path(__file__).parent
KINDS = ("published", "fitted", "predicted", "assumed", "measured")
_PLAIN = Unit("a number", "2.5", {"": 1.0})


@dataclass(frozen=True)
class Number:
    """A value in bytes, seconds or the source's unit, and its kind."""

    value: float
    kind: str


Data = Mapping[str, Any]  # of numbers, texts, lists and such mappings


@dataclass(frozen=True)
class Cell:
    """A published figure beside its prediction.

    exposed: milliseconds of a step beyond computing, as published and as predicted, if the source
    has them.
    """

    experiment: str
    row: str
    column: str
    published: float
    predicted: float
    kind: str  # fitted or predicted
    exposed: tuple[float, float] | None = None

    @property
    def error(self) -> float:
        """Relative to the published figure."""
        return self.predicted / self.published - 1

    @property
    def exposed_error(self) -> float | None:
        """The same for the milliseconds."""
        return None if self.exposed is None else self.exposed[1] / self.exposed[0] - 1


def load(path: Path = FOLDER / "published.yaml") -> Data:
    """Read the file. Raises ConfigError with the place of every number without a kind."""
    fields = reading.read(path, "published results", "begin with `hipress:`")
    data: dict[str, Any] = {name: _value(value, fields.problems) for name, value in _pairs(fields)}
    reading.refuse(fields.problems)
    return data


def curves(data: Data) -> Data:
    """The points of scaling curves, by cluster, model and system."""
    text = (FOLDER / data["hipress"]["curves"]["file"]).read_text("utf-8")
    points: Data = json.loads(text)
    return points


def kinds(data: Any) -> Counter[str]:
    """Numbers of values of each kind."""
    if isinstance(data, Number):
        return Counter([data.kind])
    each = data.values() if isinstance(data, Mapping) else data if isinstance(data, list) else ()
    return sum(map(kinds, each), Counter())


def _pairs(fields: Fields) -> Iterator[tuple[str, Value]]:
    for name in fields.names():
        yield name, fields.value(name)


def _value(value: Value, problems: Problems) -> Any:
    if isinstance(value, Section):
        return {each.key.value: _value(each.value, problems) for each in value.entries}
    if isinstance(value, Items):
        return [_value(each, problems) for each in value.values]
    return value.value if value.quoted else _number(value, problems)


def _number(text: Text, problems: Problems) -> Number | str:
    """A number with its kind, or a text that does not begin with a digit."""
    if not text.value[:1].isdigit():
        return text.value
    digits, _, kind = text.value.rpartition(" ")
    if kind not in KINDS:
        problems.add(text.span, f"{text.value!r} does not say what it is: {', '.join(KINDS)}")
        return text.value
    readings = [unit.read(digits) for unit in (_PLAIN, BANDWIDTH, TIME)]
    numbers = [each for each in readings if isinstance(each, float)]
    if not numbers:
        problems.add(text.span, f"{digits!r} is no number, bandwidth or time")
        return text.value
    return Number(numbers[0], kind)
