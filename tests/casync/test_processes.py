"""Real processes over gloo."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.casync import ranks
from tests.hipress.launch import DIED, launch
from tests.tiers import first_fast

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("size", first_fast([3, 2]))
def test_all_strategies_agree(size):
    launch(ranks.exchange, size)


def test_torchs_groups_of_messages_agree():
    """The calls that use NCCL on devices, here over gloo."""
    launch(ranks.grouped, 3)


def test_torchs_groups_have_names_of_their_own():
    """A name that came again would lead to the store's entries of the group before."""
    first, other = launch(ranks.connected_again, 2)
    assert first == other
    assert len({*first}) == len(first)


@pytest.mark.slow
def test_devices_give_the_averages_of_hosts():
    launch(ranks.staged, 2)


def test_a_killed_peer_is_noticed():
    *out, dead = launch(ranks.killed, 3, may_die=[2])
    assert dead == DIED
    assert all(
        re.match(
            r"TransportError: rank ([012]) closed the connection in step 1 "
            r"\(rank [01], peer \1, task `(recv|send)",
            o,
        )
        for o in out
    )
    assert any("peer 2" in o for o in out)


def test_a_silent_peer_times_out():
    *out, _ = launch(ranks.silent, 3)
    assert any("PeerTimeout: rank" in o and "timed out after 0.5 s" in o for o in out)
    assert all("task `" in o for o in out)


def test_a_corrupt_payload_ends_all():
    *out, _ = launch(ranks.corrupt, 3)
    assert any(
        re.match(r"PayloadError: step 1 .* peer 2, task `(merge|decode).*out of range", o)
        for o in out
    )
    assert all("task `" in o for o in out)


def test_importing_the_package_is_cheap():
    code = "import casync, sys; sys.exit(bool({'torch', 'networkx', 'numpy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
