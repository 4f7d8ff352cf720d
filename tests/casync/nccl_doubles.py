"""NCCL without a device: streams are threads, a library keeps NCCL's rules.

Doubles of its three bindings record their calls. The library matches messages by their order alone,
refuses unequal counts, runs a group when it ends, and blocks a stream until all of a group has met
its counterparts; rendezvous.py moves the bytes. Ranks are threads.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from types import ModuleType, SimpleNamespace

import torch

from casync.errors import DeadlockError
from casync.memory.host import HostMemory
from casync.transports import Member
from tests.casync.rendezvous import Meeting
from tests.patience import HANG

TYPES = {1: torch.uint8, 6: torch.float16, 7: torch.float32, 9: torch.bfloat16}
SIZES = {1: 1, 6: 2, 7: 4, 9: 2}
OPS = {0: "sum", 2: "max"}
_handles = itertools.count(1000)
_here = threading.local()
STREAMS: dict[int, Stream] = {}


class Event:
    """Implements casync.memory.Event; it may be recorded again."""

    def __init__(self):
        self._done = threading.Event()
        self._done.set()

    def done(self):
        return self._done.is_set()

    def wait(self):
        assert self._done.wait(HANG)


class Stream:
    """Implements casync.memory.Stream by a thread, which runs work in order."""

    def __init__(self):
        self.handle = next(_handles)
        self._queue = SimpleQueue()
        STREAMS[self.handle] = self
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while (call := self._queue.get()) is not None:
            call()

    def run(self, work):
        self._queue.put(work)

    def record(self, event):
        event._done.clear()
        self._queue.put(event._done.set)

    def after(self, event):
        self._queue.put(event.wait)

    def close(self):
        self._queue.put(None)

    def recorded(self):
        event = Event()
        self.record(event)
        return event


class Memory(HostMemory):
    """Memory of a device, with only the members that the transport needs."""

    def caller(self):
        return current()

    def event(self):
        return Event()


def current():
    """The current stream of this thread."""
    if not hasattr(_here, "stream"):
        _here.stream = Stream()
    return _here.stream


@dataclass
class Comm:
    """A communicator of the library, as one rank has it."""

    meeting: Meeting
    rank: int
    size: int
    error: str = ""
    number: int = field(default_factory=_handles.__next__)
    gone: threading.Event = field(default_factory=threading.Event)


class Order:
    """The order in which each rank launches groups of its communicators.

    If it differs between two ranks that share them, each may wait for the other for ever: always on
    one stream, and on two if the device has too little room for both kernels.
    """

    def __init__(self):
        self._launched = defaultdict(list)

    def launch(self, rank, meeting):
        """Raise DeadlockError if another rank launched common communicators in another order."""
        self._launched[rank].append(meeting)
        for other in list(self._launched):
            pairs = zip(*self._shared(rank, other), strict=False)
            if other != rank and any(one is not its for one, its in pairs):
                raise DeadlockError(
                    f"ranks {rank} and {other} launch groups of two communicators in different "
                    "orders: each may wait for the other"
                )

    def _shared(self, one, other):
        common = [m for m in self._launched[one] if m in self._launched[other]]
        return common, [m for m in self._launched[other] if m in common]


class Nccl:
    """The library, for all ranks. calls: the names of the calls, by rank."""

    def __init__(self):
        self.calls = defaultdict(list)
        self._order = Order()
        self._meetings: dict[bytes, tuple[Meeting, threading.Barrier]] = {}
        self._lock = threading.Lock()

    def unique_id(self) -> bytes:
        return f"id {next(_handles)}".encode().ljust(128, b"\0")

    def init(self, unique_id: bytes, rank: int, size: int) -> Comm:
        with self._lock:
            made = Meeting(size, HANG), threading.Barrier(size)
            meeting, barrier = self._meetings.setdefault(unique_id, made)
        barrier.wait(HANG)
        self.record("init", rank, size)
        return Comm(meeting, rank, size)

    def record(self, *call):
        self.calls[_here.rank].append(call)

    def group_start(self):
        _here.depth = getattr(_here, "depth", 0) + 1
        self.record("group_start")

    def group_end(self):
        self.record("group_end")
        _here.depth -= 1
        if not _here.depth:
            self._launch()

    def post(self, comm: Comm, stream: int, transfer: Member, *more):
        """Post a send, recv or all-reduce."""
        self.record(transfer.kind, transfer.data.numel(), transfer.data.dtype, *more, stream)
        group = _here.__dict__.setdefault("group", [])
        group.append((comm, stream, transfer))
        if not getattr(_here, "depth", 0):
            self._launch()

    def _launch(self):
        groups: dict[tuple[int, int], list] = {}
        for comm, stream, transfer in _here.__dict__.pop("group", []):
            groups.setdefault((comm.number, stream), []).append((comm, transfer))
        for (_, stream), members in groups.items():
            comm = members[0][0]
            with self._lock:
                self._order.launch(_here.rank, comm.meeting)
            transfers = [transfer for _, transfer in members]
            STREAMS[stream].run(lambda c=comm, t=transfers: _exchange(c, t))

    def abort(self, comm: Comm):
        """End the work that waits on a stream, undone."""
        comm.gone.set()
        comm.meeting.leave(comm.rank, "aborted")


def _exchange(comm: Comm, transfers):
    """Wait, as a kernel does, until all is done or the communicator is aborted."""
    if comm.gone.is_set():
        return
    try:
        done = comm.meeting.post(comm.rank, transfers)
        while not (done() or comm.gone.wait(1e-4)):
            pass
    except DeadlockError as error:
        comm.error = comm.error or str(error)
        comm.gone.wait(HANG)


def _to_root(comm: Comm, data: torch.Tensor, op: str, root: int) -> Member:
    """Reduce to one rank."""
    ranks = tuple(range(comm.size))
    shares = tuple(data.numel() * (rank == root) for rank in ranks)
    return Member("reduce", ranks, data, "sum", op, shares)


def _view(address, count, kind) -> torch.Tensor:
    """The memory of a ctypes call's argument, as numbers."""
    raw = (ctypes.c_uint8 * (count * SIZES[kind])).from_address(address)
    return torch.frombuffer(raw, dtype=TYPES[kind])


def pynccl_modules(nccl: Nccl) -> dict[str, ModuleType]:
    """Modules like pynccl 0.1.2, whose arguments are C's."""

    class UniqueId(ctypes.Structure):
        _fields_ = [("internal", ctypes.c_char * 512)]

    comms: dict[int, Comm] = {}

    class Calls:
        def get_unique_id(self):
            return UniqueId.from_buffer_copy(nccl.unique_id().ljust(512, b"\0"))

        def get_comm(self, p=0):
            return ctypes.c_void_p(p)

        def comm_init_rank(self, comm, size, unique_id, rank):
            assert isinstance(unique_id, UniqueId)
            made = nccl.init(bytes(unique_id)[:128], rank, size)
            comms[made.number] = made
            comm._obj.value = made.number

        def pp_send(self, address, count, kind, peer, comm, stream):
            data, made = _view(address, count, kind), comms[comm.value]
            nccl.post(made, stream, Member("send", (peer,), data, "send"), peer)

        def pp_recv(self, address, count, kind, peer, comm, stream):
            data, made = _view(address, count, kind), comms[comm.value]
            nccl.post(made, stream, Member("recv", (peer,), data, "recv"), peer)

        def all_reduce(self, source, target, count, kind, op, comm, stream):
            assert source == target  # in place
            data, made = _view(target, count, kind), comms[comm.value]
            ranks = tuple(range(made.size))
            nccl.post(made, stream, Member("reduce", ranks, data, "sum", OPS[op]), OPS[op])

        def reduce(self, source, target, count, kind, op, root, comm, stream):
            assert source == target  # in place
            data, made = _view(target, count, kind), comms[comm.value]
            nccl.post(made, stream, _to_root(made, data, OPS[op], root), OPS[op], root)

        def group_start(self):
            nccl.group_start()

        def group_end(self):
            nccl.group_end()

        def comm_get_async_error(self, comm, status):
            status._obj.value = 6 if comms[comm.value].error else 0

        def comm_abort(self, comm):
            nccl.abort(comms[comm.value])

        def comm_destroy(self, comm):
            comms[comm.value].gone.set()

    pynccl, inner = ModuleType("pynccl"), ModuleType("pynccl.binding")
    pynccl.Nccl, pynccl.binding, inner.ncclUniqueId = Calls, inner, UniqueId
    return {"pynccl": pynccl, "pynccl.binding": inner}


def nccl4py_modules(nccl: Nccl) -> dict[str, ModuleType]:
    """Modules like nccl4py 0.6, whose arguments are tensors."""

    class UniqueId:
        def __init__(self, data):
            self._data = data

        def __bytes__(self):
            return self._data

        @staticmethod
        def from_bytes(data):
            return UniqueId(bytes(data))

    class Communicator:
        @classmethod
        def init(cls, nranks, rank, unique_id, config=None):
            made = cls()
            made._comm = nccl.init(bytes(unique_id), rank, nranks)
            return made

        @property
        def is_valid(self):
            return not self._comm.gone.is_set()

        def send(self, sendbuf, peer, *, stream=None):
            nccl.post(self._comm, stream, Member("send", (peer,), sendbuf, "send"), peer)

        def recv(self, recvbuf, peer, *, stream=None):
            nccl.post(self._comm, stream, Member("recv", (peer,), recvbuf, "recv"), peer)

        def allreduce(self, sendbuf, recvbuf, op, *, stream=None, config=None):
            assert sendbuf.data_ptr() == recvbuf.data_ptr()
            ranks = tuple(range(self._comm.size))
            transfer = Member("reduce", ranks, recvbuf, "sum", OPS[op])
            nccl.post(self._comm, stream, transfer, OPS[op])

        def reduce(self, sendbuf, recvbuf, op, root=None, *, stream=None, config=None):
            assert sendbuf.data_ptr() == recvbuf.data_ptr()
            transfer = _to_root(self._comm, recvbuf, OPS[op], root)
            nccl.post(self._comm, stream, transfer, OPS[op], root)

        def get_async_error(self):
            return 6 if self._comm.error else 0

        def get_last_error(self):
            return self._comm.error

        def abort(self):
            nccl.abort(self._comm)

        def destroy(self):
            self._comm.gone.set()

    @contextmanager
    def group():
        nccl.group_start()
        try:
            yield
        finally:
            nccl.group_end()

    package, core = ModuleType("nccl"), ModuleType("nccl.core")
    package.core = core
    core.get_unique_id = lambda: UniqueId(nccl.unique_id())
    core.UniqueId, core.Communicator, core.group = UniqueId, Communicator, group
    core.SUM, core.MAX = 0, 2
    return {"nccl": package, "nccl.core": core}


def torch_functions(nccl: Nccl) -> dict[str, object]:
    """Functions like torch.distributed's with NCCL.

    Groups have their own streams, which wait for the current one; waiting for a work makes the
    current stream wait. Ranks give their numbers.
    """
    ids: dict[tuple[int, ...], bytes] = {}
    lock = threading.Lock()

    class Group:
        def __init__(self, comm):
            self.comm, self.stream = comm, Stream()

        def rank(self):
            return self.comm.rank

        def abort(self):
            nccl.abort(self.comm)
            self.stream.close()

        def shutdown(self):
            self.comm.gone.set()

    def new_group(ranks, timeout, backend, pg_options=None, *, use_local_synchronization):
        assert use_local_synchronization
        if _here.rank not in ranks:
            return None
        with lock:
            unique_id = ids.setdefault(tuple(ranks), nccl.unique_id())
        return Group(nccl.init(unique_id, ranks.index(_here.rank), len(ranks)))

    def isend(data, *, group, group_dst):
        transfer = Member("send", (group_dst,), data, "send")
        nccl.post(group.comm, group.stream.handle, transfer, group_dst)

    def irecv(data, *, group, group_src):
        transfer = Member("recv", (group_src,), data, "recv")
        nccl.post(group.comm, group.stream.handle, transfer, group_src)

    def work(group):
        done = group.stream.recorded()

        def wait():
            if group.comm.error:
                raise RuntimeError(group.comm.error)
            current().after(done)

        return SimpleNamespace(
            wait=wait, is_completed=lambda: done.done() or bool(group.comm.error)
        )

    def batch_isend_irecv(messages):
        group = messages[0].group
        group.stream.after(current().recorded())
        nccl.group_start()
        for each in messages:
            key = "group_dst" if each.op is isend else "group_src"
            each.op(each.tensor, group=group, **{key: each.group_peer})
        nccl.group_end()
        return [work(group)]

    def all_reduce(tensor, op=torch.distributed.ReduceOp.SUM, group=None, async_op=False):
        name = "sum" if op == torch.distributed.ReduceOp.SUM else "max"
        ranks = tuple(range(group.comm.size))
        group.stream.after(current().recorded())
        transfer = Member("reduce", ranks, tensor, "sum", name)
        nccl.post(group.comm, group.stream.handle, transfer, name)
        done = work(group)
        return done if async_op else done.wait()

    def reduce_scatter(output, input_list, op, group, async_op):
        assert async_op
        assert output.data_ptr() == input_list[group.comm.rank].data_ptr()
        name = "sum" if op == torch.distributed.ReduceOp.SUM else "max"
        group.stream.after(current().recorded())
        nccl.group_start()
        for root, data in enumerate(input_list):
            transfer = _to_root(group.comm, data, name, root)
            nccl.post(group.comm, group.stream.handle, transfer, name, root)
        nccl.group_end()
        return work(group)

    def message(op, tensor, *, group, group_peer):
        return SimpleNamespace(op=op, tensor=tensor, group=group, group_peer=group_peer)

    return {
        "new_group": new_group, "isend": isend, "irecv": irecv, "P2POp": message,
        "batch_isend_irecv": batch_isend_irecv, "all_reduce": all_reduce,
        "reduce_scatter": reduce_scatter,
    }  # fmt: skip


def connecting(connect, rank):
    """A connect function that works in any thread of a rank."""

    def there(ranks):
        if not hasattr(_here, "rank"):
            become(rank)
        return connect(ranks)

    return there


def become(rank: int) -> None:
    """Make this thread a rank."""
    _here.__dict__.clear()
    _here.rank = rank
