"""What kernels compute by other ways than the reference, on every value or on the hard ones."""

import ctypes

import numpy as np
import pytest

from compll.backends import cuda_nvrtc, cuda_source, trits
from compll.backends.cuda_plans import prelude
from compll.library import type_check
from tests.compll.cuda_host import build
from tests.compll.cuda_host.pieces import pieces_equal


def function(text, *args):
    """Run a C function over arrays; the first becomes what it leaves there."""
    path = build(f'#define GRADIENT 0\n{prelude()}\nextern "C" void run({text}')
    run = ctypes.CDLL(str(path)).run
    run.argtypes = [
        ctypes.c_void_p if isinstance(a, np.ndarray) else ctypes.c_longlong for a in args
    ]
    run(*(a.ctypes.data if isinstance(a, np.ndarray) else a for a in args))
    return args[0]


TRITS = """u8* out, u8* at, const u8* data) {
  for (int u = 0; u < 32; ++u) unpack_trits(data, out, 5 * 256, u, 32);
  for (int i = 0; i < 5 * 256; ++i) at[i] = (u8)trit_at(data, 5 * 256, i);
}"""


def test_trits_of_every_byte():
    data, at = np.arange(256, dtype=np.uint8), np.zeros(5 * 256, np.uint8)
    wanted = trits.unpack(data, 5 * 256, 5 * 256)
    np.testing.assert_array_equal(function(TRITS, np.zeros_like(at), at, data), wanted)
    np.testing.assert_array_equal(at, wanted)


GROUPED = """name: grouped
group: {group}
encode:
  q: where(g < 0, 0, where(g > 1, 2, 1))
  p: where(g < 1, 2, 0)
payload: {{q: "trit[n]", p: "trit[n]"}}
decode: q + 10 * p
"""


@pytest.mark.parametrize("group", [8, 64, 4096])
def test_trits_of_groups(group, tmp_path, rng):
    pieces_equal(GROUPED.format(group=group), tmp_path, rng.standard_normal)


def test_codes_of_large_groups_fit_shared_memory(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text(GROUPED.format(group=4096))
    text = cuda_source.source(type_check(path, {})[0]).full()
    _, used = cuda_nvrtc.compiled(text, "sm_75")
    assert max(one.shared for one in used.values()) <= 48 * 1024
