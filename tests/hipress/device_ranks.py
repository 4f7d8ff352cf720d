"""What the ranks of test_devices.py run: the engine on emulated devices, over gloo."""

from __future__ import annotations

import torch
import torch.distributed as dist

import compll
import hipress
from casync.errors import CasyncError
from casync.topology import Topology
from hipress import options
from hipress.devices import Placement
from hipress.errors import HipressError
from hipress.model import describe
from hipress.plan.rules import fixed_plan
from hipress.ranks import meeting as meetings
from hipress.sync import checkpoint
from hipress.sync.engine import Engine
from tests.casync.emulated import DeviceMemory, compiled
from tests.casync.streams import Schedule

SHAPES = ((1, 40), (30, 100))


def model():
    torch.manual_seed(0)
    return torch.nn.ModuleList(torch.nn.Linear(n, m, bias=False) for m, n in SHAPES)


def engine_of(params, codec, meeting, **how):
    wanted = options.make("onebit_group", min_size=0, timeout=meeting.timeout)
    topology = Topology.flat(len(meeting.ranks))
    plan = fixed_plan(params, codec, wanted, topology)
    return Engine(params, plan, wanted, dist.group.WORLD, meeting, **how)


def gradients(params, rank, step):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(sum(p.numel for p in params), generator=generator)


def reduced(engine, bucket):
    """A step of one bucket."""
    engine.begin(0)
    engine.reduce(tuple(range(len(engine.params))), bucket, last=True)
    engine.finish()


def alike(rank, size):
    """Averages and states of three steps, beside those of an engine on the host."""
    params, schedule = describe(model()), Schedule(rank)
    memory = DeviceMemory(schedule)
    placement = Placement(memory.device, "staged")
    with schedule.driving():
        device = engine_of(
            params, compiled("onebit_group"), meetings.meeting(dist.group.WORLD, 60),
            placement=placement, memory=memory,
        )  # fmt: skip
        meeting = meetings.meeting(dist.group.WORLD, 60)
        host = engine_of(params, compll.compile("onebit_group"), meeting)
        for step in range(3):
            values = gradients(params, rank, step)
            bucket = memory.filled(values)
            reduced(device, bucket)
            reduced(host, values)
            assert torch.equal(memory.download(bucket), values)
        same_states(device, host, rank, size)
        dist.barrier()
        device.close()
        host.close()


def same_states(device, host, rank, size):
    """As checkpoints have them; and they can be loaded on either."""
    saved, wanted = (
        checkpoint.export(each.buckets.residuals, each.step, rank, size)["state"]
        for each in (device, host)
    )
    assert any(values.any() for values in tensors(wanted))
    assert all(map(torch.equal, tensors(saved), tensors(wanted)))
    other = device.planned(device.plan)
    state = checkpoint.export(host.buckets.residuals, host.step, rank, size)
    checkpoint.restore(other.residuals, state, list(device.params))
    again = checkpoint.export(other.residuals, device.step, rank, size)["state"]
    assert all(map(torch.equal, tensors(again), tensors(wanted)))


def tensors(state):
    """Of a checkpoint's values, in order."""
    sides = (side for _, param in sorted(state.items()) for _, side in sorted(param.items()))
    return [values for side in sides for _, values in sorted(side.items())]


def refused(rank, size):
    """What a rank is told that asks for what cannot be, and the others, which ask for nothing."""
    asked = {"transport": "staged"} if rank == 0 else {}
    try:
        hipress.wrap(torch.nn.Linear(3, 3), "onebit_group", timeout=30, **asked)
    except HipressError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def broken(rank, size):
    """What a kernel finds wrong with the payload of the last rank ends the step of who finds it,
    and the next one of all."""
    params, schedule = describe(model()), Schedule(rank)
    memory = DeviceMemory(schedule)
    with schedule.driving():
        engine = engine_of(
            params, Garbled(compiled("topk", ratio=0.1), rank == size - 1),
            meetings.meeting(dist.group.WORLD, 60),
            placement=Placement(memory.device, "staged"), memory=memory,
        )  # fmt: skip
        try:
            for step in range(2):
                reduced(engine, memory.filled(gradients(params, rank, step)))
        except (CasyncError, HipressError) as error:
            return f"step {step}: {type(error).__name__}: {error}"
        finally:
            engine.close()
    return "nothing"


class Garbled:
    """A codec that spoils what it has encoded."""

    def __init__(self, inner, spoils):
        self._inner, self._spoils = inner, spoils

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def for_shape(self, shape):
        return self

    def encode_batch(self, x, table, out, at, **options):
        used = self._inner.encode_batch(x, table, out, at, **options)
        if self._spoils:
            out.fill_(255)
        return used
