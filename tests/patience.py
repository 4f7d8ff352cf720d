"""Time-outs of tests for events that come at once on a quiet machine.

Only a hang should reach them: machines that run tests can be ten times as slow for a minute.
Measuring speed is the task of bench/. pytest-timeout's limit is above these.
"""

import time
from collections.abc import Callable

HANG = 240.0  # seconds


def wait_until(ready: Callable[[], object]) -> None:
    """Wait for what other threads or processes bring about, and tell nobody."""
    deadline = time.monotonic() + HANG / 2  # before the launch or pytest-timeout ends the test
    while not ready():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


# Time that ranks wait for one that never comes: each test of that takes as long, and the work
# before it (connecting, a step) must fit in.
SILENCE = 5.0  # seconds
