"""What the ranks of test_device_training.py run: DDP's own hooks, and an engine on a device that is
emulated; buckets go there, and averages come back."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
from torch.futures import Future

import compll
import hipress
from hipress import session
from hipress.devices import Placement
from hipress.sync.engine import Engine
from hipress.sync.futures import map_future
from tests.casync import emulated
from tests.casync.streams import Schedule
from tests.hipress.common import SMALL_BUCKETS, digest, make, train


class Moved(Engine):
    """Its buckets are copied to its device, by the caller's stream, and back."""

    def reduce(self, indices, buffer, *, last):
        memory = Placement.memory(None)
        there = memory.filled(buffer.detach())
        averaged = super().reduce(indices, there, last=last)
        return map_future(averaged, lambda _: buffer.copy_(memory.download(there)), Future())


@contextmanager
def on_device(rank, *, transport="staged"):
    """Within it, what is wrapped is on a device, for which this gives compiled codecs."""
    schedule = Schedule(rank)
    memory = emulated.DeviceMemory(schedule)
    with schedule.driving(), ExitStack() as stack:
        for where, name, value in (
            (session, "place", mock.Mock(return_value=Placement(memory.device, transport))),
            (Placement, "memory", mock.Mock(return_value=memory)),
            (session, "Engine", Moved),
        ):
            stack.enter_context(mock.patch.object(where, name, value))
        yield lambda name, **params: emulated.Launched(emulated.compiled(name, **params), memory)


def trained(rank, codec, way):
    """A digest of the model after some steps."""
    kwargs = way.get("ddp_kwargs", SMALL_BUCKETS)
    module = make(unused=kwargs.get("find_unused_parameters", False))
    ddp = hipress.wrap(
        module.to(way.get("dtype", torch.float32)), codec, min_size=100, timeout=60,
        ddp_kwargs=kwargs,
    )  # fmt: skip
    model = torch.compile(ddp, backend="eager") if way.get("compile") else ddp
    try:
        train(model, rank, range(4), accumulate=way.get("accumulate", 1))
        return digest(module)
    finally:
        hipress.detach(ddp)


def by_way(rank, size, ways):
    """Digests of models by way, on a device and on the CPU."""
    found = {}
    for title, way in ways.items():
        with on_device(rank) as compiled:
            there = trained(rank, compiled("onebit_group"), way)
        found[title] = there, trained(rank, compll.compile("onebit_group"), way)
    return found
