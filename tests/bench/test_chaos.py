"""Ranks that end or stop at any moment: see bench/chaos.py."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_others_name_a_rank_that_is_gone_and_end():
    runs = "80"  # four minutes on two cores; the command itself does 200
    program = [sys.executable, "-m", "bench.chaos", "--runs", runs, "--verbose"]
    found = subprocess.run(program, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-20000:] + found.stderr[-2000:]
