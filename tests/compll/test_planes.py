"""Codes whose number of bits is not a power of two, as fields."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import compll
from compll.errors import SpecError
from compll.numerics import numbers
from tests.compll.cuda_host.pieces import pieces_equal
from tests.compll.wrong import problems, refuses

SPEC = """name: coded
encode:
  q: g
payload: {{q: "uint{bits}[n]"}}
decode: q
"""
COARSE = """name: coarse
group: 64
encode:
  top: bfloat16_up(max(abs(g)))
  q: g * (3 / top) + 3.5
payload: {top: bfloat16, q: "uint[3][n]"}
decode: (q - 3) * (top / 3)
feedback: error
"""


def compiled(path, text):
    path.write_text(text)
    return [compll.compile(path, target=target) for target in ("cpu", "reference")]


@pytest.mark.parametrize(("bits", "widths"), [(3, (2, 1)), (12, (8, 4)), (15, (8, 4, 2, 1))])
def test_codes_are_packed_plane_by_plane(bits, widths, tmp_path):
    cpu, reference = compiled(tmp_path / "coded.yaml", SPEC.format(bits=bits))

    @given(count=st.integers(1, 2500), seed=st.integers(0, 99))
    def equal(count, seed):
        codes = np.random.default_rng(seed).integers(0, 1 << bits, count)
        payload = cpu.encode(codes.astype(np.float32))
        assert bytes(payload) == bytes(reference.encode(codes.astype(np.float32)))
        at, shift = 0, 0
        for width in widths:
            plane = (codes >> shift & (1 << width) - 1).astype(np.uint8)
            wanted = numbers.pack(plane, width, 1024)
            assert np.array_equal(payload[at : at + len(wanted)], wanted)
            at, shift = at + len(wanted), shift + width
        assert np.array_equal(cpu.decode(payload, count), codes)

    equal()
    assert cpu.payload_bytes(128) == 128 * bits // 8 + cpu.module.status


def test_values_beyond_the_codes_are_clamped(tmp_path):
    for codec in compiled(tmp_path / "coded.yaml", SPEC.format(bits=3)):
        x = np.array([-5, 7.9, 8, 1e30, 2.5, -0.0], np.float32)
        assert codec.decode(codec.encode(x), 6).tolist() == [0, 7, 7, 7, 2, 0]


def test_feedback_knows_what_travels(tmp_path):
    x = np.random.default_rng(0).standard_normal(1000, np.float32)
    found = []
    for codec in compiled(tmp_path / "coarse.yaml", COARSE):
        state = codec.init_state(1000)
        decoded = codec.decode(codec.encode(x, state=state), 1000)
        assert np.array_equal(state["residual"], x - decoded)
        found.append(decoded)
    assert np.array_equal(*found)


@pytest.mark.slow
def test_cuda(tmp_path, rng):
    pieces_equal(COARSE, tmp_path, rng.standard_normal)


def test_selected_elements_and_matrices(tmp_path):
    kept = """name: kept
encode:
  kept: filter(g > 0, n)
  at: indices(kept)
  q: g[kept]
payload: {at: "gaps[kept]", q: "uint5[kept]"}
decode: scatter(at, q)
"""
    rows = """name: rows
encode:
  m: matrix(g, 100)
  at: top_columns(m, 3)
  v: take_columns(m, at)
payload: {at: "uint7[ceil(n / 100), 3]", v: "uint6[ceil(n / 100), 3]"}
decode: flat(place_columns(at, v, 100))
"""
    x = np.random.default_rng(0).integers(0, 32, 1000).astype(np.float32)
    for text, few in ((kept, 1000), (rows, 30)):
        cpu, reference = compiled(tmp_path / f"{text[6:10]}.yaml", text)
        payload = cpu.encode(x)
        assert bytes(payload) == bytes(reference.encode(x))
        decoded = cpu.decode(payload, 1000)
        assert np.array_equal(decoded[decoded != 0], x[decoded != 0])
        assert np.count_nonzero(decoded) == min(few, np.count_nonzero(x))


def test_planes_take_no_name_of_the_spec(tmp_path):
    text = """name: names
encode:
  q: g
  q_0: 2 * g
payload: {q: "uint3[n]", q_0: "uint3[n]"}
decode: q + 100 * q_0
"""
    for codec in compiled(tmp_path / "names.yaml", text):
        x = np.array([1, 2, 3], np.float32)
        assert codec.decode(codec.encode(x), 3).tolist() == [201, 402, 603]


def test_codes_that_ranks_add_travel_in_a_byte(tmp_path):
    text = """name: added
encode:
  top: max(abs(g))
  q: (g / combined(top) + 1) * 3
payload: {{top: float32, q: "uint{bits}[n]"}}
rounds: {{top: max, q: mean}}
decode: (q / 3 - 1) * top
"""
    cpu, _ = compiled(tmp_path / "added.yaml", text.format(bits=3))
    assert cpu.payload_bytes(100) == 104
    with pytest.raises(SpecError, match="uint1 to uint8"):
        compiled(tmp_path / "added.yaml", text.format(bits=9))


CHOSEN = """name: chosen
params: {{packed: false, few: 3}}
encode:
  q: floor(clip(g, 0, 7))
  high: q >= 4
payload:
  q: "{type}"
  high: "uint[0 if packed else 1][n]"
  {more}
decode: q + where(high, 100, 0)
"""


def chosen(type, tmp_path, more="", **params):
    path = tmp_path / "chosen.yaml"
    path.write_text(CHOSEN.format(type=type, more=more))
    return compll.compile(path, "reference", **params)


def test_parameters_choose_a_type_or_no_bits(tmp_path):
    x = np.arange(8, dtype=np.float32)
    for type in ("huffman[3][n] if packed else uint8[n]", "uint8[n] if not packed else uint3[n]"):
        wide, packed = (chosen(type, tmp_path, packed=p) for p in (False, True))
        assert wide.payload_bytes(8) == 8 + 1 + 1  # and a status
        assert np.array_equal(wide.decode(wide.encode(x), 8), x + 100 * (x >= 4))
        assert np.array_equal(packed.decode(packed.encode(x), 8), x)  # `high` is zeros
    nested = "trit[n] if few == 3 else uint2[n] if few == 4 else uint8[n]"
    sizes = [chosen(nested, tmp_path, few=few, packed=True).payload_bytes(40) for few in (3, 4, 5)]
    assert sizes == [9, 11, 41]


@pytest.mark.parametrize(
    "type, col, message",
    [
        ("uint8[n] if packed else uint99[n]", 31, "unknown type 'uint99'"),
        ("uint9 9[n] if packed else uint8[n]", 7, "'uint9 9[n]' is no type"),
        ("uint8[n] if pack else uint8[n]", 19, "unknown name 'pack'"),
        ("uint8[n] if n > 0 else uint8[n]", 19, "this must follow from the parameters"),
        ("uint8[n] if packed", 7, "'uint8[n] if packed' is no type"),
        ("uint[16][n]", 7, "uint has 0 to 15 bits, not 16"),
    ],
)  # fmt: skip
def test_types_that_cannot_be_chosen(type, col, message, tmp_path):
    (told,) = problems(CHOSEN.format(type=type, more=""), tmp_path)
    assert (told.span.line, told.span.col) == (7, col)
    assert message in told.message


def test_a_payload_has_bits(tmp_path):
    text = 'name: nothing\nencode: {q: g > 0}\npayload: {q: "uint[0][n]"}\ndecode: q\n'
    refuses(text, "3:1: no field of the payload has any bits", tmp_path)
