"""Steps of gossip: parameters go to the engine, then move towards the neighbours' estimates."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from casync.estimates import BEGIN, LAST, OWN, copy_of
from casync.runtime.deferral import as_torch
from hipress.channel.states import WORKER
from hipress.engine.engine import Engine
from hipress.engine.order import buckets
from hipress.engine.residuals import Residuals
from hipress.errors import StateError
from hipress.ranks.coordinator import Coordinator


class Mixing:
    """Averages parameters with estimates of neighbours. Holds no reference to the module.

    [Note: local steps of gossip] With x `begin` before the local steps and x after them, a round
    sends neighbours z, and moves from there (after GASLoC, Cagnasso et al. 2026)::

        y = begin + lr (x - begin)
        z = y + momentum (y - last);  last = y
        x = z + gamma sum over neighbours of w (x_hat_j - x_hat_i);  begin = x

    If all ranks are neighbours, and payloads exact, this is Nesterov's momentum on the average of
    changes, as DiLoCo has it. `begin` and `last` are kept only if lr is not 1 and momentum not 0.
    """

    def __init__(
        self,
        engine: Engine,
        parameters: Sequence[nn.Parameter],
        neighbours: Sequence[int],
        gammas: Mapping[str, float],
        *,
        every: int = 1,
        lr: float = 1.0,
        momentum: float = 0.0,
    ) -> None:
        """parameters: equal on all ranks, as the caller has checked. gammas: by codec. every: local
        steps from round to round; lr, momentum: of rounds."""
        self._engine, self._parameters, self._gammas = engine, parameters, gammas
        self._every, self._lr, self._momentum = every, lr, momentum
        self._copies = tuple(map(copy_of, neighbours))
        self._buckets = buckets(engine.params, engine.plan, engine.options)
        for number, bucket in enumerate(self._buckets):
            for _, piece, states in self._pieces(number, bucket.gather(self._values(number))):
                for values in states.values():
                    values.copy_(piece)

    def run(self) -> None:
        """Count a step, and after every few exchange with neighbours, and move towards them."""
        engine = self._engine
        engine.refuse_broken()
        if (engine.step + 1) % self._every:
            engine.step += 1
            engine.traffic.steps += 1
            return
        try:
            step, sent = engine.begin(), []
            for number, bucket in enumerate(self._buckets):
                sent.append(bucket.gather(self._values(number)))
                for _, piece, states in self._pieces(number, sent[-1]):
                    self._step_outer(piece, states)
                step.reduce(bucket.indices, sent[-1])
            step.finish(lambda number: self._mix(number, sent[number]))
        except BaseException as error:
            engine.fail(error, "gossip.step()")
            raise

    def _values(self, number: int) -> list[torch.Tensor]:
        return [self._parameters[index].detach() for index in self._buckets[number].indices]

    def _pieces(
        self, number: int, flat: torch.Tensor
    ) -> Iterator[tuple[int, torch.Tensor, dict[str, torch.Tensor]]]:
        """Parameters of a bucket: index, values in the flat bucket, and states by name."""
        buckets, indices = self._engine.buckets, self._buckets[number].indices
        for index, piece in zip(indices, buckets.pieces(indices, flat), strict=True):
            arrays = buckets.residuals.arrays(index)[WORKER]
            yield index, piece, {name: as_torch(array) for name, array in arrays.items()}

    def _step_outer(self, piece: torch.Tensor, states: Mapping[str, torch.Tensor]) -> None:
        """Change parameters x to z: see [Note: local steps of gossip]."""
        if BEGIN in states:
            piece.copy_(torch.lerp(states[BEGIN], piece.float(), self._lr))
        if LAST in states:
            before = piece.float().clone()
            piece.add_(before - states[LAST], alpha=self._momentum)
            states[LAST].copy_(before)

    def _mix(self, number: int, flat: torch.Tensor) -> None:
        """Move a bucket's parameters, after all neighbours' payloads have come."""
        for index, piece, states in self._pieces(number, flat):
            piece.add_(self._correction(index, states))
            if BEGIN in states:
                states[BEGIN].copy_(piece)
        self._buckets[number].scatter(flat, self._values(number))

    def _correction(self, index: int, states: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """gamma (sum of w x_hat_j over neighbours j and oneself - x_hat), with equal weights w."""
        count, codec = len(self._copies), self._engine.plan.decisions[index].codec
        way = states[OWN] * -count
        for name in self._copies:
            way += states[name]
        return way.mul_(self._gammas[str(codec)] / (count + 1))


def check_copies(residuals: Residuals, coordinator: Coordinator) -> None:
    """Raise StateError, on all ranks, if a rank's copy of another's estimate is not what that rank
    has: after each loaded a state of its own."""
    digests: dict[str, hashlib._Hash] = {}
    for index in sorted(residuals.places):
        for name, array in residuals.arrays(index)[WORKER].items():
            digests.setdefault(name, hashlib.sha256()).update(array.tobytes())
    estimates_by_rank = coordinator.require_equal(
        {}, {name: hashed.hexdigest() for name, hashed in digests.items()}
    )
    for rank, estimates in enumerate(estimates_by_rank):
        for other, theirs in enumerate(estimates_by_rank):
            if estimates.get(copy_of(other), theirs.get(OWN)) != theirs.get(OWN):
                names = coordinator.ranks[rank], coordinator.ranks[other]
                raise StateError(
                    f"the states do not fit together: rank {names[0]}'s copy of rank {names[1]}'s "
                    f"parameters differs from the one that rank {names[1]} loaded; each rank must "
                    "load the state that it saved, all of the same step of one training"
                )
