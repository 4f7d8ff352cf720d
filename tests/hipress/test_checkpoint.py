"""State dictionaries: exact resumption, and what does not fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import hipress
from hipress import api
from hipress.errors import StateError
from tests.hipress import ranks
from tests.hipress.launch import launch


@pytest.mark.parametrize(
    "name, scope, ddp_kwargs",
    [
        ("int8", "tensor", ranks.SMALL_BUCKETS),
        ("sparse", "tensor", ranks.SMALL_BUCKETS),
        ("int8", "bucket", ranks.UNREBUILT),
    ],
)
def test_resumes_bit_for_bit(name, scope, ddp_kwargs, tmp_path):
    for result in launch(ranks.resume, 2, name, scope, str(tmp_path), ddp_kwargs):
        assert result["again"] == result["whole"]
        assert result["state"]
        assert result["step"] == 6
        assert result["template"] == (scope == "tensor")  # for torch.distributed.checkpoint
        assert result["sides"] == (["aggregator", "worker"] if name == "int8" else ["worker"])


def test_states_that_do_not_fit(tmp_path):
    for result in launch(ranks.resume, 2, "int8", "tensor", str(tmp_path), {}):
        errors = result["errors"]
        assert {kind for kind, _ in errors.values()} == {"StateError"}
        for title, expected in {
            "format": "expected",
            "codec": "saved with codec other",
            "strategy": "second.weight: saved with strategy ring, this is ps",
            "rank": "saved by rank 7 of 2",
            "missing": "last.weight: missing from the saved state",
            "unexpected": "ghost.weight: has no codec state here",
            "shape": "second.weight: worker residual: expected (301, 131), got (2,)",
            "absent": "first.weight: its values are missing from the saved state",
            "no worker": "second.weight: worker values are missing from the saved state",
            "no aggregator": "second.weight: aggregator values are missing from the saved state",
            "step": "step 1.5 is no number of steps",
            "negative": "step -1 is no number of steps",
            "codecs": "codecs is a NoneType, not a dict",
            "strategies": "strategies is a int, not a dict",
            "list": "state is a list, not a dict",
            "values": "second.weight: expected tensors by side and name",
            "side": "second.weight: expected tensors by side and name",
        }.items():
            assert expected in errors[title][1]


@pytest.mark.parametrize("scope", ["tensor", "bucket"])
def test_what_does_not_fit_starts_from_zero(scope):
    for names, (one, none) in launch(ranks.forgotten, 2, scope):
        assert len(names) > 1
        assert one == ["second.weight"]
        assert none == []


@pytest.mark.parametrize("call", [hipress.state_dict, lambda ddp: hipress.load_state_dict(ddp, {})])
def test_no_state_within_a_step(call, monkeypatch):
    engine = SimpleNamespace(unfinished="step 3 has begun and has not ended")
    monkeypatch.setattr(api, "as_ddp", lambda module: module)
    monkeypatch.setattr(api, "_session", lambda _: SimpleNamespace(rank=1, engine=engine))
    with pytest.raises(StateError, match=r"rank 1: step 3 has begun .* wrap the model again"):
        call(None)


def test_no_state_after_a_torn_step():
    for rank, (first, *states) in enumerate(launch(ranks.torn, 2)):
        assert first[0] == "ZeroDivisionError" if rank == 1 else first[0] != "none"
        for kind, message in states:
            assert kind == "StateError"
            assert message.startswith(f"rank {rank}: step 2 ")
