"""Ranks compare their configurations before the first gradient moves, and hear of one another.

[Note: agreement]
Two ranks that run different codecs would read each other's bytes as nonsense, or wait for ever.
So at attach time each rank writes its configuration, as JSON, into the job's key-value store
(the one of `init_process_group`), and reads everybody else's. No process group is needed, which
is the point: a collective that one rank never joins cannot say who is missing; the store can.

[Note: stopping]
A rank that cannot go on writes why where all look as they wait: one whose set-up failed, that is
interrupted, that has waited in vain, or that found another's process ended (see
[Note: presence]). So all stop at once, and who comes later does not go on without it, and load a
state, say, that it has not loaded. The first reason counts: the others follow from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch.distributed as dist

from casync.errors import TransportError
from hipress import compat
from hipress.errors import AgreementTimeout, HipressError
from hipress.ranks.board import TELL_SECONDS, Board, Stop, backoff, unless_silent
from hipress.ranks.facts import compare
from hipress.ranks.store import call_store, run_in_thread

OWN = "own"  # what may differ between ranks
SKEW_SECONDS = 2.0  # seconds within which ranks that wait in vain, as long as each other, say so
LOOK_SECONDS = 0.2  # seconds between looks at the others, while a call waits for them
DONE_SECONDS = 1.0  # seconds in which a call ends that no longer needs a rank that has ended
T = TypeVar("T")


@dataclass(eq=False)
class Meeting:
    """Where the ranks of a group compare notes, any number of times."""

    board: Board
    timeout: float  # seconds
    round: int = 0  # of notes that are compared next

    @property
    def rank(self) -> int:
        """This rank within the group."""
        return self.board.rank

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global numbers, by rank within the group."""
        return self.board.ranks

    def of(self, some: Sequence[int]) -> Meeting:
        """Where some of these ranks, of which this is one, compare notes."""
        return Meeting(self.board.of(some), self.timeout)

    def settle(self, facts: Mapping[str, Any], own: Any = None) -> list[Any]:
        """Return when every rank posted equal facts; by rank, what each has of its `own`.

        Raises ConfigMismatch naming the first differing fact and both sides, AgreementTimeout
        naming the ranks that never arrived, or RankLost naming the one that ended.
        """
        round_, deadline = self.round, time.monotonic() + self.timeout
        self.round += 1
        try:
            self.board.post(round_, self.rank, {**facts, OWN: own}, deadline)
            posted = self._collect(round_, deadline)
        except HipressError:
            raise
        except BaseException as error:
            self.board.stop(round_, Stop.of(error, self.board.here))
            raise
        owned = [each.pop(OWN) for each in posted]
        compare(posted, self.ranks)
        return owned

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on; they raise as they arrive.

        Where they cannot be told, that is logged: `error` is what matters.
        """
        self.board.stop(self.round, Stop.of(error, self.board.here))
        self.round += 1

    @contextmanager
    def failures_told(self) -> Iterator[None]:
        """What fails inside, between rounds, or is interrupted, the others learn at once."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def attend(self, call: Callable[[], T], what: str) -> T:
        """What a call returns that waits for the other ranks, as each makes it.

        It runs in a thread of its own, so that this rank may be interrupted. Raises HipressError
        for a RuntimeError of the call; AgreementTimeout after the time-out; and as soon as another
        rank cannot go on, why.
        """
        deadline = time.monotonic() + self.timeout - self._skew
        outcome = run_in_thread(call)
        lost: dict[int, float] = {}  # ranks that have ended, and since when that is known
        while True:
            left = max(0.0, min(LOOK_SECONDS, deadline - time.monotonic()))
            if wait([outcome], left).done:
                return self._result(outcome, what)
            now = time.monotonic()
            self._raise(self._look(self.round, (), deadline)[1])
            lost = {rank: lost.get(rank, now) for rank in self.board.ended()}
            if lost and now - min(lost.values()) > DONE_SECONDS:
                self._stop(self.round, self.board.lost([*lost]))
            if now > deadline:
                message = f"rank {self.board.here}: {what} took longer than {self.timeout:g} s"
                raise AgreementTimeout(self._joined(message, what))

    def _result(self, outcome: Future[T], what: str) -> T:
        try:
            return outcome.result()
        except (RuntimeError, TransportError) as error:  # of gloo
            self.raise_reason(error)
            message = f"rank {self.board.here}: {what} failed: {error}"
            raise HipressError(self._joined(message, what)) from error

    def raise_reason(self, error: Exception) -> None:
        """Raise RankLost, or what another rank stopped by, where `error` follows from that."""
        reason = self.reason()
        if reason is not None:
            self.board.stop(self.round, reason)
        self._raise(reason, error)

    def named(self, error: Exception, what: str) -> Exception:
        """An error with what is known of other ranks that are to blame for it, as `explained`."""
        if not isinstance(error, TransportError):
            return error
        return type(error)(self.explained(error, what))

    def explained(self, error: Exception, what: str) -> str:
        """What an error says that came as a connection broke, or a rank was waited for in vain, in
        `what`; and before that why, as far as the others tell or can be seen."""
        return "\n".join(each for each in (self.cause(what), str(error)) if each)

    def cause(self, what: str) -> str:
        """A sentence on ranks because of which this one waited in vain; "" if nothing is known."""
        since = time.monotonic()
        self.tell(what)
        reason = self.reason()
        if reason is None:
            return self._silence(what, since)
        self.board.stop(self.round, reason)
        return reason.told(f" during {what}")

    def gone(self) -> Stop | None:
        """Why another rank takes no part any more, as far as is known now: what one has told, or
        whose process has ended. Asks no store, and waits for nothing."""
        ended = self.board.ended()  # asked first: what those have told has been heard then
        stop = self.board.heard(self.round, ())[1]
        return stop or (self.board.lost(ended) if ended else None)

    def reason(self) -> Stop | None:
        """Why a connection to another rank may have ended, as soon as that is known."""
        deadline = time.monotonic() + DONE_SECONDS
        for pause in backoff():
            reason = self.gone() or self.board.known(self.round, (), deadline)[1]
            if reason is not None or time.monotonic() > deadline:
                break
            time.sleep(pause)
        return reason

    def _look(
        self, round_: int | str, missing: Sequence[int], deadline: float
    ) -> tuple[dict[int, dict[str, Any]], Stop | None]:
        """See Board. Where the store does not answer as a rank has ended, that is the reason."""
        try:
            return self.board.look(round_, missing, deadline)
        except HipressError as error:
            self.raise_reason(error)
            raise

    def tell(self, what: str) -> None:
        """Say that this rank waits for `what` no longer, for those that ask who is silent."""
        self.board.tell(_over_key(what), {})

    def wait_for_all(self, what: str) -> None:
        """Return when every rank says that it waits for `what` no longer. Raises what `attend`
        does."""
        deadline, missing = time.monotonic() + self.timeout, self.board.others
        self.tell(what)
        for pause in backoff():
            ended = self.board.ended()
            stop = self._look(self.round, (), deadline)[1]  # first: who went on may stop later
            arrived, _ = self._look(_over_key(what), missing, deadline)
            missing = [rank for rank in missing if rank not in arrived]
            if not missing:
                return
            self._raise(stop)
            lost = [rank for rank in missing if rank in ended]
            if lost:
                self._stop(self.round, self.board.lost(lost))
            if time.monotonic() > deadline:
                names = ", ".join(str(self.ranks[rank]) for rank in missing)
                message = f"rank {self.board.here}: no word from rank {names} during {what}"
                raise AgreementTimeout(message)
            time.sleep(pause)

    def silent(self, what: str, since: float | None = None) -> list[int]:
        """Ranks that do not say, when this one does, that they wait for `what` no longer. since:
        when this one did, if it has."""
        key = _over_key(what)
        if since is None:
            since = time.monotonic()
            self.tell(what)
        deadline, missing = since + self._skew, self.board.others
        for pause in backoff():
            arrived, _ = self.board.known(key, missing, deadline)
            missing = [rank for rank in missing if rank not in arrived]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(pause)
        return [self.ranks[rank] for rank in missing]

    def _joined(self, message: str, what: str) -> str:
        return "\n".join(each for each in (self._silence(what), message) if each)

    def _silence(self, what: str, since: float | None = None) -> str:
        """A sentence on ranks that may be why this one, and others with it, waited in vain."""
        names = ", ".join(map(str, self.silent(what, since)))
        if not names:
            return ""
        return f"no word from rank {names} during {what}: stopped, cut off or ended"

    @property
    def _skew(self) -> float:
        """Of the time-out, what is left to ask who is silent."""
        return min(SKEW_SECONDS, self.timeout / 2)

    def _raise(self, stop: Stop | None, cause: Exception | None = None) -> None:
        if stop is not None:
            raise stop.error(self.board.here) from cause

    def _stop(self, round_: int, stop: Stop) -> NoReturn:
        """Stop by what this rank saw first."""
        self.board.stop(round_, stop)
        raise stop.error(self.board.here)

    def _collect(self, round_: int, deadline: float) -> list[dict[str, Any]]:
        """Everybody's facts; polls, because a store's own wait does not say who is missing."""
        missing = list(range(len(self.ranks)))
        found: dict[int, dict[str, Any]] = {}
        for pause in backoff():
            ended = self.board.ended()  # asked first: all that those have posted can be seen then
            arrived, stop = self._look(round_, missing, deadline)
            found |= arrived
            missing = [rank for rank in missing if rank not in found]
            self._raise(stop)
            if not missing:
                break
            lost = [rank for rank in missing if rank in ended]
            if lost:
                self._stop(round_, self.board.lost(lost))
            if time.monotonic() > deadline:
                error = AgreementTimeout(self._absent(missing))
                self.board.stop(round_, Stop.of(error, self.board.here))
                raise error
            time.sleep(pause)
        return [found[rank] for rank in range(len(self.ranks))]

    def _absent(self, missing: Sequence[int]) -> str:
        names = ", ".join(str(self.ranks[rank]) for rank in missing)
        came = all(rank in self.board.present for rank in missing)
        hint = " It has come, and did not go on: it may be stopped, or cut off." if came else ""
        return (
            f"rank {self.board.here} waited {self.timeout:g} s for rank {names} of "
            f"{len(self.ranks)}.{hint} Every rank must call hipress.wrap, attach and "
            "load_state_dict, the same number of times and in the same order."
        )


def meeting(group: dist.ProcessGroup, timeout: float) -> Meeting:
    """The next meeting of this group's ranks; each rank counts its meetings in the store."""
    ranks = tuple(dist.get_process_group_ranks(group))
    rank = dist.get_rank(group)
    place = ",".join(map(str, ranks))
    store = compat.job_store()
    key = f"hipress/{place}/meetings/{rank}"
    round_ = call_store(store, lambda it: it.add(key, 1), time.monotonic() + timeout, ranks[rank])
    board = Board(store, rank, ranks, f"{place}/{round_}")
    board.announce(time.monotonic() + timeout)
    return Meeting(board, timeout)


@contextmanager
def failures_told(group: dist.ProcessGroup) -> Iterator[None]:
    """What fails inside, before this rank's meeting, the others learn at theirs."""
    try:
        yield
    except BaseException as error:
        with unless_silent():
            meeting(group, TELL_SECONDS).fail(error)
        raise


def _over_key(what: str) -> str:
    """Whose keys are apart from those of gloo, which has its own below `what`."""
    return f"{what} is over"
