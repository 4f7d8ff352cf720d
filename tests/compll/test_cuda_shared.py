"""Tables of a plan share its scratch memory, and a launch adds several payloads."""

import re

import numpy as np
import pytest

import compll
from tests.compll.cuda_host import codec as codec_on
from tests.compll.cuda_host import hostile


def batch(codec, lengths):
    """A table, the offsets of its payloads, and a buffer for them."""
    starts = np.cumsum([0, *lengths[:-1]])
    table = np.array(
        [[s, n, i, 0, s] for i, (s, n) in enumerate(zip(starts, lengths, strict=True))]
    )
    ends = np.cumsum([0, *(codec.payload_bytes(n) for n in lengths)])
    return table, ends[:-1].copy(), int(ends[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", hostile.SPECS)
def test_tables_in_turn_have_the_bits_of_their_own(name, rng):
    """Scratch memory that one table leaves does not change another's results."""
    codec, reference = codec_on(name), compll.compile(name, "reference")
    sizes = ((3000, 1, 700), (129,), (1, 2500), (5000,))
    fed = bool(reference.stateful)
    states = {s: reference.init_state(sum(s), len(s)) if fed else None for s in sizes}
    ours = {s: {k: v.copy() for k, v in state.items()} if fed else None
            for s, state in states.items()}  # fmt: skip
    for turn, lengths in enumerate((*sizes, *sizes[::-1], sizes[0])):
        codec.backend.device.descending = turn % 2 == 1
        table, at, size = batch(codec, lengths)
        x = rng.standard_normal(sum(lengths)).astype(np.float32)
        for state, its in ((None, None), (ours[lengths], states[lengths])):
            out, want = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
            used = codec.encode_batch(x, table, out, at, state=state, seed=1, step=turn)
            wants = reference.encode_batch(x, table, want, at, state=its, seed=1, step=turn)
            assert used.tolist() == wants.tolist()
            np.testing.assert_array_equal(out, want)
            for add in (False, True):
                got, y = x.copy(), x.copy()
                codec.decode_batch(out, table, at, used, got, add=add, step=turn)
                reference.decode_batch(want, table, at, wants, y, add=add, step=turn)
                np.testing.assert_array_equal(got, y)
        if fed:
            for key in states[lengths]:
                np.testing.assert_array_equal(ours[lengths][key], states[lengths][key])


@pytest.mark.parametrize("name", ["int4_group", "onebit", "topk"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_several_payloads_are_added_in_their_order(name, dtype, rng):
    """In one launch, which decodes each lane by itself; the bits are those of separate ones."""
    codec, count = codec_on(name), 5
    table, at, size = batch(codec, (3000, 1, 700))
    data, lengths = np.zeros(count * size, np.uint8), []
    for k in range(count):
        x = rng.standard_normal(3701).astype(np.float32)
        used = codec.encode_batch(x, table, data[k * size :][:size], at, seed=k, step=k)
        lengths.append(np.array(used))
    y = rng.standard_normal(3701).astype(dtype)
    for add in (True, False):
        want, got = y.copy(), y.copy()
        for k in range(count):
            part = data[k * size :][:size]
            codec.decode_batch(part, table, at, lengths[k], want, add=add or k > 0)
        ats = np.array([at + k * size for k in range(count)])
        before = len(codec.backend.device.launches)
        held = (codec.hold(table), codec.hold(ats), codec.hold(np.array(lengths)))
        codec.decode_batch(data, *held, got, add=add)
        np.testing.assert_array_equal(got, want)
        if codec.merges:
            assert len(codec.backend.device.launches) - before == (1 if add else 2)
    assert codec.merges == (name != "topk")


def test_the_host_adds_several_payloads_too(rng):
    codec = compll.compile("int4_group")
    table, at, size = batch(codec, (300, 70))
    data, used = np.zeros(2 * size, np.uint8), []
    for k in range(2):
        x = rng.standard_normal(370).astype(np.float32)
        used.append(codec.encode_batch(x, table, data[k * size :][:size], at, seed=k))
    want, got = np.zeros(370, np.float32), np.ones(370, np.float32)
    for k in range(2):
        codec.decode_batch(data[k * size :][:size], table, at, used[k], want, add=True)
    ats = codec.hold(np.array([at, at + size]))
    codec.decode_batch(data, codec.hold(table), ats, np.array(used), got)
    np.testing.assert_array_equal(got, want)


def test_a_merge_is_checked_before_anything_is_added(rng):
    codec = codec_on("int4_group")
    table, at, size = batch(codec, (300,))
    y = np.zeros(300, np.float32)
    out, used = np.zeros(size, np.uint8), np.array([[size], [size]])
    with pytest.raises(compll.PayloadError):
        codec.decode_batch(out, table, np.array([at, at + 8]), used, y)
    with pytest.raises(compll.UsageError, match=r"at is \(2, 1\), and used \(1,\)"):
        codec.decode_batch(out, table, np.array([at, at]), used[0], y)
    assert not y.any()


@pytest.mark.parametrize("offset", [0, 2, 1])
def test_codes_at_an_even_address_are_words(offset, rng):
    """For example, behind an odd number of groups of 2 bytes; at odd addresses they are bytes."""
    codec, reference = codec_on("int4_group"), compll.compile("int4_group", "reference")
    text = codec.backend.source.text
    for payload in ("payload", "incoming"):
        assert re.search(rf"aligned\(\({payload} \+ s\d+\), 2\)", text)
    table, at, size = batch(codec, (64, 4096))
    x = rng.standard_normal(4160).astype(np.float32)
    out, want = np.zeros(size + offset, np.uint8), np.zeros(size + offset, np.uint8)
    used = codec.encode_batch(x, table, out, at + offset, seed=1)
    reference.encode_batch(x, table, want, at + offset, seed=1)
    np.testing.assert_array_equal(out, want)
    got, y = x.copy(), x.copy()
    codec.decode_batch(out, table, at + offset, used, got, add=True)
    reference.decode_batch(want, table, at + offset, np.array(used), y, add=True)
    np.testing.assert_array_equal(got, y)
