"""Comparison of ranks, without processes."""

import weakref

import pytest
import torch
from torch.futures import Future

from casync.memory.host import HostMemory
from hipress.engine import verify
from hipress.errors import SyncError
from hipress.model.params import Param


class Group:
    """The second rank's view of a group of two."""

    def rank(self):
        return 1

    def size(self):
        return 2

    def recv(self, tensors, peer, tag):
        """The receive that breaks it: see break_group."""
        raise RuntimeError(f"no answer of {peer}")


def test_nothing_is_compared_after_a_failure(monkeypatch):
    """Hashes of another bucket would meet those of the one that failed here, and differ."""
    compared = []
    monkeypatch.setattr(verify, "gather", lambda mine, group: compared.append(mine) or [mine] * 2)
    group = Group()
    left, verifier = weakref.ref(group), verify.Verifier(group, (4, 7), HostMemory())
    del group
    params = [Param("a", 0, 3, (3,), torch.float32, False)]
    futures = [Future() for _ in range(3)]
    first, second, third = (verifier.check(future, params, 5) for future in futures)
    futures[0].set_result(torch.ones(3))
    assert first.wait().tolist() == [1, 1, 1]
    futures[1].set_exception(ValueError("no encode"))
    with pytest.raises(ValueError, match="no encode"):
        second.wait()
    assert left() is None
    futures[2].set_result(torch.ones(3))
    with pytest.raises(SyncError, match=r"rank 7, step 5: verify ended"):
        third.wait()
    verifier.close()
    assert len(compared) == 1
