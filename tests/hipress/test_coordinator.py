"""The job's store: one that answers, one whose host is stopped, and one that fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from hipress import compat
from hipress.errors import AgreementTimeout, ConfigError, HipressError, RankLost
from hipress.ranks import coordinator as coordinators
from hipress.ranks import job
from hipress.ranks import mailbox as boards
from hipress.ranks import store as stores
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.stop import Stop
from tests.hipress.launch import CONTEXT
from tests.patience import HANG

SILENT = "the job's store at 127.0.0.1:{port}, which does not answer"
EXIT = """
import sys, torch.distributed as dist
from hipress.ranks import coordinator as coordinators, store as stores
stores.MIN_CALL_SECONDS = 0.1
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), wait_for_workers=False)
print("connected", flush=True)
sys.stdin.readline()
try:
    coordinators.Coordinator.on(store, 0, (0, 1), "exit", 0.1).require_equal({})
except coordinators.AgreementTimeout as error:
    print(error, flush=True)
"""


class Broken(dist.Store):
    """A store whose connection is lost."""

    def clone(self):
        raise dist.DistNetworkError("Broken pipe")


def _keep(pipe):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    time.sleep(3600)


@pytest.fixture(autouse=True)
def place(monkeypatch):
    """This process is rank 1 of 3; time-outs are short."""
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1, 2])
    monkeypatch.setattr(dist, "get_rank", lambda _=None: 1)
    monkeypatch.setattr(stores, "MIN_CALL_SECONDS", 0.1)
    monkeypatch.setattr(stores, "MOMENT", 0.1)
    monkeypatch.setattr(boards, "TELL_SECONDS", 0.2)
    monkeypatch.setattr(coordinators, "TELL_SECONDS", 0.2)


@pytest.fixture
def host():
    """A process that keeps a store, and its port."""
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_keep, args=(there,), daemon=True)
    process.start()
    try:
        yield process.pid, here.recv()
    finally:
        process.kill()
        process.join()


@pytest.fixture
def client(host, monkeypatch):
    """The job's store, as torch has it: with a prefix."""
    store = dist.PrefixStore(
        "default_pg", dist.TCPStore("127.0.0.1", host[1], wait_for_workers=False)
    )
    monkeypatch.setattr(compat, "job_store", lambda: store)
    return store


def state(task):
    return (task / "stat").read_text().rpartition(") ")[2][0]


@contextmanager
def stopped(pid):
    """All threads of the process, also the one that answers."""
    os.kill(pid, signal.SIGSTOP)
    while any(state(task) != "T" for task in Path(f"/proc/{pid}/task").iterdir()):
        os.sched_yield()
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_for_answer(store):
    ((outcome, _),) = stores._UNANSWERED[compat.store_address(store)]
    wait([outcome], HANG)


def test_a_stopped_host_before_the_meeting(host, client):
    pid, port = host
    with stopped(pid):
        with pytest.raises(AgreementTimeout, match=r"rank 1 waited 0\.\d+ s for") as error:
            coordinators.coordinator(None, 0.1)
        assert SILENT.format(port=port) in str(error.value)
        with pytest.raises(AgreementTimeout, match="for an earlier answer of the job's store"):
            coordinators.coordinator(None, 0.1)
    wait_for_answer(client)
    name = coordinators.coordinator(None, HANG).mailbox.name
    assert name == "0,1,2 of group None/3"  # the others count each attempt, too


def test_each_call_without_an_answer_is_waited_for(monkeypatch):
    """Two threads wait for one store; the one that gives up last gets its answer first."""
    store, answers = dist.HashStore(), [threading.Event(), threading.Event()]

    def asks(number):
        end = time.monotonic() + number
        with pytest.raises(AgreementTimeout):
            stores.call_store(store, lambda _: answers[number].wait(HANG), end, number)

    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(asks, range(2)))
        answers[1].set()
        with pytest.raises(AgreementTimeout, match="for an earlier answer of"):
            stores.call_store(store, lambda _: True, time.monotonic(), 2)
    finally:
        for each in answers:
            each.set()
    assert stores.call_store(store, lambda _: True, time.monotonic() + HANG, 2)


def test_a_stopped_host_during_the_meeting(host, client):
    coordinator = coordinators.coordinator(None, 0.1)
    with stopped(host[0]), pytest.raises(AgreementTimeout, match="which does not answer"):
        coordinator.require_equal({})


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_store_that_ends_after_the_meeting_hides_no_failure(host, client, ahead):
    """A rank reads who has come as it meets the others, not only when it first looks for notes."""
    pid, port = host
    another = dist.PrefixStore("default_pg", dist.TCPStore("127.0.0.1", port))
    other = Coordinator.on(another, 1, (1, 2), "meeting", HANG)
    mine = Coordinator.on(client, 0, (1, 2), "meeting", HANG)
    while not mine.mailbox.ended() and not mine.mailbox.epoch._watched[2]._answered:
        os.sched_yield()
    other.round += ahead
    other.fail(ValueError("theirs"))
    other.mailbox.epoch._door.close()  # as its process ends
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(HipressError, match="rank 2 failed: ValueError: theirs"):
        mine.require_equal({})


def test_a_silent_store_is_named_beside_a_rank_that_ended(host, client, monkeypatch):
    """The rank may have ended since the store is silent, and not have been heard."""
    coordinator = coordinators.coordinator(None, 0.1)
    ended = Stop("RankLost", "rank 2 ended", ended=True)
    monkeypatch.setattr(coordinator, "reason", lambda since=None: ended)
    with stopped(host[0]), pytest.raises(RankLost, match="because rank 2 ended") as caught:
        coordinator.require_equal({})
    assert "which does not answer" in caught.value.__notes__[-1]


def test_a_failure_is_told_as_it_is_where_the_store_is_silent(host, client, caplog):
    coordinator = coordinators.coordinator(None, HANG)
    with stopped(host[0]):
        with pytest.raises(ConfigError, match="mine"), coordinators.failures_told(None):
            raise ConfigError("mine")
        coordinator.fail(ConfigError("mine"))
    assert caplog.text.count("could not be told") == 2


@pytest.mark.slow
def test_a_silent_host_is_waited_for_once(host, client, monkeypatch):
    """Calls on other connections to it fail at once, where they have little time."""
    other = compat.another_client(client)
    coordinator = Coordinator.on(client, 1, (0, 1, 2), "once", HANG)
    with stopped(host[0]):
        since = time.monotonic()
        with pytest.raises(AgreementTimeout, match=r"waited 0\.\d+ s for"):
            stores.call_store(client, lambda it: it.add("a", 1), since, 1)
        monkeypatch.setattr(stores, "MIN_CALL_SECONDS", HANG)
        with pytest.raises(AgreementTimeout, match=r"waited 0\.\d+ s for an earlier answer"):
            stores.call_store(other, lambda it: it.add("a", 1), since + HANG, 1)
        told = coordinator.cause("a step", since)
        assert told == "no word from rank 0, 2 during a step: stopped, cut off or ended"
    wait_for_answer(client)
    assert stores.call_store(other, lambda it: it.add("a", 1), since + HANG, 1) == 2


def test_a_call_waits_for_an_earlier_answer_of_a_slow_host(host, client):
    """It once failed at once, and ended a site of an outer loop whose store was slow."""
    other = compat.another_client(client)
    with stopped(host[0]):
        with pytest.raises(AgreementTimeout):
            stores.call_store(client, lambda it: it.add("a", 1), time.monotonic(), 1)
        with ThreadPoolExecutor(1) as pool:
            end = time.monotonic() + HANG
            later = pool.submit(stores.call_store, other, lambda it: it.add("a", 1), end, 1)
            assert wait([later], 0.3).not_done
            os.kill(host[0], signal.SIGCONT)
            assert later.result(HANG) == 2


def test_a_time_in_which_this_process_is_stopped_counts_as_a_moment(monkeypatch):
    waited, outcome = [], Future()

    def record(futures, seconds):
        waited.append(seconds)
        return wait(futures, 0)

    monkeypatch.setattr(stores, "wait", record)
    monkeypatch.setattr(stores, "MOMENT", 0.5)
    assert not stores._ends(outcome, 5.25)
    assert sum(waited) == pytest.approx(5.75)
    assert max(waited) == 0.5
    outcome.set_result(None)
    assert stores._ends(outcome, 0.0)


def test_an_answer_that_comes_just_after_the_deadline_counts(client, monkeypatch):
    """A process that was stopped goes on behind its deadline."""
    monkeypatch.setattr(stores, "MIN_CALL_SECONDS", 0.01)
    monkeypatch.setattr(stores, "MOMENT", HANG)
    late = threading.Event()
    call = lambda it: late.wait(0.1) or it.add("late", 1)  # noqa: E731
    assert stores.call_store(client, call, time.monotonic(), 1) == 1


def test_a_store_that_ends_before_the_job_is_watched(client, monkeypatch):
    """Torch connects to it again for minutes; nobody waits for that."""
    ended = threading.Event()
    monkeypatch.setattr(compat, "another_client", lambda store: ended.wait(HANG))
    monkeypatch.setattr(job, "TELL_SECONDS", 0.1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    try:
        job.watch()
        assert client not in job._JOBS
        assert job.cause() == ""
    finally:
        ended.set()


def test_nobody_is_looked_for_where_nobody_has_a_door(tmp_path, monkeypatch):
    """With a file for a store, a thread once asked it for two minutes."""
    store, watching = dist.FileStore(str(tmp_path / "store"), 3), []
    monkeypatch.setattr(compat, "job_store", lambda: store)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(job, "_know", watching.append)
    job.watch()
    assert store in job._JOBS
    assert not watching


@pytest.mark.slow
def test_exit_while_a_call_waits(host):
    pid, port = host
    process = subprocess.Popen(
        [sys.executable, "-c", EXIT, str(port)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == "connected\n"
        with stopped(pid):
            output, _ = process.communicate("go\n", timeout=HANG)
        assert process.returncode == 0, output
        assert SILENT.format(port=port) in output
    finally:
        process.kill()


def test_errors_of_the_store(monkeypatch):
    monkeypatch.setattr(compat, "job_store", Broken)
    with pytest.raises(
        HipressError, match=r"job's store, which does not answer: .* \(Broken pipe\)"
    ):
        coordinators.coordinator(None, HANG)


def test_the_last_look_may_take_a_moment():
    """The error names missing ranks, though no time is left for the call that looks for them."""
    with pytest.raises(
        AgreementTimeout, match=r"0, 2 of 3\. Every rank must call the same functions"
    ):
        Coordinator.on(dist.HashStore(), 1, (0, 1, 2), "late", 1e-9).require_equal({})


def test_a_later_rank_learns_that_another_stopped_waiting():
    """It once went on without that rank, and waited in DDP's constructor, or loaded a state."""
    store = dist.HashStore()
    early, late, last = [
        Coordinator.on(store, r, (0, 1, 2), "gone", t) for r, t in ((0, 0.1), (1, HANG), (2, HANG))
    ]
    waiting = threading.Thread(target=lambda: found.append(errors_of(late)))
    found = []
    waiting.start()
    told = "rank 0 waited 0.1 s for rank 2 of 3. Every rank must"
    assert told in errors_of(early)
    waiting.join(HANG)
    assert found[0].startswith(f"rank 1 stops, because {told}")
    assert errors_of(last).startswith(f"rank 2 stops, because {told}")


def errors_of(coordinator):
    with pytest.raises(AgreementTimeout) as error:
        coordinator.require_equal({})
    return str(error.value)


def test_a_rank_that_left_is_gone_only_for_what_it_had_not_finished(monkeypatch):
    """The others may still get their part of a sum from a third, over a slow link."""
    monkeypatch.setattr(coordinators, "DONE_SECONDS", 0.0)
    monkeypatch.setattr(coordinators, "LOOK_SECONDS", 0.01)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first, second, _ = [Coordinator.on(store, r, (0, 1, 2), "sums", HANG) for r in range(3)]
    looks, ended = [], second.mailbox.ended
    second.mailbox.ended = lambda: looks.append(ended()) or looks[-1]
    while not second.mailbox.reached():
        second.mailbox.look("present", (), time.monotonic() + HANG)
    first.run_watched(lambda: None, "a sum")
    first.mailbox.epoch._door.close()  # as a process that ends in order

    def sum_over_a_slow_link():
        while looks.count([0]) < 5:
            time.sleep(0.01)
        return "a sum", second.gone()

    assert second.run_watched(sum_over_a_slow_link, "a sum") == ("a sum", None)
    assert second.gone() == Stop("RankLost", "rank 0 ended", ended=True)
    with pytest.raises(RankLost, match="rank 1 stops, because rank 0 ended"):
        second.run_watched(threading.Event().wait, "another sum")


class Requests:
    """A store that counts requests."""

    def __init__(self, store):
        self.store, self.count = store, 0

    def __getattr__(self, name):
        self.count += name in ("check", "compare_set", "get", "multi_get")
        return getattr(self.store, name)


def test_notes_that_are_all_there_take_two_requests():
    """They once took two for each rank, 65,000 a round of 256 ranks."""
    store = Requests(dist.HashStore())
    for rank in range(256):
        store.store.set(f"{rank}", f"[{rank}]")
    keys = {rank: f"{rank}" for rank in range(256)}
    assert stores.read_notes(store, keys) == {rank: [rank] for rank in range(256)}
    assert store.count == 2
    assert stores.read_notes(store, {**keys, "late": "late"}).keys() == keys.keys()
    assert stores.read_notes(store, {}) == {}


def test_a_look_for_notes_that_are_not_all_there_takes_three_requests(monkeypatch):
    """It once took two for each rank."""
    inner = dist.HashStore()
    mailbox = Coordinator.on(inner, 0, range(256), "late", HANG).mailbox
    for rank in range(255):
        inner.set(mailbox._key(0, rank), f"[{rank}]")
    store = Requests(inner)
    monkeypatch.setattr(mailbox.epoch, "store", store)
    assert mailbox.look(0, range(256), time.monotonic() + HANG, some=False) == ({}, None)
    assert store.count == 3
    found, _ = mailbox.look(0, range(256), time.monotonic() + HANG)  # to name who is missing
    assert {*range(256)} - {*found} == {255}
