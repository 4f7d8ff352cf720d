"""A single rank with NCCL, by each binding: on one GPU, and with doubles."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.distributed as dist

from casync.errors import TransportAborted
from casync.memory.device import DeviceMemory
from casync.nccl.bindings import BINDINGS, connect_by
from casync.transports import Member
from casync.transports.nccl import NcclTransport
from tests.casync.test_slot_transports import doubles, start  # noqa: F401
from tests.patience import HANG


def look(exchange, make, abort, *, to_itself):
    """Messages to oneself, sums of one rank, and an abort. exchange: returns when they are done."""
    reduces = [make(range(40), kind) for kind in (torch.float32, torch.float16, torch.uint8)]
    transfers = [Member("reduce", (0,), data, "sum of one", "sum") for data in reduces]
    transfers += [Member("reduce", (0,), reduces[0], "its share", "sum", (40,))]
    if to_itself:
        sent, got = make(range(1000), torch.uint8), make([0] * 1000, torch.uint8)
        transfers += [Member("send", (0,), sent, "to itself"),
                      Member("recv", (0,), got, "from itself")]  # fmt: skip
    exchange(transfers)
    for data in reduces:
        assert data.cpu().tolist() == list(range(40))
    if to_itself:
        assert torch.equal(sent.cpu(), got.cpu())
    abort()
    with pytest.raises(TransportAborted, match="rank 0 closed its communicators"):
        exchange(transfers)


def values(numbers, kind, device="cpu"):
    return torch.tensor([n % 256 for n in numbers], dtype=kind, device=device)


@pytest.mark.parametrize("binding", BINDINGS)
def test_a_rank_alone_by_doubles(binding, start):  # noqa: F811
    ranks = start(binding, 1)
    exchange = lambda group: ranks.exchange([group])  # noqa: E731
    look(exchange, values, ranks.transports[0].abort, to_itself=binding != "distributed")


@contextmanager
def one_rank():
    """A process group of one rank, over NCCL."""
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)  # at a free port
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        yield dist.PrefixStore("ours", store)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pynccl imports numba's CUDA part
@pytest.mark.parametrize("binding", BINDINGS)
def test_a_rank_alone_on_a_gpu(binding):
    """torch refuses messages to oneself. Captured sums run when the graph does."""
    device = torch.device("cuda", torch.cuda.current_device())
    memory = DeviceMemory(device)
    with one_rank() as store:
        connect = connect_by(binding, 0, [0], device, store, HANG)
        transport = NcclTransport(connect, 0, 1, memory, HANG)
        stream = torch.cuda.Stream()

        def exchange(transfers):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                transport.exchange(transfers)
            stream.synchronize()

        data = values(range(40), torch.float32, device)
        exchange([Member("reduce", (0,), data, "sum of one", "sum")])
        stream.wait_stream(torch.cuda.current_stream())

        def captured():
            transport.exchange([Member("reduce", (0,), data, "sum of one", "sum")])
            data.add_(1.0)  # NCCL launches nothing for a single rank, and no graph may be empty

        launch = memory.capture(captured)
        launch()
        torch.cuda.synchronize()
        assert data.cpu().tolist() == list(range(1, 41))
        make = partial(values, device=device)
        look(exchange, make, transport.abort, to_itself=binding != "distributed")
