"""Codecs that measurements show to keep the loss."""

from __future__ import annotations

import json

import pytest
import torch

import compll
from hipress import optim, options
from hipress.choose import evidence
from hipress.choose.evidence import Finding
from hipress.choose.search import candidates
from hipress.errors import ConfigError
from hipress.optim.optimizer_kinds import KINDS, kind_of, unwrapped


def finding(codec="topk", params=None, given=None, *, kind="sgd", workload="a", **more):
    known = {"steps": 200, "seeds": 3, "difference": 0.0, "error": 0.0} | more
    return Finding(codec, params or {"ratio": 0.01}, given or {}, kind, workload, **known)


@pytest.fixture
def measured(monkeypatch):
    """Replaces the recorded measurements."""

    def set_(*found):
        monkeypatch.setattr(evidence, "findings", lambda: found)

    return set_


def keys(kind):
    return [key for key, *_ in evidence.trusted(kind) if key not in evidence.HARMLESS]


def topk(**params):
    return compll.compile("topk", "reference", **params)


def both(**more):
    return [finding(workload=name, **more) for name in ("a", "b")]


def test_a_codec_is_trusted_where_it_kept_the_loss_on_every_workload(measured):
    measured(*both(), finding("dgc", workload="a"), finding("dgc", kind="adam", workload="c"))
    assert "topk" in keys("sgd")
    assert "topk" not in keys("adam")
    assert "topk" not in keys(None)
    assert [keys(kind) for kind in ("sgd", "adam", None)] == [["topk"], ["dgc"], []]
    measured(*both(), finding(kind="adam", workload="c"))
    assert "topk" in keys(None)
    measured(finding(steps=200), finding(steps=1000, difference=0.02))
    assert "topk" not in keys("sgd")


@pytest.mark.parametrize(
    "more, kept",
    [({"difference": 0.009}, True), ({"difference": 0.011}, False),
     ({"difference": 0.02, "error": 0.006}, True), ({"difference": 0.02, "error": 0.004}, False),
     ({"difference": -0.2, "error": 0.05}, True), ({"difference": None}, False)],
)  # fmt: skip
def test_one_workload_on_which_it_lost_is_enough(more, kept, measured):
    measured(*both(), lost := finding(workload="c", **more))
    assert ("topk" in keys("sgd")) == kept
    assert evidence.worst(topk(), "sgd") == (None if kept else lost)
    assert evidence.worst(topk(), "adam") is None


def test_seeds_that_differ_too_much_tell_nothing(measured):
    unsure = finding(workload="c", steps=1000, difference=0.02, error=0.02)
    measured(*both(), unsure)
    assert "topk" not in keys("sgd")
    assert evidence.worst(topk(), "sgd") is None
    measured(*both(), unsure, finding(workload="c"))
    assert "topk" in keys("sgd")


def test_other_parameters_are_another_codec(measured):
    measured(*both(params={"ratio": 0.05}, given={"ratio": 0.05}))
    assert not evidence.of(topk())
    assert len(evidence.of(topk(ratio=0.05))) == 2
    given, *harmless = evidence.trusted("sgd")
    assert given == ("topk ratio=0.05", "topk", {"ratio": 0.05})
    found = candidates(options.make("auto", optimizer="sgd"))
    assert list(found) == ["topk ratio=0.05", *(name for name, *_ in harmless)]


@pytest.mark.parametrize("kind", ["sgd", "adam", None])
def test_unbiased_and_lossless_codecs_need_no_evidence(kind, measured):
    measured()
    found = candidates(options.make("auto", optimizer=kind))
    assert set(found) == {"lossless", "lossless_bf16", "bf16_sr"}
    measured(finding("bf16_sr", params={}, kind="adam", difference=0.5))
    assert ("bf16_sr" in candidates(options.make("auto", optimizer=kind))) == (kind == "sgd")


def test_the_worst_is_named_with_its_figure(measured):
    measured(*both(difference=0.072), finding(workload="c", difference=0.5, seeds=1))
    told = str(evidence.worst(topk(), "sgd"))
    assert told == "loss +50.0% against fp32 after 200 steps of c, 1 seed"
    measured(*both(difference=0.5), finding(workload="c", difference=None))
    assert str(evidence.worst(topk(), "sgd")).startswith("diverged against fp32")


def test_auto_tries_what_keeps_the_loss_under_the_optimizer(measured):
    named = ("int8_group", "signum", "powersgd", "ef21", "adacomp", "efsignsgd", "thc")
    measured(*both(), *(each for name in named for each in both(codec=name, params={})))
    found = candidates(options.make("auto", optimizer="sgd"))
    # no formula predicts votes; factors and references begin anew in each turn
    owing = ["adacomp", "efsignsgd", "thc"]
    assert list(found) == ["topk", "int8_group", *owing, *evidence.HARMLESS]


@pytest.mark.parametrize(
    "more, taken",
    [({"difference": 0.029}, True), ({"difference": 0.031}, False), ({"difference": None}, False),
     ({"difference": 0.02, "error": 0.024}, True), ({"difference": 0.02, "error": 0.026}, False),
     ({"seeds": 2}, False), ({"steps": 1000, "seeds": 1}, True), ({"workload": "b"}, False)],
)  # fmt: skip
def test_lossy_codecs_are_taken_up_to_the_accepted_loss(more, taken, measured):
    """Only if it was measured for enough steps on each workload of the kind."""
    rank = {"params": {"rank": 4}, "given": {"rank": 4}}
    lost = finding("powersgd", **rank, **{"difference": 0.02, "workload": "a"} | more)
    others = [finding("powersgd", workload=each, **rank) for each in "ab"]
    measured(*both(), lost, *others, finding("dgc", {}, kind="adam"))
    if more.get("workload") == "b" or "seeds" in more or "steps" in more:
        measured(finding(workload="a"), lost)
    allowed = candidates(options.make("auto", optimizer="sgd", accept_loss=0.03))
    assert ("powersgd rank=4" in allowed) == taken
    assert "dgc" not in allowed
    assert "powersgd rank=4" not in candidates(options.make("auto", optimizer="sgd"))


def test_losses_of_a_trial_count_where_a_trial_may_zero_states_only(measured):
    kept, lost = finding("powersgd", {}), finding("powersgd", {}, difference=0.2, trial=True)
    measured(kept, lost)
    assert "powersgd" in keys("sgd")
    assert not evidence.accepted("sgd", 0.1)
    assert evidence.accepted("sgd", 0.3) == {"powersgd": lost}


def test_momentum_needs_feedback_whatever_is_accepted(measured):
    kept = {"kind": "momentum", "difference": 0.001}
    measured(finding(**kept), finding("tern_group", {}, **kept), finding("dgc", {}, **kept))
    assert list(candidates(options.make("auto", optimizer="momentum", accept_loss=0.5))) == ["topk"]


def test_evidence_without_momentum_does_not_hold_with_it(measured):
    measured(finding("powersgd", {}, kind="plain-sgd"), finding("powersgd", {}, difference=0.2))
    for kind, taken in (("plain-sgd", True), ("sgd", False)):
        wanted = options.make("auto", optimizer=kind, accept_loss=0.01)
        assert ("powersgd" in candidates(wanted)) == taken
    assert "powersgd" not in keys("plain-sgd")


def test_evidence_holds_for_another_code_of_the_same_values():
    """Entropy codes changed no value, and were no candidates."""
    plain = {key for key, *_ in evidence.trusted("sgd")}
    assert {"int4_group entropy=True", "int3_group entropy=True"} <= plain
    assert "tern_group entropy=True" not in plain
    coded = compll.compile("tern_group", "reference", entropy=True)
    packed = compll.compile("tern_group", "reference")
    assert str(evidence.worst(coded, "adam")) == str(evidence.worst(packed, "adam"))
    assert not any(each.codec == "dgc" and each.params["nesterov"] for each in evidence.findings())


def test_the_shipped_evidence_is_read():
    assert {"bf16", "fp16", "int4_group"} <= set(keys(None))
    onebit = compll.compile("onebit_group", "reference")
    assert evidence.worst(onebit, "adam") is not None
    assert "onebit_fine group=64" in keys("momentum")
    assert evidence.worst(compll.compile("onebit_fine", "reference"), "momentum-sgd") is not None
    accepted = evidence.accepted("plain-sgd", 0.01)
    assert accepted["powersgd rank=4"].difference == pytest.approx(0.0026, abs=5e-4)
    assert "powersgd rank=4" not in evidence.accepted("sgd", 0.01) | evidence.accepted("adam", 0.01)
    assert all(each.optimizer in KINDS for each in evidence.findings())
    json.dumps([each.params for each in evidence.findings()])


class Own(torch.optim.Optimizer):
    """An optimizer of unknown kind."""


class OwnAdam(torch.optim.AdamW):
    """A kind of Adam."""


class OwnSGD(optim.SGD):
    """A kind of SGD whose momentum is averaged."""


def parameters():
    return [torch.nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize(
    "optimizer, kind",
    [(None, None), ("SGD", "sgd"), ("adamw", "adam"), (torch.optim.SGD(parameters()), "plain-sgd"),
     (torch.optim.SGD(parameters(), momentum=0.9), "sgd"),
     (torch.optim.NAdam(parameters()), "adam"), (torch.optim.RMSprop(parameters()), "adam"),
     (OwnAdam(parameters()), "adam"), (Own(parameters(), {}), None),
     (optim.AdamW(parameters()), "momentum"), (optim.AdamW(parameters(), freeze=None), "adam"),
     (OwnSGD(parameters(), momentum=0.9), "momentum-sgd"),
     (optim.Lion(parameters()), "momentum-lion")],
)  # fmt: skip
def test_kinds_of_optimizers(optimizer, kind):
    assert kind_of(optimizer) == kind
    assert options.make("auto", optimizer=optimizer).optimizer == kind


@pytest.mark.parametrize(
    "wrong, told",
    [("sdg", "unknown optimizer 'sdg'. did you mean 'sgd'?"), (torch.optim.SGD, "is the class SGD"),
     (torch.nn.Linear(1, 1), "not a Linear"), (parameters(), "not a list")],
)  # fmt: skip
def test_an_unknown_optimizer_is_refused(wrong, told):
    with pytest.raises(ConfigError, match=told):
        options.make("auto", optimizer=wrong)


class Wrapper(torch.optim.Optimizer):
    """A wrapper as frameworks have them."""

    def __init__(self, name, inner):
        vars(self)[name] = inner


def wrapper(package, name, place, inner):
    return type(name, (Wrapper,), {"__module__": f"{package}.some.module"})(place, inner)


@pytest.mark.parametrize(
    "package, name, place",
    [
        ("accelerate", "AcceleratedOptimizer", "optimizer"),
        ("lightning", "LightningOptimizer", "_optimizer"),
        ("lightning", "_FabricOptimizer", "_optimizer"),
    ],
)
def test_known_wrappers_are_seen_through(package, name, place):
    """Momentum was not averaged, and gradients travelled at one bit while v was frozen."""
    inner = optim.AdamW(parameters())
    outer = wrapper(package, name, place, wrapper(package, name, place, inner))
    assert unwrapped(outer) is inner
    assert kind_of(outer) == "momentum"
    assert kind_of(wrapper(package, name, place, torch.optim.Adam(parameters()))) == "adam"


@pytest.mark.parametrize("several", [False, True])
def test_unknown_wrappers_of_momentum_are_refused(several):
    inner = optim.AdamW(parameters())
    outer = wrapper("mine", "Mine", "any", [inner] if several else inner)
    with pytest.raises(ConfigError, match=r"optimizer=Mine holds a hipress.optim.AdamW"):
        kind_of(outer)


@pytest.mark.slow  # imports frameworks
def test_wrappers_of_frameworks():
    accelerate = pytest.importorskip("accelerate")
    fabric = pytest.importorskip("lightning.fabric.wrappers")
    lightning = pytest.importorskip("lightning.pytorch.core.optimizer")
    inner = optim.AdamW(parameters())
    assert unwrapped(accelerate.Accelerator(cpu=True).prepare(inner)) is inner
    assert unwrapped(lightning.LightningOptimizer(inner)) is inner
    assert unwrapped(fabric._FabricOptimizer(inner, None)) is inner
