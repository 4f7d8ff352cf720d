"""NaN counts as largest, whatever its sign and payload: x86 makes negative ones of inf - inf."""

import numpy as np
import pytest

import compll
from tests.compll.cuda_host.pieces import pieces_equal

NANS = np.array([0x7FC00000, 0xFFC00000, 0xFFFFFFFF, 0x7FFFFFFF, 0xFF800001], np.uint32)
SPECS = {
    "top": """encode:
  kept: top(g, 3)
  i: indices(kept)
  x: g[kept]
payload: {x: "float32[kept]", i: "uint32[kept]"}
decode: scatter(i, x)
""",
    "max": """encode:
  most: max(g)
  least: min(g)
  q: g >= 0
payload: {most: float32, least: float32, q: "uint1[n]"}
decode: where(q, most, least)
""",
    "groups": """group: 32
encode:
  most: max(g)
  q: g >= 0
payload: {most: float32, q: "uint1[n]"}
decode: where(q, most, -most)
""",
    "kth": """encode:
  t: kth_largest(g, 1)
  q: g >= 0
payload: {t: float32, q: "uint1[n]"}
decode: where(q, t, -t)
""",
}


#: bytes of a payload's first field, which shows the NaN
SHOWN = {"top": 12, "max": 4, "groups": 12, "kth": 4}


def gradients(n):
    """Gradients with one NaN of each kind, and of that NaN alone."""
    for bits in NANS:
        x = np.linspace(-1, 1, n).astype(np.float32)
        x.view(np.uint32)[n // 3] = bits
        yield x
        yield np.full(n, bits, np.uint32).view(np.float32)


@pytest.mark.parametrize("name", SPECS)
def test_nan_counts_as_largest(name, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(f"name: x\n{SPECS[name]}")
    codecs = [compll.compile(path, target) for target in ("cpu", "reference")]
    for x in gradients(96):
        for codec in codecs:
            payload = codec.encode(x)
            shown = payload[: SHOWN.get(name, 4 * 96)].view(np.float32)
            wanted = 8 if name == "rows" else 1  # the whole row
            assert np.isnan(shown).sum() >= wanted, (codec, x.view(np.uint32))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_on_the_device(name, tmp_path):
    def values(n):
        x = np.linspace(-1, 1, n).astype(np.float32)
        x.view(np.uint32)[:: max(1, n // 7)] = NANS[1]
        return x

    with np.errstate(all="ignore"):
        pieces_equal(f"name: x\n{SPECS[name]}", tmp_path, values)
