"""Profiles: a probe's measurements in a JSON file, with the machine that they hold for."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from casync.cost import FREE, CodecCost, Copies, Costs, Line, Transfer
from casync.errors import PlanError
from casync.topology import Topology
from compll.frontend.source import Items
from hipress import __version__, reading
from hipress.errors import ConfigError
from hipress.reading import Fields

if TYPE_CHECKING:
    from casync.codec import Codec

FORMAT = 4
_KIND = "a profile of `hipress probe`"


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
    """Versions on which costs depend, besides the codecs. device: cpu or cuda."""
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
    """Write a profile; times in seconds, and seconds per byte."""
    data = {
        "format": FORMAT,
        "versions": versions(device),
        "nodes": [list(node) for node in topology.nodes],
        "link": asdict(link_of(next(iter(places.values())), topology)),
        "digests": {name: codec.digest for name, codec in codecs.items()},
        "places": {name: asdict(costs) for name, costs in places.items()},
    }
    path.write_text(json.dumps(data, indent=2) + "\n", "utf-8")


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
    found = {each.name: _speed(each) for each in folder.glob("*") if each.name != "lo"}
    known = {name: speed for name, speed in found.items() if speed > 0}
    if named:
        return named, found.get(named, 0.0)
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


def read(path: Path) -> Profile:
    """Read a profile. Raises ConfigError with the places of all mistakes."""
    fields = reading.read(path, _KIND, "`hipress probe` writes one")
    if (found := fields.count("format", least=0)) != FORMAT and not fields.problems.found:
        fields.problems.add(fields.at("format"), f"format {found}; this reads {FORMAT}")
    reading.refuse(fields.problems)
    fields.only(("format", "versions", "nodes", "link", "digests", "places"))
    places = {name: _costs(each) for name, each in _mappings(fields, "places")}
    if not places:
        fields.problems.add(fields.at("places"), "no place was measured")
    topology, link = _topology(fields), _link(fields.fields("link", needed=True))
    digests, versions = _texts(fields, "digests"), _texts(fields, "versions")
    reading.refuse(fields.problems)
    return Profile(places, topology, digests, versions, link)


def _topology(fields: Fields) -> Topology:
    nodes = [
        [int(n) for rank in node.values if (n := fields.measure(rank, "a rank")) % 1 == 0]
        for node in fields.items("nodes")
        if isinstance(node, Items)
    ]
    try:
        return Topology.of(nodes)
    except PlanError as error:
        fields.problems.add(fields.at("nodes"), str(error))
        return Topology.flat(1)


def _mappings(fields: Fields, name: str) -> Iterator[tuple[str, Fields]]:
    """Mappings by key in a required mapping."""
    inner = fields.fields(name, needed=True)
    for key in inner.names() if inner is not None else ():
        assert inner is not None
        each = inner.fields(key, needed=True)
        if each is not None:
            yield key, each


def _texts(fields: Fields, name: str) -> dict[str, str]:
    inner = fields.fields(name, needed=True)
    return {} if inner is None else {key: inner.text(key) for key in inner.names()}


def _link(fields: Fields | None) -> Link:
    if fields is None:
        return Link("", 0.0, 0.0, 0.0)
    fields.only(("interface", "bandwidth", "reach", "collective"))
    numbers = (fields.quantity(name) for name in ("bandwidth", "reach", "collective"))
    return Link(fields.text("interface"), *numbers)


def _costs(fields: Fields) -> Costs:
    fields.only(("exchange", "reduce", "codecs", "inside", "overlap", "copies"))
    exchange = {
        int(peers): _transfer(each)
        for peers, each in _mappings(fields, "exchange")
        if peers.isdigit()
    }
    if not exchange:
        fields.problems.add(fields.at("exchange"), "no exchange was measured")
    reduce = {name: _transfer(each) for name, each in _mappings(fields, "reduce")}
    if lacking := {"float32", "bfloat16", "float16"} - set(reduce):
        problem = f"no all-reduce of {min(lacking)} was measured"
        fields.problems.add(fields.at("reduce"), problem)
    return Costs(
        exchange,
        reduce,
        {name: _codec(each) for name, each in _mappings(fields, "codecs")},
        _transfer(fields.fields("inside", needed=True)),
        fields.quantity("overlap", most=1.0),
        _copies(fields.fields("copies")) if fields.is_mapping("copies") else None,
    )


def _codec(fields: Fields) -> CodecCost:
    kinds = ("encode", "decode", "hop")
    fields.only(kinds)
    return CodecCost(*(_line(fields.fields(kind, needed=True)) for kind in kinds))


def _copies(fields: Fields | None) -> Copies:
    if fields is None:
        return Copies(FREE, FREE, True)
    fields.only(("leave", "enter", "gradients"))
    leave, enter = (_line(fields.fields(way, needed=True)) for way in ("leave", "enter"))
    return Copies(leave, enter, fields.text("gradients") == "true")


def _transfer(fields: Fields | None) -> Transfer:
    if fields is None:
        return Transfer(FREE)
    fields.only(("line", "cores", "slows"))
    line = _line(fields.fields("line", needed=True))
    return Transfer(line, fields.quantity("cores"), fields.quantity("slows", most=1.0))


def _line(fields: Fields | None) -> Line:
    if fields is None:
        return FREE
    fields.only(("latency", "per_byte"))
    return Line(fields.quantity("latency"), fields.quantity("per_byte"))
