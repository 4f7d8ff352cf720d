"""Threads that are at work, or wait in a library, as the interpreter begins to end."""

import subprocess
import sys
from textwrap import dedent

import pytest

from tests.patience import HANG

PROGRAM = """
    import atexit, os, socket, time

    @atexit.register
    def judge():  # after the handlers of casync.shutdown
        there.send(b"x")
        thread.join({patience})
        os._exit(thread.is_alive())

    from casync.shutdown import start_thread

    here, there = socket.socketpair()

    def count():
        end = time.monotonic() + 1
        while time.monotonic() < end:  # asks for the GIL
            pass

    def read():
        here.recv(1)

    thread = start_thread({work}, "test")
"""


@pytest.mark.parametrize(
    ("work", "patience", "stays"),
    [("count", HANG, False), ("read", 0.2, sys.version_info < (3, 14))],
)
def test_only_a_thread_that_waits_is_kept_waiting(work, patience, stays):
    """A running thread may hold a lock without which the interpreter cannot end."""
    program = dedent(PROGRAM).format(work=work, patience=patience)
    done = subprocess.run([sys.executable, "-c", program], check=False, timeout=HANG)
    assert done.returncode == stays


def test_a_thread_whose_start_was_interrupted_is_left():
    program = """
import threading
from casync import shutdown
shutdown._threads.add(thread := threading.Thread())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=HANG)
    assert (done.returncode, done.stderr) == (0, b"")
