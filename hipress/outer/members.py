"""Membership: the sites that take part in a round."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist

from hipress.errors import ConfigError, HipressError
from hipress.ranks import coordinator as coordinators
from hipress.ranks.coordinator import Coordinator


@runtime_checkable
class Members(Protocol):
    """The choice of sites. Every round begins with `meet` and ends with `commit`, at all its sites.

    A site whose `meet` returns sites that others do not know of would wait for them until the
    time-out; so an implementation must give the same answers to all, also where processes end.
    """

    changes: bool  # True if sites may come and go, and a round that fails is undone
    patience: float  # seconds to wait for a site in a round

    def meet(self, *, leaving: bool) -> Coordinator:
        """Wait for the others and return the coordinator of the round's sites: the one of the round
        before if its connections can be used on, that is if it had the same sites and committed.

        leaving: this site takes part for the last time. Raises HipressError.
        """
        ...

    def commit(self, error: HipressError | None) -> bool:
        """True at all sites if the round went well at all of them; else False at all.

        error: why it did not go well here. Raises it if sites do not change.
        """
        ...

    def fail(self, error: BaseException) -> None:
        """Tell the ranks that wait for this one, other than those of sites that change, by which
        error it ends."""
        ...

    def close(self) -> None:
        """Take part no more."""
        ...


class FixedMembers:
    """The ranks of a group, each of which is at another site, or holds another shard there. The
    loss of one ends the training of all."""

    changes = False

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        """group: of the ranks; timeout: seconds to wait for them."""
        self.patience = timeout
        self._coordinator = coordinators.coordinator(group, timeout)

    def meet(self, *, leaving: bool) -> Coordinator:
        """The coordinator of all ranks of the group."""
        return self._coordinator

    def commit(self, error: HipressError | None) -> bool:
        """Raise the error, if there is one, here and at all others."""
        if error is not None:
            raise error
        return True

    def fail(self, error: BaseException) -> None:
        """Tell all ranks of the group."""
        self._coordinator.fail(error)

    def close(self) -> None:
        """Do nothing: connections end with the sites."""


@contextmanager
def failures_told(members: Members) -> Iterator[None]:
    """Tell the other ranks of this site of any error inside."""
    try:
        yield
    except BaseException as error:
        members.fail(error)
        raise


def seconds(name: str, value: Any) -> float:
    """A time to wait, from a caller, in seconds. Raises ConfigError."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    wrong = isinstance(number, bool) or not isinstance(number, int | float)
    if wrong or not 0 < number < float("inf"):
        raise ConfigError(f"{name} is a positive number of seconds, or a timedelta, not {value!r}")
    return float(number)
