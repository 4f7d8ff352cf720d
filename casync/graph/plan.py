"""From tensors and choices to parts: what travels together, and who owns it.

[Note: parts do not move] DDP delivers one bucket in the first step and other buckets from the
second on. Residuals at the aggregators must stay where they are, so a tensor's chunks and their
owners depend on the tensor, the world size and its Choice only, never on the bucket. What the
bucket decides is only which pieces share a message.

[Note: how small a chunk may be] Among N ranks a chunk is 2(N-1) messages, each of which costs some
50 microseconds whatever is in it, and as much as a payload of 60 KB at 10 Gbit/s. So a tensor is
cut into as many chunks as there are owners only if each has half of WHOLE_BYTES. At 1024 ranks
a tensor of 4 MB has 64 chunks, not 1024 with payloads of some hundred bytes; the owners of other
tensors' chunks are other ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TypeAlias

from casync.codec import FLOAT_BYTES, Codec, Operation
from casync.errors import PlanError
from casync.raw import RAW, with_raw
from casync.rounds import refuse_workers
from casync.strategies import load, refuses
from casync.topology import Topology

__all__ = ["BATCH_BYTES", "WHOLE_BYTES", "Choice", "Part", "Tensor", "assign_owners", "partition"]

Row: TypeAlias = tuple[int, int, int, int, int]

BATCH_BYTES = 4 << 20  # gradient bytes at which a message of many small tensors is closed
WHOLE_BYTES = 128 << 10  # smaller tensors are not split


@dataclass(frozen=True)
class Tensor:
    """A parameter's gradient inside a bucket; lengths and positions in elements."""

    name: str
    index: int  # position in the model: random stream, per-tensor state, default owner
    start: int  # first element in the bucket
    length: int
    state: int  # first element in the flat state arenas


@dataclass(frozen=True)
class Choice:
    """How one tensor is synchronized."""

    codec: str  # key in the executor's mapping, or RAW
    strategy: str  # module in casync.strategies
    partitions: int = 1  # chunks of a big tensor (per owner, where the strategy spreads them)
    down: str | None = None  # the codec of owners, where that is another one


@dataclass(frozen=True)
class Part:
    """What payloads hold together: many small tensors, one chunk of a big one, or a raw run."""

    id: int
    codec: str  # of workers; its key is that of the states of both sides
    strategy: str
    owner: int
    rows: tuple[Row, ...]  # the codec's table: START, LENGTH, TENSOR, OFFSET, STATE
    down: str | None = None  # of owners, where that is another one
    rounds: tuple[Operation, ...] = ()  # all-reduces that build on one another; else whole payloads
    align: int = 1  # a piece may be cut at multiples of this many elements

    @property
    def elements(self) -> int:
        """Elements over all rows."""
        return sum(row[1] for row in self.rows)


@dataclass(frozen=True)
class _Piece:
    """A whole small tensor or a chunk of a big one, before pieces are joined into parts."""

    choice: Choice
    owner: int
    small: bool
    row: Row


def assign_owners(lengths_in_model_order: Sequence[int], world_size: int) -> tuple[int, ...]:
    """Owner of every tensor of the model: each goes, in order, to the least loaded rank.

    Depends on the whole model only, so it is the same whatever the buckets are.
    """
    loads = [(0, rank) for rank in range(world_size)]
    owners = []
    for length in lengths_in_model_order:
        load_, rank = heapq.heappop(loads)
        owners.append(rank)
        heapq.heappush(loads, (load_ + length, rank))
    return tuple(owners)


def partition(
    tensors: Iterable[Tensor],
    choices: Mapping[str, Choice],
    topology: Topology,
    codecs: Mapping[str, Codec],
    *,
    owners: Mapping[str, int] | None = None,
    batch_bytes: int = BATCH_BYTES,
    whole_bytes: int = WHOLE_BYTES,
) -> tuple[Part, ...]:
    """Parts of one bucket, in bucket order.

    Tensors of at least `whole_bytes` are split into `partitions` chunks (times the owners where
    the strategy spreads them), aligned to the codec; see [Note: how small a chunk may be]. Smaller
    ones go whole, joined up to `batch_bytes`. Adjacent raw ones become runs. `owners`: by tensor
    name, whose turn it is to own the first chunk, for instance from `assign_owners`; by default the
    tensor's index. See [Note: parts do not move]. Raises PlanError.
    """
    # Where an empty tensor and another one start alike, the empty one ends there.
    ordered = sorted(tensors, key=lambda t: (t.start, t.length, t.index))
    codecs = with_raw(codecs)
    _check(ordered, choices, topology.world_size, codecs)
    pieces: list[_Piece] = []
    for tensor in ordered:
        turn = tensor.index if owners is None else owners[tensor.name]
        pieces.extend(_split(tensor, choices[tensor.name], turn, topology, codecs, whole_bytes))
    return tuple(_part(n, p, codecs) for n, p in enumerate(_join(pieces, batch_bytes)))


def _part(number: int, pieces: Sequence[_Piece], codecs: Mapping[str, Codec]) -> Part:
    choice, owner = pieces[0].choice, pieces[0].owner
    rounds = tuple(one.op for one in codecs[choice.codec].rounds)
    rows = _rows(pieces)
    align = _align(choice, codecs)
    return Part(number, choice.codec, choice.strategy, owner, rows, choice.down, rounds, align)


def _align(choice: Choice, codecs: Mapping[str, Codec]) -> int:
    return lcm(*(codecs[key].align for key in (choice.codec, choice.down) if key))


def _check(
    ordered: Sequence[Tensor],
    choices: Mapping[str, Choice],
    world_size: int,
    codecs: Mapping[str, Codec],
) -> None:
    end = 0
    for tensor in ordered:
        if tensor.length < 0 or tensor.start < end:
            raise PlanError(f"tensor {tensor.name!r} overlaps another one or has a negative length")
        end = tensor.start + tensor.length
        if tensor.name not in choices:
            raise PlanError(f"no choice for tensor {tensor.name!r}")
    for choice in dict.fromkeys(choices[t.name] for t in ordered):
        if choice.partitions < 1:
            raise PlanError(f"partitions {choice.partitions} is not positive")
        check_codecs(choice, codecs)
        refusal = refuse_workers(codecs[choice.codec], world_size)
        if refusal is not None:
            raise PlanError(refusal)


def check_codecs(choice: Choice | Part, codecs: Mapping[str, Codec]) -> None:
    """Raise PlanError when a codec is unknown, or the strategy cannot carry it."""
    down = choice.down
    for key in (choice.codec, choice.codec if down is None else down):
        if key not in codecs:
            raise PlanError(f"unknown codec {key!r}; one of {', '.join(codecs)}")
    refusal = refuses(choice.strategy, codecs[choice.codec], None if down is None else codecs[down])
    if refusal is not None:
        raise PlanError(refusal)


def _split(
    t: Tensor,
    choice: Choice,
    turn: int,
    topology: Topology,
    codecs: Mapping[str, Codec],
    whole_bytes: int,
) -> Iterator[_Piece]:
    """`turn`: whose turn it is to own the first chunk."""
    if t.length == 0:
        return
    spread = load(choice.strategy).SPREADS
    turns = topology.turns(spread)
    first = (turns or topology.ranks)[turn % len(turns or topology.ranks)]
    if _is_run(choice) or t.length * FLOAT_BYTES < whole_bytes:
        yield _Piece(choice, first, True, (t.start, t.length, t.index, 0, t.state))
        return
    most = max(1, FLOAT_BYTES * t.length // max(1, whole_bytes // 2))
    owners = 1 if spread == "tensors" else max(1, len(turns))  # of a tensor
    size = _chunk(t.length, min(most, choice.partitions * owners), _align(choice, codecs))
    for number, at in enumerate(range(0, t.length, size)):
        row = (t.start + at, min(size, t.length - at), t.index, at, t.state + at)
        owner = turns[(turn + number) % len(turns)] if turns else first
        yield _Piece(choice, owner, False, row)


def _is_run(choice: Choice) -> bool:
    """Whether it is raw and summed natively, in the bucket itself: the longer the better."""
    return choice.codec == RAW and not load(choice.strategy).SPREADS


def _chunk(length: int, count: int, align: int) -> int:
    """Elements of a chunk: the tensor in `count` equal ones, rounded up to the alignment."""
    size = -(-length // count)
    return -(-size // align) * align


def _join(pieces: Iterable[_Piece], batch_bytes: int) -> list[list[_Piece]]:
    """Pieces by part, in the order of each part's first piece."""
    parts: list[list[_Piece]] = []
    open_: dict[tuple[object, ...], list[_Piece]] = {}
    for piece in pieces:
        key = _key(piece)
        batch = open_.get(key)
        if batch is None or not _fits(batch, piece, batch_bytes):
            batch = []
            parts.append(batch)
            open_[key] = batch
        batch.append(piece)
    return parts


def _key(piece: _Piece) -> tuple[object, ...]:
    """Pieces of equal keys may share a part."""
    choice = piece.choice
    owner = piece.owner if load(choice.strategy).SPREADS else 0
    kind = (choice.codec, choice.down, choice.strategy)
    return (*kind, owner) if piece.small else (*kind, piece.row)


def _fits(batch: Sequence[_Piece], piece: _Piece, batch_bytes: int) -> bool:
    if _is_run(piece.choice):
        last = batch[-1].row
        return last[0] + last[1] == piece.row[0]
    size = sum(p.row[1] for p in batch) + piece.row[1]
    return size * FLOAT_BYTES <= batch_bytes


def _rows(pieces: Sequence[_Piece]) -> tuple[Row, ...]:
    rows = tuple(p.row for p in pieces)
    if not _is_run(pieces[0].choice):
        return rows
    start, _, *rest = rows[0]
    return ((start, sum(row[1] for row in rows), rest[0], rest[1], rest[2]),)
