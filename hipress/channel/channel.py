"""Channels: whatever hipress sends between ranks in a step goes through one.

[Note: kept programs] A program is made for each kind of exchange: its pieces, and the tensor's
type. Ranks meet in the store to make one, so all must make, keep and drop the same ones: which, the
order of calls alone decides, never what still runs here. A model has few kinds, and all are kept.
Where lengths are the user's (`all_reduce`), the kinds that were used longest ago go once the
tensors of all have more than `most` bytes together. A program runs one tensor at a time. While it
does, the next tensor of its kind takes a copy of it, up to OVERLAP: other ranks need not know.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any, SupportsIndex, TypeAlias

import torch
import torch.distributed as dist
from torch.futures import Future

from casync.codec import Codec
from casync.graph.graph import Program
from casync.memory import Memory
from casync.raw import RAW
from casync.runtime.counters import Counters
from casync.runtime.executor import Executor, TraceEvent
from casync.runtime.options import Capture
from casync.shutdown import end_with
from casync.strategies import load
from casync.topology import Topology
from hipress import options as options_
from hipress.arguments import group_of
from hipress.channel.exchange import Exchange, Piece, numbered, program_of
from hipress.channel.executors import start_executor
from hipress.channel.failures import Failures
from hipress.channel.futures import wait_within
from hipress.channel.records import (
    check_place,
    check_record,
    check_states,
    entries_of,
    export_states,
    make_record,
    refuse,
)
from hipress.channel.states import Arena, Arrays, Slice, States, arrays_of, sides_of
from hipress.codecs import compile_codec, full_name
from hipress.errors import ConfigError
from hipress.model.devices import ON_HOST, Placement
from hipress.options import Options
from hipress.ranks import coordinator as coordinators
from hipress.ranks import nodes
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.groups import group_timeout

__all__ = ["OVERLAP", "Channel"]

OVERLAP = 2  # programs of one kind

_Kind: TypeAlias = tuple[tuple[Piece, ...], torch.dtype]


@dataclass
class _Pool:
    """Programs of one kind, and the last run of each, unless it is over."""

    programs: list[Program]
    running: dict[int, Future[torch.Tensor]] = field(default_factory=dict)

    def free(self) -> int:
        """Number of a program that does not run; a new one if all do; else the first."""
        for number in range(len(self.programs)):
            run = self.running.get(number)
            if run is None or run.done():
                return number
        if len(self.programs) < OVERLAP:
            self.programs.append(replace(self.programs[0]))
            return len(self.programs) - 1
        return 0

    def end(self, number: int, future: Future[torch.Tensor]) -> None:
        """Forget a run that is over, and with it the tensor."""
        if self.running.get(number) is future:
            del self.running[number]


class Channel:
    """Ranks that exchange tensors: connections, programs by kind, states by name.

    All ranks must make the same channels, and submit the same exchanges in the same order. Threads
    and connections end by `close()`, or once the channel is collected.
    """

    def __init__(
        self,
        purpose: str,
        options: Options,
        coordinator: Coordinator,
        *,
        placement: Placement = ON_HOST,
        memory: Memory | None = None,
        codecs: Mapping[str, Codec] | None = None,
        deferred: Mapping[str, Sequence[str]] | None = None,
        topology: Topology | None = None,
        failures: Failures | None = None,
        most: int | None = None,
    ) -> None:
        """Connect the ranks, each of which calls this.

        Args:
            purpose: of the connections, different for each channel of a coordinator; for errors.
            options: topology, seed, timeout and checksum are used.
            memory: of tensors; by default the placement's.
            codecs: by key, of which the caller may replace one before a program uses it; by default
                those that `add` makes known.
            deferred: names of states that wait while a tensor is unused, by key.
            topology: of the ranks; by default they meet to find it.
            failures: of channels that end together; by default of this one alone.
            most: bytes of the tensors whose programs are kept, by default of all.
        """
        self.purpose, self.coordinator = purpose, coordinator
        self.memory, self._most = memory or placement.memory(), most
        self._added: dict[str, Codec] = {}
        self.codecs = self._added if codecs is None else codecs
        if topology is None:
            from compll import PAYLOAD_FORMAT  # takes a while

            facts = {"topology": str(options.topology), "seed": options.seed}
            facts["payload format"] = PAYLOAD_FORMAT
            places = self._agree(facts, nodes.place())
            topology = nodes.topology_of(options.topology, places, coordinator.ranks)
        self.topology = topology
        self.states: States[str] = States(topology.world_size, self.memory)
        self.failures = failures or Failures(coordinator, options.timeout)
        self._pools: OrderedDict[_Kind, _Pool] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._executor = start_executor(
            purpose, self.codecs, options, coordinator, deferred or {}, placement, self.memory
        )
        self.failures.ends(self._executor.abort)
        #: ends threads and connections; may repeat
        self.close = end_with(self, partial(_close, self.failures, self._executor))

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup | None,
        purpose: str,
        *,
        timeout: float | timedelta | None = None,
        seed: SupportsIndex = 0,
        topology: SupportsIndex | Iterable[Iterable[SupportsIndex]] | None = None,
    ) -> Channel:
        """A channel of tensors on the host, among the ranks of a group, by default all.

        timeout, seed, topology: as for `wrap`. Raises ConfigError, ConfigMismatch, AgreementTimeout
        and RankLost as `wrap` does.
        """
        ranks = group_of(group)
        with coordinators.failures_told(ranks):
            options = options_.make(
                "none", seed=seed, topology=topology,
                timeout=group_timeout(ranks) if timeout is None else timeout,
            )  # fmt: skip
        return cls(purpose, options, coordinators.coordinator(ranks, options.timeout))

    def add(self, compressor: str | os.PathLike[str] | Codec) -> str:
        """Make a codec known, unless it is, or a compressor by name or path; return its key for
        pieces. Raises ConfigError."""
        codec = compressor
        if isinstance(codec, str | os.PathLike):
            codec = compile_codec(os.fspath(codec), {})
        key = full_name(codec)
        if key in self.codecs and self.codecs[key].digest != codec.digest:
            key = f"{key} {codec.digest}"
        self._added.setdefault(key, codec)
        return key

    def with_states(self, exchange: Exchange) -> Exchange:
        """The exchange with states of its codecs, which are kept under the pieces' names; what a
        name had before moves in."""
        pieces, arenas = numbered(exchange.pieces), list[Arena]()
        tensors = max((each.number for each in pieces), default=0) + 1
        for key in dict.fromkeys(each.codec for each in pieces if each.codec in self.codecs):
            mine = [i for i, each in enumerate(pieces) if each.codec == key and self._keeps(each)]
            sides = self._sides(key, [pieces[i] for i in mine])
            if not any(codec.states for codec in sides.values()):
                continue
            slices = [
                Slice(each.name, each.length, each.strategy, each.number)
                for each in (pieces[i] for i in mine)
            ]
            arenas.append(self.states.allocate(key, sides, slices, tensors=tensors))
            for i in mine:
                pieces[i] = replace(pieces[i], state=self.states.places[pieces[i].name].offset)
        return replace(exchange, pieces=tuple(pieces), states=arrays_of(arenas))

    def _sides(self, key: str, pieces: Sequence[Piece]) -> dict[str, Codec]:
        """Codecs by side that keeps states of these pieces, whose workers have codec `key`."""
        if not pieces:
            return {}
        owner = self.codecs[pieces[0].down or key]
        return sides_of(self.codecs[key], owner, [piece.strategy for piece in pieces])

    def _keeps(self, piece: Piece) -> bool:
        """True if this rank may have states of a piece: not if another one encodes it alone."""
        alone = load(piece.strategy).RESULT == "owner's" and piece.shares is not None
        return not alone or piece.shares == ((0, self.coordinator.rank),)

    def submit(
        self,
        tensor: torch.Tensor,
        exchange: Exchange,
        *,
        draw: int,
        timeout: float | None = None,
    ) -> Future[torch.Tensor]:
        """Exchange a tensor, in place; the future's value is the tensor.

        tensor: flat and contiguous, of float32, float16 or bfloat16. draw: number by which
        stochastic codecs draw, the same on all ranks. timeout: seconds that a peer may take; by
        default those of the options.

        The first exchange of a kind meets in the store. Raises ConfigError, and ConfigMismatch if
        ranks exchange different tensors.
        """
        if exchange.elements != tensor.numel():
            what = f"{self.purpose}, {exchange.name!r}"
            raise ConfigError(
                f"{what}: pieces of {exchange.elements} elements for a tensor of {tensor.numel()}"
            )
        with self._lock:
            kind = exchange.pieces, tensor.dtype
            pool = self._pools.get(kind) or self._make_pool(kind, exchange.name)
            self._pools.move_to_end(kind)
            number = pool.free()
            future = self.run(
                pool.programs[number], tensor, exchange.states, draw, exchange.name,
                timeout=timeout,
            )  # fmt: skip
            pool.running[number] = future
        future.add_done_callback(partial(pool.end, number))
        future.add_done_callback(self._count)
        return future

    def _count(self, future: Future[torch.Tensor]) -> None:
        """Count an exchange that went well: [Note: leaving] in ranks/epoch.py."""
        with suppress(Exception):
            future.value()
            self.coordinator.mailbox.finish()

    def run(
        self,
        program: Program,
        tensor: torch.Tensor,
        states: Arrays,
        draw: int,
        name: str,
        *,
        capture: Capture = Capture.NEVER,
        timeout: float | None = None,
    ) -> Future[torch.Tensor]:
        """The same for a program that the ranks have made alike, which runs one tensor at a time:
        see Executor.submit."""
        return self._executor.submit(
            program, tensor, states, draw, name, capture=capture, timeout=timeout
        )

    def record(self, of: str, counter: int) -> dict[str, Any]:
        """This rank's states as a record, after so many steps: see make_record. of: a text that
        names the way in."""
        return make_record(of, counter, place=self._place, **export_states(self.states))

    def take_record(self, saved: Mapping[str, Any], of: str) -> int:
        """Go on from a record of `record`, bit for bit; return its counter. All ranks must call
        this. Raises StateError for another one, and ConfigMismatch for another step's than on other
        ranks; then no rank has loaded its own."""
        with self.coordinator.failures_told():
            check_record(saved, of)
            wrong = check_states(saved, entries_of(self.states), {})[1]
            refuse([*check_place(saved, self._place), *wrong])
        self.coordinator.require_equal({"the step of the state to load": saved["counter"]})
        self.states.restore(saved["states"])
        counter: int = saved["counter"]
        return counter

    @property
    def _place(self) -> list[int]:
        return [self.coordinator.rank, len(self.coordinator.ranks)]

    def compare_names(self, name: str, timeout: float) -> None:
        """Send a number under this name, and raise unless all ranks do. For tensors in an order of
        the user's: native sums carry no identity (see casync/memory/identity.py)."""
        one = Exchange(name, (Piece(1, strategy="exchange"),))
        wait_within(self.submit(torch.zeros(1, device="cpu"), one, draw=0, timeout=timeout), None)

    def wait(self, future: Future[torch.Tensor], step: int) -> None:
        """Wait on the host, or with the current stream. Raises the first failure, which names rank,
        peer and task. step: for errors."""
        self.failures.refuse()
        with self.failures.waiting(step):
            self.failures.wait(future)

    def settle_in(self, step: int) -> None:
        """Wait until a device has done all work, and raise its errors: no optimizer may step before
        they are known. Nothing after a failure, which is told already."""
        if self.failures.first is None:
            with self.failures.waiting(step):
                self.settle()

    @property
    def waited(self) -> float:
        """Seconds in waits so far."""
        return self.failures.waited

    @property
    def counters(self) -> Counters:
        """A copy of the sums so far."""
        return self._executor.counters

    @property
    def failed(self) -> bool:
        """True if an error or close() has ended the channel."""
        return self._executor.failed

    @property
    def rotates(self) -> bool:
        """True if programs should have a slot for each turn of a phase: see Executor.rotates."""
        return self._executor.rotates

    def trace(self, events: list[TraceEvent] | None) -> None:
        """Collect events of tasks from now on, between two steps; None ends it."""
        self._executor.trace = events

    def settle(self, job: Future[torch.Tensor] | None = None) -> None:
        """Wait until a device has done all submitted work, or that of one future; raise its
        errors."""
        self._executor.settle(job)

    def pop_capture_error(self) -> str:
        """Return and forget the reason why a capture failed; "" if none did."""
        return self._executor.pop_capture_error()

    def _make_pool(self, kind: _Kind, name: str) -> _Pool:
        """Agree on a new kind, make its program, and drop those that have been idle longest."""
        pieces, dtype = kind
        elements = sum(piece.length for piece in pieces)
        used = dict.fromkeys(key for each in pieces for key in (each.codec, each.down))
        codecs = [[key, self.codecs[key].digest] for key in used if key not in (None, RAW)]
        strategies = [*dict.fromkeys(piece.strategy for piece in pieces)]
        facts = {"codec": [*codecs, *strategies], "elements": elements, "type": str(dtype)}
        cuts = [(piece.length, piece.shares) for piece in pieces]
        self._agree({**facts, "tensor": name, "pieces": cuts}, what=f"to exchange {name!r}")
        program = program_of(
            pieces, self.topology, self.codecs, self.coordinator.rank, rotates=self.rotates
        )
        pool = self._pools[kind] = _Pool([program])
        while self._most is not None and len(self._pools) > 1 and self._tensor_bytes > self._most:
            self._pools.popitem(last=False)
        return pool

    @property
    def _tensor_bytes(self) -> int:
        """Bytes of a tensor of each kind: the same on all ranks, whatever still runs."""
        return sum(dtype.itemsize * each.length for pieces, dtype in self._pools for each in pieces)

    def _agree(self, facts: Mapping[str, object], own: object = None, what: str = "") -> list[Any]:
        named = {f"{each} of {self.purpose}": fact for each, fact in facts.items()}
        return self.coordinator.require_equal(named, own, what)


def _close(failures: Failures, executor: Executor) -> None:
    failures.close()
    executor.close()
