"""Places of compression: the device itself, or the host, to which gradients are copied.

[Note: places] Each place has its own codecs, with other keys, and its own costs: of codecs, of
transfers, of copies, and of the slow-down of the backward pass. A plan belongs to one place. The
first place is the model's device, where the native all-reduce runs, to which all plans are
compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist

from casync.codec import Codec
from casync.cost import Costs
from casync.memory.host import HostMemory
from casync.topology import Topology
from hipress.channel.executors import start_slots
from hipress.choose import probe
from hipress.choose.plan import HOSTED, Plan
from hipress.choose.probe import HOST, ProbeSetup
from hipress.choose.search import FAR, TRIED, Search, why_tried
from hipress.choose.workload import Workload
from hipress.model.devices import NCCL, Placement
from hipress.ranks.coordinator import Coordinator

__all__ = ["Device", "Places"]


@dataclass(frozen=True)
class Device:
    """A place of compression, and the search for plans there."""

    name: str  # one of hipress.model.devices.TRANSPORTS
    search: Search
    setup: ProbeSetup


@dataclass(frozen=True)
class Places:
    """All places, each with its costs as far as they are known."""

    every: tuple[Device, ...]
    costs: tuple[Costs, ...] = ()

    @classmethod
    def of(cls, search: Search, coordinator: Coordinator, placement: Placement) -> Places:
        """The place of the model, and the host as well if the model is on a device. All ranks of
        the group must call this."""
        memory, name = placement.memory(), placement.transport
        if placement.on_host:
            return cls((Device(name, search, ProbeSetup(HostMemory(), memory)),))
        setup = ProbeSetup(memory, memory, start_slots("probe", coordinator, placement, memory))
        search = replace(search, slots=setup.slots is not None)
        return cls.on_device(Device(name, search, setup), ProbeSetup(HostMemory(), memory))

    @classmethod
    def on_device(cls, first: Device, host: ProbeSetup = HOST) -> Places:
        """A device's place, and the host with the same codecs unless rules have a device's."""
        if first.search.overrides.codecs:
            return cls((first,))
        hosted = first.search.codecs.hosted()
        search = replace(first.search, codecs=hosted, slots=False)
        return cls((first, Device("host", search, host)))

    @classmethod
    def read(cls, search: Search, costs: Mapping[str, Costs]) -> Places:
        """Places with measured costs, by name."""
        name, *others = costs
        first = Device(name, replace(search, slots=name in NCCL), HOST)
        places = cls.on_device(first) if others else cls((first,))
        return replace(places, costs=tuple(costs.values()))

    @property
    def by_name(self) -> dict[str, Costs]:
        """Costs by name, for `read`."""
        return {place.name: each for place, each in zip(self.every, self.costs, strict=True)}

    @property
    def first(self) -> Device:
        """The place of the model."""
        return self.every[0]

    @property
    def topology(self) -> Topology:
        """Topology of all places."""
        return self.first.search.topology

    @property
    def codecs(self) -> dict[str, Codec]:
        """Codecs of all places, by key."""
        every = [place.search.codecs.every(place.search.params) for place in self.every]
        return {key: codec for some in every for key, codec in some.items()}

    @property
    def reported(self) -> Costs:
        """Costs for reports: those of the first place, with codecs and copies of all."""
        codecs = {key: cost for costs in self.costs for key, cost in costs.codecs.items()}
        copies = next((costs.copies for costs in self.costs if costs.copies), None)
        return replace(self.costs[0], codecs=codecs, copies=copies)

    def measure_links(self, group: dist.ProcessGroup) -> Places:
        """The places with newly measured links. Every rank must call this."""
        links = tuple(
            probe.measure_link(group, each.search.codecs, self.topology, each.setup)
            for each in self.every
        )
        if self.costs:
            links = tuple(
                replace(link, codecs=costs.codecs, overlap=costs.overlap)
                for link, costs in zip(links, self.costs, strict=True)
            )
        return replace(self, costs=links)

    def measure_codecs(self, group: dist.ProcessGroup) -> Places:
        """The places with measured costs of compiled codecs. Every rank must call this."""
        pairs = zip(self.every, self.costs, strict=True)
        return replace(
            self,
            costs=tuple(
                probe.measure_codecs(group, each.search.codecs, costs, each.setup)
                for each, costs in pairs
            ),
        )

    def measure(self, group: dist.ProcessGroup) -> Places:
        """The places with all costs, of compiled codecs. Every rank must call this."""
        return self.measure_links(group).measure_codecs(group)

    def message_seconds(self, group: dist.ProcessGroup) -> float:
        """Seconds of a message now. Every rank must call this."""
        return probe.message_seconds(group, self.topology, self.first.setup)

    def abort(self) -> None:
        """Disconnect after a failed measurement."""
        for each in self.every:
            each.setup.abort()

    def close(self) -> None:
        """Disconnect."""
        for each in self.every:
            each.setup.close()

    def promising(self) -> Places:
        """The places with those codecs that promise to pay; without places that have none."""
        native = self.first.search.native(self.costs[0])
        pairs = [
            (replace(each, search=each.search.promising(costs, native)), costs)
            for each, costs in zip(self.every, self.costs, strict=True)
        ]
        kept = [pairs[0], *(pair for pair in pairs[1:] if pair[0].search.codecs)]
        return Places(tuple(place for place, _ in kept), tuple(costs for _, costs in kept))

    def compile(self, check: Callable[[], None] = lambda: None) -> dict[str, Codec]:
        """The codecs of all places, compiled for them, for `use_compiled`; from any thread.

        check: called before each codec; its error ends this."""
        codecs: dict[str, Codec] = {}
        with self.first.setup.memory.current():
            for each in self.every:
                codecs |= each.search.codecs.compile(each.search.params, check)
            for codec in codecs.values():
                check()
                codec.prepare()
        return codecs

    def use_compiled(self, compiled: Mapping[str, Codec]) -> None:
        """Use the compiled codecs from now on."""
        for each in self.every:
            each.search.codecs.use_compiled(compiled)

    def plans(self, workload: Workload | None = None) -> tuple[Plan, ...]:
        """Plans as of Search.plans, over all places: the best of each place, by predicted step."""
        if workload is not None:  # payloads are the same at all places
            hosted = {(key + HOSTED, index): n for (key, index), n in workload.payloads.items()}
            workload = replace(workload, payloads={**workload.payloads, **hosted})
        pairs = zip(self.every, self.costs, strict=True)
        first, *others = [each.search.plans(costs, workload) for each, costs in pairs]
        if not others:
            return first
        *tried, native = first
        for plan in (plan for plans in others for plan in plans[:-1]):
            tried.append(replace(plan, why=why_tried(plan.seconds, native.seconds)))
        least = min((plan.seconds for plan in (*tried, native)), default=0.0)
        near = sorted((p for p in tried if p.seconds <= FAR * least), key=lambda p: p.seconds)
        best = {plan.hosted: plan for plan in reversed(near)}
        rest = [plan for plan in near if plan is not best[plan.hosted]]
        kept = sorted([*best.values(), *rest[: TRIED - len(best)]], key=lambda p: p.seconds)
        return (*kept, native)

    def reasons(self, workload: Workload) -> Iterator[str]:
        """Text per place: its best plan, and the speeds behind it; for several places."""
        for place, costs in zip(self.every, self.costs, strict=True):
            best = place.search.plans(costs, workload)[0]
            text = f"{best.label}, {best.seconds * 1e3:.2f} ms a step"
            if not best.compresses:
                text = "no plan that compresses"
            yield f"{place.name}: {text}; {_speeds(costs)}"


def _speeds(costs: Costs) -> str:
    """Text such as
    `35% of a codec's time hides behind the backward pass, gradients leave the device ...`."""
    text = f"{costs.overlap:.0%} of a codec's time hides behind the backward pass"
    if costs.copies is None:
        return text
    what = "gradients" if costs.copies.gradients else "payloads"
    leave, enter = (
        1e-9 / line.per_byte if line.per_byte else math.inf
        for line in (costs.copies.leave, costs.copies.enter)
    )
    return f"{text}, {what} leave the device at {leave:.3g} GB/s and enter it at {enter:.3g}"
