"""A conformance test for all transports without tags; ranks are threads.

NCCL is a double, see nccl_doubles.py, through doubles of each of its bindings.
"""

import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import repeat
from queue import SimpleQueue
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from casync.errors import CasyncError, PeerTimeout, PlanError
from casync.memory.host import HostMemory
from casync.nccl import distributed
from casync.nccl.bindings import BINDINGS, connect_by, through_store
from casync.nccl.nccl4py import Nccl4py
from casync.nccl.pynccl import Pynccl
from casync.nccl.watchdog import Watchdog
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.transports import Member
from casync.transports.nccl import NcclTransport
from tests.casync import nccl_doubles
from tests.casync.fakes import (
    CODECS,
    EVERY,
    gradients,
    graph_of,
    in_worlds,
    replay,
    run,
    slices,
    states_of,
    world,
)
from tests.casync.nccl_doubles import Memory, Nccl, become, connecting, current
from tests.casync.rendezvous import Meeting
from tests.patience import HANG

LENGTHS = (7, 31, 40000)


class Ranks:
    """Ranks as threads, each with its transport, over NCCL by a binding or "rendezvous"."""

    def __init__(self, name, size, timeout, doubles):
        self.size, self.nccl = size, Nccl()
        self.errors = [SimpleQueue() for _ in range(size)]
        self._pools = [ThreadPoolExecutor(1) for _ in range(size)]
        endpoints, store = Meeting(size, timeout).endpoints(), dist.HashStore()
        doubles(self.nccl)

        def make(rank):
            become(rank)
            if name == "rendezvous":
                return endpoints[rank]
            connect = connect_by(name, rank, range(size), torch.device("cpu"), store, timeout)
            return NcclTransport(
                connecting(connect, rank), rank, size, Memory(), timeout,
                tell=self.errors[rank].put, stream=lambda: current().handle,
            )  # fmt: skip

        self.transports = self.all(make)

    def close(self):
        for transport in self.transports:
            transport.abort()
        self.all(lambda rank: current().close())

    def submit(self, rank, call, *args):
        return self._pools[rank].submit(call, *args)

    def all(self, call, ranks=None):
        """Results of a call on each rank."""
        ranks = range(self.size) if ranks is None else ranks
        futures = [self.submit(rank, call, rank) for rank in ranks]
        return [future.result(HANG) for future in futures]

    def exchange(self, groups):
        """Run a group on each rank, until all are complete."""
        return self.all(lambda rank: self.run(rank, groups[rank]))

    def run(self, rank, transfers):
        self.transports[rank].exchange(transfers)
        current().recorded().wait()

    def waiting(self, rank):
        """A rank's transport, whose groups are complete when `exchange` returns."""
        end = self.transports[rank]
        return SimpleNamespace(
            rank=rank, world_size=self.size, exchange=partial(self.run, rank),
            abort=end.abort, close=end.close,
        )  # fmt: skip

    def error(self, rank, future):
        """The error of a group, from that call or a later one."""
        try:
            future.result(HANG)
            while True:
                self.submit(rank, self.transports[rank].exchange, []).result(HANG)
        except CasyncError as error:
            return f"{type(error).__name__}: {error}"


@pytest.fixture
def doubles(monkeypatch):
    """A function that installs doubles of all bindings of an NCCL."""

    def put(nccl):
        modules = nccl_doubles.nccl4py_modules(nccl) | nccl_doubles.pynccl_modules(nccl)
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        for name, function in nccl_doubles.torch_functions(nccl).items():
            monkeypatch.setattr(dist, name, function)

    return put


@pytest.fixture
def start(doubles):
    """A function that makes n ranks over the named transport."""
    made = []

    def make(name, size, timeout=HANG):
        made.append(Ranks(name, size, timeout, doubles))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


@pytest.fixture(params=["rendezvous", *BINDINGS])
def ranks(request, start):
    """Makes n ranks."""
    return partial(start, request.param)


@pytest.fixture(params=BINDINGS)
def nccl(request, start):
    """Makes n ranks over NCCL."""
    return partial(start, request.param)


def send(peer, *values):
    return Member("send", (peer,), torch.tensor(values, dtype=torch.uint8), f"send to {peer}")


def recv(peer, size):
    return Member("recv", (peer,), torch.zeros(size, dtype=torch.uint8), f"recv from {peer}")


def reduce(ranks, data, op="sum"):
    return Member("reduce", ranks, data, f"reduce over {ranks}", op)


def test_messages_match_by_their_order(ranks):
    """Within a group, and from group to group."""
    boxes = [recv(0, 2), recv(0, 1), recv(0, 3)]
    made = ranks(2)
    made.exchange([[send(1, 1, 2), send(1, 3)], boxes[:2]])
    made.exchange([[send(1, 4, 5, 6)], boxes[2:]])
    assert [box.data.tolist() for box in boxes] == [[1, 2], [3], [4, 5, 6]]


def test_everybody_sends_to_everybody_in_one_group(ranks):
    size, room = 4, 100_000
    boxes = {(a, b): recv(a, room) for a in range(size) for b in range(size) if a != b}
    groups = [
        [boxes[a, rank] for a in range(size) if a != rank]
        + [send(b, *[16 * rank + b] * room) for b in range(size) if b != rank]
        for rank in range(size)
    ]
    ranks(size).exchange(groups)
    assert all(bool((box.data == 16 * a + b).all()) for (a, b), box in boxes.items())


def test_a_message_without_bytes_moves_nothing_and_holds_up_nobody(ranks):
    box = recv(0, 1)
    ranks(2).exchange([[send(1), send(1, 7)], [recv(0, 0), box]])
    assert box.data.tolist() == [7]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_sums_are_the_same_everywhere(ranks, dtype):
    generator = torch.Generator().manual_seed(0)
    data = [(torch.rand(1001, generator=generator) * 50).to(dtype) for _ in range(3)]
    total = torch.stack(data).float().sum(0)
    largest = [torch.tensor([rank, 5 - rank], dtype=dtype) for rank in range(3)]
    ranks(3).exchange(
        [[reduce((0, 1, 2), data[r]), reduce((0, 1, 2), largest[r], "max")] for r in range(3)]
    )
    assert torch.equal(data[0], data[1])
    assert torch.equal(data[0], data[2])
    torch.testing.assert_close(data[0].float(), total, rtol=2e-2, atol=3e-2)
    assert largest[1].tolist() == [2, 5]


def test_some_ranks_reduce_while_all_send(ranks):
    """Overlapping groups, in the order of the graph; some ranks have fewer than others."""
    subsets = [(0, 1), (2, 3), (0, 1), (1, 2, 3), (0, 3)]
    data = {(i, r): torch.full((3,), 10.0**r) for i, some in enumerate(subsets) for r in some}
    boxes = [recv((rank - 1) % 4, 1) for rank in range(4)]
    groups = [
        [
            *(reduce(some, data[i, rank]) for i, some in enumerate(subsets) if rank in some),
            boxes[rank],
            send((rank + 1) % 4, rank),
        ]
        for rank in range(4)
    ]
    ranks(4).exchange(groups)
    assert [box.data.tolist() for box in boxes] == [[3], [0], [1], [2]]
    for (i, _), values in data.items():
        assert values.tolist() == [sum(10.0**r for r in subsets[i])] * 3


def test_two_communicators_in_different_orders_are_an_error(nccl):
    """A deadlock on a device: the double reports it at once, without the time-out."""
    made, pair, everybody = nccl(3), (0, 1), (0, 1, 2)

    def run(rank, order):
        for ranks in order:
            made.transports[rank].exchange([reduce(ranks, torch.ones(2))])

    made.submit(2, run, 2, [everybody]).result(HANG)
    first = made.submit(0, run, 0, [pair, everybody])
    other = made.submit(1, run, 1, [everybody, pair])
    errors = []
    for future in (first, other):
        with suppress(CasyncError):
            future.result(HANG)
        errors.append(str(future.exception()))
    told = r"ranks [01] and [01] launch groups of two communicators in different orders"
    assert any(re.search(told, error) for error in errors), errors


def test_unequal_lengths_are_an_error(ranks):
    """NCCL leaves the result undefined; the double reports it if its binding can."""
    made = ranks(2, timeout=1.0)
    futures = [
        made.submit(rank, made.run, rank, group)
        for rank, group in enumerate([[send(1, 1, 2)], [recv(0, 3)]])
    ]
    errors = [made.error(rank, future) for rank, future in enumerate(futures)]
    for error in errors:
        assert re.search("sizes differ|waiting for `(send|recv)|waited 1 s for `(send|recv)", error)


def test_a_receive_that_waits_blocks_its_stream(nccl):
    """Rank 1's send is behind its receive, so rank 0 must send before it waits for it."""
    made, box, late = nccl(2), recv(0, 1), recv(1, 1)
    made.submit(1, made.transports[1].exchange, [box]).result(HANG)
    made.submit(1, made.transports[1].exchange, [send(0, 5)]).result(HANG)
    behind = made.submit(1, lambda: current().recorded()).result(HANG)
    assert not behind.done()
    for group in ([send(1, 4)], [late]):
        made.submit(0, made.transports[0].exchange, group).result(HANG)
    made.submit(0, lambda: current().recorded()).result(HANG).wait()
    behind.wait()
    assert (box.data.tolist(), late.data.tolist()) == ([4], [5])


def test_a_peer_that_does_not_come_ends_the_wait_with_a_name(nccl):
    """The host does not wait; the next call raises the error, and a callback gets it."""
    made = nccl(2, timeout=1.0)
    future = made.submit(0, made.run, 0, [recv(1, 4), send(1, 3)])
    text = made.error(0, future)
    assert text == "PeerTimeout: rank 0 waited 1 s for `recv from 1`, `send to 1`"
    assert type(made.errors[0].get(timeout=HANG)) is PeerTimeout


def test_connecting_waits_for_no_rank_without_an_end(doubles):
    doubles(Nccl())
    store = dist.HashStore()
    with pytest.raises(PeerTimeout, match=r"ranks \[1, 2\] did not come to connect \[0, 1, 2\]"):
        NcclTransport(through_store(Nccl4py(), store, 0, 0.1), 0, 3, Memory(), HANG)


def test_connecting_ends_at_the_time_out_though_nccl_waits_on():
    """A communicator that is made after the time-out is aborted at once."""
    gate, made = threading.Event(), SimpleQueue()

    class Late:
        def abort(self):
            made.put("aborted")

    def connect(ranks):
        assert gate.wait(HANG)
        return Late()

    with pytest.raises(PeerTimeout, match=r"rank 0 waited 0.2 s for `connecting ranks \[0, 1\]`"):
        NcclTransport(connect, 0, 2, Memory(), 0.2)
    assert not gate.is_set()
    gate.set()
    assert made.get(timeout=HANG) == "aborted"


def test_an_abort_ends_what_is_under_way(nccl):
    made = nccl(3)
    future = made.submit(0, made.transports[0].exchange, [recv(1, 4)])
    behind = made.submit(0, lambda: current().recorded()).result(HANG)
    made.transports[0].abort()
    behind.wait()
    assert made.error(0, future) == "TransportAborted: rank 0 closed its communicators"
    assert made.errors[0].empty()  # it knows


def test_close_waits_for_what_is_under_way(nccl):
    made, box = nccl(2), recv(0, 2)
    made.submit(1, made.transports[1].exchange, [box]).result(HANG)
    closed = made.submit(1, made.transports[1].close)
    made.submit(0, made.transports[0].exchange, [send(1, 8, 9)]).result(HANG)
    closed.result(HANG)
    assert box.data.tolist() == [8, 9]


def test_a_slot_is_a_group_of_messages_and_then_one_of_each_set_of_ranks(nccl):
    made = nccl(3)
    some, other = torch.ones(5), torch.ones(6, dtype=torch.bfloat16)
    everybody, pair = (0, 1, 2), (0, 2)
    groups = [
        [reduce(pair, some), send(1, 1, 2), reduce(everybody, other, "max"), recv(2, 4)],
        [reduce(everybody, other.clone(), "max"), recv(0, 2), send(0), recv(2, 0)],
        [reduce(pair, some.clone()), reduce(everybody, other.clone(), "max"), send(0, 1, 2, 3, 4)],
    ]
    made.exchange(groups)
    calls = [call[:-1] for call in made.nccl.calls[0] if call[0] in ("send", "recv", "reduce")]
    connecting = ("reduce", 1, torch.float32, "sum")  # torch's first call among some ranks
    assert [call for call in calls if call != connecting] == [
        ("send", 2, torch.uint8, 1),
        ("recv", 4, torch.uint8, 2),
        ("reduce", 5, torch.float32, "sum"),
        ("reduce", 6, torch.bfloat16, "max"),
    ]
    assert [call[0] for call in made.nccl.calls[1]].count("send") == 0  # of no bytes
    assert balanced(made.nccl.calls[0])


@pytest.mark.parametrize("shares", [(1, 3, 2), (2, 2, 2), (4, 0, 2)])
def test_each_rank_gets_its_share_of_a_sum(shares, ranks):
    """NCCL cannot scatter to an empty share, so then all ranks may get the whole sum."""
    data = [torch.arange(6.0) * (1 + rank) for rank in range(3)]
    made, everybody = ranks(3), (0, 1, 2)
    made.exchange([[Member("reduce", everybody, own, "sum", "sum", shares)] for own in data])
    wanted = torch.split(torch.arange(6.0) * 6, [*shares])
    for rank, own in enumerate(data):
        assert torch.equal(torch.split(own, [*shares])[rank], wanted[rank])


def test_a_reduce_scatter_is_a_reduce_to_each_rank_in_one_group(nccl):
    made, shares = nccl(2), (2, 3)
    data = [torch.ones(5), torch.ones(5)]
    made.exchange([[Member("reduce", (0, 1), own, "sum", "sum", shares)] for own in data])
    sums = [call[:-1] for call in made.nccl.calls[0] if call[0] == "reduce"]
    kind = torch.float32, "sum"
    assert sums[-2:] == [("reduce", 2, *kind, 0), ("reduce", 3, *kind, 1)]
    assert [call[0] for call in made.nccl.calls[0]][-4:] == [
        "group_start", "reduce", "reduce", "group_end"
    ]  # fmt: skip
    assert [own.tolist() for own in data] == [[2, 2, 1, 1, 1], [1, 1, 2, 2, 2]]


def balanced(calls):
    """True if begins and ends of groups alternate."""
    names = [call[0] for call in calls if call[0].startswith("group")]
    return names == ["group_start", "group_end"] * (len(names) // 2)


@pytest.mark.parametrize("name", ["nccl4py", "pynccl"])
def test_bindings_work_on_the_current_stream_and_group_by_communicator(name, start):
    made = start(name, 2)
    handle = made.submit(0, lambda: current().handle).result(HANG)
    data = torch.ones(3)
    made.exchange([[send(1, 1), reduce((0, 1), data)], [recv(0, 1), reduce((0, 1), data.clone())]])
    assert made.nccl.calls[0] == [
        ("init", 0, 2),
        ("group_start",),
        ("send", 1, torch.uint8, 1, handle),
        ("group_end",),
        ("group_start",),
        ("reduce", 3, torch.float32, "sum", handle),
        ("group_end",),
    ]


@pytest.mark.parametrize("before", [None, "3"])
def test_torch_makes_groups_of_ours_without_what_it_does_of_its_own_accord(before, monkeypatch):
    """No watchdog that ends the process; no split of the default communicator, which would wait for
    ranks outside the group."""
    name, seen = "TORCH_NCCL_ASYNC_ERROR_HANDLING", []
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 3))

    def new_group(ranks, timeout, backend, pg_options, *, use_local_synchronization):
        seen.append((os.environ[name], world.bound_device_id, ranks))
        return "group"

    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: seen.append(group))
    distributed.connector(range(4, 8), HANG, torch.device("cpu"))([0, 2])
    assert seen == [("0", None, [4, 6]), "group"]
    assert os.environ.get(name) == before
    assert world.bound_device_id == torch.device("cuda", 3)


def test_a_communicator_of_torchs_reports_its_failure():
    """The last work reports a failure, which no longer ends the process; by its wait, since torch
    2.11 has no type of Python for Work.exception."""
    work = mock.Mock(**{"is_completed.return_value": True, "exception.side_effect": TypeError})
    made = distributed._Communicator(SimpleNamespace())
    made._sums = [work]
    with made.group():
        assert made.failure() == ""
    assert made.failure() == ""
    work.wait.side_effect = RuntimeError("remote process exited")
    assert made.failure() == "remote process exited"


def test_a_watch_that_fails_ends_the_transport():
    """Otherwise no wait would have a time-out."""
    told, seen = threading.Event(), []

    def fail(error):
        seen.append(str(error))
        told.set()

    def failure():
        raise TypeError("unregistered type")

    watchdog = Watchdog(3, 0.1, fail, failure, HostMemory())
    assert told.wait(HANG)
    watchdog.stop()
    assert seen == ["rank 3 cannot watch NCCL: TypeError('unregistered type')"]


def test_an_unknown_binding_is_named():
    with pytest.raises(PlanError, match="unknown binding of NCCL 'ncc'; one of distributed, nccl4"):
        connect_by("ncc", 0, [0], torch.device("cpu"), dist.HashStore(), HANG)


def test_lengths_beyond_32_bits_are_parted_for_pynccl(start, monkeypatch):
    monkeypatch.setattr("casync.nccl.pynccl._LONGEST", 3)
    made, box = start("pynccl", 2), recv(0, 7)
    data = [torch.arange(4.0), torch.arange(4.0)]
    made.exchange([[send(1, *range(7)), reduce((0, 1), data[0])], [box, reduce((0, 1), data[1])]])
    assert box.data.tolist() == list(range(7))
    assert data[0].tolist() == [0, 2, 4, 6]
    assert [call[1] for call in made.nccl.calls[0] if call[0] == "send"] == [3, 3, 1]


@pytest.mark.parametrize(
    "library, package, extra",
    [(Nccl4py, "nccl", r"hipress\[cuda12\]"), (Pynccl, "pynccl", "pip install pynccl")],
)
def test_a_missing_binding_names_what_to_install(library, package, extra, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(PlanError, match=extra):
        library()


def test_a_missing_libnccl_names_where_it_is_looked_for(monkeypatch):
    modules = nccl_doubles.pynccl_modules(Nccl())

    def nowhere():
        raise Exception("Cannot open library for nccl")

    modules["pynccl"].Nccl = nowhere
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(PlanError, match="NUMBA_NCCLLIB"):
        Pynccl()


@pytest.mark.parametrize(
    "strategy, codec, world_size, per_node",
    in_worlds(EVERY, EVERY, [(3, 2), (2, 1), (4, 2), (8, 4)]),
)
def test_every_strategy_over_nccl_has_the_bits_of_the_executor(
    strategy, codec, world_size, per_node, start
):
    graph = graph_of(LENGTHS, strategy, codec, world_size, per_node=per_node, least_bytes=4000)
    total = sum(LENGTHS)
    made = start("nccl4py", world_size)
    states, others = ([states_of(total) for _ in range(world_size)] for _ in range(2))
    programs = slices(graph)
    with world(world_size) as executors:
        for step in range(2):
            buckets = gradients(total, world_size, seed=step)
            wanted = [bucket.clone() for bucket in buckets]
            run(executors, programs, wanted, others, step)
            ran = [
                made.submit(rank, replay, graph.slice(rank), made.waiting(rank), CODECS, *rest)
                for rank, rest in enumerate(zip(buckets, states, repeat(step), strict=False))
            ]
            for future in ran:
                future.result(HANG)
            assert all(map(torch.equal, buckets, wanted))


@pytest.mark.parametrize("owns", [False, True])
def test_an_executor_closes_the_transport_that_it_owns(owns, monkeypatch):
    end, told = Meeting(2).endpoints()[0], []
    monkeypatch.setattr(end, "close", lambda: told.append("closed"))
    monkeypatch.setattr(end, "abort", lambda: told.append("aborted"))
    Executor(end, CODECS, RunOptions(watch=True, owns=owns)).close()
    assert told == ["closed"] * owns  # if nothing runs, nothing is interrupted
