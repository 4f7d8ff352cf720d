"""A training whose ranks are killed and come back in other numbers: examples/elastic.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
