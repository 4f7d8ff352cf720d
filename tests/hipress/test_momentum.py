"""Averages of momentum, on real ranks."""

from __future__ import annotations

import pytest
import torch

from hipress.choose.tuner import WATCHED
from tests.hipress import momentum_ranks
from tests.hipress.common import make
from tests.hipress.launch import launch

RANKS_DIFFER = "ranks have taken between 2 and 3 steps of their optimizer, this one "


def slowly(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clipped", *slowly("adam", "sgd", "lion")])
def test_both_ways_in_train_alike_and_ranks_stay_equal(name):
    (wrapped, synchronized), other = launch(momentum_ranks.ways, 2, name, momentum_ranks.CODEC)
    assert [each[1:] for each in (wrapped, synchronized)] == [each[1:] for each in other]
    assert wrapped == synchronized
    if name in ("adam", "clipped"):
        assert "from then on its momentum: onebit_fine (ps) for " in wrapped[2]
        assert wrapped[2].endswith("now after the freeze")
        assert wrapped[3] == [(WATCHED, {"uncompressed"}), (14 - WATCHED, {"compressed"})]
    else:
        assert wrapped[2].startswith("onebit_fine (ps)")
        assert "averages of the momentum of hipress.optim." in wrapped[2]
    assert wrapped[0][-1] < 0.8 * wrapped[0][0]


def test_a_named_compressor_is_told_with_the_phase_that_uses_it():
    """A warning once said that nothing is compressed."""
    (((level, line),), _) = launch(momentum_ranks.first_line, 2)
    assert level == "INFO"
    assert "freezes (freeze=4), gradients: nothing is compressed" in line
    assert "from then on its momentum: onebit_fine (ps) for " in line


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adam", *slowly("sgd", "lion")])
def test_uncompressed_they_train_as_one_process_does(name):
    """A process with both ranks' data, without averages, gets the same losses."""
    both = [each[0][0] for each in launch(momentum_ranks.ways, 2, name, "none")]
    model = make()
    optimizer = momentum_ranks.make_optimizer(name, model)
    if name == "sgd":
        optimizer = torch.optim.SGD(
            model.parameters(), lr=0.02, momentum=0.9, nesterov=True, weight_decay=0.01
        )
    for step in range(14):
        optimizer.zero_grad()
        losses = [momentum_ranks.backward(model, rank, step, 0.5) for rank in range(2)]
        optimizer.step()
        assert [each[step] for each in both] == pytest.approx(losses, rel=2e-3)


@pytest.mark.parametrize("at", [7, *slowly(2, 4)])
def test_checkpoints_before_at_and_after_the_freeze_resume_bit_by_bit(at):
    ranks = launch(momentum_ranks.checkpoints, 2, at)
    assert len({rank[0] for rank in ranks}) == 1
    assert len({rank[3] for rank in ranks}) == 1
    for straight, resumed, refused, norm in ranks:
        assert norm > 0.05
        assert resumed == straight
        assert refused.kind == ("StateError" if at > 4 else "none")
        assert at <= 4 or "load the optimizer's state of the same step first" in refused.message


@pytest.mark.slow
@pytest.mark.parametrize("way", ["synchronizer", *slowly("wrap")])
def test_torchs_states_of_an_optimizer_resume_bit_by_bit(way):
    """Loaded in a new process, the freeze was lost; a Synchronizer refused the first of them."""
    ranks = launch(momentum_ranks.torchs_states, 2, way)
    assert len({digest for rank in ranks for digest in rank}) == 1, ranks


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wrap", *slowly("synchronizer")])
def test_ranks_clip_to_max_norm_times_the_measured_ratio(way):
    (norm, wanted), *others = launch(momentum_ranks.norms, 3, way)
    assert norm == pytest.approx(wanted, rel=1e-4)
    assert norm > 0.055
    assert all(other == norm for other, _ in others)


@pytest.mark.slow
def test_a_step_that_overflows_leaves_momentum_and_feedback_alone():
    ranks = launch(momentum_ranks.scaled, 2)
    assert ranks[0] == ranks[1]
    calm, *stayed, rough = ranks[0]
    assert stayed == [True, True]
    assert calm == rough


@pytest.mark.slow
def test_momentum_enters_once_for_all_micro_batches():
    assert max(launch(momentum_ranks.accumulated, 2)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wrap", *slowly("synchronizer")])
def test_unused_parameters_keep_momentum_and_feedback(way):
    ranks = launch(momentum_ranks.unused, 2, way)
    assert ranks[0] == ranks[1]
    assert ranks[0][0]


@pytest.mark.slow
def test_an_early_freeze_is_told_by_rank_0():
    (told,), others = launch(momentum_ranks.early, 2)
    assert told.startswith("hipress: v is frozen after 4 steps")
    assert others == []


@pytest.mark.slow
def test_mistakes_are_told_on_every_rank():
    ranks = launch(momentum_ranks.mistakes, 2)
    for found in ranks:
        expected = {
            "twice": ("ConfigError", "steps a module that hipress synchronizes"),
            "clipped": ("SyncError", "Instead of clip_grad_norm_ pass max_norm= to AdamW"),
            ".data": ("SyncError", "a .grad was changed between the average and step()"),
            ".numpy()": ("SyncError", "a .grad was changed between the average and step()"),
            "no step": ("SyncError", "no optimizer.step() came after it"),
            "dgc": ("ConfigError", "'dgc' keeps u and v of its own"),
            "int4_group": ("ConfigError", "'int4_group' has no feedback"),
            "policy": ("ConfigError", "a policy needs gradients"),
            "torch's": (
                "ConfigError",
                "'freeze' is an argument of the optimizers",
            ),
            "accepted": ("ConfigMismatch", "accept_loss"),
            "of others": ("ConfigError", "steps none of the model's parameters"),
            "forgotten by wrap": ("SyncError", "pass it as optimizer="),
            "forgotten by Synchronizer": ("SyncError", "pass it as optimizer="),
            "second step": ("SyncError", "sync.step() a second time, and no gradient since"),
            "ranks": ("ConfigMismatch", "'freeze': 4"),
        }
        for way in ("wrap", "Synchronizer", "attach"):
            foreign = (
                "parameters that the model has" if way == "Synchronizer" else "AdamW steps none"
            )
            expected[f"torch's of others by {way}"] = ("ConfigError", foreign)
            rates = "rank 0: group 0: lr=0.1, rank 1: group 0: lr=0.2"
            expected[f"rates by {way}"] = ("ConfigMismatch", rates)
        assert {what: error.kind for what, error in found.items()} == {
            what: kind for what, (kind, _) in expected.items()
        }
        for what, (_, text) in expected.items():
            assert text in found[what].message


@pytest.mark.slow
def test_ranks_that_would_freeze_apart_are_told():
    (kind, message), (other, theirs) = launch(momentum_ranks.apart, 2)
    assert (kind, other) == ("SyncError", "SyncError")
    assert RANKS_DIFFER + "3" in message
    assert RANKS_DIFFER + "2" in theirs


@pytest.mark.slow
def test_a_freeze_before_the_warm_up_ends_is_refused():
    for kind, message in launch(momentum_ranks.warming, 2):
        assert kind == "ConfigError"
        assert "freeze=4: the learning rate still rises" in message


@pytest.mark.slow
def test_parameters_of_16_bits():
    (losses, one), (_, other) = launch(momentum_ranks.halves, 2)
    assert one == other
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_a_state_of_fewer_ranks_keeps_momentum_and_v():
    saved = launch(momentum_ranks.saved, 2)
    ranks = launch(momentum_ranks.grown, 3, saved[0])
    assert len({rank[1] for rank in ranks}) == 1
    assert {rank[2] for rank in ranks} == {"onebit_fine (ps)"}


@pytest.mark.slow
def test_modes_of_ddp():
    found, others = launch(momentum_ranks.modes, 2)
    for name, (first, last, digest) in found.items():
        assert digest == others[name][2], name
        assert last < first, name


@pytest.mark.slow
def test_joins_are_refused_on_every_rank():
    for _, message in launch(momentum_ranks.joins, 2):
        assert "use no join of DDP's, in which a rank without data takes no step" in message


@pytest.mark.parametrize("name", ["lion", *slowly("sgd")])
def test_auto_takes_nothing_for_an_optimizer_that_one_bit_was_measured_to_harm(name):
    (why, losses, digest), (_, _, other) = launch(momentum_ranks.unmeasured, 2, name)
    assert "no compressor was measured to keep the loss under this optimizer" in why
    assert losses[-1] < losses[0]
    assert digest == other


def test_each_rank_is_clipped_to_its_own_norm_where_one_is_given():
    found, other = launch(momentum_ranks.limits, 2)
    assert found == other
    assert found["of ranks, out of reach"] == found["none"]
    assert found["of ranks"] == found["of both"]
    assert found["of both"] != found["none"]
