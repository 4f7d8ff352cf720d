"""Messages of other tensors, jobs and epochs are refused by an error that names both."""

import pytest
import torch

from casync.errors import PayloadError
from casync.memory.identity import NOTHING, Identity, digest_of
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.testing import Hub
from tests.casync.fakes import CODECS, gradients, graph_of, world
from tests.patience import HANG


def identity(epoch=0, job=0, name="", *known):
    names = {digest_of(each): each for each in (name, *known) if each}
    return Identity(epoch, job, name, names)


def told(mine, other, payload=0):
    """The error for a message of another identity."""
    with pytest.raises(PayloadError) as caught:
        mine.check(payload, other)
    return str(caught.value)


def test_its_own_payload_is_accepted():
    for one in (identity(), identity(3, 70_000, "weights"), identity(127, 65_535, "w" * 200)):
        for payload in (0, 1, 2**24 - 1):
            one.check(payload, one.of(payload))
            assert 0 <= one.of(payload) < 2**63


def test_another_tensor_is_named():
    text = told(identity(0, 5, "a", "b"), identity(0, 5, "b").of(0))
    assert "the message is of job 5, bucket 'b', payload 0, not of job 5, bucket 'a'" in text
    text = told(identity(0, 5, "a"), identity(0, 5, "b").of(0))
    assert f"bucket #{digest_of('b'):x}, unknown here, payload 0" in text


def test_other_jobs_epochs_and_payloads_are_named():
    mine = identity(1, 2, "a")
    assert "of job 3, bucket 'a', payload 0, epoch 1, not" in told(mine, identity(1, 3, "a").of(0))
    assert "payload 0, epoch 2, not" in told(mine, identity(2, 2, "a").of(0))
    assert "payload 7, epoch 1, not" in told(mine, mine.of(7))
    assert told(mine, NOTHING) == "the message is empty"


@pytest.mark.parametrize("strategy", ["ps", "ring", "exchange", "gtopk"])
def test_ranks_that_average_different_tensors_of_a_length_name_both(strategy):
    """They once got a mixture of the two."""
    graph = graph_of([1000], strategy, "exact", 2, partitions=1)
    with world(2) as executors:
        for name in ("a", "b"):  # known to both
            submitted(executors, graph, (name, name))
        futures = submitted(executors, graph, ("a", "b"), wait=False)
        texts = []
        for future in futures:
            with pytest.raises(Exception, match=r"in step|step 0 failed") as caught:
                future.wait()
            texts.append(str(caught.value))
    assert any("bucket 'b'" in text and "bucket 'a'" in text for text in texts)


def submitted(executors, graph, names, *, wait=True):
    """Futures of a bucket of each rank, by its name for the rank."""
    buckets = gradients(1000, 2, seed=0)
    made = [
        executor.submit(graph.slice(rank), buckets[rank], {}, 0, name)
        for rank, (executor, name) in enumerate(zip(executors, names, strict=True))
    ]
    if wait:
        torch.futures.wait_all(made)
    return made


def test_late_messages_of_another_epoch_are_named():
    graph = graph_of([1000], "exchange", "exact", 2, partitions=1)
    hub = Hub(2)
    ends = hub.endpoints()
    bucket = gradients(1000, 1, seed=0)[0]
    with (
        Executor(ends[0], CODECS, RunOptions(timeout=HANG, epoch=1)) as before,
        Executor(ends[1], CODECS, RunOptions(timeout=HANG, epoch=2)) as after,
    ):
        before.submit(graph.slice(0), bucket.clone(), {}, 0)
        with hub.changed:  # else rank 0 may refuse rank 1's message before it sends its own
            assert hub.changed.wait_for(lambda: any(hub.mail.values()), HANG)
        future = after.submit(graph.slice(1), bucket, {}, 0)
        with pytest.raises(PayloadError, match=r"payload 0, epoch 1, not of job 0, .* epoch 2"):
            future.wait()
