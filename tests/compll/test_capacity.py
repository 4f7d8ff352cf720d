"""Payloads cut to a capacity: alike on all backends, within their room, and nothing is lost."""

import numpy as np
import pytest

import compll
from compll.errors import UsageError
from compll.ir.layout import cuts
from compll.runtime.batches import Encoding
from tests.compll.conftest import CASES, costing, modules
from tests.compll.test_cuda import WHERE, kernels

LENGTHS = (1000, 5000, 3, 1)
GUARD = 0xA5
CUT = [costing(case) for case, typed in zip(CASES, modules(CASES), strict=True) if cuts(typed)]


def bits(values):
    return values.view(f"u{values.itemsize}")


def pieces():
    """A table of pieces one behind the other."""
    starts = np.cumsum([0, *LENGTHS[:-1]])
    rows = [[s, n, i, 64 * i, s] for i, (s, n) in enumerate(zip(starts, LENGTHS, strict=True))]
    return np.array(rows, np.int64)


def room(codec, share):
    """Capacities, each a share of the largest payload, and adjacent payloads.

    The first piece is the last in memory, so a write behind a piece's room hits one already
    checked.
    """
    least = [codec.payload_bytes(0) + 64 for _ in LENGTHS]
    sizes = [
        max(a, int(share * codec.payload_bytes(n))) for a, n in zip(least, LENGTHS, strict=True)
    ]
    capacity = np.array(sizes, np.int64)
    at = np.cumsum([0, *sizes[:0:-1]])[::-1].copy()
    return capacity, at, np.full(sum(sizes) + 512, GUARD, np.uint8)


class Device:
    """Generated CUDA kernels, on a GPU or the CPU, as a codec of host arrays."""

    def __init__(self, codec, where):
        self.kernels, self.codec = kernels((codec.module, codec.params), where, 64), codec
        self.init_state = codec.init_state

    def encode_batch(self, x, table, out, at, *, state, seed, step, capacity):
        put, get = self.kernels.device.upload, self.kernels.device.download
        most = self.codec._arguments.capacity(table, capacity, state)
        held, there = {name: put(kept) for name, kept in state.items()}, put(out)
        how = Encoding(seed, step, most=most)
        used = self.kernels.encode_batch(put(x), table, there, at, held, how)
        out[:] = get(there)
        for name, kept in held.items():
            state[name][:] = get(kept)
        return get(used)


def steps_agree(case, make):
    """Three steps of a backend equal the reference's."""
    name, params = case
    reference = compll.compile(name, "reference", **params)
    codecs = reference, make(name, params, reference)
    table, total = pieces(), sum(LENGTHS)
    states = [codec.init_state(total, len(LENGTHS)) for codec in codecs]
    rng = np.random.default_rng(7)
    for step, share in enumerate((0.05, 0.3, 1.0)):
        x = rng.standard_normal(total).astype(np.float32)
        capacity, at, _ = room(reference, share)
        found = []
        for codec, state in zip(codecs, states, strict=True):
            out = room(reference, share)[2]
            used = codec.encode_batch(
                x.copy(), table, out, at, state=state, seed=3, step=step, capacity=capacity
            )
            assert (np.asarray(used) <= capacity).all()
            assert (out[int(at[0] + capacity[0]) :] == GUARD).all()
            found.append([out[a : a + u].tobytes() for a, u in zip(at, used, strict=True)])
        assert found[0] == found[1], share
        for kept in states[0]:
            assert np.array_equal(*(bits(state[kept]) for state in states)), (share, kept)


@pytest.mark.parametrize("case", CUT)
def test_cpu_kernels_cut_as_the_reference(case):
    steps_agree(case, lambda name, params, reference: compll.compile(name, "cpu", **params))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("case", CUT)
def test_cuda_kernels_cut_as_the_reference(case, where):
    steps_agree(case, lambda name, params, reference: Device(reference, where))


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_overflow_stays_in_the_residual(target):
    codec = compll.compile("threshold", target, tau=0.5)
    n, cut = 4000, 0
    state, rng = codec.init_state(n), np.random.default_rng(0)
    for size in (400, 1000, 2**40):
        x, before = rng.standard_normal(n).astype(np.float32), state["residual"].copy()
        payload = codec.encode(x, state=state, capacity=size)
        assert len(payload) <= size
        sent = codec.decode(payload, n)
        assert np.array_equal(sent + state["residual"], x + before)
        cut += int((np.abs(state["residual"]) >= 0.5).sum())
    assert cut > 3000
    assert not (np.abs(state["residual"]) >= 0.5).any()  # all of it was sent in the end


def test_room_for_all_changes_nothing():
    codec = compll.compile("adaptive_threshold", "cpu")
    x, at, table = np.linspace(-1, 1, 999, dtype=np.float32), np.zeros(1, np.int64), None
    table = np.array([[0, 999, 0, 0, 0]])
    size, outs = codec.payload_bytes(999), []
    for more in ({}, {"capacity": np.array([size])}):
        out, state = np.zeros(size, np.uint8), codec.init_state(999)
        used = codec.encode_batch(x.copy(), table, out, at, state=state, **more)
        outs.append(out[: used[0]].tobytes())
    assert outs[0] == outs[1]


@pytest.mark.parametrize(
    "name, capacity, message",
    [
        ("topk", [100], "a capacity needs a selection by filter"),
        ("wangni", [100], "and a state for elements that are cut"),
        ("threshold", [1], "no payload of 10 elements fits into 1 bytes"),
        ("threshold", [100, 100], "the table has 1 rows, and capacity 2"),
    ],
)
def test_capacities_that_cannot_be_are_refused(name, capacity, message):
    codec = compll.compile(name, "reference")
    out, at, x = np.zeros(999, np.uint8), np.zeros(1, np.int64), np.ones(10, np.float32)
    table, state = np.array([[0, 10, 0, 0, 0]]), codec.init_state(10) or None
    with pytest.raises(UsageError, match=message):
        codec.encode_batch(x, table, out, at, state=state, capacity=np.array(capacity))


def test_a_capacity_without_a_state_is_refused():
    codec = compll.compile("threshold", "reference")
    out, at, x = np.zeros(999, np.uint8), np.zeros(1, np.int64), np.ones(10, np.float32)
    table = np.array([[0, 10, 0, 0, 0]])
    with pytest.raises(UsageError, match="a state for elements that are cut"):
        codec.encode_batch(x, table, out, at, capacity=np.array([100]))
