"""Compiled kernels, as other processes and threads find them."""

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import compll
from compll.backends.cpu import jit
from compll.errors import UsageError
from tests.patience import HANG
from tests.tiers import first_fast

RUN = """
import hashlib, json, sys
import numpy as np
import compll
from compll.backends.cpu import jit
from compll.errors import UsageError
digest, x = hashlib.sha256(), np.sin(np.arange(3000, dtype=np.float32) ** 2)
for name in sys.argv[1:]:
    codec = compll.compile(name)
    state = codec.init_state(len(x))
    payload = codec.encode(x, state=state, seed=2**64 - 1, step=1)
    for array in (payload, codec.decode(payload, len(x), step=1), *state.values()):
        digest.update(array.tobytes())
loaded = [m for m in ("compll.backends.cpu.printer", "scipy") if m in sys.modules]
print(json.dumps([digest.hexdigest(), loaded]))
"""


def run(root=None, *, specs=("threelc",), jobs=1):
    """Results of fresh processes that start at once, and the modules that they imported."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", RUN, *specs],
            env=os.environ | ({"COMPLL_CACHE": str(root)} if root else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(jobs)
    ]
    found = []
    for job in started:
        out, err = job.communicate(timeout=HANG)
        assert (job.returncode, err) == (0, "")
        found.append(json.loads(out))
    return found


def of_arrays(name):
    """True if a spec's decode is no function of single elements."""
    return compll.compile(name, "reference").module.decoded is None


def test_one_of_two_processes_compiles_and_a_later_one_does_not(tmp_path):
    one, two = run(tmp_path, jobs=2)
    assert one[0] == two[0]
    assert [] in (one[1], two[1])  # one compiled, the other waited
    assert [*(tmp_path / "cpu").glob("threelc_*.o")]
    assert not [*(tmp_path / "cpu").glob("*.tmp"), *(tmp_path / "cpu").glob("*.lock")]
    assert run(tmp_path) == [[one[0], []]]


@pytest.mark.parametrize("name", first_fast([s for s in compll.list_specs() if of_arrays(s)]))
def test_specs_of_arrays_need_no_compiler_either(name):
    run(specs=[name])  # now they are cached
    ((_, loaded),) = run(specs=[name])
    assert loaded == []


def test_threads_at_once(rng):
    onebit = compll.compile("onebit")
    xs = [rng.standard_normal(20_000 + i).astype(np.float32) for i in range(8)]
    expected = [onebit.encode(x).tobytes() for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            assert [p.tobytes() for p in pool.map(onebit.encode, xs)] == expected


def test_a_call_lets_other_threads_run():
    codec = compll.compile("onebit")
    ready, go, ran = threading.Event(), threading.Event(), []

    def other():
        ready.set()
        go.wait()
        ran.append(True)

    thread = threading.Thread(target=other)
    table = np.zeros((1 << 18, 5), np.int64)  # many empty pieces
    given = {"x": np.zeros(1, np.float32), "table": table, "rows": len(table)}
    thread.start()
    ready.wait()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # no switch takes the lock from a thread: it must release it
    try:
        go.set()
        calls = 0
        while not ran and calls < 1000:
            codec.backend.call("decode_set", given, [])
            calls += 1
        assert ran
    finally:
        sys.setswitchinterval(before)
        thread.join()


def test_a_processor_that_is_not_known_is_refused(monkeypatch):
    monkeypatch.setattr(jit, "NAME", "z80")
    with pytest.raises(UsageError, match="COMPLL_CPU is 'z80', not x86-64-v3 or x86-64-v2"):
        jit.features()
