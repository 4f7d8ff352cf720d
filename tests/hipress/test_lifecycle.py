"""One rank, import, interpreter exit, threads."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

import hipress
from tests.hipress import ranks
from tests.hipress.fakes import Int8
from tests.hipress.launch import launch

HEAVY = ("numba", "networkx", "matplotlib", "typer", "rich", "yaml")

EXIT = """
import sys, torch, torch.distributed as dist, hipress
from tests.hipress import ranks
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
ddp = hipress.wrap(ranks.make(), ranks.codec("int8"), verify=True)
ranks.train(ddp, rank, range(2))
if sys.argv[3] == "destroy":
    dist.destroy_process_group()
print("trained", flush=True)
"""


def test_import_is_light():
    code = (
        "import sys, time, torch; begin = time.perf_counter(); import hipress; "
        "print(time.perf_counter() - begin); "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    seconds, loaded = subprocess.check_output([sys.executable, "-c", code], text=True).split("\n")[
        :2
    ]
    assert float(seconds) < 1.0
    before = subprocess.check_output(
        [
            sys.executable,
            "-c",
            f"import sys, torch; print([n for n in {HEAVY!r} if n in sys.modules])",
        ],
        text=True,
    )
    assert loaded == before.strip()


@pytest.mark.parametrize("ending", ["destroy", "leave"])
def test_interpreter_exits(ending, tmp_path):
    start = time.monotonic()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", EXIT, str(rank), str(tmp_path / "store"), ending],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            output, _ = process.communicate(timeout=40)
            assert process.returncode == 0, output
            assert "trained" in output
    finally:
        for process in processes:
            process.kill()
    assert time.monotonic() - start < 40


def test_threads_end():
    for alive, after_death, after_detach in launch(ranks.lifetime, 2):
        assert "casync-compute" in alive
        assert "hipress-verify" in alive
        assert after_death == after_detach == []


def test_one_rank():
    ((losses, reducer, (hooked, bare, wrapped)),) = launch(ranks.alone, 1)
    assert losses[-1] < losses[0]
    assert reducer[0] == hooked[0] == bare[0] == wrapped[0] == "ConfigError"
    assert "python_reducer" in reducer[1]
    assert "allreduce_hook" in hooked[1]
    assert "expected a DistributedDataParallel" in bare[1]
    assert "hipress.attach" in wrapped[1]


def test_without_process_group():
    with pytest.raises(hipress.ConfigError, match="init_process_group"):
        hipress.wrap(ranks.make(), Int8())
