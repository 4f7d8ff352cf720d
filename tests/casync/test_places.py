"""Where gradients of a device are compressed."""

import pytest

from casync.predict.cost import CodecCost, Costs, Line, Transfer
from casync.predict.places import PLACES, Device, stages_at
from casync.predict.stages import PREDICTED, Item, stages
from casync.predict.timeline import Load, simulate_step
from casync.topology import Topology

FOUR = Topology.flat(4)
NESTED = Topology.of([[0, 1], [2, 3]])
ITEM = Item(gradient=4e6, payload=1e6, parts=4)


def codec(speed):
    """So many bytes a second."""
    line = Line(1e-6, 1 / speed)
    return CodecCost(line, line, line)


def measured(cores):
    link = Transfer(Line(1e-4, 1e-9))
    return Costs({3: link, 1: link}, {"float32": link}, {"int8": codec(cores)}, inside=link)


def seconds(place, strategy, costs, device, topology=FOUR):
    found = stages_at(place, strategy, ITEM, "int8", topology, costs, device)
    return simulate_step([Load(0.0, found)], 0.0, 0.0).seconds


@pytest.mark.parametrize("strategy", PREDICTED)
def test_the_faster_place_is_told(strategy):
    topology = NESTED if strategy == "hierarchical" else FOUR

    def best(kernels, cores, copy):
        device = Device({"int8": codec(kernels)}, Line(1e-5, 1 / copy))
        times = {
            each: seconds(each, strategy, measured(cores), device, topology) for each in PLACES
        }
        return min(times, key=times.__getitem__)

    assert best(kernels=3e11, cores=5e9, copy=1e10) == "device"
    assert best(kernels=1e9, cores=2e10, copy=2e10) == "host"  # one that sorts, say
    assert best(kernels=1e9, cores=2e10, copy=1e8) == "device"  # the copy takes too long


@pytest.mark.parametrize("strategy", PREDICTED)
def test_what_a_place_adds(strategy):
    """To the same stages: on the host both ways of the gradient, staged each way of payloads."""
    topology = NESTED if strategy == "hierarchical" else FOUR
    costs = measured(1e10)
    plain = stages(strategy, ITEM, costs.codecs["int8"], topology, costs)
    device = Device(costs.codecs, Line(0.0, 1e-8))
    on_host = stages_at("host", strategy, ITEM, "int8", topology, costs, device)
    assert on_host[1:-1] == plain
    assert sum(s.delay for s in on_host) - sum(s.delay for s in plain) == pytest.approx(2 * 4e-2)
    assert stages_at("device", strategy, ITEM, "int8", topology, costs, device) == plain
    staged = Device(costs.codecs, Line(0.0, 1e-8), staged=True)
    found = stages_at("device", strategy, ITEM, "int8", topology, costs, staged)
    more = sum(s.delay for s in found) - sum(s.delay for s in plain)
    assert more == pytest.approx(2e-2 * sum(s.wire for s in plain))
