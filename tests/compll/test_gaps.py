"""Gaps have one encoding each; every backend refuses others, and accepts encode's. Fields
that decode does not use are checked alike."""

import numpy as np
import pytest

import compll
from compll.errors import PayloadError
from tests.compll.cuda_host.pieces import compiled

SPEC = """name: example
encode:
  kept: filter(abs(g) > 0, n)
  i: indices(kept)
  v: g[kept]
payload: {i: "gaps[kept]", v: "float32[kept]"}
decode: scatter(i, v)
"""
POSITIONS = """name: example
encode:
  kept: filter(abs(g) > 0, n)
  other: indices(kept)
  i: indices(kept)
  v: g[kept]
payload: {{other: "{}", i: "gaps[kept]", v: "float32[kept]"}}
decode: scatter(i, v)
"""
CODES = """name: example
encode: {{other: "abs(sign(g))", big: "g > 1"}}
payload: {{other: "{}", big: "uint[1][n]"}}
decode: where(big == 1, 2, 0)
"""


def payload(gaps, count):
    head = np.array([count, len(gaps)], "<u4").view(np.uint8)
    values = np.arange(1, count + 1, dtype="<f4").view(np.uint8)
    return np.concatenate([head, np.array(gaps, np.uint8), values, [np.uint8(0)]])


def decodes(folder, spec=SPEC):
    """Decoders by name; each returns the elements, or raises PayloadError."""
    device, reference = compiled(spec, folder)
    cpu = compll.compile(folder / "spec.yaml", "cpu")

    def on_device(data, n):
        out, table = np.zeros(n, np.float32), np.array([[0, n, 0, 0, 0]])
        device.decode_batch(
            data, table, np.zeros(1, np.int64), np.array([len(data)]), out, add=False
        )
        device.raise_found()
        return out

    return {"reference": reference.decode, "cpu": cpu.decode, "cuda": on_device}


@pytest.mark.parametrize(
    "gaps, places",
    [
        ([5, 0], [5, 6]),
        ([128 | 1, 1, 3], [129, 133]),
        ([128, 1, 0], [128, 129]),
        ([0, 128 | 127, 128 | 127, 0], None),
        ([128 | 5, 0, 0], None),
        ([5, 128, 0], None),
        ([128 | 5, 128, 0, 0], None),
        ([*[128] * 5, 0, 0], None),
        ([*[128] * 6, 1, 0], None),
        ([5, 128], None),
        ([5], None),
        ([5, 0, 0], None),
        # very long: more bytes than encode can make of this number of elements
        ([*[128, 128, 128, 128, 128, 0] * 1000], None),
    ],
    ids=str,
)
def test_a_gap_has_one_spelling(gaps, places, tmp_path):
    n, count = 1000, 2 if len(gaps) < 100 else 1000
    data = payload(gaps, count)
    for name, decode in decodes(tmp_path).items():
        if places is None:
            with pytest.raises(PayloadError):
                decode(data, n)
        else:
            expected = np.zeros(n, np.float32)
            expected[places] = [1, 2]
            assert np.array_equal(decode(data, n), expected), name


def test_all_backends_agree_on_hostile_bytes(tmp_path, rng):
    n, accepted, known = 300, 0, decodes(tmp_path)
    for _ in range(300):
        gaps = rng.choice([0, 1, 5, 127, 128, 129, 133], rng.integers(1, 7))
        data = payload(gaps, int(rng.integers(1, 4)))
        found = [outcome(decode, data, n) for decode in known.values()]
        assert found[0] == found[1] == found[2], gaps
        accepted += found[0] is not None
    assert 10 < accepted < 200


@pytest.mark.parametrize(
    "spec, type_",
    [
        (POSITIONS, "gaps[kept]"), (POSITIONS, "golomb[kept]"),
        (CODES, "huffman[4][n]"), (CODES, "runs[n]"),
    ],
    ids=["gaps", "golomb", "huffman", "runs"],
)  # fmt: skip
def test_fields_that_decode_does_not_use_are_checked(spec, type_, tmp_path):
    x = np.zeros(40, np.float32)
    x[[3, 9, 30]] = 2
    known = decodes(tmp_path, spec.format(type_))
    whole, refused = compll.compile(tmp_path / "spec.yaml", "cpu").encode(x), 0
    head = 12 if spec is POSITIONS else 4
    for place in range(head, len(whole)):
        for bit in range(8):
            data = whole.copy()
            data[place] ^= 1 << bit
            found = {name: outcome(decode, data, len(x)) for name, decode in known.items()}
            assert len(set(found.values())) == 1, (place, bit, found)
            refused += found["reference"] is None
    assert refused


def outcome(decode, data, n):
    try:
        return decode(data, n).tobytes()
    except PayloadError:
        return None
