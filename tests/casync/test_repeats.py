"""Messages from which repeated blocks are left out."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from casync.errors import PayloadError
from casync.memory.host import HostMemory
from casync.memory.identity import NOTHING
from casync.memory.repeat_elision import BLOCK, MARK, expand, extent, promises, squeeze
from casync.memory.slots import Slot
from tests.casync.fakes import assert_identical, graph_of, run, slices, world
from tests.casync.test_messages import layout

WORDS = 8 * 20_000


def message_of(runs, seed, tail=0):
    """Runs of (number of words, True if one word is repeated), and `tail` more words."""
    random = np.random.default_rng(seed)
    pieces = [
        np.full(length, random.integers(1 << 62)) if same else random.integers(1 << 62, size=length)
        for length, same in [*runs, (tail, False)]
    ]
    return np.concatenate(pieces).view(np.uint8)


def wire_for(message):
    return np.zeros(MARK + len(message), np.uint8)


MESSAGES = st.builds(
    message_of,
    st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=3, max_size=20),
    st.integers(0, 99),
    st.integers(0, 7),
)


@given(MESSAGES)
def test_elided_repeats_are_restored(message):
    if len(message) < BLOCK:
        return
    wire = wire_for(message)
    size = squeeze(message, wire)
    if not size:
        return
    assert size <= len(message) * 3 / 4
    assert extent(wire, len(message)) == size
    back = np.full(len(message) + 8, 7, np.uint8)
    assert expand(wire[:size].copy(), back) == len(message)
    np.testing.assert_array_equal(back[:-8], message)
    assert (back[-8:] == 7).all()


def test_all_but_one_block_of_zeros_stays_at_home():
    message = np.zeros(WORDS, np.uint8)
    assert promises(message)
    assert squeeze(message, wire_for(message)) == MARK + 40 * 8 + BLOCK  # 2500 bits


@pytest.mark.parametrize("message", [
    np.random.default_rng(0).integers(256, size=WORDS).astype(np.uint8),
    np.zeros(BLOCK, np.uint8),
    np.zeros(0, np.uint8),
], ids=["noise", "short", "empty"])  # fmt: skip
def test_messages_without_repeats_are_not_searched(message):
    assert not promises(message)


def test_blocks_that_only_seem_to_repeat_are_sent_unchanged():
    message = np.random.default_rng(0).integers(256, size=WORDS).astype(np.uint8)
    blocks = message.reshape(-1, BLOCK)
    step = len(blocks) // 64
    blocks[step - 1 :: step] = blocks[step - 2 :: step, -1:]  # where promises() looks
    blocks[step - 2 :: step] = blocks[step - 2 :: step, -1:]
    assert promises(message)
    assert squeeze(message, wire_for(message)) == 0


@given(MESSAGES, st.data())
def test_damage_raises_or_gives_a_message(message, data):
    wire = wire_for(message)
    size = squeeze(message, wire) if len(message) >= BLOCK else 0
    if not size:
        return
    for _ in range(3):
        at = data.draw(st.integers(0, min(size, 64) - 1))
        wire[at] = data.draw(st.integers(0, 255))
    back = np.zeros(len(message) + 8, np.uint8)
    try:
        extent(wire[:size], len(message))
    except PayloadError:
        return
    assert expand(wire[:size], back[:-8]) <= len(message)
    assert not back[-8:].any()


@pytest.mark.parametrize("mark", [-2, 1, 63, 100, 10_001 * 8, 2**62])
def test_marks_that_no_sender_writes_are_refused(mark):
    wire = np.zeros(MARK + 10_000 * 8, np.uint8)
    wire[:MARK].view(np.int64)[0] = mark
    with pytest.raises(PayloadError, match="squeezed message"):
        extent(wire, 10_000 * 8)


def test_slots_tell_messages_that_did_not_come_whole():
    made = layout("exact", [40_000])
    memory = HostMemory()
    sender, receiver = (Slot(made, 0, travels, memory) for travels in (True, False))
    sender.fill(made.bound)
    message = sender.message(7)
    receiver.clear()
    assert receiver.identity == NOTHING
    receiver.clear()[: len(message)] = message
    with pytest.raises(PayloadError, match=f"message of 99 bytes, expected {len(message)}"):
        receiver.take_message(99)
    receiver.clear()[: len(message)] = message
    receiver.take_message(len(message))
    assert receiver.identity == 7
    assert receiver.spared == sender.spared > made.size - 3000


@pytest.mark.parametrize("strategy, codec", [
    ("ps", "exact"), ("ring", "exact"), ("exchange", "exact"), ("exchange", "sparse"),
])  # fmt: skip
def test_an_embeddings_gradient_travels_without_its_zeros(strategy, codec):
    programs = slices(graph_of([512 * 400], strategy, codec, 3))
    sent = []
    for rows in (400, 8):
        buckets = [torch.zeros(400, 512) for _ in range(3)]
        for rank, bucket in enumerate(buckets):
            torch.manual_seed(rank)
            bucket[torch.randperm(400)[:rows]] = torch.randn(rows, 512)
        mean = sum(buckets) / 3
        flat = [bucket.flatten() for bucket in buckets]
        with world(3) as executors:
            for _ in range(2):  # buffers are used again
                copies = [bucket.clone() for bucket in flat]
                run(executors, programs, copies)
            counters = executors[0].counters
            sent.append(counters.wire_bytes)
            assert counters.bytes_sent - counters.bytes_spared == counters.wire_bytes
        assert_identical(copies)
        if codec == "exact":
            torch.testing.assert_close(copies[0], mean.flatten())
    assert sent[1] < 0.15 * sent[0]
