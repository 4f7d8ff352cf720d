"""States of a sharded model's compressors, saved and restored by parameter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from casync.codec import Codec
from casync.runtime.deferral import as_torch
from hipress.channel.states import AGGREGATOR, WORKER, undelivered
from hipress.engine.exchange import Exchange
from hipress.errors import StateError
from hipress.plan.codecs import full_name, state_of

__all__ = ["Row", "clear", "export", "restore", "undelivered_by_name"]

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


def undelivered_by_name(rows: Sequence[Row]) -> dict[str, torch.Tensor]:
    """The gradient that this replica has not delivered, by parameter: flat float32, of the length
    of the first rank's shard; zeros before the first average. See [Note: undelivered gradient] in
    engine/residuals.py."""
    gradients: dict[str, torch.Tensor] = {}
    for row in rows:
        arrays, ranks = row.exchange.states.get(row.name, {}), row.exchange.topology.world_size
        wholes = {
            key: undelivered(
                {side: arrays[key, side] for side in SIDES if (key, side) in arrays},
                dict.fromkeys(SIDES, codec), row.strategy, ranks,
            )
            for key, codec in {key: codec for _, key, codec, *_ in row.places()}.items()
        }  # fmt: skip
        for name, key, _, _, mine in row.places():
            total = wholes[key]
            empty = torch.zeros(mine.stop - mine.start)
            gradients[name] = empty if total is None else total[mine].cpu()
    return gradients


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
        arrays = row.exchange.states.get(row.name, {})
        for name, key, codec, number, mine in row.places():
            codecs[name] = full_name(codec)
            state[name] = {
                side: {
                    field.name: as_torch(arrays[key, side][field.name])[
                        mine if field.per == "element" else slice(number, number + 1)
                    ].to("cpu", copy=True)
                    for field in codec.states
                }
                for side in SIDES
                if (key, side) in arrays
            }
    return {"codecs": codecs, "state": state}


def restore(rows: Sequence[Row], saved: Mapping[str, Any]) -> None:
    """Load what `export` saved. Raises StateError for another model or other codecs, before
    anything is loaded."""
    wanted = {name: full_name(codec) for row in rows for name, _, codec, *_ in row.places()}
    codecs = saved["codecs"]
    if codecs != wanted:
        name = min(each for each in {*wanted, *codecs} if wanted.get(each) != codecs.get(each))
        raise StateError(
            f"the saved state of {name!r} is of {codecs.get(name, 'no compressor')}, and it has "
            f"{wanted.get(name, 'none with states')} now: call hipress.shard as before"
        )
    for row in rows:
        arrays = row.exchange.states.setdefault(row.name, {})
        for name, key, codec, number, mine in row.places():
            for side, values in saved["state"][name].items():
                if (key, side) not in arrays:
                    arrays[key, side] = state_of(
                        codec, row.exchange.memory, sum(row.lengths), tensors=len(row.params)
                    )
                for field in codec.states:
                    place = mine if field.per == "element" else slice(number, number + 1)
                    as_torch(arrays[key, side][field.name])[place].copy_(values[field.name])
