"""Rounds: the average of one fragment's pseudo-gradient over the sites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch.futures import Future

from hipress.errors import HipressError
from hipress.outer.fragments import Fragment
from hipress.outer.schedule import Schedule
from hipress.outer.sites import Copies, Sites, bytes_of


@dataclass
class Round:
    """A fragment's pseudo-gradient on its way.

    [Note: undo] Until `commit` nothing that lasts has changed but the states of codecs, which take
    up what an encode leaves out. `undo` puts back copies of these, made before the first encode.
    Weights, agreed weights and momentum change in `commit` alone, and what the fragment has
    not delivered is cleared there. So after `undo` all is as before, bit for bit, and the next
    round has it.
    """

    number: int  # from 0 on
    fragment: Fragment
    sites: Sites
    schedule: Schedule
    #: flat pseudo-gradient of this site until `wait` returns, then the average
    values: torch.Tensor
    sent: torch.Tensor | None  # the weights of then, where the way since then is kept
    before: Copies = field(default_factory=list)  # states, if the round may be undone
    counted: Sequence[int] = ()  # ranks of the sites that have a pseudo-gradient
    scale: float = 1.0  # of the average
    futures: list[Future[torch.Tensor]] = field(default_factory=list)
    error: HipressError | None = None  # of the start

    @classmethod
    def of(
        cls,
        number: int,
        fragment: Fragment,
        sites: Sites,
        schedule: Schedule,
        counted: Sequence[int],
    ) -> Round:
        """A round that has not started. counted: ranks of the sites that have a pseudo-gradient.
        Newcomers have none yet: they send zeros, which count neither in the average nor in the
        median of norms."""
        keeps = schedule.delay > 0 and schedule.mix is None
        sent = fragment.weights() if keeps else None
        values = fragment.change()
        if fragment.undelivered is not None:
            values += fragment.undelivered
        before = sites.copy(fragment.bundles) if sites.changes else []
        scale = sites.count / len(counted)
        return cls(number, fragment, sites, schedule, values, sent, before, counted, scale)

    def start(self) -> None:
        """Send. Errors are raised by `wait`, which may undo the round."""
        try:
            with self.sites.failures.scope(self.number):
                if self.schedule.clip == "median":
                    self._clip()
                for bundle in self.fragment.bundles:
                    future = self.sites.submit(bundle, self.values[bundle.part])
                    if future is not None:
                        self.futures.append(future)
        except HipressError as error:
            self.error = error

    def wait(self) -> None:
        """Wait for the average. Raises the first failure, which names rank, peer and task."""
        if self.error is not None:
            raise self.error
        for future in self.futures:
            self.sites.wait(future, self.number)
        self.futures = []
        if self.scale != 1:
            self.values *= self.scale
            self.scale = 1.0

    def commit(self, seed: int) -> None:
        """Take over the average. seed: of roundings, the same at all sites."""
        self.fragment.undelivered = None
        self.fragment.advance(self.values, self.schedule.outer, seed)
        self.fragment.move(self.sent, self.schedule.mix)

    def undo(self) -> None:
        """Go back to the begin: see [Note: undo]."""
        self.sites.put_back(self.before)

    @property
    def held_bytes(self) -> int:
        """Bytes that this holds while it is under way."""
        return (
            bytes_of(self.before)
            + self.values.nbytes
            + (0 if self.sent is None else self.sent.nbytes)
        )

    def _clip(self) -> None:
        """Shorten a pseudo-gradient that is longer than the sites' median."""
        norm = float(torch.linalg.vector_norm(self.values, dtype=torch.float64))
        median = self.sites.median_norm(norm, self.counted)
        if norm > median:
            self.values *= median / norm
