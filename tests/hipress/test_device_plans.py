"""Policies and "auto" on devices, which are emulated; several ranks over gloo."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from casync.topology import Topology
from hipress.choose import probe
from hipress.choose.probe import ProbeSetup
from tests.casync.emulated import DeviceMemory
from tests.casync.rendezvous import Meeting
from tests.casync.streams import FakeEnd, Schedule
from tests.hipress import device_plan_ranks
from tests.hipress.launch import launch
from tests.patience import HANG
from tests.tiers import first_fast


class Alike:
    """A group of ranks whose numbers are all the same."""

    def __init__(self, rank):
        self._rank = rank

    def rank(self):
        return self._rank

    def barrier(self):
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.slow
def test_a_link_without_tags_is_measured_on_the_stream(monkeypatch):
    """Groups of messages and reduces, as over NCCL, move the right bytes."""
    for name, value in (("QUICK", -1.0), ("SLOW", 1e9), ("LARGE", 1 << 12), ("REPEATS", 2)):
        monkeypatch.setattr(probe, name, value)
    monkeypatch.setattr(probe, "all_reduce_max", lambda values, group: values)
    told, schedule, coordinator = [], Schedule(2), Meeting(3)
    ends = [FakeEnd(coordinator, rank, lambda *each: told.append(each)) for rank in range(3)]

    def measured(end):
        memory = DeviceMemory(schedule)
        setup = ProbeSetup(memory, memory, end)
        wire = setup.wire(Alike(end.rank))
        mine = memory.filled(torch.full((4,), end.rank, dtype=torch.uint8))
        came, total = wire.zeros(4, torch.uint8), memory.filled(torch.full((2,), float(end.rank)))
        wire.swap(mine, [(end.rank + 1) % 3], [(came, (end.rank - 1) % 3)])
        wire.reduce(total)
        costs = probe.measure_link(Alike(end.rank), {}, Topology.flat(3), setup)
        return came.cpu().tolist(), total.cpu().tolist(), costs

    with schedule.driving(), ThreadPoolExecutor(3) as threads:
        found = list(threads.map(measured, ends, timeout=HANG))
    for rank, (came, total, costs) in enumerate(found):
        assert (came, total) == ([(rank - 1) % 3] * 4, [3.0, 3.0])
        assert sorted(costs.exchange) == [1, 2]
        assert costs.to(2).line(1e6) > 0
        assert costs.copies is None  # no data goes through host memory
        assert all(0 <= each.slows <= 1 for each in costs.reduce.values())
        assert {each.cores for each in (*costs.exchange.values(), *costs.reduce.values())} == {0.0}
    assert {name for _, name in told} == {"a message of the probe", "an all-reduce of the probe"}


@pytest.mark.slow
@pytest.mark.parametrize("name", first_fast(["Accordion", "GraVAC", "Warmup"]))
def test_a_policy_on_a_device_does_as_on_the_host(name):
    """Bit for bit. It waits for the device once in a window, never in a step between."""
    (labels, waits), (others, _) = launch(device_plan_ranks.by_policy, 2, name)
    assert labels == others
    assert len({tuple(each) for each in labels}) > 1, labels
    window = device_plan_ranks.POLICIES[name].new_state([], 2).window if name != "GraVAC" else 4
    assert waits == ([] if name == "Warmup" else list(range(window, 14, window)))


@pytest.mark.slow
def test_a_trial_on_a_device():
    (averages, tried, off, waits, costs, _), other = launch(device_plan_ranks.by_trial, 2)
    assert averages == other[0]
    assert tried == other[1]
    assert off < 1e-4
    assert [verdict for _, verdict, _ in tried].count("kept") == 1
    assert all(steps == 6 for _, _, steps in tried)
    places = [" on the host (" in plan for plan, _, _ in tried]
    assert places.count(True) > 0 < places[:-1].count(False)
    assert tried[-1][0] == "no compression"
    assert waits == [0]  # none after the trial
    assert costs == other[4]
    assert all(cost.encode(1e6) > 0 for cost in costs.codecs.values())
    assert costs.copies is not None
    assert costs.copies.leave(1e6) > 0


@pytest.mark.slow
def test_a_trial_over_nccl_tries_graphs_of_what_is_compressed_on_the_device():
    first, other = launch(device_plan_ranks.by_trial, 2, False, "nccl")
    averages, tried, off, waits, _, pinned = first
    assert (averages, tried) == other[:2]
    assert off < 1e-4
    plans = [plan for plan, *_ in tried]
    captured = [plan for plan in plans if plan.endswith(", captured")]
    others = ("no compression", " on the host (", "lossless", ", captured")  # lengths of one vary
    alone = [plan for plan in plans if not any(each in plan for each in others)]
    assert captured == [f"{plan}, captured" for plan in alone], plans
    assert all(steps == 6 for _, _, steps in tried)
    assert waits == [0]
    hosts, device = pinned  # bytes of copies on the host, which a plan of the device gives back
    assert hosts > 0 == device


@pytest.mark.gpu
def test_gpu_plans():
    """Two ranks that share a GPU."""
    for name in ("GraVAC", "Accordion"):
        (labels, _), (others, _) = launch(device_plan_ranks.by_policy, 2, name, True)
        assert labels == others
    (averages, tried, off, _, costs, _), other = launch(device_plan_ranks.by_trial, 2, True)
    assert (averages, tried) == other[:2]
    assert off < 1e-4
    assert any(" on the host (" in plan for plan, _, _ in tried)
    assert all(cost.encode(1e6) > 0 for cost in costs.codecs.values())
