"""Whole numbers in the payload, of every type and level."""

import numpy as np
import pytest

import compll
from tests.compll.cuda_host.pieces import pieces_equal

#: the same number, or numbers, as every type
STORAGES = {"a": "int32", "b": "uint32", "c": "uint16"}
SPEC = """name: integers
GROUP
encode:
  e: exponent(max(abs(g)))
  k: where(g < 0, 3, 7)
  a: k
  b: k + 1
  c: k + 2
  d: (5 << k - 6) + (-77 >> 30 * k - 90)
payload: {e: int32, a: "int32[n]", b: "uint32[n]", c: "uint16[n]", d: "int32[n]"}
decode: exp2(e) * (a - 5) * (b - 6) * (c - 7) + where(e < 0, e, 0) + d
"""


@pytest.mark.slow
@pytest.mark.parametrize("group", ["", "group: 32"])
def test_numbers_below_zero_arrive(group, tmp_path, rng):
    """A number of the tensor, or of a group, was once read without its sign. And of a shift's bits
    only the lowest five were used."""
    text = SPEC.replace("GROUP", group)
    path = tmp_path / "integers.yaml"
    path.write_text(text)
    x = np.float32(1e-3) * rng.standard_normal(1000).astype(np.float32)
    for target in ("reference", "cpu"):
        codec = compll.compile(path, target)
        y = codec.decode(codec.encode(x), len(x))
        groups = np.split(x, range(32, len(x), 32)) if group else [x]
        e = np.concatenate([0 * a + np.floor(np.log2(np.abs(a).max())) for a in groups])
        wanted = np.exp2(e) * np.where(x < 0, -8, 8) + np.minimum(e, 0) + np.where(x < 0, -77, 9)
        np.testing.assert_array_equal(y, wanted)
    pieces_equal(text, tmp_path, lambda n: 1e-3 * rng.standard_normal(n))


@pytest.mark.slow
def test_integers_of_selected_elements_into_a_state(tmp_path, rng):
    """The conversion stood around `where(kept, a, b)`, which the CPU backend once refused."""
    path = tmp_path / "state.yaml"
    path.write_text("""
name: chosen
state: {s: "float32[n]"}
encode:
  kept: filter(g > s, n)
  index: indices(kept)
  value: g[kept]
payload: {index: "gaps[kept]", value: "float32[kept]"}
decode: scatter(index, value)
update: {s: "where(kept, 1, exponent(g))"}
""")
    x = rng.standard_normal(500).astype(np.float32)
    for target in ("reference", "cpu"):
        codec = compll.compile(path, target)
        state = codec.init_state(500)
        codec.encode(x, state=state)
        wanted = np.where(x > 0, 1, np.floor(np.log2(np.abs(x))))
        np.testing.assert_array_equal(state["s"], wanted)


BITS = ("e >> 1", "e & 255", "-e ^ 3", "(e | 6) << 2", "e << e", "e >> e", "e << 99",
        "e >> (n + 63)", "3 << 20 * e", "e * 1000000000", "(e > 0) * 3000000000", "e // (e - e)",
        "e % (e - e)", "(7 - e) // 3", "(7 - e) % -3", "-(e - e)",
        "mean(g) // 0.1", "mean(g) % 0.1")  # fmt: skip


@pytest.mark.slow
def test_bits_of_one_number(tmp_path):
    """Constants reach kernels as floats, which have no bits; negative zero is one, too.

    Bounds of a whole number that is no element were once those of int32 in the reference.
    """
    names = [f"y{number}" for number in range(len(BITS))]
    lines = [f"  {name}: {bits}" for name, bits in zip(names, BITS, strict=True)]
    fields = ", ".join(f"{name}: float32" for name in names)
    text = "\n".join(["name: bits", "encode:", "  e: exponent(max(abs(g)))", *lines])
    text += f'\npayload: {{{fields}, g: "uint1[n]"}}\ndecode: {" + ".join(names)} + 0 * g\n'
    for top in (0.01, 2.0, 5.0):
        values = lambda n, top=top: np.resize(np.float32([0, top]), n)  # noqa: E731
        pieces_equal(text, tmp_path, values, lengths=(2, 1, 700), on=("cpu", "cuda"))
    reference = compll.compile(tmp_path / "spec.yaml", "reference")
    values = reference.encode(np.array([0, 2], np.float32))[: 4 * len(BITS)].view(np.float32)
    found = dict(zip(BITS, values, strict=True))
    assert found["e * 1000000000"] == 1e9
    assert found["mean(g) // 0.1"] == 10, "floor(1 / 0.1)"


HELD = """name: held
encode:
  v: EXPRESSION
  a: v
  b: v
  c: v
  z: g
payload: {a: "int32SHAPE", b: "uint32SHAPE", c: "uint16SHAPE", z: "float32[n]"}
decode: DECODED + 0 * z
feedback: error
"""
ELEMENTS = ("where(g < 0, -5, 7)", "g * 1e10", "exponent(g) - 3", "g > 0", "where(g < 0, 0 / 0, g)")
NUMBERS = ("floor(sum(g) - 100)", "sum(abs(g)) * 1e9", "count(g > 0) - 5", "-1e30 * max(g)")
RANGES = {"int32": (-(2**31), 2**31), "uint32": (0, 2**32), "uint16": (0, 2**16 - 1)}


def held(expression, decoded, path):
    """The path of a spec that stores an expression in every type."""
    text = HELD.replace("EXPRESSION", expression).replace("DECODED", decoded)
    text = text.replace("SHAPE", "[n]" if expression in ELEMENTS else "")
    path.write_text(text)
    return text


@pytest.mark.slow
@pytest.mark.parametrize("expression", [*ELEMENTS, *NUMBERS])
def test_feedback_knows_what_is_held(expression, tmp_path):
    """Numbers beyond a type's range once wrapped around in the payload, but not in the residual."""
    path = tmp_path / "held.yaml"
    x = np.array([-1, 2, -3, 4, 0.5, 0], np.float32)
    values = []
    for field, storage in STORAGES.items():  # each one separately if no compiling is needed
        held(expression, field, path)
        values.append(checked(compll.compile(path, "reference"), x))
        low, high = RANGES[storage]
        assert (values[-1] >= low).all()
        assert (values[-1] <= high).all()
    text = held(expression, "(a + 0 * z) + 3 * (b + 0 * z) - 5 * (c + 0 * z)", path)
    a, b, c = values  # and all at once, as floats
    for target in ("reference", "cpu"):
        np.testing.assert_array_equal(checked(compll.compile(path, target), x), a + 3 * b - 5 * c)
    pieces_equal(text, tmp_path, np.random.default_rng(1).standard_normal, lengths=(6, 1, 40))


ROUNDED = """name: rounded
encode:
  a: exponent(OF) * 1003
  b: g
payload: {a: "TYPE", b: "float32[n]"}
decode: DECODED + 0 * b
feedback: error
"""


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32", "bfloat16[n]"])
def test_feedback_knows_how_floats_round_integers(kind, tmp_path):
    """The residual once used the unrounded integer."""
    path = tmp_path / "rounded.yaml"
    of = "g" if "[n]" in kind else "max(g)"
    text = ROUNDED.replace("OF", of).replace("TYPE", kind).replace("DECODED", "a")
    path.write_text(text.replace("1003", "1003003") if kind == "float32" else text)
    checked(compll.compile(path, "reference"), np.array([3, 1e-9, 2e9], np.float32))


def test_feedback_shifts_what_is_held(tmp_path):
    """The int32 of a float was once a float, too, which has no bits."""
    path = tmp_path / "rounded.yaml"
    text = ROUNDED.replace("exponent(OF) * 1003", "sum(g)").replace("TYPE", "int32")
    path.write_text(text.replace("DECODED", "(a << 1)"))
    assert checked(compll.compile(path, "reference"), np.full(3, 1.5, np.float32))[0] == 8


def checked(codec, x):
    """The decoded values, checked against the residual."""
    state = codec.init_state(len(x))
    y = codec.decode(codec.encode(x, state=state), len(x))
    np.testing.assert_array_equal(state["residual"], x - y)
    return y


@pytest.mark.slow
def test_integers_beside_a_search(tmp_path, rng):
    """A tile's stored integers and the counts of the search once had one name."""
    text = """
name: searched
encode:
  power: exponent(g)
  size: bisect(abs(g), 0, max(abs(g)), 3, n / 5, 5)
  low: power & 15
  high: (power + 128) >> 4
payload: {size: float32, low: "uint4[n]", high: "uint4[n]"}
decode: size * exp2(high * 16 + low - 128)
"""
    pieces_equal(text, tmp_path, rng.standard_normal, on=["cpu"])
