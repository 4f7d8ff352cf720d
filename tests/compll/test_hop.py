"""Decode, add and encode in one kernel give the same results as one after the other."""

import itertools

import numpy as np
import pytest

import compll
from compll.runtime.batches import Incoming

SIZES = [0, 1, 7, 33, 1024, 1500, 2048 + 77]


def test_a_hop_is_decode_add_encode(cpu, rng):
    for fed, writeback in itertools.product({False, cpu.stateful}, (False, True)):
        hops_agree(cpu, rng, fed, writeback)


def hops_agree(cpu, rng, fed, writeback):
    starts = np.cumsum([3, *SIZES[:-1]])
    table = np.array(
        [[s, n, i % 2, 64 * i, s] for i, (s, n) in enumerate(zip(starts, SIZES, strict=True))]
    )
    total = int(starts[-1] + SIZES[-1])
    sizes = [cpu.payload_bytes(n) for n in SIZES]
    at, room = np.cumsum([1, *sizes[:-1]]), 1 + sum(sizes)
    taken = np.zeros(room, np.uint8)
    options = {"seed": 3, "step": 2}
    used = cpu.encode_batch(
        rng.standard_normal(total).astype(np.float32), table, taken, at, **options
    )
    results = []
    x = rng.standard_normal(total).astype(np.float32)
    for fused in (False, True):
        y, out = x.copy(), np.zeros(room, np.uint8)
        state = cpu.init_state(total, 2) if fed else None
        incoming = Incoming(taken, at, used) if fused else None
        if not fused:
            cpu.decode_batch(taken, table, at, used, y, add=True, step=2)
        lengths = cpu.encode_batch(
            y,
            table,
            out,
            at,
            state=state,
            scale=0.5,
            writeback=writeback,
            incoming=incoming,
            **options,
        )
        if not writeback:
            y[:] = 0
        results.append([out, lengths, y, *(state or {}).values()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=f"{fed=} {writeback=}")


def test_non_finite_values_survive_a_hop():
    codec = compll.compile("mxnet_2bit")
    x = np.zeros(1500, np.float32)
    x[700] = np.nan
    table, at = np.array([[0, 1500, 0, 0, 0]]), np.zeros(1, np.int64)
    taken = codec.encode(x)
    y, out = np.ones(1500, np.float32), np.zeros(codec.payload_bytes(1500), np.uint8)
    incoming = Incoming(taken, at, np.array([len(taken)]))
    codec.encode_batch(
        y, table, out, at, state=codec.init_state(1500), incoming=incoming, writeback=True
    )
    assert np.isnan(codec.decode(out, 1500)).all()
    assert np.isnan(y).all()


def test_a_wrong_length_is_refused():
    codec = compll.compile("onebit_group")
    table, at = np.array([[0, 100, 0, 0, 0]]), np.zeros(1, np.int64)
    out = np.zeros(codec.payload_bytes(100), np.uint8)
    with pytest.raises(compll.PayloadError, match="bytes"):
        codec.encode_batch(
            np.zeros(100, np.float32), table, out, at, incoming=Incoming(out, at, np.array([3]))
        )


@pytest.mark.parametrize("name", ["signsgd", "terngrad"])
def test_aggregators_kernels_can_be_compiled_ahead(name):
    codec = compll.compile(name)
    codec.prepare()
    assert any(name.startswith("hop") for name in codec.backend.functions) == codec.fuses
    assert codec.fuses == (name == "signsgd")  # several walks would each decode


@pytest.mark.parametrize("name", ["onebit", "dgc"])
def test_payloads_are_not_read_from_where_others_are_written(name):
    codec, n = compll.compile(name, "reference"), 64
    x, table, at = np.ones(n, np.float32), np.array([[0, n, 0, 0, 0]]), np.zeros(1, np.int64)
    out = np.zeros(2 * codec.payload_bytes(n), np.uint8)
    used = codec.encode_batch(x, table, out, at)
    with pytest.raises(compll.UsageError, match="memory in common"):
        codec.encode_batch(x, table, out, at, incoming=Incoming(out[:-1], at, used))
    begin = np.array([codec.payload_bytes(n)])
    incoming = Incoming(out[: begin[0]], at, used)
    codec.encode_batch(x, table, out[begin[0] :], at, incoming=incoming)


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_payloads_may_be_read_from_between_those_written(target):
    """A call writes the first and third room of an array, and reads the second and fourth."""
    codec, n = compll.compile("onebit", target), 64
    x, size = np.linspace(-1, 1, 2 * n, dtype=np.float32), codec.payload_bytes(n)
    table = np.array([[0, n, 0, 0, 0], [n, n, 1, 0, 0]])
    out = np.zeros(4 * size, np.uint8)
    read, written = np.array([size, 3 * size]), np.array([0, 2 * size])
    used = codec.encode_batch(x.copy(), table, out, read)
    apart = [codec.encode(x[:n] + codec.decode(codec.encode(x[:n]), n)),
             codec.encode(x[n:] + codec.decode(codec.encode(x[n:]), n))]  # fmt: skip
    codec.encode_batch(x.copy(), table, out, written, incoming=Incoming(out, read, used))
    assert [out[at : at + size].tobytes() for at in written] == [bytes(each) for each in apart]
    for near in (read - 1, read[::-1] - size + 1):
        with pytest.raises(compll.UsageError, match="memory in common"):
            codec.encode_batch(x.copy(), table, out, near, incoming=Incoming(out, read, used))
