"""Stages of a strategy's synchronization on a cluster, copies of a device included."""

from __future__ import annotations

from casync import strategies
from casync.cost import FREE, CodecCost, Copies, Costs
from casync.graph.plan import BATCH_BYTES
from casync.stages import ENTER, INSIDE, LEAVE, WIRE, Item, Setting, Stage
from casync.topology import Topology

__all__ = ["PREDICTED", "native", "stages"]

#: strategies whose steps are predicted
PREDICTED = tuple(name for name in strategies.list_strategies() if strategies.load(name).stages)


def native(size: float, costs: Costs) -> tuple[Stage, ...]:
    """Stages of a native all-reduce of `size` bytes."""
    one = Topology.flat(1)
    setting = Setting(one, costs, CodecCost(FREE, FREE), BATCH_BYTES, one)
    return _with_copies((setting.reduce(size, 1, "float32"),), size, costs.copies)


def stages(
    strategy: str,
    item: Item,
    codec: CodecCost,
    topology: Topology,
    costs: Costs,
    *,
    turns: bool = False,
) -> tuple[Stage, ...]:
    """Stages of each rank for `item`, by one of PREDICTED. turns: see Setting."""
    make = strategies.load(strategy).stages
    assert make is not None
    groups = strategies.groups(strategy, topology)
    setting = Setting(topology, costs, codec, BATCH_BYTES, groups, turns)
    return _with_copies(make(item, setting), item.gradient, costs.copies)


def _with_copies(
    chain: tuple[Stage, ...], gradient: float, copies: Copies | None
) -> tuple[Stage, ...]:
    """The stages with copies from and to a device: of gradients, or of payloads."""
    if copies is None:
        return chain
    if copies.gradients:
        leave, enter = _copies(gradient, copies)
        return (leave, *chain, enter)
    stages: list[Stage] = []
    for stage in chain:
        leave, enter = _copies(stage.size, copies)
        stages += [leave, stage, enter] if stage.lane in (WIRE, INSIDE) else [stage]
    return tuple(stages)


def _copies(size: float, copies: Copies) -> tuple[Stage, Stage]:
    return Stage(LEAVE, copies.leave(size)), Stage(ENTER, copies.enter(size))
