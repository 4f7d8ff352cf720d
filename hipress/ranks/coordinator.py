"""Meetings: ranks compare their configurations before the first gradient, and report failures.

[Note: agreement] Two ranks with different codecs would misread each other's bytes, or wait for
ever. So at attach time each rank writes its configuration, as JSON, into the job's key-value store
(the one of `init_process_group`), and reads those of all others. This needs no process group: a
collective that one rank never joins cannot say who is missing; the store can.

[Note: stopping] A rank that cannot go on posts the reason in the store, where all ranks look as
they wait: its set-up failed, it was interrupted, it waited in vain, or it found that another
process had ended (see [Note: presence] in epoch.py). So all stop at once, and a late rank does not
go on without it: it does not load a state, for example, that the first has not loaded. The first
reason counts; others follow from it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from casync.errors import CasyncError, TransportError
from hipress import compat
from hipress.compat import Store
from hipress.errors import AgreementTimeout, ConfigMismatch, HipressError, RankLost, of_casync
from hipress.ranks.epoch import epoch_of
from hipress.ranks.mailbox import TELL_SECONDS, StoreMailbox, backoff, unless_silent
from hipress.ranks.stop import Stop
from hipress.ranks.store import run_in_thread


def compare(posted: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> None:
    """Raise ConfigMismatch for the first fact on which a rank differs from the group's first."""
    for other in range(1, len(posted)):
        for key in sorted({*posted[0], *posted[other]}, key=_order):
            left, right = posted[0].get(key), posted[other].get(key)
            if key == "digests":
                sides = left or {}, right or {}
                # names and paths of specs may differ between ranks
                if sorted(sides[0].values()) != sorted(sides[1].values()):
                    raise ConfigMismatch(_other_text(*sides, ranks[0], ranks[other]))
            elif left != right:
                what, mine, yours = _narrow(key, left, right)
                raise ConfigMismatch(
                    f"ranks disagree on {what}: rank {ranks[0]}: {mine}, "
                    f"rank {ranks[other]}: {yours}"
                )


def _other_text(left: Mapping[str, str], right: Mapping[str, str], one: int, other: int) -> str:
    """Message for a codec whose text or parameters differ between two ranks."""
    name = min(n for n in {*left, *right} if left.get(n) != right.get(n))
    digests = " and ".join(str(side.get(name, "none"))[:12] for side in (left, right))
    return (
        f"{name} differs between ranks {one} and {other} (digests {digests}); "
        "give every rank the same text and parameters"
    )


def _order(key: str) -> tuple[bool, bool, str]:
    """Sort key: the codec, which readers recognize best; then options, digests and the plan."""
    return (key != "compressor", key in ("digests", "plan"), key)


def _narrow(key: str, left: Any, right: Any) -> tuple[str, str, str]:
    """Name and both values of a difference; of two lists only the first entry that differs."""
    if not (isinstance(left, list) and isinstance(right, list)):
        return key, str(left), str(right)
    for index, (mine, yours) in enumerate(itertools.zip_longest(left, right)):
        if mine != yours:
            absent = "nothing"
            return f"{key}, entry {index}", str(mine or absent), str(yours or absent)
    return key, str(left), str(right)


OWN = "own"  # key of values that may differ between ranks
SKEW_SECONDS = 2.0  # seconds within which all ranks that wait in vain post that
LOOK_SECONDS = 0.2  # seconds between looks at the others while a call waits
DONE_SECONDS = 1.0  # seconds left to a call after a rank has ended
T = TypeVar("T")


@dataclass(eq=False)
class Coordinator:
    """The place where the ranks of a group compare facts, in any number of rounds."""

    mailbox: StoreMailbox
    timeout: float  # seconds
    round: int = 0  # number of the next comparison

    @classmethod
    def on(
        cls, store: Store, rank: int, ranks: Sequence[int], name: str, timeout: float
    ) -> Coordinator:
        """A coordinator of these ranks, which meet in a store.

        rank: this rank's number within the group. ranks: all ranks of it, by numbers that are
        unique among those that use the store. name: of the group; each of its ranks must make as
        many coordinators by that name. Raises AgreementTimeout or HipressError if the store does
        not answer or fails.
        """
        epoch = epoch_of(store, ranks[rank])
        epoch.meetings[name] += 1  # first: the others count this one, too, if joining fails
        epoch.join(store, time.monotonic() + timeout)
        place = f"{name}/{epoch.meetings[name]}"
        return cls(StoreMailbox(epoch, rank, tuple(ranks), place), timeout)

    @property
    def rank(self) -> int:
        """Number of this rank within the group."""
        return self.mailbox.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global rank numbers, by rank within the group."""
        return self.mailbox.ranks

    def of(self, some: Sequence[int]) -> Coordinator:
        """The coordinator of a subset of these ranks, which must include this one."""
        return Coordinator(self.mailbox.of(some), self.timeout)

    def require_equal(self, facts: Mapping[str, Any], own: Any = None, what: str = "") -> list[Any]:
        """Wait until every rank has posted equal facts; return each rank's `own`, by rank. what:
        the purpose, for errors, such as "to exchange 'x'".

        Raises ConfigMismatch naming the first differing fact and both sides, AgreementTimeout
        naming the ranks that never arrived, or RankLost naming the one that ended.
        """
        round_, deadline = self.round, time.monotonic() + self.timeout
        try:
            with self._store_errors_told():
                self.mailbox.post(round_, self.rank, {**facts, OWN: own}, deadline)
            posted = self._collect(round_, deadline, what)
        except HipressError:
            raise
        except BaseException as error:
            self.mailbox.stop(round_, Stop.of(error, self.mailbox.here))
            raise
        finally:
            self.round += 1
        with self.failures_told():  # all have posted this round: all have read the one before
            self.mailbox.forget(round_ - 1)
        owned = [each.pop(OWN) for each in posted]
        compare(posted, self.ranks)
        return owned

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on; they raise when they arrive.

        Logs a failure to tell them: `error` is the one that matters.
        """
        lost = self.mailbox.epoch.lost if compat.is_collective(error) else None
        self.mailbox.stop(self.round, lost or Stop.of(error, self.mailbox.here))
        self.round += 1

    @contextmanager
    def failures_told(self) -> Iterator[None]:
        """Tell the others at once of any error or interrupt inside, between two rounds."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def run_watched(
        self, call: Callable[[], T], what: str, give_up: Callable[[], None] = lambda: None
    ) -> T:
        """Return the result of a call that waits for the other ranks; each of them makes it.

        The call runs in a thread of its own, so that this rank may be interrupted. Raises
        HipressError for a RuntimeError of the call, AgreementTimeout after the time-out, and
        another rank's stop as soon as that rank cannot go on.

        give_up: ends the call, for which nobody waits any more.
        """
        outcome = run_in_thread(call)
        try:
            return self._wait_watched(outcome, what)
        finally:
            if not outcome.done():
                give_up()

    def _wait_watched(self, outcome: Future[T], what: str) -> T:
        deadline = time.monotonic() + self.timeout - self._skew
        lost: dict[int, float] = {}  # time at which each ended rank was found
        while True:
            left = max(0.0, min(LOOK_SECONDS, deadline - time.monotonic()))
            if wait([outcome], left).done:
                result = self._result(outcome, what)
                self.mailbox.finish()
                return result
            now = time.monotonic()
            self._raise(self._look(self.round, (), deadline)[1])
            lost = {rank: lost.get(rank, now) for rank in self.mailbox.missed()}
            if lost and now - min(lost.values()) > DONE_SECONDS:
                self._stop(self.round, self.mailbox.lost([*lost]))
            if now > deadline:
                message = f"rank {self.mailbox.here}: {what} took longer than {self.timeout:g} s"
                raise AgreementTimeout(self._joined(message, what))

    def _result(self, outcome: Future[T], what: str) -> T:
        try:
            return outcome.result()
        except (RuntimeError, TransportError) as error:  # of gloo
            self.raise_reason(error)
            message = f"rank {self.mailbox.here}: {what} failed: {error}"
            raise HipressError(self._joined(message, what)) from error

    def raise_reason(self, error: Exception) -> None:
        """Raise RankLost, or another rank's stop, if `error` follows from that."""
        reason = self.reason()
        if reason is not None:
            self.mailbox.stop(self.round, reason)
        self._raise(reason, error)

    def named(self, error: Exception, what: str) -> Exception:
        """An error of casync as one of hipress, a transport's with the text of `explained`; any
        other error as it is."""
        if not isinstance(error, CasyncError):
            return error
        broken = isinstance(error, TransportError)
        return of_casync(error, self.explained(error, what) if broken else str(error))

    def explained(self, error: Exception, what: str) -> str:
        """The text of an error that came when a connection broke or a rank timed out during `what`,
        preceded by the cause, as far as other ranks or their processes tell it."""
        return "\n".join(each for each in (self.cause(what), str(error)) if each)

    def cause(self, what: str, since: float | None = None) -> str:
        """A sentence on the ranks for which this one waited in vain; "" if nothing is known.
        since: time at which this one posted that it waits no longer, if it has."""
        if since is None:
            since = time.monotonic()
            self.tell(what)
        reason = self.reason(since)
        if reason is None:
            return self._silence(what, since)
        self.mailbox.stop(self.round, reason)
        return reason.told(f" during {what}")

    def gone(self) -> Stop | None:
        """The reason why another rank takes no part any more, as known now: its stop, or the end of
        its process before it had finished what this rank waits for. Asks no store and does not
        wait."""
        ended = self.mailbox.missed()  # first: notes of ended ranks have been heard then
        stop = self.mailbox.heard(self.round, ())[1]
        if stop is None and ended:  # one that was a round ahead may have told why
            stop = self.mailbox.heard(self.round + 1, ())[1] or self.mailbox.lost(ended)
        return stop

    def reason(self, since: float | None = None) -> Stop | None:
        """Cause of a broken connection to another rank, or None DONE_SECONDS after it was found
        broken, at time `since` or now; but looks about for a moment in any case."""
        now = time.monotonic()
        deadline = max(now + LOOK_SECONDS, (now if since is None else since) + DONE_SECONDS)
        for pause in backoff():
            reason = self.gone() or self.mailbox.known(self.round, (), deadline)[1]
            if reason is not None or time.monotonic() > deadline:
                break
            time.sleep(pause)
        return reason

    def _look(
        self, round_: int | str, ranks: Sequence[int], deadline: float, *, some: bool = True
    ) -> tuple[dict[int, dict[str, Any]], Stop | None]:
        """StoreMailbox.look."""
        with self._store_errors_told():
            return self.mailbox.look(round_, ranks, deadline, some=some)

    @contextmanager
    def _store_errors_told(self) -> Iterator[None]:
        """Raise the end of a rank in place of the store's errors, if that is why it is silent; else
        tell the others, who would see only that this rank ends."""
        try:
            yield
        except HipressError as error:
            try:
                self.raise_reason(error)
            except RankLost as lost:
                if isinstance(error, AgreementTimeout):
                    lost.add_note(str(error))  # that rank may have ended since the store is silent
                raise
            self.mailbox.stop(self.round, Stop.of(error, self.mailbox.here))
            raise

    def tell(self, what: str) -> None:
        """Post that this rank no longer waits for `what`, for ranks that ask who is silent."""
        self.mailbox.tell(_over_key(what), {})

    def wait_for_all(self, what: str) -> None:
        """Wait until no rank waits for `what` any more. Raises the errors of `run_watched`."""
        deadline, others = time.monotonic() + self.timeout, self.mailbox.others
        self.tell(what)
        for pause in backoff():
            ended, late = self.mailbox.ended(), time.monotonic() > deadline
            stop = self._look(self.round, (), deadline)[1]  # first: arrived ranks may stop later
            key, some = _over_key(what), late or bool(ended)
            arrived, _ = self._look(key, others, deadline, some=some)
            missing = [rank for rank in others if rank not in arrived]
            if not missing:
                return
            self._raise(stop)
            lost = [rank for rank in missing if rank in ended]
            if lost:
                self._stop(self.round, self.mailbox.lost(lost))
            if late:
                names = ", ".join(str(self.ranks[rank]) for rank in missing)
                message = f"rank {self.mailbox.here}: no word from rank {names} during {what}"
                raise AgreementTimeout(message)
            time.sleep(pause)

    def silent(self, what: str, since: float | None = None) -> list[int]:
        """Global numbers of the ranks that do not post, when this one does, that they no longer
        wait for `what`. since: time at which this one posted, if it has."""
        key = _over_key(what)
        if since is None:
            since = time.monotonic()
            self.tell(what)
        deadline, missing = since + self._skew, self.mailbox.others
        for pause in backoff():
            arrived, _ = self.mailbox.known(key, missing, deadline)
            missing = [rank for rank in missing if rank not in arrived]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(pause)
        return [self.ranks[rank] for rank in missing]

    def _joined(self, message: str, what: str) -> str:
        return "\n".join(each for each in (self._silence(what), message) if each)

    def _silence(self, what: str, since: float | None = None) -> str:
        """A sentence on the ranks that may be why this one waited in vain; "" if there are none."""
        names = ", ".join(map(str, self.silent(what, since)))
        if not names:
            return ""
        return f"no word from rank {names} during {what}: stopped, cut off or ended"

    @property
    def _skew(self) -> float:
        """Seconds of the time-out that are left to ask who is silent."""
        return min(SKEW_SECONDS, self.timeout / 2)

    def _raise(self, stop: Stop | None, cause: Exception | None = None) -> None:
        if stop is not None:
            raise stop.error(self.mailbox.here) from cause

    def _stop(self, round_: int, stop: Stop) -> NoReturn:
        """Post and raise the stop that this rank saw first."""
        self.mailbox.stop(round_, stop)
        raise stop.error(self.mailbox.here)

    def _collect(self, round_: int, deadline: float, what: str) -> list[dict[str, Any]]:
        """The facts of all ranks, by polling: see [Note: polling] in store.py."""
        everyone = range(len(self.ranks))
        for pause in backoff():
            # ended ranks first: all their posts can be seen then
            ended, late = self.mailbox.ended(), time.monotonic() > deadline
            some = late or bool(ended)
            posted, stop = self._look(round_, everyone, deadline, some=some)
            missing = [rank for rank in everyone if rank not in posted]
            self._raise(stop)
            if not missing:
                break
            lost = [rank for rank in missing if rank in ended]
            if lost:
                self._stop(round_, self.mailbox.lost(lost))
            if late:
                error = AgreementTimeout(self._absent(missing, what))
                self.mailbox.stop(round_, Stop.of(error, self.mailbox.here))
                raise error
            time.sleep(pause)
        return [posted[rank] for rank in everyone]

    def _absent(self, missing: Sequence[int], what: str) -> str:
        names = ", ".join(str(self.ranks[rank]) for rank in missing)
        came = all(map(self.mailbox.came, missing))
        hint = " It has come before: now it makes another call, or it stands still." if came else ""
        purpose = f" {what}" if what else ""
        return (
            f"rank {self.mailbox.here} waited {self.timeout:g} s for rank {names} of "
            f"{len(self.ranks)}{purpose}.{hint} Every rank must call the same functions of hipress "
            "(wrap, shard, Outer, load_state_dict and so on), as often and in the same order."
        )


def coordinator(group: dist.ProcessGroup, timeout: float) -> Coordinator:
    """A coordinator of this group, in the job's store. Groups of equal ranks may meet in several
    threads at once, so the place has the group's name, too."""
    ranks = dist.get_process_group_ranks(group)
    name = f"{','.join(map(str, ranks))} of group {compat.group_name(group)}"
    return Coordinator.on(compat.job_store(), dist.get_rank(group), ranks, name, timeout)


@contextmanager
def failures_told(group: dist.ProcessGroup) -> Iterator[None]:
    """Tell the others, at their coordinator, of any error inside, before this rank has one."""
    try:
        yield
    except BaseException as error:
        with unless_silent():
            coordinator(group, TELL_SECONDS).fail(error)
        raise


def _over_key(what: str) -> str:
    """Key of the notes that ranks no longer wait; gloo has its own keys, below `what`."""
    return f"{what} is over"
