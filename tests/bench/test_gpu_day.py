"""The days on a GPU, rehearsed: the output of each step, and failures."""

import json
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from bench import gpu_check, gpu_kernels, gpu_second
from bench.gpu_memory import Place, on_shim
from bench.gpu_second import Step

DAY = Path(__file__).parents[2] / "bench" / "gpu_day.sh"


def day(*args, python=None):
    env = {k: v for k, v in os.environ.items() if k != "PYTHON"}
    env |= {"PYTHON": str(python)} if python else {}
    return subprocess.run([DAY, *args], env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_step_ends_in_a_line_and_json(tmp_path):
    done = day("--rehearse", "--out", str(tmp_path), "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("(1) versions: green, ")
    told = json.loads((tmp_path / "1.json").read_text())
    assert (told["green"], told["rehearsed"], told["name"]) == (True, True, "versions")
    assert json.loads((tmp_path / "gpu_facts.json").read_text())["bits_of_the_cpu"]


def test_the_day_ends_where_a_step_is_red(tmp_path):
    broken = tmp_path / "python"
    broken.write_text('#!/bin/sh\n[ "$1" = - ] && exec python3 "$@"\necho no torch here; exit 3\n')
    broken.chmod(broken.stat().st_mode | stat.S_IXUSR)
    done = day("--rehearse", "--out", str(tmp_path / "out"), "3", "4", python=broken)
    assert done.returncode == 3
    assert done.stdout.splitlines()[0].startswith("(3) check: RED, ")
    told = json.loads((tmp_path / "out" / "3.json").read_text())
    assert (told["green"], told["status"], told["last"]) == (False, 3, "no torch here")
    assert not (tmp_path / "out" / "4.json").exists()


@pytest.mark.parametrize("broken", [False, True])
def test_a_difference_of_a_bit_is_found(broken, monkeypatch):
    """A difference anywhere in a kernel's output is found."""
    if broken:
        host = Place.host
        monkeypatch.setattr(Place, "host", lambda self, array: host(self, array) ^ 1
                            if array.dtype.kind == "u" else host(self, array))  # fmt: skip
    row = gpu_check.check("onebit_group", [1000], ["float32", "bfloat16"], on_shim)
    assert row["cases"] == 12
    assert len(row["wrong"]) == (12 if broken else 0)
    assert all("payload: " in told for told in row["wrong"])


def test_steps_of_the_second_day_go_on_after_red_ones(tmp_path):
    """All that ended is kept at once, with what it wrote; a step's time-out ends its children."""
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    out.mkdir()
    waits = "import threading; threading.Event().wait()"
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {waits!r}])"
    wrote = f"open({str(work / 'nccl.json')!r}, 'w').write('[3]'); print('E   bad'); sys.exit(4)"
    steps = [
        Step("hangs", 1, ("-c", child)), Step("fails", 60, ("-c", f"import sys; {wrote}")),
        Step("ends", 60, ("-c", "import os; print(os.environ['WHERE'])"), {"WHERE": "here"}),
    ]  # fmt: skip
    day = gpu_second.Day(work, out, dict(os.environ), 100, {"rehearsed": True})
    rows = day.run([[steps[:2]], [[steps[2]], [Step("late", 60, ("-c", "print('at last')"))]]])
    told = json.loads((out / "gpu_second.json").read_text())
    assert told["steps"] == rows
    assert told["files"] == {"nccl.json": [3]}
    assert [(row["step"], row["green"]) for row in rows[:2]] == [("hangs", False), ("fails", False)]
    assert (rows[0]["status"], rows[1]["status"]) == ("killed after 1 s", 4)
    assert rows[1]["failed"] == ["E   bad"]
    assert {row["told"] for row in rows[2:]} == {"here", "at last"}
    with tarfile.open(out / "logs.tgz") as kept:
        assert {"hangs.log", "fails.log", "ends.log", "nccl.json"} < set(kept.getnames())


def test_the_second_day_leaves_out_what_no_time_is_left_for(tmp_path):
    day = gpu_second.Day(tmp_path, tmp_path, dict(os.environ), 1, {})
    (row,) = day.run([[[Step("none", 60, ("-c", "raise SystemExit"))]]])
    assert (row["green"], row["told"]) == (False, "left out: no time was left")


def test_chosen_steps_of_the_second_day_keep_their_order(tmp_path):
    phases = gpu_second.day(tmp_path, "")
    left = gpu_second.select(phases, "others,gpt2,kernels")
    names = [[step.name for lane in phase for step in lane] for phase in left]
    assert names == [["nccl", "kernels"], ["gpt2"], ["others"]]
    with pytest.raises(ValueError, match="no steps \\['gpt3'\\]; choose from auto"):
        gpu_second.select(phases, "gpt3")


@pytest.mark.slow
def test_kernels_of_a_spec_without_a_hop_are_compiled():
    assert "powersgd" in gpu_kernels.compile_one("powersgd", "float32", "90")
