"""Kernels compiled by two processes: the same bytes, whatever becomes of the second."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import compll
from compll.backends.cpu import load as cpu_load
from compll.backends.cpu import native as cpu_native
from compll.backends.cpu import numba_kernels as cpu
from compll.backends.cpu import object as cpu_object
from compll.backends.cpu import parallel_compile as cpu_apart
from compll.backends.cpu.declare import Declared
from tests.tiers import first_fast

pytestmark = pytest.mark.skipif(not cpu_native.possible(), reason="numba's kernels serve here")
#: what the second process may do instead
OTHERWISE = {
    "fails": "sys.exit(3)",
    "is killed": "import os; os.kill(os.getpid(), 9)",
    "writes nothing": "pass",
    "writes no kernels": "print('hello')",
    "hangs": "import time; time.sleep(600)",
}


def of_length(size):
    """A kernel with that much bytecode."""
    return Declared(SimpleNamespace(__code__=SimpleNamespace(co_code=bytes(size))), ("void()",))


@given(st.lists(st.integers(1, 9999), max_size=9))
def test_shares_are_all_kernels_about_evenly(sizes):
    kernels = {str(i): of_length(size) for i, size in enumerate(sizes)}
    own, others = cpu_apart.shares(kernels)
    assert own | others == kernels
    assert not own.keys() & others.keys()
    mine, theirs = (sum(map(cpu_apart.length, each.values())) for each in (own, others))
    assert abs(mine - theirs) <= max(sizes, default=0)
    assert max(sizes, default=0) in [0, *map(cpu_apart.length, own.values())]


@pytest.fixture
def source():
    """fp16's kernels: their text, and where they would be cached."""
    text = cpu.Source(compll.compile("fp16", "reference").module).text
    return text, cpu_load.place("fp16", text)


@pytest.fixture
def two(monkeypatch, tmp_path, source):
    """fp16 compiled by two processes into an empty folder; gives the kernels' file."""
    monkeypatch.delenv("COMPLL_JOBS")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(cpu_apart, "LEAST", 1)
    text, path = source

    def keep():
        file = tmp_path / "kernels.native"
        module = lambda: cpu_load.imported(path, text)  # noqa: E731
        found = cpu_load.keep(file, lambda: cpu_load.saved(path, text), module)
        assert cpu_native.read(file) == found
        return found

    return keep


@pytest.fixture
def compiled(monkeypatch):
    """The names of kernels that this process compiles."""
    names, stored = [], cpu_object.stored
    monkeypatch.setattr(cpu_object, "stored", lambda found: names.extend(found) or stored(found))
    return names


def works(found, source):
    """Whether kernels do what those of one process do."""
    alone = compll.compile("fp16")
    joined = type(alone.backend)(alone.module, alone.params)
    joined.kernels = cpu_native.link(found, None)
    x = np.random.default_rng(3).standard_normal(1000).astype(np.float32)
    table, at = np.array([[0, 1000, 0, 0, 0]], np.int64), np.zeros(1, np.int64)
    results = []
    for backend in (alone.backend, joined):
        out = np.zeros(8000, np.uint8)
        place = {"seed": 1, "step": 2, "scale": 1.0, "writeback": False}
        used = backend.encode_batch(x.copy(), table, out, at, None, **place)
        y = np.zeros(1000, np.float32)
        backend.decode_batch(out, table, at, used, y, add=True)
        results.append((out.tobytes(), y.tobytes()))
    return results[0] == results[1]


def test_each_process_compiles_its_share(two, compiled, source):
    found = two()
    assert len(found.images) == 2
    assert "encode" in compiled
    assert {*compiled} < {*found.kernels}
    assert works(found, source)


@pytest.mark.parametrize("otherwise", first_fast(OTHERWISE))
def test_this_process_can_do_without_the_other(otherwise, two, compiled, source, monkeypatch):
    monkeypatch.setattr(cpu_apart, "PROGRAM", f"import sys; {OTHERWISE[otherwise]}")
    monkeypatch.setattr(cpu_apart, "PATIENCE", 0.1 if otherwise == "hangs" else 60.0)
    found = two()
    assert {*compiled} == {*found.kernels}
    assert works(found, source)


def test_a_python_that_does_not_start(two, compiled, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert {*two().kernels} == {*compiled}


def test_the_other_ends_with_the_first(two, monkeypatch):
    begun, start = [], cpu_apart.start
    monkeypatch.setattr(cpu_apart, "start", lambda file: begun.append(start(file)) or begun[-1])
    monkeypatch.setattr(cpu_apart, "PROGRAM", "import time; time.sleep(600)")

    def interrupted(kernels):
        raise KeyboardInterrupt

    monkeypatch.setattr(cpu_object, "stored", interrupted)
    with pytest.raises(KeyboardInterrupt):
        two()
    assert [process.returncode for process in begun] == [-9]


@pytest.mark.parametrize("reason", ["one core", "COMPLL_JOBS", "frozen", "no Python", "short"])
def test_one_process_compiles(reason, two, source, tmp_path, monkeypatch):
    file = cpu_load.saved(*reversed(source))
    if reason == "one core":
        monkeypatch.setattr("os.sched_getaffinity", lambda process: {5})
    elif reason == "COMPLL_JOBS":
        monkeypatch.setenv("COMPLL_JOBS", "1")
    elif reason == "frozen":
        monkeypatch.setattr(sys, "frozen", True, raising=False)
    elif reason == "no Python":
        monkeypatch.setattr(sys, "executable", None)
    else:
        file = tmp_path / "short.py"
        file.write_text("")
    monkeypatch.setattr(subprocess, "Popen", None)
    with cpu_apart.begun(file) as process:
        assert process is None


@pytest.mark.parametrize("cores, pays", [(2, True), (1, False), (None, False)])
def test_systems_that_tell_no_affinity(cores, pays, monkeypatch):
    monkeypatch.delenv("COMPLL_JOBS")
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert cpu_apart.allowed() == pays
