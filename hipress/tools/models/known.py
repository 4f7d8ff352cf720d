"""A model's step: gradients in the order of the backward pass, and the work before each of them."""

from __future__ import annotations

import json
from dataclasses import astuple, dataclass
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from itertools import accumulate
from math import prod
from pathlib import Path

from compll.files import write_file
from hipress.errors import unknown
from hipress.tools.models.work import NOTHING, Speed, Work

__all__ = ["Gradient", "Model", "Pass", "list_models", "load", "read", "write"]

FORMAT = 1


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
    return read(resources.files("hipress.tools.models").joinpath(f"{name}.json"))


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
    write_file(path, f'{{\n{head},\n "gradients": [\n{rows}\n ]\n}}\n')


def _numbers(work: Work) -> list[int]:
    return [round(each) for each in astuple(work)]


def read(path: Traversable) -> Model:
    """Read a file that `write` made."""
    data = json.loads(path.read_text("utf-8"))
    gradients = tuple(
        Gradient(name, tuple(shape), Work(*map(float, work)))
        for name, shape, work in data["gradients"]
    )
    forward = Work(*map(float, data["forward"]))
    return Model(data["name"], gradients, forward, data["source"], data["batch"], data["unit"])
