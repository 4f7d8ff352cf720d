"""Signs that vote: on every rank the winner is that of a plain count."""

import numpy as np
import pytest
import torch

from casync.building.parts import Choice
from casync.errors import PlanError
from casync.strategies import refuses
from tests.casync.fakes import CODECS, SIZES, Fake, gradients, planned, run, tensors_of, world


class Voter(Fake):
    """A codec of one bit per element: the sign."""

    name = "voter"
    align = 8
    vote = True
    reencodes = False

    def payload_bytes(self, n):
        return (n + 7) // 8

    def pack(self, x):
        return np.packbits(x < 0).tobytes()

    def unpack(self, data, n):
        return np.where(np.unpackbits(data)[:n], -1, 1).astype(np.float32)


@pytest.mark.parametrize("world_size", [2, 3, 4, 5])
def test_the_majority_wins(world_size):
    codecs = {"voter": Voter()}
    tensors = tensors_of(SIZES)
    choices = {t.name: Choice("voter", "vote", 2) for t in tensors}
    graph = planned(tensors, choices, world_size, codecs)
    buckets = gradients(sum(SIZES), world_size, seed=world_size)
    count = sum(np.where(b.numpy() < 0, -1, 1) for b in buckets)
    with world(world_size, codecs=codecs) as executors:
        run(executors, graph, buckets)
    for bucket in buckets:
        assert torch.equal(bucket, torch.from_numpy(np.where(count < 0, -1, 1).astype(np.float32)))


@pytest.mark.parametrize("strategy", ["ps", "ring", "exchange"])
def test_strategies_that_average_refuse_votes(strategy):
    assert "use strategy 'vote'" in refuses(strategy, Voter())


def test_the_vote_refuses_the_rest():
    assert "does not vote" in refuses("vote", CODECS["sign"])
    choices = {"t0": Choice("sign", "vote", 1)}
    with pytest.raises(PlanError, match="does not vote"):
        planned(tensors_of([9]), choices, 2, CODECS)
