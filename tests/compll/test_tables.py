"""Tables of a few numbers per tensor: quantiles, means by bin, and sketch made of them."""

from pathlib import Path

import numpy as np
import pytest

import compll
from compll.numerics.bits import from_key, order_key
from compll.routines import tables
from tests.compll.routines import quantiles
from tests.compll.wrong import refuses
from tests.tiers import first_fast

MORE = np.load(Path(__file__).parent / "golden" / "more.npz")


def sketched(x, q):
    """Bins of equally many elements, decoded as their means, in plain NumPy."""
    edges = np.sort(x)[np.arange(1, q) * len(x) // q]
    bins = np.searchsorted(edges, x, side="right")
    means = [x[bins == i].mean(dtype=np.float64) if (bins == i).any() else 0 for i in range(q)]
    return np.array(means, np.float32)[bins]


@pytest.mark.parametrize("q", first_fast([64, 4, 16, 256]))
@pytest.mark.parametrize("n", [1, 3, 100, 5000])
def test_sketch_is_the_mean_of_quantile_bins(q, n):
    x = np.random.default_rng(n).laplace(size=n).astype(np.float32)
    codec = compll.compile("sketch", "cpu", q=q)
    np.testing.assert_allclose(codec.decode(codec.encode(x), n), sketched(x, q), rtol=1e-6)


def test_sketch_is_near_the_published_one():
    """Their quantiles lie between elements, so some elements are in a neighbouring bin."""
    x, theirs = MORE["grace_sketch/x"], MORE["grace_sketch/y"]
    codec = compll.compile("sketch", "cpu")
    y = codec.decode(codec.encode(x), len(x))
    spread = np.abs(x).mean()
    assert (np.abs(y - theirs) < 0.05 * spread).mean() > 0.95
    assert np.linalg.norm(y - x) < 1.05 * np.linalg.norm(theirs - x)


SPEC = """
name: tabled
params: {q: 8}
state: {s: "float32[n]"}
encode:
  edges: quantiles(g + s, q)
  i: bucket(g + s, edges)
  count_of: sum_by(i, where(g > 0, 1, 0), 2 * q) / max(1, sum_by(i, 1, 2 * q))
  first: lookup(edges, 0 - 5) + lookup(edges, 99)
  high: bucket(sum(g), edges)
  y: lookup(count_of, i) + first + high
payload: {edges: "float32[q - 1]", count_of: "float32[1, 2 * q]", y: "float32[n]", i: "uint4[n]"}
decode: y + lookup(edges, i) + lookup(count_of, 3)
update:
  s: g - lookup(edges, i)
"""


@pytest.mark.slow
def test_tables_at_every_place(tmp_path):
    path = tmp_path / "tabled.yaml"
    path.write_text(SPEC)
    codecs = [compll.compile(path, target) for target in ("reference", "cpu")]
    n, states = 3000, [c.init_state(3000) for c in codecs]
    s = np.zeros(n, np.float32)
    for step in range(3):
        x = np.random.default_rng(step).standard_normal(n).astype(np.float32)
        payloads = [c.encode(x, state=t, step=step) for c, t in zip(codecs, states, strict=True)]
        assert np.array_equal(*payloads)
        assert np.array_equal(*(c.decode(payloads[0], n) for c in codecs))
        z = x + s
        edges = np.sort(z)[np.arange(1, 8) * n // 8]
        i = np.searchsorted(edges, z, side="right")
        shares = np.array([(x[i == k] > 0).mean() for k in range(8)], np.float32)
        high = np.searchsorted(edges, x.sum(), side="right")
        y = shares[i] + edges[0] + edges[-1] + high + edges[np.minimum(i, 6)] + shares[3]
        np.testing.assert_allclose(codecs[1].decode(payloads[1], n), y, rtol=1e-5, atol=1e-5)
        s = x - edges[np.minimum(i, 6)]
        assert np.array_equal(states[1]["s"], s)
        assert np.array_equal(states[0]["s"], s)


@pytest.mark.parametrize(
    "encode, declared, message",
    [
        ("quantiles(g, n)", "float32[8]", "the size of a table is a whole number"),
        ("quantiles(g, 5000)", "float32[8]", "from 2 to 4096"),
        ("quantiles(mean(g), 8)", "float32[7]", "quantiles takes elements first"),
        ("quantiles(g, 8)", "float32[8]", "'t' is a table of 7 numbers"),
        ("quantiles(g, 8)", "float16[7]", "'t' is a table of 7 numbers"),
        ("quantiles(g, 8)", "float32", "'t' is a table of 7 numbers"),
        ("1 + quantiles(g, 8)", "float32[7]", "a table is no number"),
        ("mean(quantiles(g, 8))", "float32", ""),
        ("sum_by(g, g, 8)", "float32[1, 8]", "sum_by takes integers first"),
        ("bucket(g, 3)", "float32[n]", "bucket takes a table, not int"),
        ("lookup(quantiles(g, 8), g)", "float32[n]", "lookup takes an integer"),
        ("where(g > 0, quantiles(g, 8), 0)", "float32[n]", "a table is no number"),
        ("max(quantiles(g, 8), g)", "float32[n]", "a table is no number"),
        ("top(quantiles(g, 8), 3)", "float32[n]", "top selects among elements"),
    ],
)
def test_limits_of_tables(encode, declared, message, tmp_path):
    text = f"name: bad\nencode:\n  t: {encode}\npayload: {{t: '{declared}'}}\ndecode: t\n"
    refuses(text, rf"spec.yaml:\d+:\d+: .*{message}", tmp_path)


@pytest.mark.parametrize("group", ["", "group: 64\n"])
def test_a_table_is_not_what_decode_gives(group, tmp_path):
    text = "name: bad\n" + group + "encode: {t: 'quantiles(g, 8)'}\npayload: {t: 'float32[7]'}\n"
    wanted = "looks at the whole tensor" if group else "not one number per element"
    refuses(text + "decode: t\n", wanted, tmp_path)


def many(kind, rng):
    n = tables.MANY + 17
    return {
        "normal": rng.standard_normal(n),
        "few": rng.integers(-2, 3, n) * 0.5,
        "same": np.full(n, 7.0),
        "near": 1 + rng.integers(0, 300, n) / (1 << 21),  # one upper half, several middle bytes
        "zeros": rng.standard_normal(n) * (rng.random(n) < 0.1),
        "wild": rng.integers(0, 1 << 32, n, dtype=np.uint64).astype(np.uint32).view(np.float32),
    }[kind].astype(np.float32)


KINDS = ["normal", "few", "same", "near", "zeros", "wild"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("q", first_fast([64, 4, 256]))
def test_many_elements_find_their_buckets(kind, q, rng):
    x = many(kind, rng)
    cpu, reference = (compll.compile("sketch", target, q=q) for target in ("cpu", "reference"))
    assert np.array_equal(cpu.encode(x), reference.encode(x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [4, 64, 256])
def test_quantiles_are_those_of_the_sorted_elements(kind, parts, rng):
    for x in (many(kind, rng), many(kind, rng)[:3000]):
        ranks = np.arange(1, parts) * len(x) // parts
        wanted = from_key(np.sort(order_key(x))[ranks])
        assert quantiles(x, parts).tobytes() == wanted.tobytes()


POWERS = """
name: powers
params: {bits: 3}
encode:
  edges: quantiles(g, SIZE)
  i: bucket(g, edges)
  low: i & MASK
payload:
  edges: float32[SIZE - 1]
  low: uint8[n]
decode: lookup(edges, low)
"""


@pytest.mark.parametrize("target", first_fast(["reference", "cpu"]))
def test_powers_of_whole_numbers_are_whole(target, tmp_path, rng):
    x = rng.standard_normal(300).astype(np.float32)
    payloads = []
    for size, mask in (("2**bits", "(2**bits - 1)"), ("8", "7"), ("1 << bits", "7")):
        path = tmp_path / "powers.yaml"
        path.write_text(POWERS.replace("SIZE", f"({size})").replace("MASK", mask))
        payloads.append(compll.compile(path, target).encode(x))
    assert len({payload.tobytes() for payload in payloads}) == 1


@pytest.mark.parametrize("size", ["2.0**bits", "2**-bits", "2**10**9", "9**9**9", "2**bits / 1"])
def test_other_powers_are_no_sizes(size, tmp_path):
    text = POWERS.replace("SIZE - 1", "7").replace("SIZE", size).replace("MASK", "7")
    refuses(text, "a whole number from 2 to 4096", tmp_path)


def test_groups_have_no_quantiles(tmp_path):
    text = (
        "name: grouped\ngroup: 64\nencode:\n  t: quantiles(g, 4)\n  q: bucket(g, t)\n"
        "payload: {q: 'uint2[n]'}\ndecode: q * 1.0\n"
    )
    refuses(text, "remove `group:`, or write a table of levels", tmp_path)
