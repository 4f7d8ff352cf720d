"""A probe's measurements in a file: JSON, of one format, with what they depend on."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from casync.errors import PlanError
from casync.predict.cost import CodecCost, Costs, Line, Transfer
from casync.topology import Topology
from hipress import __version__
from hipress.errors import ConfigError

if TYPE_CHECKING:
    from casync.codec import Codec

FORMAT = 2


@dataclass(frozen=True)
class Profile:
    """What a link and the codecs cost, and where that was measured."""

    costs: Costs
    topology: Topology
    digests: Mapping[str, str]  # by codec
    versions: Mapping[str, str]

    def differences(self, codecs: Mapping[str, Codec]) -> list[str]:
        """In what this machine and these codecs are not those of the profile."""
        found = [
            f"{name} {self.versions.get(name)!r} there, {here!r} here"
            for name, here in versions().items()
            if self.versions.get(name) != here
        ]
        found += [f"codec {n!r} is not in it" for n in codecs if n not in self.costs.codecs]
        return found + [
            f"codec {name!r} has another text or other parameters"
            for name, codec in codecs.items()
            if self.digests.get(name, codec.digest) != codec.digest
        ]


def versions() -> dict[str, str]:
    """What costs depend on besides the codecs."""
    processor = platform.processor() or platform.machine()
    return {"hipress": __version__, "torch": torch.__version__, "processor": processor}


def write(path: Path, costs: Costs, topology: Topology, codecs: Mapping[str, Codec]) -> None:
    """All times in seconds, and seconds per byte."""
    data = {
        "format": FORMAT,
        "versions": versions(),
        "nodes": [list(node) for node in topology.nodes],
        "digests": {name: codec.digest for name, codec in codecs.items()},
        "costs": asdict(costs),
    }
    path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")


def read(path: Path) -> Profile:
    """Raises ConfigError for what is no profile."""
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != FORMAT:
            raise ConfigError(f"profile {path}: format {data['format']!r}; this reads {FORMAT}")
        topology = Topology.of(data["nodes"])
        return Profile(_costs(data["costs"]), topology, data["digests"], data["versions"])
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, PlanError) as error:
        if isinstance(error, ConfigError):
            raise
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} is no profile of `hipress probe`: {what}") from error


def _costs(data: Mapping[str, Any]) -> Costs:
    codecs = {
        name: CodecCost(*(_line(each[kind]) for kind in ("encode", "decode", "hop")))
        for name, each in data["codecs"].items()
    }
    exchange = {int(peers): _transfer(each) for peers, each in data["exchange"].items()}
    if not exchange:
        raise ValueError("no exchange was measured")
    return Costs(
        exchange,
        {name: _transfer(each) for name, each in data["reduce"].items()},
        codecs,
        _transfer(data["inside"]),
        _positive(data["overlap"]),
    )


def _transfer(data: Mapping[str, Any]) -> Transfer:
    return Transfer(_line(data["line"]), _positive(data["cores"]))


def _positive(value: Any) -> float:
    if not float(value) >= 0:
        raise ValueError(f"{value!r} is negative, or no number")
    return float(value)


def _line(data: Mapping[str, Any]) -> Line:
    line = Line(float(data["latency"]), float(data["per_byte"]))
    if not (line.latency >= 0 and line.per_byte >= 0):
        raise ValueError(f"a negative time: {dict(data)}")
    return line
