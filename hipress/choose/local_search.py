"""A local search for the ways of a model's gradients, by predicted steps.

[Note: search] A plan is judged by its predicted step (casync/predict/timeline.py), so a choice for
a tensor is judged together with the choices for all others: compressing a tensor whose transfer
ends behind the backward pass gains nothing. First each way (codec and strategy) is used for all
tensors. The best of these is then changed tensor by tensor, largest first, repeatedly until nothing
helps or BUDGET steps have been simulated. Tensors of equal length share a choice, except the
largest. At last the result is tried with neighbours in a bucket fused before compression: fewer
messages, coarser chunks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from casync.codec import Codec
from hipress.choose.objective import Objective, Predicted, Way, cuttable

__all__ = ["Choices", "LocalSearch"]

BUDGET = 100  # simulated steps
WORTH = 0.01  # least gain of a tensor's own choice, over the step; predictions err by more
WAYS = 6  # ways tried for a tensor: those that are fastest for all
CUTS = (2, 4)  # multiples of the usual partitions that are tried, too

Choices = tuple[Way | None, ...]  # by kind; None: no codec


class LocalSearch:
    """The best choices so far, and the predicted steps of all that were tried."""

    def __init__(
        self,
        objective: Objective,
        codecs: Mapping[str, Codec],
        suited: Sequence[Collection[str]],
        bound: Choices,
    ) -> None:
        """objective: of kinds with a choice, then of those without. codecs: by key, of both.
        suited: keys of the codecs among which to choose, by kind. bound: ways of the others."""
        self._objective, self._codecs, self._suited, self._bound = objective, codecs, suited, bound
        #: predicted steps, by choices
        self.known: dict[Choices, Predicted] = {}
        #: values of the steps with each way of a kind, the others as in `best`
        self.around: dict[int, dict[Way | None, float]] = {}
        #: choices that are faster with a group of NCCL for each turn of a phase, if any
        self.turning: Choices | None = None
        self.native: Choices = (None,) * len(suited) + bound
        self.best = self.native

    def everywhere(self, way: Way) -> Choices:
        """Choices with this way for all kinds that it suits."""
        return tuple(way if way.codec in keys else None for keys in self._suited) + self._bound

    def predict(self, choices: Choices) -> Predicted:
        """The predicted step with these choices."""
        if choices not in self.known:
            self.known[choices] = self._objective.step(choices)
        return self.known[choices]

    def weigh(self, choices: Choices) -> float:
        """The value to minimize: predicted seconds with a penalty, see Objective.weighed."""
        return self._objective.weighed(self.predict(choices), choices)

    def run(self, ways: Sequence[Way], *, fuses: bool, turns: bool) -> None:
        """Search from the best of the ways on; see [Note: search].

        fuses: True if neighbours may be fused; turns: if NCCL's groups may be for turns.
        """
        ordered = sorted(ways, key=lambda way: self.weigh(self.everywhere(way)))
        self.best = min((self.native, *self.known), key=self.weigh)
        while self._objective.steps < BUDGET and self._improve(ordered[:WAYS]):
            pass
        if fuses:
            self._fuse()
        if turns:
            self._turn()

    def _improve(self, ways: Sequence[Way]) -> bool:
        """Change the best choices kind by kind, within the budget; return True if any changed."""
        changed = False
        for kind in range(len(self._suited)):
            steps = {way: self.weigh(self._with(kind, way)) for way in self._options(kind, ways)}
            self.around[kind] = steps
            first = min(steps, key=lambda way: steps[way])
            if steps[first] < (1 - WORTH) * steps[self.best[kind]]:
                self.best, changed = self._with(kind, first), True
            if self._objective.steps >= BUDGET:
                break
        return changed

    def _options(self, kind: int, ways: Sequence[Way]) -> list[Way | None]:
        """Candidates for a kind: its present way, none, others, or the present with more cuts."""
        now = self.best[kind]
        options = [now, None, *(way for way in ways if way.codec in self._suited[kind])]
        if now is not None and cuttable(self._codecs[now.codec]):
            options += [replace(now, cut=cut) for cut in CUTS]
        return list(dict.fromkeys(options))

    def _with(self, kind: int, way: Way | None) -> Choices:
        return (*self.best[:kind], way, *self.best[kind + 1 :])

    def _fuse(self) -> None:
        """Fuse neighbours in the best choices, if that is faster. Not if it would change a codec's
        result for a tensor, nor with states, whose owners would depend on DDP's buckets."""
        codecs = [self._codecs[way.codec] for way in self.best if way is not None]
        if any(codec.states or not cuttable(codec) for codec in codecs):
            return
        fused = tuple(way and replace(way, fused=True, cut=1) for way in self.best)
        if self.weigh(fused) < (1 - WORTH) * self.weigh(self.best):
            self.best, self.around = fused, {}

    def _turn(self) -> None:
        """Use a group of NCCL for each turn of a phase, if that is faster."""
        predicted = self._objective.turning().step(self.best)
        if predicted.seconds < (1 - WORTH) * self.predict(self.best).seconds:
            self.known[self.best], self.turning = predicted, self.best
