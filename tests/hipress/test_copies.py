"""A device's gradients on the host, with copies that complete at once."""

import queue

import pytest
import torch
from torch.futures import Future

from casync.memory.host import HostMemory
from hipress.engine.host_staging import HostCopies
from hipress.errors import SyncError
from tests.patience import HANG


@pytest.fixture
def copies():
    made = HostCopies(HostMemory())
    yield made
    made.close()


class Averages:
    """Buckets that reached the host, in order; they become averages when a test says so."""

    def __init__(self):
        self._came = queue.SimpleQueue()

    def __call__(self, values):
        future = Future()
        self._came.put((values, future))
        return future

    def next(self):
        return self._came.get(timeout=HANG)


def test_a_bucket_that_is_on_its_way_is_not_written_over(copies):
    """The first bucket is of a step abandoned after an error in its backward pass."""
    averages, buckets = Averages(), [torch.full((3,), 1.0), torch.full((3,), 2.0)]
    futures = [copies.average(0, averages, bucket) for bucket in buckets]
    came = [averages.next() for _ in buckets]
    for values, future in came:
        future.set_result(values.mul_(10))
    assert [future.wait().tolist() for future in futures] == [[10.0] * 3, [20.0] * 3]
    assert [bucket.tolist() for bucket in buckets] == [[10.0] * 3, [20.0] * 3]


def test_pinned_memory_is_used_again_until_buckets_change(copies):
    averages, places = Averages(), []
    for size, dtype in ((3, torch.float32),) * 2 + ((5, torch.float32), (5, torch.float64)):
        averaged = copies.average(0, averages, torch.ones(size, dtype=dtype))
        values, future = averages.next()
        assert (values.shape, values.dtype) == ((size,), dtype)
        future.set_result(values)
        averaged.wait()
        places.append(values)
    assert places[0].data_ptr() == places[1].data_ptr()
    assert len({each.data_ptr() for each in places}) == 3


def test_errors_on_the_host_are_reported_unchanged(copies):
    averages, bucket = Averages(), torch.ones(3)
    averaged = copies.average(0, averages, bucket)
    averages.next()[1].set_exception(SyncError("rank 1: gone"))
    with pytest.raises(SyncError, match="rank 1: gone"):
        averaged.wait()


def test_a_device_that_fails_is_told():
    class Failing(HostMemory):
        def event(self):
            made = super().event()
            made.wait = self.wait
            return made

        def wait(self):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    copies = HostCopies(Failing())
    try:
        averaged = copies.average(0, Averages(), torch.ones(3))
        with pytest.raises(SyncError, match="did not come to the host: CUDA error: an illegal"):
            averaged.wait()
    finally:
        copies.close()
