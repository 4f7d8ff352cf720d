"""Connections of our own."""

import pytest
import torch.distributed as dist

from hipress.agree import Meeting
from hipress.errors import HipressError
from hipress.link import connect
from hipress.options import Options
from hipress.session import _auto


def test_a_connection_that_cannot_be_made_names_the_rank():
    meeting = Meeting(dist.HashStore(), 1, (3, 5), 0.05, "here")
    with pytest.raises(HipressError, match=r"^rank 5: no connection between ranks \(3, 5\) for it"):
        connect(meeting, "it")


def test_a_link_that_cannot_be_measured_names_the_rank(monkeypatch):
    def measure(group, codecs):
        raise RuntimeError("closed by peer")

    monkeypatch.setattr("hipress.session.connect", lambda meeting, purpose: None)
    monkeypatch.setattr("hipress.probe.measure", measure)
    meeting = Meeting(dist.HashStore(), 1, (3, 5), 0.05, "here")
    with pytest.raises(HipressError, match=r"^rank 5: the link between ranks \(3, 5\) could not"):
        _auto((), {}, Options(), None, meeting)
