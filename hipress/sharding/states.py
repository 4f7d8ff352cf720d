"""States of a sharded model's compressors, saved and restored by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from casync.runtime.deferral import as_torch
from hipress.engine.exchange import Exchange
from hipress.engine.residuals import AGGREGATOR, WORKER, undelivered
from hipress.errors import StateError
from hipress.plan.codecs import described, state_of

if TYPE_CHECKING:
    from casync.codec import Codec

__all__ = ["Row", "clear", "export", "held_back", "restore"]

_Saved: TypeAlias = dict[str, dict[str, torch.Tensor]]  # by side and name of a state
SIDES = (WORKER, AGGREGATOR)


@dataclass(frozen=True)
class Row:
    """A rank's row of a group of parameters, for which an exchange keeps states under a name."""

    exchange: Exchange
    strategy: str
    name: str
    params: Sequence[str]
    keys: Sequence[str]
    codecs: Sequence[Codec | None]
    lengths: Sequence[int]  # in elements, as are starts
    starts: Sequence[int]

    def places(self) -> Iterator[tuple[str, str, Codec, int, slice]]:
        """Name, key, codec, number and elements of each parameter whose codec keeps states."""
        every = zip(self.params, self.keys, self.codecs, self.lengths, self.starts, strict=False)
        for number, (name, key, codec, length, start) in enumerate(every):
            if codec is not None and codec.states and length:
                yield name, key, codec, number, slice(start, start + length)


def held_back(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """The gradient that this replica has not delivered, by parameter: flat float32, of the length
    of the first rank's shard; zeros before the first average. See [Note: undelivered gradient] in
    engine/residuals.py."""
    found: dict[str, torch.Tensor] = {}
    for row in rows:
        kept, ranks = row.exchange.states.get(row.name, {}), row.exchange.topology.world_size
        wholes = {
            key: undelivered(
                {side: kept[key, side] for side in SIDES if (key, side) in kept},
                dict.fromkeys(SIDES, codec), row.strategy, ranks,
            )
            for key, codec in {key: codec for _, key, codec, *_ in row.places()}.items()
        }  # fmt: skip
        for name, key, _, _, mine in row.places():
            total = wholes[key]
            empty = torch.zeros(mine.stop - mine.start)
            found[name] = empty if total is None else total[mine].cpu()
    return found


def clear(rows: Sequence[Row]) -> None:
    """Set all states to zero, as at the start."""
    for row in rows:
        for arrays in row.exchange.states.get(row.name, {}).values():
            for values in arrays.values():
                as_torch(values).zero_()


def export(rows: Sequence[Row]) -> dict[str, Any]:
    """Copies of all states, by parameter, and the codecs that they belong to."""
    state: dict[str, _Saved] = {}
    codecs: dict[str, str] = {}
    for row in rows:
        kept = row.exchange.states.get(row.name, {})
        for name, key, codec, number, mine in row.places():
            codecs[name] = described(codec)
            state[name] = {
                side: {
                    field.name: as_torch(kept[key, side][field.name])[
                        mine if field.per == "element" else slice(number, number + 1)
                    ].to("cpu", copy=True)
                    for field in codec.states
                }
                for side in SIDES
                if (key, side) in kept
            }
    return {"codecs": codecs, "state": state}


def restore(rows: Sequence[Row], saved: Mapping[str, Any]) -> None:
    """Load what `export` saved. Raises StateError for another model or other codecs, before
    anything is loaded."""
    wanted = {name: described(codec) for row in rows for name, _, codec, *_ in row.places()}
    found = saved["codecs"]
    if found != wanted:
        name = min(each for each in {*wanted, *found} if wanted.get(each) != found.get(each))
        raise StateError(
            f"the saved state of {name!r} is of {found.get(name, 'no compressor')}, and it has "
            f"{wanted.get(name, 'none with states')} now: call hipress.shard as before"
        )
    for row in rows:
        kept = row.exchange.states.setdefault(row.name, {})
        for name, key, codec, number, mine in row.places():
            for side, values in saved["state"][name].items():
                if (key, side) not in kept:
                    kept[key, side] = state_of(
                        codec, row.exchange.memory, sum(row.lengths), tensors=len(row.params)
                    )
                for field in codec.states:
                    place = mine if field.per == "element" else slice(number, number + 1)
                    as_torch(kept[key, side][field.name])[place].copy_(values[field.name])
