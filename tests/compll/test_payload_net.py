"""Every spec's payloads, decoded values and states, bit for bit, as recorded.

This net catches unintended changes by the compiler: payloads between ranks of different versions or
processors must stay the same. After an intended change, `pytest --update-golden` on this file
records those of the reference backend again.
"""

import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import compll
from tests.compll.conftest import CASES, KINDS, label, variants

GOLDEN = Path(__file__).parent / "golden" / "payloads.json"
SIZES = (1, 31, 1000, 1025, 20011)
STEPS = 3
SHAPES = {"powersgd": (143, 7)}


def gradient(n: int, seed: int) -> np.ndarray:
    """float32 [n] over several orders of magnitude, a tenth zeros. Made from integers, since
    NumPy's random numbers may change with its version."""
    state = (np.arange(n, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    words = (state >> np.uint64(40)).astype(np.int64)
    signs = np.where(words & 1, -1.0, 1.0)
    exponents = np.ldexp(1.0, -((words >> 1) & 7).astype(np.int32))
    values = signs * exponents * ((words >> 4) & 0xFFFF) / 65536
    return np.where(words % 10 == 0, 0.0, values).astype(np.float32)


def encoded(codec, n, states, step):
    """Payloads and decoded values of all ranks: of one rank, or of the rounds of one."""
    x = gradient(n, step)
    if not codec.rounds:
        payload = codec.encode(x, state=states or None, seed=7, step=step)
        return [payload], codec.decode(payload, n, step=step)
    table, sums = np.array([[0, n, 0, 0, 0]]), []
    options = {"workers": 1, "state": states or None, "seed": 7, "step": step}
    for number, one in enumerate(codec.rounds):
        out, at = np.zeros(one.payload_bytes(n), np.uint8), np.zeros(1, np.int64)
        codec.encode_round(number, x, table, out, at, sums, **options)
        sums.append((out, at))
    codec.decode_rounds(x, table, sums, **options)
    return [out for out, _ in sums], x


def digest(case, target: str) -> str:
    name, params = case
    hashed = hashlib.sha256()
    codec = compll.compile(name, target=target, **params)
    sizes = SIZES
    if name in SHAPES:
        codec, sizes = codec.for_shape(SHAPES[name]), (int(np.prod(SHAPES[name])),)
    for n in sizes:
        states = codec.init_state(n)
        for step in range(STEPS):
            payloads, decoded = encoded(codec, n, states, step)
            for array in (*payloads, decoded, *(states[key] for key in sorted(states))):
                hashed.update(np.ascontiguousarray(array).tobytes())
    return hashed.hexdigest()[:32]


@pytest.fixture(scope="module")
def golden(request):
    if request.config.getoption("--update-golden"):
        found = {label(case): digest(case, "reference") for case in CASES}
        GOLDEN.write_text(json.dumps(found, indent=1) + "\n")
    return json.loads(GOLDEN.read_text())


def test_every_spec_is_in_the_net(golden):
    assert sorted(golden) == sorted(map(label, CASES))


@variants
def test_the_bits_are_those_recorded(case, golden):
    assert digest(case, "reference") == golden[label(case)]


def test_those_of_the_cpu_are_the_same(case, golden):
    assert digest(case, "cpu") == golden[label(case)]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86's levels")
@pytest.mark.parametrize(
    "processor, cases", [("x86-64-v3", KINDS), ("x86-64-v2", [c for c in CASES if not c[1]])]
)
def test_those_of_lesser_processors_are_the_same(processor, cases, golden, tmp_path):
    """A spec of every kind of kernel, and all on the least of them."""
    script = (
        "import json; from tests.compll.test_payload_net import digest, label; "
        f"print(json.dumps({{label(case): digest(case, 'cpu') for case in {cases}}}))"
    )
    own = {"COMPLL_CPU": processor, "COMPLL_CACHE": str(tmp_path)}
    told = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | own, capture_output=True, check=True
    )
    found = json.loads(told.stdout)
    assert found == {label(case): golden[label(case)] for case in cases}
