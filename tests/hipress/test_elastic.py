"""A training whose ranks are killed and come back in other numbers: examples/elastic.py."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.patience import HANG

SCRIPT = Path(__file__).with_name("elastic_killed.py")


def run(folder, ranks, steps, victim, after):
    """The output of rank 0, of a training that goes on to this number of steps."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
    own = {"PYTHONPATH": str(SCRIPT.parents[2]), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with subprocess.Popen(
        [*start, "--nproc-per-node", f"{ranks}", SCRIPT, f"{steps}", f"{victim}", f"{after}"],
        cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, **own, "OMP_NUM_THREADS": "1"},
    ) as agent:  # fmt: skip
        try:
            out, errors = agent.communicate(timeout=HANG)
        finally:
            agent.terminate()  # it ends its ranks
    assert agent.returncode == 0, out + errors
    assert (folder / f"killed-{steps}").exists()
    return out


@pytest.mark.slow  # torchrun starts 22 processes
@pytest.mark.timeout(4 * HANG)
def test_a_training_survives_its_ranks(tmp_path):
    """Four ranks, then three, then four, of which one is killed each time: torchrun starts the rest
    again, and they go on from the last checkpoint with all that was not delivered."""
    out = "".join(run(tmp_path, *way) for way in ((4, 20, 2, 13), (3, 30, 1, 5), (4, 40, 3, 7)))
    losses = [(int(step), int(ranks), float(loss)) for step, ranks, loss in
              re.findall(r"step (\d+), (\d) ranks: loss ([\d.]+)", out)]  # fmt: skip
    assert [each[:2] for each in losses] == [(10, 4), (20, 4), (30, 3), (40, 4)]
    assert [*sorted(losses, key=lambda each: -each[2])] == losses
    told = re.findall(r"(save|load) (\d+) (\S+) (\S+)", out)
    saved = {step: (total, norm) for kind, step, total, norm in told if kind == "save"}
    loaded = [(step, total, norm) for kind, step, total, norm in told if kind == "load"]
    assert [step for step, *_ in loaded] == ["10", "20", "20", "30", "30"]
    for step, *held in loaded:
        assert [*map(float, held)] == pytest.approx([*map(float, saved[step])], rel=1e-4, abs=1e-4)
        assert float(held[1]) > 0.01


EXAMPLE = SCRIPT.parents[2] / "examples" / "elastic.py"
ENOUGH = 1_000_000  # steps: the test ends the training


class Nodes:
    """Agents of torchrun, each a node of one rank, that meet by themselves."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.agents = folder, dict[int, subprocess.Popen]()
        # nodes meet there; it outlives each of them, and has its port before they start
        self._store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def start(self, number: int) -> None:
        """Start a node."""
        patience = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"
        own = {
            "PYTHONPATH": str(SCRIPT.parents[2]),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"out-{number}").open("a") as out:
            self.agents[number] = subprocess.Popen(
                [
                    sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:4",
                    "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d",
                    "--rdzv-endpoint", f"localhost:{self._store.port}",
                    "--rdzv-conf", f"is_host=0,{patience}",
                    EXAMPLE, f"{ENOUGH}",
                ],
                cwd=self.folder, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **own},
                start_new_session=True,
            )  # fmt: skip

    def kill(self, number: int) -> None:
        """End a node and its rank at once."""
        with self.agents.pop(number) as agent:
            for rank in children(agent.pid):
                os.kill(rank, signal.SIGKILL)
            agent.kill()

    def close(self) -> None:
        for number in [*self.agents]:
            self.kill(number)

    def steps(self) -> list[tuple[int, int, float]]:
        """Step, ranks and loss of all lines so far."""
        text = "".join(file.read_text() for file in self.folder.glob("out-*"))
        found = re.findall(r"step (\d+), (\d) ranks: loss ([\d.]+)", text)
        return [(int(step), int(ranks), float(loss)) for step, ranks, loss in found]

    def await_ranks(self, ranks: int, after: int = 0) -> list[tuple[int, int, float]]:
        """Lines of this number of ranks beyond a step, as soon as there are two."""
        until = time.monotonic() + 2 * HANG
        while time.monotonic() < until:
            found = sorted(each for each in self.steps() if each[1] == ranks and each[0] > after)
            if len(found) > 1:
                return found
            time.sleep(0.2)
        texts = "\n".join(file.read_text()[-3000:] for file in self.folder.glob("out-*"))
        raise AssertionError(f"no steps of {ranks} ranks: {self.steps()}\n{texts}")


def children(pid: int) -> list[int]:
    """Processes that a process started."""
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


@pytest.mark.slow  # torchrun starts 20 processes
@pytest.mark.timeout(8 * HANG)
def test_nodes_leave_and_join(tmp_path):
    """Four nodes of `--nnodes 1:4`; one is killed, and three go on from the last checkpoint; it
    comes back, and four go on."""
    nodes = Nodes(tmp_path)
    with ExitStack() as stack:
        stack.callback(nodes.close)
        for number in range(4):
            nodes.start(number)
        four = nodes.await_ranks(4)
        nodes.kill(3)
        three = nodes.await_ranks(3)
        nodes.start(3)
        again = nodes.await_ranks(4, after=three[-1][0])
    assert four[0][0] < three[0][0]
    for _, _, loss in (*three, *again):
        assert loss < four[0][2]
