"""Programs that end while gloo or a store waits in a thread: their exit status is their own.

Each program lets a call return, in its thread, in the moment in which the interpreter is half
gone: an object that is collected then makes the call's peer answer, and gives the call time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref

import pytest

from hipress.ranks import job
from tests.patience import HANG

#: the peer is rank 1, a process that does nothing but be there, and is killed at the end
BEGIN = """
import os, signal, sys, time, torch, torch.distributed as dist
from datetime import timedelta
from hipress import compat
from hipress.ranks.coordinator import Coordinator
from hipress.ranks.groups import Agreement, all_reduce_max, start_all_reduce_max
from hipress.ranks.store import run_in_thread
from hipress.errors import HipressError

rank, port = int(sys.argv[1]), int(sys.argv[2])
if "forks" in sys.argv and (child := os.fork()):
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
store = dist.TCPStore("127.0.0.1", port, is_master=rank == 1, wait_for_workers=False)
print(store.port, flush=True)
dist.init_process_group(
    "gloo", store=dist.PrefixStore("torch", store), rank=rank, world_size=2,
    timeout=timedelta(seconds=60),
)

class Last:
    "Lets the peer end as this interpreter does."
    def __del__(self, kill=os.kill, peer=int(sys.argv[3]), how=signal.SIGKILL, sleep=time.sleep):
        kill(peer, how)
        sleep(1)

sys.last = Last()
"""
CALLS = {
    "a watched call": """
from hipress.ranks import coordinator as coordinators
coordinator = coordinators.coordinator(dist.group.WORLD, 3)
agreement = Agreement(coordinator, "a test")
if rank == 1:
    time.sleep(3600)
try:
    agreement.largest([1.0], "waiting")
except HipressError as error:
    print(type(error).__name__, flush=True)
sys.exit(7)
""",
    "a collective that calls back": """
if rank == 1:
    time.sleep(3600)
future = start_all_reduce_max(torch.ones(3), dist.group.WORLD)
future.add_done_callback(lambda _: None)
sys.exit(7)
""",
    "a call of the store": """
if rank == 1:
    time.sleep(3600)
run_in_thread(lambda: store.get("what nobody sets"))
time.sleep(0.5)
sys.exit(7)
""",
    "connecting": """
if rank == 1:
    time.sleep(3600)
group = lambda: compat.gloo_group(store.clone(), 0, 2, timedelta(seconds=60))
run_in_thread(group)
time.sleep(0.5)
sys.exit(7)
""",
}


@pytest.mark.slow  # test_coordinator.py ends a process while a call waits, too
@pytest.mark.parametrize("call", CALLS)
def test_the_exit_status_of_a_program_whose_call_still_waits(call):
    assert_own_status(call)


@pytest.mark.slow
def test_the_exit_status_of_a_forked_process():
    """It did not break the collectives that would call back."""
    assert_own_status("a collective that calls back", "forks")


def assert_own_status(call, *more):
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", BEGIN + CALLS[call]]
    peer = subprocess.Popen(
        [*program, "1", "0", "0"], env=environment, stdout=subprocess.PIPE, text=True
    )
    try:
        port = peer.stdout.readline().strip()
        found = subprocess.run(
            [*program, "0", port, str(peer.pid), *more], env=environment, capture_output=True,
            text=True, timeout=HANG,
        )  # fmt: skip
        assert found.returncode == 7, found.stderr
    finally:
        peer.kill()
        peer.communicate()


class Mailbox:
    """A mailbox whose ranks never arrive; the interpreter begins to end at the second look."""

    def __init__(self, ending):
        self.ending, self.looks = ending, 0

    def reached(self):
        return False

    def look(self, *_):
        self.looks += 1
        if self.looks == 2:
            self.ending.set()


def test_ranks_that_have_not_arrived_are_not_awaited_beyond_the_end(monkeypatch):
    """A call of the store that begins later ends in an interpreter that is half gone."""
    ending = threading.Event()
    monkeypatch.setattr(job, "_ending", ending)
    mailbox = Mailbox(ending)
    job._know(weakref.ref(mailbox))
    assert mailbox.looks == 2
