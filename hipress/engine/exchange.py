"""Exchanges of flat tensors between ranks: averages, sums at owners, and values given to all.

[Note: kept programs] A program is made for each kind of tensor: strategy, pieces and type. Ranks
meet in the store to make one, so all must make, keep and drop the same ones: which, the order of
calls alone decides, never what still runs here. A model has few kinds, and all are kept. Where
lengths are the user's (`all_reduce`), the kinds that were used longest ago go once the tensors of
all have more than ROOM bytes together. A program runs one tensor at a time; while it does, the next
tensor of its kind takes a copy of it, up to OVERLAP, which other ranks need not know.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.futures import Future

import compll
from casync.building.parts import Choice, Tensor
from casync.building.tasks import Encode
from casync.codec import Codec, State
from casync.graph.graph import Program, build_program
from casync.graph.plan import partition
from casync.memory import Memory
from casync.memory.host import HostMemory
from casync.raw import RAW
from casync.regions import whole_key
from casync.strategies import load
from hipress.channel.executors import start_executor
from hipress.channel.futures import wait_within
from hipress.errors import ConfigError
from hipress.model.devices import ON_HOST, Placement
from hipress.options import Options
from hipress.plan.codecs import full_name, state_of
from hipress.plan.plan import partitions
from hipress.ranks import nodes
from hipress.ranks.coordinator import Coordinator

__all__ = ["OVERLAP", "ROOM", "Exchange", "Piece", "rows"]

ROOM = 256 << 20  # bytes of the tensors whose programs all_reduce keeps
OVERLAP = 2  # programs of one kind

_Kind: TypeAlias = tuple[str, tuple["Piece", ...], torch.dtype]
_States: TypeAlias = dict[tuple[str, str], State]  # by codec and side


@dataclass(frozen=True)
class Piece:
    """Neighbouring elements of a tensor that are compressed as one."""

    length: int  # elements
    codec: str = RAW  # key of Exchange.add
    owner: int | None = None  # the rank that owns them; None: shared out among ranks
    down: str | None = None  # codec of owners, if another
    #: number of its tensor and first element among those of `Exchange.reserve`, whose states it
    #: has; None: those of the tensor exchanged, in order
    place: tuple[int, int] | None = None


def rows(length: int, ranks: int, codec: str = RAW) -> tuple[Piece, ...]:
    """A row of the tensor for each rank, of equal lengths, as in a reduce-scatter: no block of a
    codec straddles two rows."""
    if length % ranks:
        raise ConfigError(f"{length} elements do not make rows of one length for {ranks} ranks")
    return tuple(Piece(length // ranks, codec, owner) for owner in range(ranks))


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


class Exchange:
    """An executor, programs by kind of tensor, and states by name of tensor.

    All ranks must make the same exchanges in the same order.
    """

    def __init__(
        self,
        purpose: str,
        options: Options,
        coordinator: Coordinator,
        *,
        placement: Placement = ON_HOST,
        memory: Memory | None = None,
        most: int | None = None,
    ) -> None:
        """Connect the ranks, each of which calls this.

        purpose: of the connections, different for each Exchange of a coordinator; for errors, too.
        options: topology, seed, timeout, checksum and capture are used. memory: of the tensors; by
        default the host's. most: bytes of the tensors whose programs are kept, by default of all:
        see [Note: kept programs].
        """
        self.states: dict[str, _States] = {}  # by name, of tensors exchanged with feedback
        self.calls = 0  # exchanges so far; stochastic codecs draw by it
        self._purpose, self._coordinator = purpose, coordinator
        self.memory, self._most = memory or HostMemory(), most
        facts = {"topology": str(options.topology), "seed": options.seed}
        facts["payload format"] = compll.PAYLOAD_FORMAT
        places = self._agree(facts, nodes.place())
        self.topology = nodes.topology_of(options.topology, places, coordinator.ranks)
        self._codecs: dict[str, Codec] = {}
        self._pieces: dict[str, tuple[Piece, ...]] = {}  # of named states
        self._sizes: dict[str, tuple[int, int]] = {}  # of named states: tensors and elements
        self._pools: OrderedDict[_Kind, _Pool] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self.executor = start_executor(
            purpose, self._codecs, options, coordinator, {}, placement, self.memory
        )

    def add(self, codec: Codec) -> str:
        """Make a codec known, unless it is; return its key for pieces."""
        key = full_name(codec)
        if key in self._codecs and self._codecs[key].digest != codec.digest:
            key = f"{key} {codec.digest}"
        self._codecs.setdefault(key, codec)
        return key

    def reserve(self, name: str, tensors: int, elements: int) -> None:
        """Have states under this name for so many tensors and elements in all, so that an exchange
        may leave some of them out: pieces tell their places."""
        self._sizes[name] = tensors, elements

    def submit(
        self,
        tensor: torch.Tensor,
        strategy: str,
        pieces: Iterable[Piece],
        *,
        name: str = "",
        feedback: bool = False,
        draw: int | None = None,
    ) -> Future[torch.Tensor]:
        """Exchange a tensor, in place; the future's value is the tensor.

        tensor: flat and contiguous, of float32, float16 or bfloat16. pieces: all of it, in order.
        name: the same on all ranks, which is checked.
        feedback: keep the states of codecs under this name, with the same pieces in every call,
            unless its states are reserved.
        draw: number by which stochastic codecs draw; by default that of this exchange.

        The first exchange of a kind meets in the store. Raises ConfigError, and ConfigMismatch if
        ranks exchange different tensors.
        """
        with self._lock:
            kind = strategy, tuple(pieces), tensor.dtype
            pool = self._pools.get(kind) or self._make_pool(kind, tensor.numel(), name)
            self._pools.move_to_end(kind)
            number = pool.free()
            program = pool.programs[number]
            states = self._states(kind, name, program) if feedback else {}
            drawn = self.calls if draw is None else draw
            future = self.executor.submit(program, tensor, states, drawn, name)
            pool.running[number] = future
            self.calls += 1
        future.add_done_callback(partial(pool.end, number))
        future.add_done_callback(self._finish)
        return future

    def _finish(self, future: Future[torch.Tensor]) -> None:
        """Count an exchange that went well: [Note: leaving] in ranks/epoch.py."""
        with suppress(Exception):
            future.value()
            self._coordinator.mailbox.finish()

    def compare_names(self, name: str) -> None:
        """Send a number under this name, and raise unless all ranks do. For tensors in an order of
        the user's: native sums carry no identity (see casync/memory/identity.py)."""
        wait_within(self.submit(torch.zeros(1), "exchange", [Piece(1)], name=name), None)

    def close(self) -> None:
        """End the threads and connections."""
        self._coordinator.mailbox.epoch.tell_finished()
        self.executor.close()

    def _make_pool(self, kind: _Kind, elements: int, name: str) -> _Pool:
        """Agree on a new kind, make its program, and drop those that have been idle longest."""
        strategy, pieces, dtype = kind
        if sum(piece.length for piece in pieces) != elements:
            raise ConfigError(f"pieces of {strategy!r} do not add up to {elements} elements")
        used = dict.fromkeys(key for each in pieces for key in (each.codec, each.down))
        codecs = [[key, self._codecs[key].digest] for key in used if key not in (None, RAW)]
        facts = {"codec": [*codecs, strategy], "elements": elements, "type": str(dtype)}
        cuts = [(piece.length, piece.owner) for piece in pieces]
        self._agree({**facts, "tensor": name, "pieces": cuts}, what=f"to exchange {name!r}")
        pool = self._pools[kind] = _Pool([self._program(strategy, pieces)])
        while self._most is not None and len(self._pools) > 1 and self._tensor_bytes > self._most:
            self._pools.popitem(last=False)
        return pool

    @property
    def _tensor_bytes(self) -> int:
        """Bytes of a tensor of each kind: the same on all ranks, whatever still runs."""
        return sum(
            dtype.itemsize * piece.length for _, pieces, dtype in self._pools for piece in pieces
        )

    def _program(self, strategy: str, pieces: Sequence[Piece]) -> Program:
        """This rank's program. Owners that encode alone have states of their own pieces only."""
        rank, ranks = self._coordinator.rank, self.topology.world_size
        tensors, choices, shares = [], {}, {}
        start = state = 0
        for index, piece in enumerate(pieces):
            number, at = piece.place or (index, state)
            tensor = Tensor(f"{index}", number, start, piece.length, at)
            codec = self._codecs.get(piece.codec)
            cut = 1 if codec is None else partitions(piece.length, codec, strategy, ranks)
            choices[tensor.name] = Choice(piece.codec, strategy, cut, piece.down)
            if piece.owner is not None:
                shares[tensor.name] = ((0, piece.owner),)
            start += piece.length
            state += piece.length if self._has_state(strategy, piece) else 0
            tensors.append(tensor)
        parts = partition(tensors, choices, self.topology, self._codecs, shares=shares)
        rotates = self.executor.rotates
        return build_program(parts, self.topology, self._codecs, rank, rotates=rotates)

    def _has_state(self, strategy: str, piece: Piece) -> bool:
        alone = load(strategy).RESULT == "owner's" and piece.owner is not None
        return not alone or piece.owner == self._coordinator.rank

    def _states(self, kind: _Kind, name: str, program: Program) -> _States:
        """The states under this name, made at its first exchange: those that its encodes use."""
        strategy, pieces, _ = kind
        if name not in self._sizes and self._pieces.setdefault(name, pieces) != pieces:
            raise ConfigError(
                f"{self._purpose}: the pieces of {name!r} are not those for which it keeps states; "
                "exchange it as before, or under another name"
            )
        states = self.states.setdefault(name, {})
        total = sum(piece.length for piece in pieces if self._has_state(strategy, piece))
        tensors, elements = self._sizes.get(name, (len(pieces), total))
        for task in (task for task in program.tasks if isinstance(task, Encode)):
            codec = self._codecs.get(whole_key(task.codec)[0])
            key = program.parts[task.part].codec, task.side
            if codec is not None and codec.states and key not in states:
                states[key] = state_of(codec, self.memory, elements, tensors=tensors)
        return states

    def _agree(self, facts: dict[str, object], own: object = None, what: str = "") -> list[Any]:
        named = {f"{each} of {self._purpose}": fact for each, fact in facts.items()}
        return self._coordinator.require_equal(named, own, what)
