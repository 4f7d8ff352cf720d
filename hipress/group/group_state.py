"""States of a process group `hipress`, by all-reduce: see [Note: names of all-reduces]."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from casync.codec import Codec
from casync.runtime.deferral import as_torch
from hipress.engine.exchange import Exchange
from hipress.engine.residuals import undelivered
from hipress.errors import StateError
from hipress.plan.codecs import full_name, state_of

__all__ = ["GroupState", "GroupWay"]

FORMAT = 1
KEYS = {"format", "group", "of", "calls", "states", "owed"}
_Saved: TypeAlias = dict[str, dict[str, torch.Tensor]]  # by side and name of a state

log = logging.getLogger("hipress")


@dataclass(frozen=True)
class GroupWay:
    """The codecs of a group's all-reduces by side, and their strategy."""

    codecs: Mapping[str, Codec]
    strategy: str
    rank: int
    ranks: int

    def __str__(self) -> str:
        names = " and down ".join(dict.fromkeys(map(full_name, self.codecs.values())))
        return f"{names} by {self.strategy} on rank {self.rank} of {self.ranks}"

    def undelivered(self, sides: Mapping[str, Mapping[str, Any]]) -> torch.Tensor | None:
        """The gradient that states hold back, on the host."""
        total = undelivered(sides, self.codecs, self.strategy, self.ranks)
        return None if total is None else total.cpu()


@dataclass
class GroupState:
    """Debts of a group from step to step, besides the states in its exchanges."""

    calls: int = 0  # compressed all-reduces so far; stochastic codecs draw by it
    #: gradients that a portable state had not delivered, flat, until their all-reduce comes
    owed: dict[str, torch.Tensor] = field(default_factory=dict)
    loaded: dict[str, _Saved] = field(default_factory=dict)  # states, until theirs comes
    _passes: int = 0  # backward passes begun since a state was loaded

    def deliver(self, name: str, tensor: torch.Tensor) -> None:
        """Add to a gradient what is owed to it."""
        owed = self.owed.pop(name, None)
        if owed is not None:
            tensor.detach().add_(owed.view(tensor.shape).to(tensor.device))

    def begin_pass(self) -> None:
        """Note that a backward pass begins. The first one after a load had all-reduces for all that
        is owed, unless something has changed."""
        self._passes += 1
        if self._passes == 2 and (self.owed or self.loaded):
            log.warning(
                "hipress group: the loaded state has residuals of %s, which the backward pass did "
                "not make; they wait. Load it into the same model, with as many shards",
                ", ".join({**self.owed, **self.loaded}),
            )

    def place(self, exchange: Exchange, name: str, key: str, way: GroupWay) -> None:
        """Give an exchange the loaded states of this name. key: of the workers' codec there."""
        for side, values in self.loaded.pop(name, {}).items():
            codec, (first, *_) = way.codecs[side], values.values()
            arrays = state_of(codec, exchange.memory, first.numel())
            for each in codec.states:
                as_torch(arrays[each.name]).copy_(values[each.name])
            exchange.states.setdefault(name, {})[key, side] = arrays

    def export(self, exchanges: Iterable[Exchange], way: GroupWay) -> dict[str, Any]:
        """This rank's states, by name of all-reduce."""
        states = {name: dict(sides) for name, sides in self.loaded.items()}
        for name, sides in _states_of(exchanges):
            states[name] = {
                side: {each: as_torch(a).to("cpu", copy=True) for each, a in arrays.items()}
                for side, arrays in sides.items()
            }
        owed = {name: values.clone() for name, values in self.owed.items()}
        return self._state(str(way), states, owed)

    def export_portable(
        self,
        exchanges: Iterable[Exchange],
        way: GroupWay,
        mean: Callable[[torch.Tensor], torch.Tensor],
    ) -> dict[str, Any]:
        """Undelivered gradients, the same on all ranks, which call this alike. mean: over these."""
        owed = dict(self.owed)
        for name, sides in (*_states_of(exchanges), *self.loaded.items()):
            gradient = way.undelivered(sides)
            if gradient is not None:
                owed[name] = mean(gradient + owed.get(name, 0))
        owed = {name: values.clone() for name, values in owed.items() if values.any()}
        return self._state("any ranks", {}, owed)

    def load(self, state: Mapping[str, Any], exchanges: Iterable[Exchange], way: GroupWay) -> None:
        """Go on from a state. Raises StateError."""
        if set(state) != KEYS or state["format"] != FORMAT:
            raise StateError("this is no state of a process group hipress, or of a newer version")
        if state["states"] and state["of"] != str(way):
            raise StateError(
                f"the state is of {state['of']}, and this is {way}: load on each rank the file "
                "that it saved, or save with portable=True"
            )
        for exchange in exchanges:
            exchange.states.clear()
        self.calls, self._passes = state["calls"], 0
        self.owed = {name: values.clone() for name, values in state["owed"].items()}
        self.loaded = {name: dict(sides) for name, sides in state["states"].items()}

    def _state(
        self, of: str, states: dict[str, _Saved], owed: dict[str, torch.Tensor]
    ) -> dict[str, Any]:
        common = {"format": FORMAT, "group": True, "of": of, "calls": self.calls}
        return {**common, "states": states, "owed": owed}


def _states_of(exchanges: Iterable[Exchange]) -> Iterable[tuple[str, dict[str, Any]]]:
    """The states of exchanges, by name and side."""
    for exchange in exchanges:
        for name, states in exchange.states.items():
            yield name, {side: arrays for (_, side), arrays in states.items()}
