"""A conformance test for all transports, in one process."""

import threading
import time
import weakref
from collections import defaultdict, deque
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from casync.errors import PeerTimeout, TransportError
from casync.testing import Hub
from casync.transports.distributed import DistributedTransport, start_all_reduce
from tests.patience import HANG


def memory(size, path):
    return Hub(size).endpoints()


def distributed(size, path):
    """Several gloo ranks in one process, without a default group."""
    ends = [None] * size
    # gloo connects all pairs while it is constructed, so every rank needs a thread
    threads = [threading.Thread(target=_gloo, args=(ends, r, size, path)) for r in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return ends


def _gloo(ends, rank, size, path):
    store = dist.FileStore(str(path), size)

    def connect(ranks):
        some = dist.PrefixStore(str(ranks), store)
        place = ranks.index(rank)
        return dist.ProcessGroupGloo(some, place, len(ranks), timedelta(seconds=HANG))

    ends[rank] = DistributedTransport(connect(range(size)), connect)


@pytest.fixture(params=[memory, distributed])  # test_slot_transports.py tests those without posts
def make(request, tmp_path):
    """A function that makes the endpoints of n ranks; a new transport needs a maker above."""
    return lambda size: request.param(size, tmp_path / "store")


def bytes_of(*values):
    return torch.tensor(values, dtype=torch.uint8)


def test_ranks(make):
    ends = make(3)
    assert [(end.rank, end.world_size) for end in ends] == [(0, 3), (1, 3), (2, 3)]


def test_a_channel_keeps_its_order_and_channels_are_apart(make):
    ends = make(2)
    boxes = [torch.zeros(4, dtype=torch.uint8) for _ in range(4)]
    waits = [
        ends[1].post_recv(box, 0, channel) for box, channel in zip(boxes, (1, 0, 0, 1), strict=True)
    ]
    sends = [
        ends[0].post_send(bytes_of(*[n] * 4), 1, channel)
        for n, channel in [(1, 0), (2, 0), (3, 1), (4, 1)]
    ]
    for handle in [*sends, *waits]:
        handle.wait(HANG)
    assert [box.tolist()[0] for box in boxes] == [3, 1, 2, 4]


def test_a_send_may_come_before_its_recv(make):
    ends = make(2)
    sent = ends[0].post_send(bytes_of(7, 8), 1, 0)
    box = torch.zeros(2, dtype=torch.uint8)
    ends[1].post_recv(box, 0, 0).wait(HANG)
    sent.wait(HANG)
    assert box.tolist() == [7, 8]


def test_a_message_may_be_shorter_than_the_room(make):
    ends = make(2)
    box = torch.full((5,), 9, dtype=torch.uint8)
    handle = ends[1].post_recv(box, 0, 0)
    ends[0].post_send(bytes_of(1, 2), 1, 0).wait(HANG)
    assert handle.wait(HANG) in (2, None)
    assert box.tolist() == [1, 2, 9, 9, 9]


def test_everybody_sends_to_everybody_at_once(make):
    ends = make(3)
    size = 300_000
    pairs = [(a, b) for a in range(3) for b in range(3) if a != b]
    boxes = {pair: torch.zeros(size, dtype=torch.uint8) for pair in pairs}
    handles = [ends[b].post_recv(boxes[a, b], a, 0) for a, b in pairs]
    handles += [
        ends[a].post_send(torch.full((size,), 3 * a + b, dtype=torch.uint8), b, 0) for a, b in pairs
    ]
    for handle in handles:
        handle.wait(HANG)
    assert all(bool((box == 3 * a + b).all()) for (a, b), box in boxes.items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_reduce_sums_in_place_the_same_everywhere(make, dtype):
    ends = make(3)
    data = [
        torch.randn(1001, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(3)
    ]
    total = torch.stack(data).float().sum(0)
    second = [torch.full((2,), float(rank), dtype=dtype) for rank in range(3)]
    handles = [end.post_reduce(d, range(3)) for end, d in zip(ends, data, strict=True)]
    handles += [end.post_reduce(d, range(3)) for end, d in zip(ends, second, strict=True)]
    for handle in handles:
        handle.wait(HANG)
    assert torch.equal(data[0], data[1])
    assert torch.equal(data[0], data[2])
    torch.testing.assert_close(data[0].float(), total, rtol=2e-2, atol=3e-2)
    assert second[1].tolist() == [3.0, 3.0]


def test_the_peer_that_closed_is_named_not_another_rank():
    ends = Hub(3).endpoints()
    ends[0].abort()
    waiting = ends[1].post_recv(torch.zeros(1, dtype=torch.uint8), 2, 0)
    ends[2].abort()
    with pytest.raises(TransportError, match="closed by rank 2"):
        waiting.wait(HANG)


def test_both_ends_may_ask_for_a_mailbox_at_once():
    """A dictionary lets other threads run while it makes a missing value; this test forces that."""
    hub, both = Hub(2), threading.Barrier(2)

    def mailbox():
        with suppress(threading.BrokenBarrierError):
            both.wait(0.1)
        return deque()

    hub.mail = defaultdict(mailbox)
    sender, receiver = hub.endpoints()
    posting = threading.Thread(target=sender.post_send, args=(bytes_of(7), 1, 0))
    posting.start()
    waiting = receiver.post_recv(into := bytes_of(0), 0, 0)
    posting.join()
    assert waiting.wait(HANG) == 1
    assert into.item() == 7


def test_a_hub_keeps_no_sum_that_all_have_posted():
    hub = Hub(2)
    ends = hub.endpoints()
    for _ in range(3):
        handles = [end.post_reduce(torch.ones(1), range(2)) for end in ends]
        assert [handle.wait(HANG) for handle in handles] == [-1, -1]
    assert not hub.sums


def test_some_ranks_reduce_without_the_others(make):
    """Overlapping groups, each in its own order; gloo connects when the members first meet."""
    ends = make(4)
    groups = [(0, 1), (2, 3), (0, 1), (1, 2, 3), (0, 3)]
    data = {(i, r): torch.full((3,), 10.0**r) for i, ranks in enumerate(groups) for r in ranks}

    def reduce(rank):
        mine = [(i, ranks) for i, ranks in enumerate(groups) if rank in ranks]
        handles = [ends[rank].post_reduce(data[i, rank], ranks) for i, ranks in mine]
        for handle in handles:
            handle.wait(HANG)

    threads = [threading.Thread(target=reduce, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (i, _), values in data.items():
        assert values.tolist() == [sum(10.0**r for r in groups[i])] * 3


@pytest.mark.parametrize("operation", ["recv", "reduce"])
def test_waiting_has_an_end(make, operation):
    ends = make(2)
    data = torch.zeros(4, dtype=torch.uint8)
    if operation == "recv":
        handle = ends[0].post_recv(data, 1, 0)
    else:
        handle = ends[0].post_reduce(data.float(), range(2))
    begin = time.monotonic()
    with pytest.raises(PeerTimeout, match=r"timed out after 0\.1 s"):
        handle.wait(0.1)
    assert time.monotonic() - begin < HANG
    ends[0].abort()


def test_abort_ends_waits_here_and_at_the_peer(make):
    """A thread waits on each side; one side aborts."""
    ends = make(2)
    errors = []

    def wait(handle):
        with pytest.raises(TransportError) as caught:
            handle.wait(HANG)
        errors.append(caught.value)

    handles = [end.post_recv(torch.zeros(1, dtype=torch.uint8), 1 - end.rank, 0) for end in ends]
    threads = [threading.Thread(target=wait, args=(handle,)) for handle in handles]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    ends[0].abort()
    for thread in threads:
        thread.join()
    assert len(errors) == 2
    assert time.monotonic() - begin < HANG / 2
    with pytest.raises(TransportError):
        ends[1].post_send(bytes_of(1), 0, 0).wait(HANG)


def test_abort_ends_waits_of_all_peers_when_one_is_gone(make):
    """The rank after the one that gives up, which could pass on an abort, has ended already."""
    ends = make(3)
    ends[2].abort()
    with pytest.raises(TransportError):
        ends[1].post_recv(torch.zeros(1, dtype=torch.uint8), 2, 0).wait(HANG)
    handle = ends[0].post_recv(torch.zeros(1, dtype=torch.uint8), 1, 0)
    ends[1].abort()
    with pytest.raises(TransportError) as caught:
        handle.wait(HANG)
    assert not isinstance(caught.value, PeerTimeout)


def test_a_watch_ends_with_the_connection(make):
    ends = make(3)
    watches = [ends[0].watch(2), ends[1].watch(2), ends[2].watch(0)]
    ends[2].abort()
    for handle in watches:
        with pytest.raises(TransportError) as caught:
            handle.wait(HANG)
        assert not isinstance(caught.value, PeerTimeout)


def test_a_watch_ends_where_bytes_were_moving(tmp_path):
    """Gloo leaves the receive to its time-out."""
    ends = distributed(2, tmp_path / "store")
    watch = ends[0].watch(1)
    data, sent = torch.zeros(1 << 27, dtype=torch.uint8), torch.ones(1 << 27, dtype=torch.uint8)
    begin, received = time.monotonic(), ends[0].post_recv(data, 1, 0)
    send = ends[1].post_send(sent, 0, 0)
    while not data[0] and time.monotonic() - begin < HANG:
        pass
    ends[1].abort()
    with pytest.raises(TransportError) as caught:
        watch.wait(HANG)
    assert not isinstance(caught.value, PeerTimeout)
    del received, send


def test_a_collective_under_way_does_not_keep_its_group():
    """Its callback held the last reference, so a thread of gloo once ended the group, joined itself
    there, and the process died."""

    class Group:
        def allreduce(self, tensors, options):
            return self

        def get_future(self):
            return torch.futures.Future()

    group = Group()
    reference = weakref.ref(group)
    under_way = start_all_reduce(torch.zeros(1), group, dist.AllreduceOptions(), "a sum")
    del group
    assert reference() is None
    assert not under_way.done()
