"""A model's step: gradients in the order of the backward pass, and the work before each of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from importlib import resources
from itertools import accumulate
from math import prod
from pathlib import Path

from compll.frontend.source import Items, Text, Value
from hipress import reading
from hipress.errors import unknown
from hipress.tools.models.work import NOTHING, Speed, Work

__all__ = ["Gradient", "Model", "Pass", "list_models", "load", "read", "write"]

FORMAT = 1
_KEYS = ("format", "name", "source", "batch", "unit", "forward", "gradients")


@dataclass(frozen=True)
class Gradient:
    """The gradient of one parameter."""

    name: str
    shape: tuple[int, ...]
    work: Work  # of the backward pass since the gradient before

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class Pass:
    """Times of a step of one device without communication. Seconds."""

    forward: float
    ready: tuple[float, ...]  # by gradient, since the beginning of the backward pass

    @property
    def backward(self) -> float:
        """Seconds of the backward pass."""
        return self.ready[-1] if self.ready else 0.0

    @property
    def step(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward

    def scaled(self, step: float) -> Pass:
        """The same pass, scaled to a step of `step` seconds."""
        factor = step / self.step if self.step > 0 else 0.0
        return Pass(factor * self.forward, tuple(factor * each for each in self.ready))


@dataclass(frozen=True)
class Model:
    """Gradients in the order in which autograd finishes them."""

    name: str
    gradients: tuple[Gradient, ...]
    forward: Work = NOTHING
    source: str = ""  # origin of the measurement
    batch: int = 1  # samples, tokens or other units per device and step
    unit: str = "samples"

    @cached_property
    def numel(self) -> int:
        """Number of parameter elements."""
        return sum(each.numel for each in self.gradients)

    @cached_property
    def work(self) -> Work:
        """Work of a whole step."""
        return self.forward + Work.total(each.work for each in self.gradients)

    def timed(self, speed: Speed) -> Pass:
        """Times of a step on a device of this speed."""
        works = (speed.seconds(each.work) for each in self.gradients)
        return Pass(speed.seconds(self.forward), tuple(accumulate(works)))


def list_models() -> tuple[str, ...]:
    """Names of the models that come with the package, sorted."""
    files = resources.files("hipress.tools.models").iterdir()
    return tuple(sorted(f.name.removesuffix(".json") for f in files if f.name.endswith(".json")))


def load(name: str) -> Model:
    """A model that comes with the package. ConfigError for an unknown name."""
    if name not in list_models():
        raise unknown("model", name, list_models())
    with resources.as_file(
        resources.files("hipress.tools.models").joinpath(f"{name}.json")
    ) as path:
        return read(path)


def write(model: Model, path: Path) -> None:
    """Write a model file: per gradient a line of name, shape and work (operations of products,
    their bytes, bytes of all else, kernels)."""
    about = {
        "format": FORMAT, "name": model.name, "source": model.source, "batch": model.batch,
        "unit": model.unit, "forward": _numbers(model.forward),
    }  # fmt: skip
    head = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in about.items())
    rows = ",\n".join(
        f"  {json.dumps([each.name, list(each.shape), _numbers(each.work)], ensure_ascii=False)}"
        for each in model.gradients
    )
    path.write_text(f'{{\n{head},\n "gradients": [\n{rows}\n ]\n}}\n', "utf-8")


def _numbers(work: Work) -> list[int]:
    return [round(each) for each in astuple(work)]


def read(path: Path) -> Model:
    """Read a file that `write` made. Raises ConfigError with the places of all mistakes."""
    fields = reading.read(path, "a model", f"begin with `format: {FORMAT}`")
    fields.only(_KEYS)
    if (found := fields.count("format", least=0)) != FORMAT:
        fields.problems.add(fields.at("format"), f"format {found}; this reads {FORMAT}")
    reader = _Reader(fields)
    model = Model(
        fields.text("name"),
        tuple(reader.gradients()),
        reader.work(fields.items("forward"), "forward"),
        fields.text("source"),
        fields.count("batch"),
        fields.text("unit"),
    )
    reading.refuse(fields.problems)
    return model


@dataclass(frozen=True)
class _Reader:
    fields: reading.Fields

    def gradients(self) -> Iterator[Gradient]:
        for value in self.fields.items("gradients"):
            row = value.values if isinstance(value, Items) else ()
            if len(row) == 3 and isinstance(row[0], Text):
                name = row[0].value
                yield Gradient(name, self.shape(row[1], name), self.work(_items(row[2]), name))
                continue
            message = (
                "a gradient is a list of name, shape and work, like [w, [3, 4], [24, 96, 0, 1]]"
            )
            self.fields.problems.add(value.span, message)

    def shape(self, value: Value, name: str) -> tuple[int, ...]:
        found = tuple(
            self.fields.measure(each, f"shape of {name!r}", least=1) for each in _items(value)
        )
        if not isinstance(value, Items) or any(each % 1 for each in found if each == each):
            self.fields.problems.add(
                value.span, f"the shape of {name!r} is a list of whole numbers"
            )
            return ()
        return tuple(int(each) for each in found if each == each)

    def work(self, values: Sequence[Value], name: str) -> Work:
        if len(values) == 4:
            return Work(*(self.fields.measure(each, f"work of {name!r}") for each in values))
        place = values[0].span if values else self.fields.at("forward")
        message = f"the work of {name!r} is four numbers: operations and bytes of products, "
        self.fields.problems.add(place, message + "bytes of all else, kernels")
        return NOTHING


def _items(value: Value) -> tuple[Value, ...]:
    return value.values if isinstance(value, Items) else ()
