"""Messages that are damaged on their way."""

import numpy as np
import pytest
import torch

from casync.errors import PayloadError
from casync.memory.identity import IDENTITY
from casync.memory.repeat_elision import MARK
from casync.memory.slots import CHECKSUM
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.testing import Hub
from tests.casync.fakes import (
    CODECS,
    MEANS,
    SIZES,
    assert_identical,
    each_strategy,
    gradients,
    graph_of,
    run,
    slices,
    states_of,
    world,
)
from tests.patience import HANG

WHERE = "step 7 failed: rank 0, peer 1, task `recv rank=0 part=0 "
TOTAL = sum(SIZES)
FRONT = IDENTITY + CHECKSUM + MARK
CARRIED = [pair for pair in each_strategy(MEANS) if pair[0] != "allreduce"]


class Damaging:
    """A transport whose messages to rank 0 arrive with one bit of byte `at` flipped."""

    def __init__(self, end, at):
        self._end, self._at = end, at

    def __getattr__(self, name):
        return getattr(self._end, name)

    def post_send(self, data, peer, channel):
        data = data.clone()
        if peer == 0:
            data[self._at % len(data)] ^= 16
        return self._end.post_send(data, peer, channel)


def damaged(graph, buckets, at):
    """The error of rank 0 of two in step 7, with byte `at` of rank 1's messages damaged."""
    ends = Hub(2).endpoints()
    options = {"timeout": HANG, "checksum": True}
    with (
        Executor(ends[0], CODECS, RunOptions(**options)) as here,
        Executor(Damaging(ends[1], at), CODECS, RunOptions(**options)) as there,
    ):
        there.submit(graph.slice(1), buckets[1], states_of(TOTAL), 7)
        future = here.submit(graph.slice(0), buckets[0], states_of(TOTAL), 7)
        with pytest.raises(PayloadError) as caught:
            future.wait()
    return str(caught.value)


@pytest.mark.parametrize("strategy, codec", CARRIED)
def test_checksums_change_no_result(strategy, codec):
    programs, found = slices(graph_of(SIZES, strategy, codec, 3)), []
    for checksum in (False, True):
        with world(3, checksum=checksum) as executors:
            for step in range(2):  # buffers are used again
                buckets = gradients(TOTAL, 3, seed=step)
                run(executors, programs, buckets, [states_of(TOTAL) for _ in range(3)])
        assert_identical(buckets)
        found.append(buckets[0])
    np.testing.assert_array_equal(*[bucket.view(torch.int32).numpy() for bucket in found])


@pytest.mark.parametrize(
    "at", [0, 3, IDENTITY, IDENTITY + CHECKSUM, IDENTITY + CHECKSUM + MARK, 1001, -1]
)
@pytest.mark.parametrize("codec", ["exact", "sparse", "sign"])
def test_one_bit_is_noticed(codec, at):
    graph = graph_of([5000], "exchange", codec, 2)
    told = damaged(graph, gradients(5000, 2, seed=0), at)
    assert told.startswith(WHERE)


@pytest.mark.parametrize("at", [0, IDENTITY, FRONT, 4500, -1])
def test_one_bit_of_a_squeezed_message_is_noticed(at):
    buckets = [torch.zeros(200_000) for _ in range(2)]
    for bucket in buckets:
        bucket[:1000] = torch.randn(1000)
    graph = graph_of([200_000], "exchange", "exact", 2, partitions=1)
    told = damaged(graph, buckets, at)
    assert told.startswith(WHERE)
