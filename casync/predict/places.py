"""Where gradients of a device are compressed: there, or on the host.

The fourth of what Espresso (EuroSys'23) chooses. On the device kernels take the place of the
backward pass's, and nothing is copied but, where the transport is the host's, payloads. On the host
gradients go there first, and averages come back; then the cores do what they do for a model on the
CPU. Copies run beside all else, so here they are delays. Which place pays is for `simulate_step` to
say, with either's stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from casync.predict.cost import CodecCost, Costs, Line
from casync.predict.stages import Item, Stage, stages
from casync.topology import Topology

__all__ = ["PLACES", "Device", "Place", "stages_at"]

Place: TypeAlias = Literal["device", "host"]
PLACES: tuple[Place, ...] = ("device", "host")


@dataclass(frozen=True)
class Device:
    """What was measured of a device."""

    codecs: Mapping[str, CodecCost]  # by key, as of the host in Costs
    copy: Line  # bytes to pinned memory of the host, or from there
    staged: bool = False  # whether payloads travel by the host


def stages_at(
    place: Place,
    strategy: str,
    item: Item,
    codec: str,
    topology: Topology,
    costs: Costs,
    device: Device,
) -> tuple[Stage, ...]:
    """What a rank does for an item that is on its device, as `stages` has it for one on the host.

    codec: its key in what was measured. `costs`: those of the link, and of the host's cores.
    """
    if place == "host":
        found = stages(strategy, item, costs.codecs[codec], topology, costs)
        copied = Stage(False, 0.0, delay=device.copy(item.gradient))
        return (copied, *found, copied)
    found = stages(strategy, item, device.codecs[codec], topology, costs)
    if not device.staged:
        return found
    each = 2 * device.copy(item.payload)  # there and back, at most
    return tuple(replace(s, delay=s.delay + each) if s.wire else s for s in found)
