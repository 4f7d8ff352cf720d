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
from casync.predict.cost import CodecCost, Copies, Costs, Line, Transfer
from casync.topology import Topology
from hipress import __version__
from hipress.errors import ConfigError

if TYPE_CHECKING:
    from casync.codec import Codec

FORMAT = 3


@dataclass(frozen=True)
class Profile:
    """What a link and the codecs cost, and where that was measured."""

    places: Mapping[str, Costs]  # by name of a place, where the model is first
    topology: Topology
    digests: Mapping[str, str]  # by codec
    versions: Mapping[str, str]

    @property
    def device(self) -> str:
        """Where the model is: cpu or cuda."""
        return "cuda" if "device" in self.versions else "cpu"

    def differences(self, codecs: Mapping[str, Codec]) -> list[str]:
        """In what this machine and these codecs are not those of the profile."""
        found = [
            f"{name} {self.versions.get(name)!r} there, {here!r} here"
            for name, here in versions(self.device).items()
            if self.versions.get(name) != here
        ]
        found += [f"codec {n!r} is not in it" for n in codecs if n not in self.digests]
        return found + [
            f"codec {name!r} has another text or other parameters"
            for name, codec in codecs.items()
            if self.digests.get(name, codec.digest) != codec.digest
        ]


def versions(device: str = "cpu") -> dict[str, str]:
    """What costs depend on besides the codecs. `device`: cpu or cuda."""
    processor = platform.processor() or platform.machine()
    found = {"hipress": __version__, "torch": torch.__version__, "processor": processor}
    if device == "cuda":
        found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return found


def write(
    path: Path,
    places: Mapping[str, Costs],
    topology: Topology,
    codecs: Mapping[str, Codec],
    device: str = "cpu",
) -> None:
    """All times in seconds, and seconds per byte."""
    data = {
        "format": FORMAT,
        "versions": versions(device),
        "nodes": [list(node) for node in topology.nodes],
        "digests": {name: codec.digest for name, codec in codecs.items()},
        "places": {name: asdict(costs) for name, costs in places.items()},
    }
    path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")


def refuse_unwritable(path: Path) -> None:
    """Raise ConfigError where `write` could not, before anything was measured."""
    try:
        with path.open("a"):
            pass
        if not path.stat().st_size:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be written: {error}") from error


def read(path: Path) -> Profile:
    """Raises ConfigError for what is no profile."""
    try:
        data = json.loads(path.read_text("utf-8"))
        if data["format"] != FORMAT:
            raise ConfigError(f"profile {path}: format {data['format']!r}; this reads {FORMAT}")
        topology = Topology.of(data["nodes"])
        places = {name: _costs(costs) for name, costs in data["places"].items()}
        if not places:
            raise ValueError("no place was measured")
        return Profile(places, topology, _texts(data["digests"]), _texts(data["versions"]))
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, PlanError) as error:
        if isinstance(error, ConfigError):
            raise
        what = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} is no profile of `hipress probe`: {what}") from error


def _texts(data: Mapping[str, Any]) -> dict[str, str]:
    if not all(isinstance(value, str) for value in data.values()):
        raise ValueError(f"expected texts by name, not {dict(data)}")
    return dict(data)


def _costs(data: Mapping[str, Any]) -> Costs:
    codecs = {
        name: CodecCost(*(_line(each[kind]) for kind in ("encode", "decode", "hop")))
        for name, each in data["codecs"].items()
    }
    exchange = {int(peers): _transfer(each) for peers, each in data["exchange"].items()}
    if not exchange:
        raise ValueError("no exchange was measured")
    if lacking := {"float32", "bfloat16", "float16"} - set(data["reduce"]):
        raise ValueError(f"no all-reduce of {min(lacking)} was measured")
    return Costs(
        exchange,
        {name: _transfer(each) for name, each in data["reduce"].items()},
        codecs,
        _transfer(data["inside"]),
        _positive(data["overlap"]),
        data["copies"] and _copies(data["copies"]),
    )


def _copies(data: Mapping[str, Any]) -> Copies:
    return Copies(_line(data["leave"]), _line(data["enter"]), bool(data["gradients"]))


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
