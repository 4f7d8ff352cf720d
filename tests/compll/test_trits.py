"""Trits, five in a byte, and their runs: both backends, published bytes, damaged payloads."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compll
from compll.backends.reference import fields
from tests.compll import oracles
from tests.compll.routines import PRINTERS, stream
from tests.compll.wrong import refuses

MORE = np.load(Path(__file__).parent / "golden" / "more.npz")
INPUTS = np.load(Path(__file__).parent / "golden" / "published.npz")
CASES = sorted({k.rsplit("/", 1)[0] for k in MORE if k.startswith("3lc_")})

PLAIN = """
name: plain
{group}
encode:
  q: where(g < 0, 0, where(g > 1, 2, 1))
  low: g < 1
payload: {{q: "{kind}[n]", p: "{other}[n]", low: "uint1[n]"}}
decode: q + 10 * p + 100 * low
"""


@pytest.mark.parametrize("case", CASES)
def test_published_bytes(case):
    """Published planes hold fifths of the whole tensor: one tile."""
    held = {k.rsplit("/", 1)[1]: MORE[k] for k in MORE if k.startswith(f"{case}/")}
    codes = (held["quantized"] + 1).astype(np.uint8)
    x = INPUTS[f"input/{case.split('/')[1]}"]
    assert np.array_equal(oracles.shorten_runs(held["quartic"]), held["zero_run"])
    assert np.array_equal(oracles.lengthen_runs(held["zero_run"]), held["quartic"])
    assert np.array_equal(fields.unpack_trits(held["quartic"], len(codes), len(codes)), codes)
    codec = compll.compile("threelc", "cpu", s=float(case.split("/")[0][5:]))
    y = codec.decode(codec.encode(x), len(x))
    np.testing.assert_allclose(y, held["quantized"] * held["scale"], rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("printer", PRINTERS)
@given(st.lists(st.tuples(st.sampled_from([0, 121, 121, 242]), st.integers(1, 40)), max_size=12))
@settings(deadline=None)
def test_runs_round_trip(printer, groups):
    data = np.array([byte for byte, count in groups for _ in range(count)], np.uint8)
    short = oracles.shorten_runs(data)
    assert np.array_equal(oracles.lengthen_runs(short), data)
    assert len(short) <= len(data)
    out = np.full(len(data) + 2, 7, np.uint8)
    end = stream("runs", printer).store(data, len(data), out)
    assert np.array_equal(out[:end], short)
    assert (out[len(data) :] == 7).all()
    assert stream("runs", printer).load(short, len(data), len(data)) == data.tolist()
    assert stream("runs", printer).load(short, len(data) + 1, len(data)) is None


@given(st.lists(st.integers(0, 2), max_size=300), st.sampled_from([8, 64, 1024]))
@settings(deadline=None)
def test_pack_round_trip(codes, tile):
    codes = np.array(codes, np.uint8)
    packed = fields.pack_trits(codes, tile)
    assert (packed < oracles.FIRST).all()
    assert np.array_equal(fields.unpack_trits(packed, len(codes), tile), codes)


@pytest.mark.slow
@pytest.mark.parametrize("group", ["", "group: 64"])
@pytest.mark.parametrize("kind, other", [("trit", "trit"), ("runs", "trit"), ("runs", "runs")])
def test_fields_of_trits_side_by_side(kind, other, group, tmp_path):
    path = tmp_path / "plain.yaml"
    text = PLAIN.format(kind=kind, other=other, group=group)
    path.write_text(text.replace("  low:", "  p: where(g < 0.5, 3, g)\n  low:"))
    codecs = [compll.compile(path, target) for target in ("reference", "cpu")]
    for n in (0, 1, 5, 63, 64, 1000, 1024, 3333):
        x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
        first, second = (c.encode(x) for c in codecs)
        assert np.array_equal(first, second)
        assert len(first) <= codecs[0].payload_bytes(n)
        q, p = 1 + (x > 1) - (x < 0), np.where(x < 0.5, 2, np.minimum(x, 2).astype(int))
        for codec in codecs:
            assert np.array_equal(codec.decode(first, n), q + 10 * p + 100 * (x < 1))
    assert codecs[0].fixed == (kind == "trit")


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_zeros_take_next_to_nothing(target):
    codec = compll.compile("threelc", target)
    assert len(codec.encode(np.zeros(100_000, np.float32))) < 100_000 / 5 / 14 + 20


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_wrong_lengths_are_refused(target):
    codec = compll.compile("threelc", target)
    payload = codec.encode(np.random.default_rng(0).laplace(size=3000).astype(np.float32))
    for at, value in ((0, 1), (0, 255), (3, 255), (8, 255), (len(payload) - 1, 250)):
        wrong = payload.copy()
        wrong[at] = value if wrong[at] != value else value - 1
        with pytest.raises(compll.PayloadError):
            codec.decode(wrong, 3000)
    huge = payload.copy()
    huge[8:] = 255  # 14 bytes each: more than the tensor has
    with pytest.raises(compll.PayloadError):
        codec.decode(huge, 3000)


@pytest.mark.parametrize(
    "payload, message",
    [
        ("k: 'trit[s]'", "trit holds a value of every element"),
        ("m: trit", "trit holds elements"),
        ("g: 'runs[n]', i: 'gaps[s]'", "runs do not go together with selections"),
        ("g: 'trits[n]'", "unknown type 'trits'\\n.*did you mean 'trit'"),
    ],
)
def test_values_that_trits_cannot_hold(payload, message, tmp_path):
    text = (
        "name: bad\nencode:\n  s: top(g, 3)\n  i: indices(s)\n  k: g[s]\n  m: mean(g)\n"
        f"payload: {{{payload}}}\ndecode: 0\n"
    )
    refuses(text, rf"spec.yaml:7:\d+: .*{message}", tmp_path)
