"""Training speeds of devices: peaks of data sheets, and the assumed shares of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from hipress.reading import BANDWIDTH, FLOPS, SHARE, TIME, Fields
from hipress.tools.models.work import Speed

__all__ = ["DEVICES", "Device"]

REACHED = 0.8  # share of a memory's bandwidth reached by kernels that only move data


@dataclass(frozen=True)
class Device:
    """The device of a rank. `flops` and `memory` are the speeds reached, not the peaks."""

    name: str
    flops: float  # per second, in matrix products of the training's number type
    memory: float  # bytes a second
    width: float  # bytes of a number over those of float32
    launch: float  # least seconds of a kernel
    overlap: float  # share of a codec's work that a backward pass hides: 0 to 1
    slows: float = 0.0  # share of its speed that a backward pass loses while links are busy
    core: float = 0.0  # core seconds per byte on the link
    about: str = ""
    holds: float = 0.0  # bytes of its memory; 0 if unknown

    @property
    def host(self) -> bool:
        """True for a CPU."""
        return self.core > 0

    @property
    def speed(self) -> Speed:
        """The device's speed, for rooflines."""
        return Speed(self.flops, self.memory, self.launch, self.width)


def _gpu(name: str, peak: float, share: float, memory: float, width: float, holds: float) -> Device:
    kind = "float32" if width == 1 else "bfloat16"
    about = (
        f"{share:.0%} of {peak * 1e-12:g} TFLOP/s in {kind} and {REACHED:.0%} of "
        f"{memory * 1e-9:g} GB/s are reached; a third of a codec hides behind the backward pass, "
        "which transfers slow by 5%"
    )
    return Device(name, share * peak, REACHED * memory, width, 5e-6, 0.3, 0.05, 0.0, about, holds)


DEVICES: Mapping[str, Device] = {
    each.name: each
    for each in (
        _gpu("v100", 15.7e12, 0.83, 900e9, 1.0, 32e9),
        _gpu("a40", 149.7e12, 0.5, 696e9, 0.5, 48e9),
        _gpu("a100", 312e12, 0.5, 2039e9, 0.5, 80e9),
        _gpu("h100", 989e12, 0.45, 3350e9, 0.5, 80e9),
        _gpu("b200", 2250e12, 0.45, 8000e9, 0.5, 180e9),
        Device(
            "cpu", 60e9, 10e9, 1.0, 1e-5, 0.0, 0.0, 5e-10,
            "a core a rank, of 60 GFLOP/s and 10 GB/s; a byte on the link takes 0.5 ns of it",
        ),
    )
}  # fmt: skip

_KEYS = ("name", "flops", "memory", "launch", "overlap", "slows", "core")


def read(fields: Fields) -> Device:
    """The device of a cluster file: a name, or a mapping with a name and changed values."""
    inner = fields.fields("device") if fields.is_mapping("device") else None
    name = fields.text("device") if inner is None else inner.text("name")
    if name and name not in DEVICES:
        fields.unknown("device", name, DEVICES)
    base = DEVICES.get(name, DEVICES["h100"])
    if inner is None:
        return base
    inner.only(_KEYS)
    changed = replace(
        base,
        flops=inner.quantity("flops", FLOPS, base.flops),
        memory=inner.quantity("memory", BANDWIDTH, base.memory),
        launch=inner.quantity("launch", TIME, base.launch),
        overlap=inner.quantity("overlap", SHARE, base.overlap, most=1.0),
        slows=inner.quantity("slows", SHARE, base.slows, most=1.0),
        core=inner.quantity("core", TIME, base.core),
    )
    overridden = ", ".join(key for key in inner.names() if key != "name")
    return replace(changed, about=f"{base.about}; given: {overridden}") if overridden else changed
