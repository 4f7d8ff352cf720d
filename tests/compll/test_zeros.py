"""Tiles of zeros of either sign, among others: the CPU's results are the reference's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import compll
from compll.runtime.batches import Encoding, Incoming
from tests.compll.cuda_host.pieces import compiled
from tests.tiers import first_fast

FED = """name: fed
group: 64
encode:
  top: bfloat16_up(max(abs(g)))
  q: floor(g * (7 / top) + random(0, 1)) + 7
payload:
  top: bfloat16
  q: uint4[n]
decode: (q - 7) * (top / 7)
feedback: error
"""
#: and the most elements of a tile
KNOWN = [("int4_group", 64), ("tern_group", 64)]
KNOWN += [
    pytest.param(name, tile, marks=pytest.mark.slow)
    for name, tile in (("int8_group", 256), ("qsgd", 128), ("natural", 1024))
]
KINDS = [
    [0.0], [-0.0], [0.0, -0.0], [1e-45, 0.0, -1e-45], [0.0] * 63 + [3.0], [-2.5, 0.1, 0.0, 7.0],
    [-1.0, -0.0], [0.0, np.nan], [0.0, -np.inf],
]  # fmt: skip


def gradients(tile):
    """Tiles of one kind each, the last one shorter."""
    kinds = st.lists(st.sampled_from(KINDS), min_size=1, max_size=5)
    lengths = st.integers(1, tile)
    return st.builds(
        lambda all_, rest: tiles(all_, tile)[: (len(all_) - 1) * tile + rest], kinds, lengths
    )


def tiles(kinds, tile):
    return np.concatenate([np.resize(np.float32(kind), tile) for kind in kinds])


def encoded(codec, x, incoming, state, **options):
    """Results of kernels that encode, and of those that merge: payloads, and the decoded x."""
    at, found = np.zeros(1, np.int64), []
    taken = codec.encode(np.resize(incoming, len(x)), seed=1)
    for hop in (None, Incoming(taken, at, np.array([len(taken)]))):
        y, out = x.copy(), np.zeros(codec.payload_bytes(len(x)), np.uint8)
        table = np.array([[0, len(x), 0, 2**32 - 1024, 0]])
        codec.encode_batch(
            y, table, out, at, state=state, writeback=True, incoming=hop, seed=5, **options
        )
        found += [out, np.where(np.isnan(y), 0, y).view(np.uint32)]
    return found


def words(data):
    """Bytes by fours; all NaNs are equal, since a product of two has the sign of either."""
    padded = np.resize(data.view(np.uint8), -(-data.nbytes // 4) * 4)
    return np.where(np.isnan(padded.view(np.float32)), 0x7FC00000, padded.view(np.uint32))


def agree(codecs, x, incoming, **options):
    """Assert that the CPU's backend and the reference agree, with states from step to step."""
    states = [codec.init_state(len(x)) or None for codec in codecs]
    for step in range(2):
        made = [
            encoded(codec, x, incoming, state, step=step, **options)
            for codec, state in zip(codecs, states, strict=True)
        ]
        kept = [[a.view(np.uint32) for a in (state or {}).values()] for state in states]
        for one, other in zip(made[0] + kept[0], made[1] + kept[1], strict=True):
            assert np.array_equal(words(one), words(other))


@pytest.mark.parametrize("name, tile", KNOWN)
def test_they_are_as_the_reference_has_them(name, tile):
    codecs = [compll.compile(name, target) for target in ("cpu", "reference")]

    @settings(max_examples=15, deadline=None)
    @given(gradients(tile), st.sampled_from(KINDS), st.sampled_from([1.0, 0.25]))
    def check(x, incoming, scale):
        agree(codecs, x, np.float32(incoming), scale=scale)

    check()


def test_states_are_as_the_reference_has_them(tmp_path):
    path = tmp_path / "fed.yaml"
    path.write_text(FED)
    codecs = [compll.compile(path, target) for target in ("cpu", "reference")]
    for kind in KINDS:
        agree(codecs, tiles([kind, [0.0], [-0.0], [5.0, 0.0]], 64)[:-9], np.float32([0.0]))


SUMS = {
    "group": "group: 8\nencode:\n  s: {}\npayload: {{s: float32}}\ndecode: s + 0 * n\n",
    "tensor": "encode:\n  s: {}\npayload: {{s: float32}}\ndecode: s + 0 * n\n",
}


@pytest.mark.parametrize("form", first_fast(["sum(-g)", "sum(g)", "mean(round(-g))", "sum(g * g)"]))
@pytest.mark.parametrize("kind", SUMS)
def test_signs_of_zero_sums(kind, form, tmp_path):
    """Zeros behind a tile's end are 0.0, also where a kernel has -0.0 or NaN there, by a negative
    or infinite scale; totals begin with 0.0."""
    device, reference = compiled("name: zeros\n" + SUMS[kind].format(form), tmp_path)
    cpu, at = compll.compile(tmp_path / "spec.yaml", "cpu"), np.zeros(1, np.int64)
    tensors = {5: (0.0, -0.0, 1.0), 13: (0.0, -0.0), 1025: (0.0, -0.0), 1 << 17: (-0.0, 0.0)}
    for n, values in tensors.items():
        table = np.array([[0, n, 0, 0, 0]])
        for value in values:
            for scale in (1.0, -1.0, np.inf) if n < 2000 else (1.0,):
                found = [np.zeros(reference.payload_bytes(n), np.uint8) for _ in range(3)]
                x = np.full(n, value, np.float32)
                for codec, out in zip((reference, cpu), found, strict=False):
                    codec.encode_batch(x.copy(), table, out, at, scale=scale)
                device.encode_batch(x.copy(), table, found[2], at, None, Encoding(scale=scale))
                # a status byte may follow
                sums = [out[: len(out) // 4 * 4].view("<f4") for out in found]
                same = {np.nan_to_num(of_all).tobytes() for of_all in sums}
                assert len(same) == 1, (n, value, scale, found)
