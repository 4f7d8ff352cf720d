"""Exchanges as data: the pieces of a flat tensor, and the program that they make.

An exchange averages a tensor, sums its rows at their owners, or gives owners' rows to all: that is
the strategy of each piece. A bucket of DDP is an exchange whose pieces are its parameters; so are a
reduce-scatter and an all-gather of FSDP2, a fragment of an outer loop, a tensor of `all_reduce`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from casync.building.parts import Choice, Part, Tensor
from casync.codec import Codec
from casync.graph.graph import Program, build_program
from casync.graph.plan import partition
from casync.graph.shares import Shares
from casync.raw import RAW
from casync.strategies import owns_mean
from casync.topology import Topology
from hipress.channel.states import Arrays, Runs
from hipress.codecs import NATIVE, partitions

__all__ = ["Exchange", "Piece", "parts_of", "program_of", "rows"]


@dataclass(frozen=True)
class Piece:
    """Neighbouring elements of a tensor that are compressed as one."""

    length: int  # elements
    codec: str = RAW  # key of the channel's codecs
    strategy: str = NATIVE  # module of casync.strategies
    down: str | None = None  # key of the owners' codec, if another
    #: owners of its elements; None: they are shared out among the ranks
    shares: Shares | None = None
    partitions: int | None = None  # see Choice; None: as many as suit its length
    number: int = -1  # of the tensor, for draws and states; by default its place in the exchange
    state: int = 0  # first element in the states
    name: str = field(default="", compare=False)  # of a tensor with states; for errors


@dataclass(frozen=True)
class Exchange:
    """An exchange of a flat tensor among ranks, the same on all of them."""

    name: str
    pieces: tuple[Piece, ...]  # all of the tensor, in order
    states: Arrays = field(default_factory=dict)  # of codecs with states: see Channel.with_states

    @cached_property
    def elements(self) -> int:
        """Elements of the tensor."""
        return sum(piece.length for piece in self.pieces)


def rows(row: Iterable[Piece], ranks: int) -> tuple[Piece, ...]:
    """Pieces of a tensor with a row like this for each rank, which owns it, as in a reduce-scatter:
    no block of a codec straddles two rows."""
    pieces = tuple(row)
    return tuple(replace(each, shares=((0, rank),)) for rank in range(ranks) for each in pieces)


def program_of(
    pieces: Sequence[Piece],
    topology: Topology,
    codecs: Mapping[str, Codec],
    rank: int,
    *,
    rotates: bool,
    owned: Mapping[str, Runs] | None = None,
) -> Program:
    """This rank's program. Raises ConfigError for pieces that codecs and strategy do not suit.

    rotates: see casync.build. owned: by codec, the elements of workers' states that this rank's
    aggregator has, if it does not have all.
    """
    parts = list(parts_of(pieces, topology, codecs))
    for part in owned_parts(parts, rank) if owned else ():
        if owned is not None and part.codec in owned:
            firsts = tuple(owned[part.codec].before(row[4]) for row in part.rows)
            parts[part.id] = replace(part, owned=firsts)
    return build_program(parts, topology, codecs, rank, rotates=rotates)


def parts_of(
    pieces: Sequence[Piece], topology: Topology, codecs: Mapping[str, Codec]
) -> tuple[Part, ...]:
    """Parts of an exchange: see casync.graph.plan."""
    ranks = topology.world_size
    tensors, choices, shares = list[Tensor](), dict[str, Choice](), dict[str, Shares]()
    start = 0
    for index, piece in enumerate(numbered(pieces)):
        name = piece.name or f"piece {index}"
        cut, codec = piece.partitions, codecs.get(piece.codec)
        if cut is None:
            cut = 1 if codec is None else partitions(piece.length, codec, piece.strategy, ranks)
        tensors.append(Tensor(name, piece.number, start, piece.length, piece.state))
        choices[name] = Choice(piece.codec, piece.strategy, cut, piece.down)
        if piece.shares is not None:
            shares[name] = piece.shares
        start += piece.length
    return partition(tensors, choices, topology, codecs, shares=shares)


def numbered(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces that all have a number."""
    return [replace(p, number=i) if p.number < 0 else p for i, p in enumerate(pieces)]


def owned_parts(parts: Iterable[Part], rank: int) -> list[Part]:
    """Parts whose mean this rank encodes, as an aggregator."""
    return [part for part in parts if owns_mean(part, rank)]
