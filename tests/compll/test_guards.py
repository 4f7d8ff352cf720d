"""Nothing is written behind an output: payloads, values, and states have guards behind them.

Specs are random ones, gradients such that a payload is as long as it can be.
"""

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import compll
from tests.compll.test_cuda import sanitized
from tests.compll.test_random_specs import valid

GUARD, BEHIND = 0xA5, 4096
SLOW = "COMPLL_SPECS" in os.environ


class Guarded:
    """Arrays with guards behind them."""

    def __init__(self):
        self.memory = []

    def array(self, size, dtype):
        """Zeros."""
        room = size * np.dtype(dtype).itemsize
        whole = np.full(room + BEHIND, GUARD, np.uint8)
        whole[:room] = 0
        self.memory.append(whole[room:])
        return whole[:room].view(dtype)

    def assert_untouched(self, about):
        assert all((each == GUARD).all() for each in self.memory), about


def gradients(n):
    """Gradients of one number everywhere, which a filter may select, and one of all magnitudes."""
    for number in (0.1, 16777216.0, 1.0, 0.5, -0.0, np.inf, np.nan):
        yield np.full(n, number, np.float32)
    yield (np.arange(n) % 3 * 10.0 ** (np.arange(n) % 78 - 40)).astype(np.float32)


def run(path, about):
    codec = compll.compile(path, "cpu")
    for n in (1, 33, 1061):
        for step, x in enumerate(gradients(n)):
            guards, size = Guarded(), codec.payload_bytes(n)
            out, values = guards.array(size, np.uint8), guards.array(n, np.float32)
            state = {
                name: guards.array(len(kept), kept.dtype)
                for name, kept in codec.init_state(n).items()
            }
            values[:] = x
            table, at = np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64)
            more = {"state": state or None, "seed": 3, "step": step, "writeback": True}
            used = codec.encode_batch(values, table, out, at, **more)
            codec.decode_batch(out, table, at, used, values)
            guards.assert_untouched(about)
            assert 0 < used[0] <= size, about


@settings(
    max_examples=60 if SLOW else 4,
    deadline=None,
    derandomize=not SLOW,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(0, 2**32))
def test_random_specs_write_within_their_outputs(seed, tmp_path):
    text, path = valid(seed, tmp_path)
    run(path, text)


EQUAL = """name: over
encode:
  t: {tag}
  a: filter(t == {one})
  b: filter(t == {two})
  i: indices(a)
  x: g[a]
  y: g[b]
payload: {{i: "uint32[a]", x: "float32[a]", y: "float32[b]"}}
decode: scatter(i, x)
"""


@pytest.mark.parametrize(
    "tag, one, two",
    [
        ("abs(g)", "0.1", "0.1000000001"),
        ("abs(g)", "16777216", "16777217"),
        ("g", "0", "-0.0"),
        ("g - 0.1", "0", "1e-46"),
        ("int(g)", "2147483647", "2147483648"),
    ],
)
def test_numbers_that_elements_do_not_tell_apart(tag, one, two, tmp_path):
    path = tmp_path / "over.yaml"
    path.write_text(EQUAL.format(tag=tag, one=one, two=two))
    assert compll.compile(path, "reference").payload_bytes(1000) >= 12 * 1000
    run(path, path.read_text())


def test_the_bound_of_many_families_is_soon_known(tmp_path):
    """It took 2**families layouts."""
    lines = ["name: many", "encode:"]
    fields = []
    for i in range(40):
        lines += [f"  t{i}: floor(g * {i + 1})"]
        for form in ("a", "b"):
            lines += [f"  {form}{i}: filter(t{i} == {'ab'.index(form)})"]
            lines += [f"  x{form}{i}: g[{form}{i}]"]
            fields.append(f'  x{form}{i}: "float32[{form}{i}]"')
    lines += ["  i: indices(a0)", "payload:", '  i: "uint32[a0]"', *fields]
    path = tmp_path / "many.yaml"
    path.write_text("\n".join([*lines, "decode: scatter(i, xa0)", ""]))
    codec = compll.compile(path, "reference")
    assert codec.payload_bytes(1000) == 80 * 4 + 40 * 4000 + 4000 + codec.module.status


@pytest.mark.slow
def test_kernels_of_the_device_write_within_their_outputs(tmp_path):
    """The host's double of CUDA under AddressSanitizer, on outputs as long as they must be."""
    paths = []
    for seed in range(6):
        (folder := tmp_path / str(seed)).mkdir()
        paths.append(str(valid(seed, folder)[1]))
    (tmp_path / "over.yaml").write_text(EQUAL.format(tag="abs(g)", one="0.1", two="0.1000000001"))
    sanitized(*paths, str(tmp_path / "over.yaml"))
