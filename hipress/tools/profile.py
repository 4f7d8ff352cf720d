"""Profiles: a probe's measurements in a JSON file, with the machine that they hold for."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import torch

from casync.codec import Codec
from casync.cost import Costs
from casync.errors import PlanError
from casync.topology import Topology
from compll.files import write_json
from hipress import __version__
from hipress.errors import ConfigError
from hipress.reading import read_json

FORMAT = 4


@dataclass(frozen=True)
class Link:
    """A node's link to others: nominal bandwidth, and the share reached. Zeros are unknown."""

    interface: str
    bandwidth: float  # bytes a second, each way
    reach: float  # share of the bandwidth that all ranks of a node reach together
    collective: float  # fixed seconds of a native all-reduce


UNKNOWN = Link("", 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Profile:
    """Costs of link and codecs, and the machine that they hold for."""

    places: Mapping[str, Costs]  # by name of a place; the model's first
    topology: Topology
    digests: Mapping[str, str]  # by codec
    versions: Mapping[str, str]
    link: Link = UNKNOWN

    @property
    def device(self) -> str:
        """Device of the model: cpu or cuda."""
        return "cuda" if "device" in self.versions else "cpu"

    def differences(self, codecs: Mapping[str, Codec]) -> list[str]:
        """Texts on differences between this machine and these codecs, and those of the profile."""
        texts = [
            f"{name} {self.versions.get(name)!r} there, {here!r} here"
            for name, here in versions(self.device).items()
            if self.versions.get(name) != here
        ]
        texts += [f"codec {n!r} is not in it" for n in codecs if n not in self.digests]
        return texts + [
            f"codec {name!r} has another text or other parameters"
            for name, codec in codecs.items()
            if self.digests.get(name, codec.digest) != codec.digest
        ]


def versions(device: str = "cpu") -> dict[str, str]:
    """Versions on which costs depend, besides the codecs. device: cpu or cuda."""
    processor = platform.processor() or platform.machine()
    here = {"hipress": __version__, "torch": torch.__version__, "processor": processor}
    if device == "cuda":
        here["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return here


def write(
    path: Path,
    places: Mapping[str, Costs],
    topology: Topology,
    codecs: Mapping[str, Codec],
    device: str = "cpu",
) -> None:
    """Write a profile; times in seconds, and seconds per byte."""
    data = {
        "format": FORMAT,
        "versions": versions(device),
        "nodes": [list(node) for node in topology.nodes],
        "link": asdict(link_of(next(iter(places.values())), topology)),
        "digests": {name: codec.digest for name, codec in codecs.items()},
        "places": {name: asdict(costs) for name, costs in places.items()},
    }
    write_json(path, data)


def link_of(costs: Costs, topology: Topology) -> Link:
    """The link of rank 0's node, with the bandwidth that its interface reports."""
    interface, sold = _interface()
    per_byte = costs.to(topology.world_size).line.per_byte
    reached = topology.largest / per_byte if per_byte > 0 else 0.0
    collective = costs.reduce["float32"].line.latency if "float32" in costs.reduce else 0.0
    return Link(interface, sold, min(1.0, reached / sold) if sold else 0.0, collective)


def _interface(folder: Path = Path("/sys/class/net")) -> tuple[str, float]:
    """Name and bytes a second of gloo's interface, or of the only one with a known speed."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    speeds = {each.name: _speed(each) for each in folder.glob("*") if each.name != "lo"}
    known = {name: speed for name, speed in speeds.items() if speed > 0}
    if named:
        return named, speeds.get(named, 0.0)
    return next(iter(known.items())) if len(known) == 1 else ("", 0.0)


def _speed(interface: Path) -> float:
    try:
        return max(0, int((interface / "speed").read_text("ascii"))) * 1.25e5
    except (OSError, ValueError):  # the interface is down, or has no speed
        return 0.0


def refuse_unwritable(path: Path) -> None:
    """Raise ConfigError if the file cannot be written, before anything is measured."""
    try:
        with path.open("a"):
            pass
        if not path.stat().st_size:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"profile {path} cannot be written: {error}") from error


@dataclass(frozen=True)
class _File:
    """A profile as `write` lays it out."""

    format: int
    versions: dict[str, str]
    nodes: list[list[int]]
    link: Link
    digests: dict[str, str]
    places: dict[str, Costs]


def read(path: Path) -> Profile:
    """Read a profile. Raises ConfigError with the path of the first mistake in the file."""
    file = read_json(path, "profile of `hipress probe`", _File, FORMAT)
    wrong = next(chain(_unmeasured(file.places), _no_measures(asdict(file))), None)
    if wrong is not None:
        raise ConfigError(f"{path}: {wrong}")
    try:
        topology = Topology.of(file.nodes)
    except PlanError as error:
        raise ConfigError(f"{path}: nodes: {error}") from error
    return Profile(file.places, topology, file.digests, file.versions, file.link)


def _unmeasured(places: Mapping[str, Costs]) -> Iterator[str]:
    """Texts on costs that every profile has, and this one lacks."""
    if not places:
        yield "places: no place was measured"
    for name, costs in places.items():
        if not costs.exchange:
            yield f"places.{name}: no exchange was measured"
        if lacking := {"float32", "bfloat16", "float16"} - set(costs.reduce):
            yield f"places.{name}: no all-reduce of {min(lacking)} was measured"


def _no_measures(value: object, place: str = "") -> Iterator[str]:
    """Texts on numbers that no measurement gives, in nested mappings."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _no_measures(each, f"{place}.{key}".strip("."))
    elif isinstance(value, float):
        most = 1.0 if place.endswith((".overlap", ".slows")) else sys.float_info.max
        if not 0 <= value <= most:
            yield f"{place}: {value:g} is not {'0 to 1' if most == 1 else 'at least 0, and finite'}"
