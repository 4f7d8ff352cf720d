"""From tensors and choices to parts: pieces that travel together, and their owner."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm
from typing import NamedTuple, TypeAlias

from casync.building.parts import Choice, Part, Row, Tensor
from casync.codec import FLOAT_BYTES, Codec
from casync.errors import PlanError
from casync.graph.shares import SMALL_BYTES, Shares, shares_alone
from casync.raw import RAW, with_raw
from casync.rounds import refuse_workers
from casync.strategies import groups, load, refuses
from casync.topology import Topology

__all__ = ["BATCH_BYTES", "check_codecs", "partition"]

_Cut: TypeAlias = tuple[int, int, int]  # first element in the tensor, owner, number of the message

BATCH_BYTES = 4 << 20  # gradient bytes at which a message is closed


class _Piece(NamedTuple):
    """A piece of a tensor for one owner in one message, before pieces are joined into parts."""

    choice: Choice
    owner: int
    number: int  # number of the message for this owner
    row: Row


def partition(
    tensors: Iterable[Tensor],
    choices: Mapping[str, Choice],
    topology: Topology,
    codecs: Mapping[str, Codec],
    *,
    shares: Mapping[str, Shares] | None = None,
    batch_bytes: int = BATCH_BYTES,
    least_bytes: int = SMALL_BYTES,
) -> tuple[Part, ...]:
    """Parts of one bucket, in bucket order, each for one owner and one choice.

    If the strategy spreads a tensor, each owner gets a share of it, aligned to the codec. An
    owner's share is cut into `partitions` chunks of at least `least_bytes`. The first chunks of all
    tensors for one owner by the same choice share a message, and so do the second ones, up to
    `batch_bytes` of gradient; adjacent raw tensors become runs.

    shares: by tensor name, from `share_out` of the whole model, see [Note: parts do not move]; a
    tensor without shares is cut into shares of at least `least_bytes`, too, and the rank of its
    index owns the first. Raises PlanError.
    """
    # an empty tensor sorts before another one with the same start
    ordered = sorted(tensors, key=lambda t: (t.start, t.length, t.index))
    codecs = with_raw(codecs)
    _check(ordered, choices, topology.world_size, codecs)
    pieces: list[_Piece] = []
    for tensor in (each for each in ordered if each.length):
        mine = (shares or {}).get(tensor.name)
        if mine is None:
            mine = shares_alone(tensor.length, tensor.index, topology.world_size, least_bytes)
        choice = choices[tensor.name]
        cuts = _cuts(tensor, choice, mine, topology, least_bytes)
        pieces.extend(_pieces(tensor, choice, _aligned(cuts, _unit(choice, codecs), tensor.length)))
    return tuple(_part(n, p, codecs) for n, p in enumerate(_join(pieces, batch_bytes)))


def _part(number: int, pieces: Sequence[_Piece], codecs: Mapping[str, Codec]) -> Part:
    choice, owner = pieces[0].choice, pieces[0].owner
    rounds = tuple(one.op for one in codecs[choice.codec].rounds)
    rows = _rows(pieces)
    return Part(number, choice.codec, choice.strategy, owner, rows, choice.down, rounds)


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
    """Raise PlanError if a codec is unknown, or the strategy cannot carry it."""
    down = choice.down
    for key in (choice.codec, choice.codec if down is None else down):
        if key not in codecs:
            raise PlanError(f"unknown codec {key!r}; one of {', '.join(codecs)}")
    refusal = refuses(choice.strategy, codecs[choice.codec], None if down is None else codecs[down])
    if refusal is not None:
        raise PlanError(refusal)


def _pieces(t: Tensor, choice: Choice, cuts: Iterable[tuple[_Cut, int]]) -> Iterator[_Piece]:
    for (begin, owner, number), end in cuts:
        row = (t.start + begin, end - begin, t.index, begin, t.state + begin)
        yield _Piece(choice, owner, number, row)


def _cuts(
    t: Tensor, choice: Choice, shares: Shares, topology: Topology, least_bytes: int
) -> list[_Cut]:
    spread = load(choice.strategy).SPREADS
    turns = groups(choice.strategy, topology).turns(spread) or topology.ranks
    first = shares[0][1] if shares else t.index
    owned = [(0, turns[first % len(turns)])]
    if spread in ("ranks", "nodes"):
        owned = _owned(t, shares, turns, topology.world_size)
    ends = [*(begin for begin, _ in owned[1:]), t.length]
    cuts = [
        (at, owner, number)
        for (begin, owner), end in zip(owned, ends, strict=True)
        for number, at in enumerate(_chunks(begin, end, choice, least_bytes))
    ]
    if spread == "tensors":
        return [(at, turns[(first + number) % len(turns)], number) for at, _, number in cuts]
    return cuts


def _chunks(begin: int, end: int, choice: Choice, least_bytes: int) -> Iterator[int]:
    """First elements of equal chunks: `partitions` of them, or fewer if they were too small."""
    most = (end - begin) * FLOAT_BYTES // max(1, least_bytes)
    count = 1 if _is_run(choice) else max(1, min(choice.partitions, most))
    return (begin + (end - begin) * number // count for number in range(count))


def _owned(t: Tensor, shares: Shares, turns: Sequence[int], ranks: int) -> list[tuple[int, int]]:
    """First elements and owners of a tensor's shares."""
    count = len(turns)
    if not shares:
        return [(t.length * i // count, turns[(t.index + i) % count]) for i in range(count)]
    return [(begin, turns[turn * count // ranks]) for begin, turn in shares]


def _aligned(cuts: Sequence[_Cut], unit: int, length: int) -> Iterator[tuple[_Cut, int]]:
    """Cuts moved to multiples of the unit, with the end of each chunk; none is empty."""
    begins = [-(-begin // unit) * unit for begin, *_ in cuts]
    for (_, owner, number), begin, end in zip(cuts, begins, [*begins[1:], length], strict=True):
        if begin < min(end, length):
            yield (begin, owner, number), min(end, length)


def _unit(choice: Choice, codecs: Mapping[str, Codec]) -> int:
    """Unit of cuts in elements: an even number of groups, so that earlier codes of 16 bits per
    group end at multiples of 4 bytes."""
    align = lcm(*(codecs[key].align for key in (choice.codec, choice.down) if key is not None))
    return align if align == 1 else 2 * align


def _is_run(choice: Choice) -> bool:
    """True if the tensor is raw and summed natively in the bucket itself: the longer the better."""
    return choice.codec == RAW and not load(choice.strategy).SPREADS


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
    """Key of pieces that may share a part."""
    choice, spread = piece.choice, load(piece.choice.strategy).SPREADS
    kind = (choice.codec, choice.down, choice.strategy)
    return (*kind, piece.owner if spread else 0, piece.number)


def _fits(batch: Sequence[_Piece], piece: _Piece, batch_bytes: int) -> bool:
    if _is_run(piece.choice):
        last = batch[-1].row
        return last[0] + last[1] == piece.row[0]
    size = sum(p.row[1] for p in batch) + piece.row[1]
    again = batch[-1].row[2] == piece.row[2]  # a codec may have a state of the tensor
    return not again and size * FLOAT_BYTES <= batch_bytes


def _rows(pieces: Sequence[_Piece]) -> tuple[Row, ...]:
    rows = tuple(p.row for p in pieces)
    if not _is_run(pieces[0].choice):
        return rows
    start, _, *rest = rows[0]
    return ((start, sum(row[1] for row in rows), rest[0], rest[1], rest[2]),)
