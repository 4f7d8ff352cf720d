"""Regions of pieces: together they are the whole, and the volume does not grow with the world."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casync.building.parts import Part
from casync.codec import StateField
from casync.graph.layout import Layout
from casync.raw import with_raw
from casync.regions import NONZERO, region_key, whole_key
from tests.casync.fakes import CODECS, Sparse, gradients, graph_of, world

REGIONS = with_raw(CODECS)


class Largest(Sparse):
    """The hundredth of the elements with the largest magnitudes."""

    name = "largest"
    states = (StateField("residual"),)

    def pack(self, x):
        kept, most = np.zeros_like(x), np.argsort(-np.abs(x))[: len(x) // 100]
        kept[most] = x[most]
        return super().pack(kept)


@given(
    st.lists(st.integers(1, 4000), min_size=1, max_size=4),
    st.integers(1, 5),
    st.sampled_from([1, 8, 32]),
    st.sampled_from([NONZERO, "exact", "half", "sparse"]),
    st.floats(0, 1),
)
def test_regions_add_up_to_the_whole(lengths, count, align, codec, density):
    """Each region is decoded on its own, and changes no elements of others."""
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    rows = tuple((s, n, 0, 0, s) for s, n in zip(starts, lengths, strict=True))
    table = np.array(rows, np.int64)
    random = np.random.default_rng(0)
    x = (random.integers(-9, 9, sum(lengths)) * (random.random(sum(lengths)) < density)).astype(
        np.float32
    )
    got, total = np.full_like(x, 7), np.ones_like(x)
    for number in range(count):
        region = REGIONS[region_key(codec, number, count, align)]
        layout = Layout.of(Part(0, codec, "oktopk", 0, rows), region)
        message = np.zeros(layout.size, np.uint8)
        at, used, _ = layout.pack(message, region.encode_batch(x, table, message, layout.at))
        region.decode_batch(message, table, at, used, got)
        region.decode_batch(message, table, at, used, total, add=True)
    assert np.array_equal(got, x)
    assert np.array_equal(total, x + 1)


def test_keys_name_codec_and_region():
    assert whole_key(region_key("a:b", 3, 8, 32)) == ("a:b", 8)
    assert whole_key("topk") == ("topk", 1)
    with pytest.raises(KeyError, match="zip"):
        REGIONS[region_key("zip", 0, 2, 1)]


@pytest.mark.parametrize("index", [[3, 3], [5, 2], [0, 10]])
def test_bad_indices_are_refused(index):
    payload = np.concatenate([np.array(index, np.uint32), np.ones(2, np.uint32)]).view(np.uint8)
    with pytest.raises(ValueError, match="ascend below 10"):
        decode(payload)


@pytest.mark.parametrize("size", [12, 48])
def test_bad_lengths_are_refused(size):
    with pytest.raises(ValueError, match=f"{size} bytes are no pairs"):
        decode(np.zeros(size, np.uint8))


def decode(payload):
    table, used = np.array([[0, 10, 0, 0, 0]]), np.array([len(payload)])
    at, out = np.zeros(1, np.int64), np.zeros(10, np.float32)
    REGIONS[region_key(NONZERO, 0, 1, 1)].decode_batch(payload, table, at, used, out)


def moved(strategy, world_size, length=1 << 18):
    """Bytes that each rank sends and receives in a step; gradients are large in one stretch, which
    differs a bit between ranks."""
    codecs = CODECS | {"largest": Largest()}
    graph = graph_of([length], strategy, "largest", world_size, partitions=1, codecs=codecs)
    buckets = gradients(length, world_size, seed=0)
    for rank, bucket in enumerate(buckets):
        bucket[rank * 1000 : rank * 1000 + 20000] *= 10
    with world(world_size, codecs=codecs) as executors:
        torch.futures.wait_all(
            [
                executor.submit(graph.slice(rank), buckets[rank], {}, 0)
                for rank, executor in enumerate(executors)
            ]
        )
        assert all(torch.equal(bucket, buckets[0]) for bucket in buckets)
        counters = [executor.counters for executor in executors]
        return [c.bytes_sent for c in counters], [c.bytes_received for c in counters]


def sent(strategy, world_size):
    """Mean bytes that a rank sends."""
    return sum(moved(strategy, world_size)[0]) / world_size


@pytest.mark.parametrize("world_size", [4, 8])
def test_no_owner_has_much_more_than_others_to_receive(world_size):
    """Selected values lie in a tenth of the tensor: contiguous regions would give nearly all of
    them to one or two owners."""
    received = moved("oktopk", world_size)[1]
    assert max(received) < 1.3 * sum(received) / world_size


def test_states_of_a_region_are_where_the_whole_has_them():
    """An owner's rejected values are at the places of its elements; other places are zero."""
    region = REGIONS[region_key("sign", 1, 2, 32)]
    table = np.array([[0, 5000, 0, 0, 3000], [5000, 3000, 1, 0, 0]])
    random = np.random.default_rng(0)
    x = random.standard_normal(8000).astype(np.float32)
    given, state = x.copy(), region.init_state(8000)
    out = np.zeros(8000, np.uint8)
    at = np.array([0, 4000])
    region.encode_batch(x, table, out, at, state=state, writeback=True)
    residual = np.concatenate([state["residual"][3000:], state["residual"][:3000]])
    mine = residual != 0
    assert mine.sum() == (4 * 512 + 392) + (2 * 512 + 440)  # every other block, and the last one
    assert np.allclose((x + residual)[mine], given[mine], atol=1e-6)
    assert np.array_equal(x[~mine], given[~mine])


def test_the_volume_of_oktopk_does_not_grow_with_the_world():
    """Below 6 k words: selection up and down take 2 each; an all-gather's volume grows."""
    k = (1 << 18) // 100
    for world_size in (2, 4, 8):
        share = (world_size - 1) / world_size
        assert sent("oktopk", world_size) <= 1.02 * 4 * 4 * k * share
    assert sent("exchange", 8) > 3 * sent("oktopk", 8)
