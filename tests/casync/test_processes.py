"""Real processes over gloo."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import HANG
from tests.tiers import first_fast

ROOT = Path(__file__).parents[2]


class Ranks:
    """Processes of one case. `end` waits for some of them and gives their output."""

    def __init__(self, case, size, store):
        command = [sys.executable, "-W", "ignore", "-m", "tests.casync.ranks", case]
        self.processes = [
            subprocess.Popen(
                [*command, str(rank), str(size), str(store)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]

    def end(self, ranks):
        results = [self.processes[rank].communicate(timeout=HANG) for rank in ranks]
        codes = [self.processes[rank].returncode for rank in ranks]
        assert codes == [0] * len(codes), "\n".join(err for _, err in results)
        return [out for out, _ in results]  # where some releases of torch tell of gloo, too

    def kill(self):
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def start(tmp_path):
    """Starts a case; kills what is left."""
    started = []

    def go(case, size):
        started.append(Ranks(case, size, tmp_path / "store"))
        return started[-1]

    yield go
    for ranks in started:
        ranks.kill()


@pytest.mark.parametrize("size", first_fast([3, 2]))
def test_all_strategies_agree(start, size):
    start("exchange", size).end(range(size))


def test_a_killed_peer_is_noticed(start):
    out = start("killed", 3).end([0, 1])
    assert all(
        re.search(
            r"(?m)^TransportError: rank ([012]) closed the connection in step 1 "
            r"\(rank [01], peer \1, task `(recv|send)",
            o,
        )
        for o in out
    )
    assert any("peer 2" in o for o in out)


def test_a_silent_peer_times_out(start):
    out = start("silent", 3).end([0, 1])
    assert any("PeerTimeout: rank" in o and "timed out after 0.5 s" in o for o in out)
    assert all("task `" in o for o in out)


def test_a_corrupt_payload_ends_all(start):
    out = start("corrupt", 3).end([0, 1])
    assert any(
        re.search(r"(?m)^PayloadError: step 1 .* peer 2, task `(merge|decode).*out of range", o)
        for o in out
    )
    assert all("task `" in o for o in out)


def test_importing_the_package_is_cheap():
    code = "import casync, sys; sys.exit(bool({'torch', 'networkx', 'numpy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
