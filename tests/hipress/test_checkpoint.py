"""State dictionaries: exact resumption, and states that do not fit."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

import compll
import hipress
from casync.topology import Topology
from hipress.channel.records import GRADIENTS, make_record
from hipress.choose.plan import fixed_plan
from hipress.engine import saving
from hipress.engine.residuals import Residuals
from hipress.errors import StateError
from hipress.handles import SessionHandle
from hipress.model.params import describe
from hipress.options import Options
from tests.hipress import checkpoint_ranks, outer_ranks
from tests.hipress.fakes import Int8
from tests.hipress.launch import DIED, launch
from tests.tiers import first_fast


def test_torch_distributed_checkpoint_loads_all_of_a_state(tmp_path):
    cases = {
        f"{way.__name__} {scope}": (way, scope)
        for way in (hipress.wrap, hipress.Synchronizer)
        for scope in ("tensor", "bucket", "model")
    }
    for found in launch(checkpoint_ranks.through_dcp, 2, str(tmp_path), cases):
        for title, (saved, loaded) in found.items():
            assert loaded == saved, title
            assert sum(saved.values()) > 0, title


def test_a_load_that_leaves_a_state_of_another_plan_unused_is_refused(tmp_path):
    """A new process knows the keys of a policy's levels, but not those of the plan that "auto"
    chose: torch.distributed.checkpoint would leave these out."""
    for found in launch(checkpoint_ranks.changing_through_dcp, 2, str(tmp_path)):
        (kind, message), saved, loaded = found["auto"]
        assert kind == "StateError"
        assert "missing from the saved state" in message
        assert "torch.save and torch.load keep" in message
        assert sum(saved.values()) > 0
        assert not loaded
        error, saved, loaded = found["policy"]
        assert error == ("none", "")
        assert saved == loaded
        assert sum(saved.values()) > 0


def test_states_that_do_not_fit():
    for errors in launch(checkpoint_ranks.unfit, 2):
        assert {kind for kind, _ in errors.values()} == {"StateError"}
        for title, expected in {
            "format": "expected",
            "older": "state format 5 of an earlier version; this one reads 8",
            "other": "the state is that of a hipress.Outer, and this is a model of hipress.wrap",
            "codec": "norm.bias and 4 more: saved with int8_fake() of another spec, this is int8",
            "renamed": "saved with topk(ratio=0.01), this is int8_fake()",
            "undelivered": "second.weight: undelivered: expected (301, 131), got (2,)",
            "strategy": "norm.bias and 4 more: saved with strategy ring, this is ps",
            "rank": "saved by rank 7 of 2",
            "missing": "norm.bias and 4 more: missing from the saved state",
            "unexpected": "ghost.weight: saved with x, and there is no such",
            "shape": "second.weight: worker residual: expected (301, 131), got (2,)",
            "absent": "norm.bias and 3 more: its values are missing from the saved state",
            "no worker": "second.weight: worker values are missing from the saved state",
            "no aggregator": "second.weight: aggregator values are missing from the saved state",
            "step": "counter 1.5: expected a number of steps",
            "negative": "counter -1: expected a number of steps",
            "codecs": "codecs None: expected three texts by name",
            "list": "states []: expected tensors by name, side and name of a state",
            "plan": ": expected a codec, a strategy and partitions by name",
            "values": ": expected tensors by name, side and name of a state",
            "side": ": expected tensors by name, side and name of a state",
        }.items():
            assert expected in errors[title].message


def test_ranks_load_states_of_one_step():
    """Otherwise the shared random draws of ranks would differ from then on, without an error."""
    results = launch(checkpoint_ranks.load_apart, 2)
    for result in results:
        assert result.apart.kind == "ConfigMismatch"
        assert "the step of the state to load: rank 0: 3, rank 1: 2" in result.apart.message
        assert result.refused.kind in ("ConfigMismatch", "StateError")
        assert result.kept
    one, other = results
    assert "rank 0 stops, because rank 1 failed: StateError: " in one.refused.message
    assert other.refused.kind == "StateError"
    assert one.digest == other.digest


def test_a_rank_that_loads_too_late():
    """It once loaded its state, though the others had given up and kept theirs."""
    for rank, (load, kept, step, state) in enumerate(launch(checkpoint_ranks.load_late, 2)):
        assert load.kind == "AgreementTimeout"
        assert (
            "rank 1 stops, because " if rank else ""
        ) + "rank 0 waited 0.1 s for" in load.message
        assert kept
        assert step.kind == "SyncError"
        assert "load_state_dict failed: " in step.message
        assert state.kind == "StateError"
        assert state.message.startswith(f"rank {rank}: load_state_dict failed: ")


@pytest.mark.parametrize("scope", ["tensor", "bucket"])
def test_states_that_do_not_fit_start_from_zero(scope):
    for names, (one, none) in launch(checkpoint_ranks.forgotten, 2, scope):
        assert len(names) > 1
        assert one == ["second.weight"]
        assert none == []


def test_a_load_that_is_interrupted_has_failed(monkeypatch):
    """Another rank may have loaded its state, so this one may take no step with its old state."""
    ended = []

    def require_equal(_):
        raise KeyboardInterrupt

    engine = SimpleNamespace(
        unfinished=None,
        chooser=None,
        buckets_for=lambda _: SimpleNamespace(residuals=None),
        fail=lambda error, what: ended.append((type(error), what)),
    )
    coordinator = SimpleNamespace(require_equal=require_equal, failures_told=nullcontext)
    session = SimpleNamespace(
        rank=1, world_size=2, place=[1, 2], engine=engine, coordinator=coordinator
    )
    monkeypatch.setattr(saving, "validate", lambda *_, **__: [])
    with pytest.raises(KeyboardInterrupt):
        SessionHandle(None, session).load_state_dict(make_record(GRADIENTS, 3))
    assert ended == [(KeyboardInterrupt, "load_state_dict")]


@pytest.mark.slow
def test_no_state_within_a_step_or_after_a_torn_one():
    for rank, torn in enumerate(launch(checkpoint_ranks.torn, 2)):
        assert torn.step.kind == "ZeroDivisionError" if rank == 1 else torn.step.kind != "none"
        for state in (*torn.within, *torn.after):
            assert state.kind == "StateError"
            assert state.message.startswith(f"rank {rank}: step 2 ")
            assert "wrap the model again" in state.message
        if rank == 1:  # rank 0 may have learned of the failure
            assert all("has begun and has not ended" in state.message for state in torn.within)
        assert len(torn.within) == len(torn.after) == 2


def test_values_are_those_of_the_same_elements_in_any_layout():
    """They were once in the order in which a parameter's values lie in memory."""
    value = torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5)
    kept = []
    for layout in (torch.channels_last, torch.contiguous_format):
        model = torch.nn.Conv2d(3, 2, (4, 5), bias=False)
        model.weight = torch.nn.Parameter(value.contiguous(memory_format=layout))
        params = describe(model)
        kept.append(
            Residuals(params, fixed_plan(params, Int8(), Options(min_size=0), Topology.flat(2)))
        )
        kept[-1].place_all()
    last, first = [each.arrays(0)["worker"]["residual"] for each in kept]
    last[:] = value.permute(0, 2, 3, 1).flatten()
    state = saving.export([0, 2], kept[0], 1)
    assert torch.equal(state["states"]["weight"]["worker"]["residual"], value)
    restore(kept[1], state)
    assert torch.equal(torch.from_numpy(first), value.flatten())
    last[:] = 0
    restore(kept[0], state)
    assert torch.equal(torch.from_numpy(last), value.permute(0, 2, 3, 1).flatten())


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda v: v / 0, "damaged: a value is NaN or infinite"),
        (lambda v: v.double() + 1e300, "damaged: a value is NaN or infinite"),
        (lambda v: v.int(), "expected floats in memory, got int32 strided on cpu"),
        (lambda v: v.to("meta"), "expected floats in memory, got float32 strided on meta"),
        (lambda v: v.to_sparse(), "expected floats in memory, got float32 sparse_coo on cpu"),
    ],
)
def test_values_that_are_none_of_a_state(change, told):
    """NaN was once loaded and spoilt the next step; missing values failed on this rank only."""
    params = describe(torch.nn.Linear(3, 2, bias=False))
    residuals = Residuals(params, fixed_plan(params, Int8(), Options(min_size=0), Topology.flat(2)))
    residuals.place_all()
    state = saving.export([0, 2], residuals, 1)
    side = state["states"]["weight"]["worker"]
    side["residual"] = change(side["residual"])
    with pytest.raises(StateError, match=f"weight: worker residual: {told}"):
        restore(residuals, state)
    assert saving.validate(residuals, state, [0, 2], strict=False) == []


def restore(residuals, state):
    saving.restore(residuals, state, saving.validate(residuals, state, [0, 2], strict=True))


@pytest.mark.parametrize(
    "before, after",
    first_fast([("topk", "onebit"), ("onebit", "powersgd"), ("ring", "topk"), ("topk", "none")]),
)
def test_portable_states_lose_no_gradient(before, after, tmp_path):
    """Whatever the numbers of ranks, the codecs and the strategies."""
    path = str(tmp_path / "state.pt")
    for ranks in (2, 3):
        for off, saved, norm in launch(checkpoint_ranks.saves_portable, ranks, before, path):
            assert off < 1e-4
            assert saved < 1e-6
            assert (norm > 0.1) == (before != "none")
        for others in (2, 3):
            found = launch(checkpoint_ranks.loads_portable, others, after, path)
            assert all(off < 1e-4 for off, _ in found)
            assert len({digest for _, digest in found}) == 1


def test_a_portable_state_of_nothing_moves_nothing():
    """The whole model once travelled, as zeros in float64."""
    for found in launch(checkpoint_ranks.nothing_owed, 2):
        assert found == {"wrap": 0, "shard": 0, "Outer": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, ways", first_fast([("12", ("alternate",)), ("12345", ("wrap", "sync"))])
)
def test_undelivered_gradients_at_any_number_of_ranks(sizes, ways, tmp_path):
    """They are kept by a file and by torch.distributed.checkpoint, for other codecs and ways: also
    by one rank, which compresses nothing."""
    path, saved, sizes = str(tmp_path), {}, [*map(int, sizes)]
    for ranks in sizes:
        now = [("wrap", "sync")[ranks % 2]] if "alternate" in ways else ways
        saved |= launch(checkpoint_ranks.saves_everywhere, ranks, path, now)[0]
    assert sum(owed.norm() > 1 for owed in saved.values()) == 4 * len(ways) * (len(sizes) - 1)
    for ranks in sizes:
        for found in launch(checkpoint_ranks.loads_everywhere, ranks, path, saved):
            assert len(found) == len(saved)
            for case, off in found.items():
                assert max(off) < 1e-5, (case, ranks, off)


def owing():
    """The specs whose states hold gradient back."""
    states = {name: compll.compile(name).states for name in compll.list_specs()}
    return [n for n, each in states.items() if any(s.fate == "owed" or s.gradient for s in each)]


@pytest.mark.slow
def test_every_codec_that_holds_gradient_back_delivers_it_under_another(tmp_path):
    """Sums of a spec's own (`owed:`) were once lost with another compressor."""
    path, names, saved = str(tmp_path), owing(), {}
    assert {"dgc", "adacomp", "efsignsgd", "sidco_e", "thc"} < {*names}
    for ranks in (2, 3):
        saved |= launch(checkpoint_ranks.saves_everywhere, ranks, path, ("sync",), names)[0]
    assert [case for case, owed in saved.items() if owed.norm() < 0.01] == []
    for ranks in (1, 2, 3):
        for found in launch(checkpoint_ranks.loads_everywhere, ranks, path, saved, names):
            for case, off in found.items():
                assert max(off) < 1e-4, (case, ranks, off)


@pytest.mark.slow  # the next is like it, by hipress.shard
def test_shards_and_replicas_in_other_numbers(tmp_path):
    path = str(tmp_path / "checkpoint")
    saved = launch(checkpoint_ranks.sharded, 4, 2, path, False)[0]
    assert all(values.any() for values in saved.values())
    for ranks, shards in ((2, 1), (2, 2), (3, 3)):
        for found in launch(checkpoint_ranks.sharded, ranks, shards, path, True):
            assert found.keys() == saved.keys()
            for name, values in found.items():
                assert torch.allclose(values, saved[name], atol=1e-6), (name, ranks, shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    "codec", first_fast([{"compressor": "topk", "ratio": 0.1}, "onebit_group"])
)
def test_replicas_of_hipress_shard_in_other_numbers(codec, tmp_path):
    """Their undelivered gradient is kept, whatever the numbers of shards and of replicas; there was
    no portable form."""
    path = str(tmp_path / "checkpoint")
    results = launch(checkpoint_ranks.replicas, 4, 2, codec, path, False)
    assert max(off for _, off in results) < 1e-5
    (saved,), _ = results[0]
    assert saved.norm() > 1
    others = ((2, 2, codec), (3, 1, codec), (3, 3, None), (1, 1, codec))
    for ranks, shards, now in others:
        for found, off in launch(checkpoint_ranks.replicas, ranks, shards, now, path, True):
            assert all(torch.allclose(each, saved, atol=1e-6) for each in found), (ranks, shards)
            assert off < 1e-5, (ranks, shards)


@pytest.mark.slow
def test_other_ways_in_at_one_to_five_ranks(tmp_path):
    """Replicas of hipress.shard and sites of an Outer: the undelivered gradient is the same for
    fewer ranks and for more, and nothing is lost after that."""
    topk = {"compressor": "topk", "ratio": 0.1}
    for ranks in (2, 5):
        path = str(tmp_path / f"{ranks}")
        (held,), away = launch(checkpoint_ranks.replicas, ranks, 1, topk, f"{path}-shard", False)[0]
        sites = launch(outer_ranks.moved_by_dcp, ranks, f"{path}-outer", False)[0][0]["undelivered"]
        assert away < 1e-5
        for now in (1, 3, 4):
            shards = 2 if now == 4 else 1
            there = launch(checkpoint_ranks.replicas, now, shards, topk, f"{path}-shard", True)
            for found, off in there:
                assert max([off, *((each - held).abs().max() for each in found)]) < 1e-5
            for state, _ in launch(outer_ranks.moved_by_dcp, now, f"{path}-outer", True):
                for name, values in sites.items():
                    assert torch.allclose(state["undelivered"][name], values, atol=1e-5)


def test_a_process_that_is_killed_while_it_saves_leaves_the_last_checkpoint(tmp_path):
    path = str(tmp_path)
    killed, _ = launch(checkpoint_ranks.killed_while_saving, 2, path, may_die={0})
    assert killed == DIED
    assert [file.parent.name for file in tmp_path.glob("*/.metadata")] == ["1"]
    assert [*(tmp_path / "2").glob("*.distcp")]
    assert min(launch(checkpoint_ranks.exact_elsewhere, 3, f"{path}/1")) > 1


def test_a_process_that_is_killed_while_it_writes_leaves_the_last_file(tmp_path):
    path = str(tmp_path)
    assert launch(checkpoint_ranks.killed_while_writing, 1, path, may_die={0}) == [DIED]
    assert torch.load(tmp_path / "hipress-0.pt")["values"].sum() == 3


@pytest.mark.slow
def test_a_policy_goes_on_with_its_own_measurements_only():
    """Also with another number of ranks. Another policy's once ended the session."""
    found = launch(checkpoint_ranks.measured_elsewhere, 2)
    found += launch(checkpoint_ranks.measured_elsewhere, 3, found[0][2])
    for before, after, _ in found:
        assert before == after != ""


@pytest.mark.slow
@pytest.mark.parametrize("name", first_fast(["ef21", "diana", "dgc"]))
def test_states_of_shares_keep_their_sum_at_another_number_of_ranks(name, tmp_path):
    """References of twice as many ranks would add up to twice their mean, and bias each average."""
    path = str(tmp_path / "checkpoint")
    saved, mean = launch(checkpoint_ranks.shares, 3, name, path, False)[0]
    assert saved.norm() > 1
    assert torch.allclose(saved, mean, atol=1e-5)
    for ranks in (2, 4):
        for loaded, again in launch(checkpoint_ranks.shares, ranks, name, path, True):
            assert torch.allclose(loaded, saved, atol=1e-5)
            assert torch.allclose(again, mean, atol=1e-5)


@pytest.mark.slow
def test_averages_of_momentum_go_on_at_another_number_of_ranks(tmp_path):
    path = str(tmp_path / "checkpoint")
    owed, momentum, _ = launch(checkpoint_ranks.frozen, 2, path, False)[0]
    assert owed.norm() > 1
    for ranks in (3, 1):
        found = launch(checkpoint_ranks.frozen, ranks, path, True)
        for brought, held, digest in found:
            assert torch.allclose(brought, owed, atol=1e-5)
            assert torch.equal(held, momentum)
            assert digest == found[0][2]


def test_one_rank_adds_what_was_undelivered_once_and_in_its_scale():
    """Not to a step that a GradScaler leaves out."""
    (left, owed), *_ = launch(checkpoint_ranks.scaled, 1)
    before, first, _, second, mean, third, last = left
    assert (before, first, second, third) == (2560, 2560, 0, 0)
    assert (mean, last) == (3.0, 3.0)  # 2 + 1, and then 3
    assert owed == {}


def test_a_model_of_hipress_shard_goes_on_at_another_number_of_ranks(tmp_path):
    path = str(tmp_path / "checkpoint")
    passes = launch(checkpoint_ranks.sharded_by_hipress, 2, path, False)
    assert passes == [3, 3]
    assert launch(checkpoint_ranks.sharded_by_hipress, 3, path, True) == [3, 3, 3]
