"""Huffman codes of a field: lengths, streams of all backends, damaged payloads, their bound."""

import heapq

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compll
from compll.ir.storage import HUFFMAN_LONGEST, Huffman
from tests.compll import oracles
from tests.compll.cuda_host.pieces import compiled, decode_alike, pieces_equal
from tests.compll.routines import PRINTERS, stream
from tests.compll.wrong import refuses
from tests.tiers import first_fast

WIDTHS = range(1, 9)

LEVELS = """
name: levels
params: {bits: 4, spread: 1.0}
encode:
  top: max(abs(g))
  middle: 2**(bits - 1)
  q: floor(g / top * middle / spread) + middle
payload: {top: float32, q: "TYPE[bits][n]"}
decode: (q - middle) * (top / middle)
feedback: error
"""


def skewed(rng, bits, count):
    """Numbers of 1 to 2**bits kinds, with frequencies of a random skew."""
    kinds = rng.permutation(1 << bits)[: rng.integers(1, (1 << bits) + 1)]
    chances = rng.choice([1.0, 1.1, 1.7, 3.0]) ** -np.arange(len(kinds))
    return rng.choice(kinds, count, p=chances / chances.sum()).astype(np.uint8)


def least(counts):
    """Bits of all codes by Huffman's tree: the sum of its inner nodes."""
    heap, total = [c for c in counts if c], 0
    heapq.heapify(heap)
    while len(heap) > 1:
        joined = heapq.heappop(heap) + heapq.heappop(heap)
        total += joined
        heapq.heappush(heap, joined)
    return total


@given(st.lists(st.integers(0, 40), min_size=16, max_size=16).filter(any))
def test_codes_are_as_short_as_any(counts):
    found = oracles.huffman_lengths(np.array(counts), 4)
    assert sum(c * max(bits, 0) for c, bits in zip(counts, found, strict=True)) == least(counts)
    assert ((found < 0) == (np.array(counts) == 0)).all()
    assert sum(2.0**-bits for bits in found if bits >= 0) == 1


@pytest.mark.parametrize("counts", [[2**i for i in range(32)], [1] * 255 + [10**9]])
def test_no_code_is_longer_than_a_window(counts):
    counts = np.array(counts + [0] * (256 - len(counts)))
    found = oracles.huffman_lengths(counts, 8)
    assert found.max() <= HUFFMAN_LONGEST
    assert sum(2.0**-bits for bits in found if bits >= 0) == 1


@pytest.mark.parametrize("printer", PRINTERS)
@given(st.integers(0, 2**32), st.sampled_from(WIDTHS), st.sampled_from([1, 3, 1023, 1024, 6001]))
@settings(deadline=None, max_examples=200)
def test_both_backends_write_and_read_the_same(printer, seed, bits, count):
    rng = np.random.default_rng(seed)
    values = skewed(rng, bits, count)
    field = oracles.encode_huffman(values, bits)
    assert len(field) <= Huffman(bits=bits).most_bytes(count, count)
    assert np.array_equal(oracles.decode_huffman(field, count, bits), values)
    out = np.full(len(field) + 16, 7, np.uint8)
    end = stream("huffman", printer).store(values, bits, out)
    assert np.array_equal(out[:end], field)
    assert (out[end:] == 7).all()
    assert stream("huffman", printer).load(field, count, bits) == values.tolist()


@pytest.mark.parametrize("printer", PRINTERS)
def test_codes_that_had_to_be_cut(printer):
    """Frequencies of Fibonacci numbers would take codes of up to 20 bits."""
    numbers = [1, 1]
    while len(numbers) < 21:
        numbers.append(numbers[-1] + numbers[-2])
    values = np.repeat(np.arange(len(numbers), dtype=np.uint8), numbers)
    np.random.default_rng(0).shuffle(values)
    field = oracles.encode_huffman(values, 5)
    out = np.zeros(len(field), np.uint8)
    assert stream("huffman", printer).store(values, 5, out) == len(field)
    assert np.array_equal(out, field)
    assert stream("huffman", printer).load(field, len(values), 5) == values.tolist()


@pytest.mark.parametrize("bits", [1, 3, 8])
def test_the_longest_field_is_within_the_bound(bits):
    """Equal frequencies, and tiles whose streams do not end with a byte."""
    for count in (1, 2, 1023, 1025, 5 * 1024 + 3):
        values = np.arange(count, dtype=np.uint8) & ((1 << bits) - 1)
        size = len(oracles.encode_huffman(values, bits))
        bound = Huffman(bits=bits).most_bytes(count, count)
        assert size <= bound
        assert count < 1000 or bound - size < 2 * (1 + count / 1024)


@pytest.mark.parametrize("printer", PRINTERS)
@given(st.integers(0, 2**32), st.sampled_from(WIDTHS), st.sampled_from([1, 1000, 1024, 5001]))
@settings(deadline=None, max_examples=200)
def test_damaged_fields_are_refused_or_read_alike(printer, seed, bits, count):
    rng = np.random.default_rng(seed)
    field = oracles.encode_huffman(skewed(rng, bits, count), bits)
    places = rng.integers(0, rng.choice([len(field), (1 << bits) // 2 + 2]), 2)
    field[places % len(field)] = rng.integers(0, 256, 2)
    field = field[: rng.choice([len(field), rng.integers(0, len(field) + 1)])]
    wanted = oracles.decode_huffman(field, count, bits)
    found = stream("huffman", printer).load(field, count, bits)
    assert found == (None if wanted is None else wanted.tolist())


def damaged(field):
    """Fields of three numbers, 0, 0 and 1, of two bits, with a mistake each."""
    yield field[:-1]  # the last stream is shorter than the head says
    yield np.append(field, np.uint8(0))
    for place, byte in ((0, 0), (0, 0x02), (0, 0x11), (0, 0x3E), (1, 0x02), (2, 2), (4, 0x21)):
        other = field.copy()
        other[place] = byte
        yield other


@pytest.mark.parametrize("printer", PRINTERS)
def test_the_mistakes_that_are_refused(printer):
    values = np.array([0, 0, 1], np.uint8)
    field = oracles.encode_huffman(values, 2)
    assert field.tolist() == [0x22, 0, 1, 0, 0b00100000]
    assert stream("huffman", printer).load(field, 3, 2) == [0, 0, 1]
    for wrong in damaged(field):
        assert oracles.decode_huffman(wrong, 3, 2) is None
        assert stream("huffman", printer).load(wrong, 3, 2) is None


@pytest.mark.parametrize("target", ["reference", "cpu"])
@pytest.mark.parametrize("spec", ["int4_group", "int3_group", "tern_group"])
def test_levels_are_those_of_the_packed_spec(spec, target):
    plain, coded = (compll.compile(spec, target, entropy=entropy) for entropy in (False, True))
    for n in (1, 63, 1024, 3001):
        x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
        x[n // 2 :] *= n % 2  # groups of zeros, too
        payloads = [codec.encode(x, seed=5, step=n) for codec in (plain, coded)]
        first, second = (c.decode(p, n) for c, p in zip((plain, coded), payloads, strict=True))
        assert np.array_equal(first.view(np.uint32), second.view(np.uint32))
        assert len(payloads[1]) <= coded.payload_bytes(n)
    assert not coded.fixed


def made(kind, tmp_path, target, **params):
    path = tmp_path / f"{kind}.yaml"
    path.write_text(LEVELS.replace("TYPE", kind))
    return compll.compile(path, target, **params)


@pytest.mark.parametrize("bits", first_fast([5, 1, 8]))
def test_the_residual_is_that_of_packed_codes(bits, tmp_path):
    n = 2500
    codecs = [made("uint", tmp_path, "cpu", bits=bits), made("huffman", tmp_path, "cpu", bits=bits)]
    codecs.append(made("huffman", tmp_path, "reference", bits=bits))
    states = [codec.init_state(n) for codec in codecs]
    for step in range(2):
        x = np.random.default_rng(step).laplace(size=n).astype(np.float32)
        for codec, state in zip(codecs, states, strict=True):
            payload = codec.encode(x, state=state, step=step)
            assert len(payload) <= codec.payload_bytes(n)
            codec.decode(payload, n)
    for state in states[1:]:
        assert np.array_equal(state["residual"], states[0]["residual"])


@pytest.mark.parametrize("bits", first_fast([8, 1, 3]))
def test_cuda_kernels_are_the_same(bits, tmp_path, rng):
    text = LEVELS.replace("TYPE", "huffman")
    pieces_equal(text, tmp_path, rng.standard_normal, bits=bits)
    sizes = (70_001, 1, 0, 1024, 1025)  # blocks have 64 tiles
    pieces_equal(text, tmp_path, lambda n: rng.laplace(size=n) ** 3, lengths=sizes, bits=bits)
    pieces_equal(text, tmp_path, lambda n: np.where(np.arange(n) % 999, 0, np.nan), bits=bits)


def test_cuda_kernels_refuse_the_same(tmp_path, rng):
    codecs = compiled(LEVELS.replace("TYPE", "huffman"), tmp_path)
    n, turns, taken = 3000, 60, 0
    good = codecs[1].encode(rng.laplace(size=n).astype(np.float32))
    for turn in range(turns):
        data = good.copy()
        end = (30, len(data))[turn % 2]  # the head, or any place
        data[rng.integers(8, end, 1 + turn % 3)] ^= np.uint8(1 << turn % 8)
        taken += decode_alike(codecs, data, n)
    assert 3 < taken < turns


@pytest.mark.parametrize(
    "payload, message",
    [
        ("k: 'huffman[4][s]'", "huffman holds a value of every element"),
        ("m: 'huffman[4]'", r"m' is one number, and huffman\[...\] holds elements"),
        ("g: 'huffman[0][n]'", "huffman has 1 to 8 bits, not 0"),
        ("g: 'huffman[9][n]'", "huffman has 1 to 8 bits, not 9"),
        ("g: 'huffman[n]'", "'g' is declared one number"),
        ("g: huffman", "'huffman' is not a type\\n.*write huffman\\[bits"),
        ("g: 'huffman4[n]'", "unknown type 'huffman4'\\n.*did you mean 'huffman'"),
        ("g: 'huffman[2][n]', i: 'gaps[s]'", "Huffman codes do not go together with selections"),
        ("x: 'huffman[2][10, 10]'", "'x': a matrix is .*uint"),
    ],
)
def test_values_that_huffman_codes_cannot_hold(payload, message, tmp_path):
    text = (
        "name: bad\nencode:\n  s: top(g, 3)\n  i: indices(s)\n  k: g[s]\n  m: mean(g)\n"
        "  x: matrix(g, 10)\n"
        f"payload: {{{payload}}}\ndecode: 0\n"
    )
    refuses(text, rf"spec.yaml:8:\d+: .*{message}", tmp_path)


def test_ranks_do_not_add_huffman_codes(tmp_path):
    text = (
        "name: added\nencode: {s: max(abs(g)), q: g / combined(s) + 1}\n"
        "payload: {s: float32, q: 'huffman[2][n]'}\nrounds: {s: max, q: mean}\ndecode: q * s\n"
    )
    refuses(text, "q", tmp_path)


SHORT_NUMBERS = """
name: short
encode:
  q: int(min(abs(g), 3))
payload: {q: "huffman[2][n]"}
decode: q
"""


def test_longer_codes_than_encode_makes_are_refused(tmp_path):
    """A header, sizes of streams and `used` that agree on more bytes than a payload can have once
    let kernels read behind the array's end: host code sees no `used` in a device's memory."""
    device, reference = compiled(SHORT_NUMBERS, tmp_path)
    cpu, n = compll.compile(tmp_path / "spec.yaml", "cpu"), 4096
    good = reference.encode(np.zeros(n, np.float32))
    size = int(good[:4].view("<u4")[0])
    # codes of 3, 1, 2 and 3 bits, of which 110 stands for each zero
    field = bytes([0x24, 0x43]) + 4 * (384).to_bytes(2, "little") + 512 * b"\xdb\x6d\xb6"
    longer = np.frombuffer(
        len(field).to_bytes(4, "little") + field + good[4 + size :].tobytes(), np.uint8
    )
    assert len(longer) > reference.payload_bytes(n)
    assert decode_alike((reference, cpu, device), good, n)
    assert not decode_alike((reference, cpu, device), longer, n)
