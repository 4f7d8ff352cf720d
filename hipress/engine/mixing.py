"""Steps of gossip: parameters go to the engine, then move towards the neighbours' estimates."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from casync.estimates import OWN, copy_of
from hipress.engine.engine import Engine
from hipress.engine.order import buckets
from hipress.engine.residuals import WORKER, Floats, Residuals
from hipress.errors import StateError
from hipress.ranks.coordinator import Coordinator


class Mixing:
    """Averages parameters with estimates of neighbours. Holds no reference to the module."""

    def __init__(
        self,
        engine: Engine,
        parameters: Sequence[nn.Parameter],
        neighbours: Sequence[int],
        gammas: Mapping[str, float],
    ) -> None:
        """parameters: equal on all ranks, as the caller has checked. gammas: by codec."""
        self._engine, self._parameters, self._gammas = engine, parameters, gammas
        self._copies = tuple(map(copy_of, neighbours))
        self._buckets = buckets(engine.params, engine.plan, engine.options)
        for number, bucket in enumerate(self._buckets):
            flat = bucket.gather(self._values(number))
            pieces = engine.buckets.pieces(bucket.indices, flat)
            for index, piece in zip(bucket.indices, pieces, strict=True):
                for array in self._estimates(index).values():
                    array[:] = piece.float().numpy()

    def run(self) -> None:
        """Exchange with neighbours, and move towards them."""
        engine = self._engine
        engine.refuse_broken()
        try:
            step, sent = engine.begin(), []
            for number, bucket in enumerate(self._buckets):
                sent.append(bucket.gather(self._values(number)))
                step.reduce(bucket.indices, sent[-1])
            step.finish(lambda number: self._mix(number, sent[number]))
        except BaseException as error:
            engine.fail(error, "gossip.step()")
            raise

    def _values(self, number: int) -> list[torch.Tensor]:
        return [self._parameters[index].detach() for index in self._buckets[number].indices]

    def _estimates(self, index: int) -> dict[str, Floats]:
        return self._engine.buckets.residuals.pieces(index)[WORKER]

    def _mix(self, number: int, flat: torch.Tensor) -> None:
        """Move a bucket's parameters, after all neighbours' payloads have come."""
        bucket = self._buckets[number]
        pieces = self._engine.buckets.pieces(bucket.indices, flat)
        for index, piece in zip(bucket.indices, pieces, strict=True):
            piece.add_(self._way(index))
        bucket.scatter(flat, self._values(number))

    def _way(self, index: int) -> torch.Tensor:
        """gamma (sum of w x_hat_j over neighbours j and oneself - x_hat), with equal weights w."""
        arrays = {name: torch.from_numpy(a) for name, a in self._estimates(index).items()}
        count, codec = len(self._copies), self._engine.plan.decisions[index].codec
        way = arrays[OWN] * -count
        for name in self._copies:
            way += arrays[name]
        return way.mul_(self._gammas[str(codec)] / (count + 1))


def agree(residuals: Residuals, coordinator: Coordinator) -> None:
    """After states were loaded: raise StateError, on all ranks, if a rank's copy differs from the
    estimate that the other rank loaded."""
    found: dict[str, hashlib._Hash] = {}
    for index in sorted(residuals.places):
        for name, array in residuals.pieces(index)[WORKER].items():
            found.setdefault(name, hashlib.sha256()).update(array.tobytes())
    held = coordinator.require_equal(
        {}, {name: hashed.hexdigest() for name, hashed in found.items()}
    )
    for rank, estimates in enumerate(held):
        for other, theirs in enumerate(held):
            if estimates.get(copy_of(other), theirs.get(OWN)) != theirs.get(OWN):
                names = coordinator.ranks[rank], coordinator.ranks[other]
                raise StateError(
                    f"the states do not fit together: rank {names[0]}'s copy of rank {names[1]}'s "
                    f"parameters differs from the one that rank {names[1]} loaded; each rank must "
                    "load the state that it saved, all of the same step of one training"
                )
