"""Plans that switch during training: states are handed on, and ranks stay equal."""

from __future__ import annotations

from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from casync.cost import CodecCost, Costs, Line, Transfer
from casync.memory.host import HostMemory, Instant
from casync.topology import Topology
from hipress.choose import probe, trial
from hipress.choose import tuner as tuners
from hipress.choose.chooser import StepEvent
from hipress.choose.places import Device, Places
from hipress.choose.probe import ProbeSetup
from hipress.choose.rules import NO_RULES
from hipress.choose.search import Registry
from hipress.choose.tuner import WATCHED, Compilation, Tuner
from hipress.choose.workload import Observer
from hipress.codecs import NATIVE
from hipress.errors import ConfigError, RankLost
from hipress.model.params import Param
from hipress.options import Options
from hipress.ranks import groups as link_
from tests.hipress import tuner_ranks
from tests.hipress.launch import launch
from tests.tiers import first_fast

CHAINS = {
    2: ["int8", "int8", "sparse", "sparse", NATIVE, "ring", "all", "int8", "ring", NATIVE],
    4: ["nodes", "nodes", "int8", "ring", "nodes", "ring", "ring", "sparse", NATIVE],
}


def slowly(*values):
    return [pytest.param(*each, marks=pytest.mark.slow) for each in values]


@pytest.mark.slow
@pytest.mark.parametrize("scope", first_fast(["tensor", "bucket"]))
@pytest.mark.parametrize("world_size", CHAINS)
def test_residuals_of_a_dropped_codec_are_handed_on(world_size, scope):
    """Nothing is lost: after a step that sends all, sums of averages are those of gradients."""
    names = CHAINS[world_size]
    results = launch(tuner_ranks.handed_on, world_size, names, scope)
    for name, (off, _) in zip(names, results[0], strict=True):
        assert (off < 1e-4) == (name == NATIVE), (name, off)
    for other in results[1:]:
        assert other == results[0]


def test_sums_of_a_specs_own_are_handed_on():
    """To another codec and back, as residuals are."""
    own = ["adacomp", "efsignsgd", "thc"]
    names = [*own, NATIVE, *own[::-1], "int8", NATIVE]
    results = launch(tuner_ranks.handed_on, 2, names, "tensor")
    for name, (off, _) in zip(names, results[0], strict=True):
        assert (off < 1e-4) == (name == NATIVE), (name, off)
    assert results[0] == results[1]


@pytest.mark.parametrize("way", first_fast(["wrap", "attach", "synchronizer", "unused"]))
def test_ranks_agree_on_one_plan_and_stay_together(way):
    """verify=True compares every average, through all switches of a trial."""
    (first, text, digest), *others = launch(tuner_ranks.agreed, 2, way)
    for report, _, other in others:
        assert other == digest
        for key in ("tried", "trial_seconds", "decisions"):
            assert report[key] == first[key]
    verdicts = [each["verdict"] for each in first["tried"]]
    assert verdicts.count("kept") == 1
    assert len(verdicts) == 4
    assert all(each["steps"] == 6 and each["step_seconds"] > 0 for each in first["tried"])
    assert "the trial cost" in " ".join(text.split())
    kept = first["tried"][verdicts.index("kept")]["plan"]
    codecs = {d["codec"] for d in first["decisions"] if d["codec"]}
    assert all(codec in kept for codec in codecs)
    assert (not codecs) == (kept == "no compression")


def test_a_report_says_alike_of_model_and_parameters_why_nothing_is_compressed():
    """It once said of parameters, throughout training, that the first steps are watched."""
    for whole, parts in launch(tuner_ranks.left_alone, 2):
        assert parts == {"no compressor was measured to keep the loss under this optimizer"}
        assert whole.endswith(parts.pop())


@pytest.mark.slow
def test_wrap_and_the_first_steps_do_not_wait_for_a_compiler():
    assert launch(tuner_ranks.compiled_meanwhile, 2) == [(0, 4), (0, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("freezes", [False, True])
def test_compiled_codecs_are_tried(freezes):
    for found, tried in launch(tuner_ranks.backends, 2, freezes):
        assert found == {"cpu"}
        assert tried > 1


def test_a_rank_that_dies_amid_a_trial_is_noticed():
    (kind, message, seconds), _ = launch(tuner_ranks.dies, 2, may_die=[1])
    assert seconds < 30
    assert (kind, message) == ("RankLost", "rank 0 stops, because rank 1 ended")


def test_a_failure_on_one_rank_ends_the_trial_on_all():
    (first, again), (own, _) = launch(tuner_ranks.stops, 2)
    assert first[0] == "SyncError"
    assert "rank 1" in first[1]
    assert "out of paper" in first[1]
    assert first[2] < 30
    assert again[0] in ("SyncError", "RuntimeError")  # DDP's own, of the step that did not end
    assert "out of paper" in own[1]


@pytest.mark.slow
def test_powersgd_takes_turns_where_its_loss_is_accepted():
    (tried, whys, accepted, digest), other = launch(tuner_ranks.by_word, 2, 0.0, 0.01)
    assert other == (tried, whys, accepted, digest)
    assert tried == ["powersgd rank=4 (allreduce)", "no compression"]
    assert "powersgd rank=4(columns=131)" in whys
    told = "gains time, within accept_loss=0.01: loss +0.3% against fp32 after 1000 steps of "
    assert all(why.startswith(told + "lstm-sgd, ") for why in whys.values())
    assert accepted == 0.01


@pytest.mark.parametrize("momentum, accepted", [(0.9, 0.01), *slowly((0.0, None))])
def test_powersgd_takes_none_without_the_word_nor_against_the_evidence(momentum, accepted):
    """With momentum it loses on digits."""
    for tried, whys, _, _ in launch(tuner_ranks.by_word, 2, momentum, accepted):
        assert (tried, whys) == ([], {})


def test_states_other_than_residuals_are_zeroed_after_a_turn():
    ranks = launch(tuner_ranks.zeroed, 2)
    assert ranks[0] == ranks[1]
    interrupted, fresh, warm = ranks[0]
    assert interrupted == fresh
    assert warm != fresh


def test_a_state_is_loaded_into_the_plan_it_was_saved_by():
    for before, after, codecs, stateful in launch(tuner_ranks.resumed, 2):
        assert stateful
        assert before == after
        assert codecs == {"int8_fake"}


@dataclass(frozen=True)
class Search:
    """Three plans; under other costs, two others."""

    topology: Topology = field(default_factory=lambda: Topology.flat(2))
    codecs: Registry = field(default_factory=lambda: Registry({}, Options()))
    params: tuple[object, ...] = ()
    overrides: object = NO_RULES
    options: Options = field(default_factory=Options)
    slots: bool = False

    def plans(self, costs, workload):
        names = {1: ["a", "b", "native"], 2: ["native", "c"]}[next(iter(costs.exchange))]
        return tuple(map(script, names))

    def unplanned(self):
        return script("native")


def script(name):
    made = SimpleNamespace(
        label=name, compresses=name != "native", seconds=1.0, facts=lambda n=name: n
    )
    made.owned_as = lambda before: made
    return made


#: costs, told apart by their number of peers
SLOW, FAST = (
    Costs({n: Transfer(Line(0, 0))}, {}, {"a": CodecCost(*[Line(0, 0)] * 3)}) for n in (1, 2)
)


class Clock(HostMemory):
    """A memory whose time advances by the seconds of a step of each plan."""

    def __init__(self, seconds):
        self.now, self.seconds = 0.0, seconds

    def moment(self):
        return Instant(self.now)


@pytest.fixture
def scripted(monkeypatch):
    """A tuner, and a function that takes steps and returns their plans."""
    link = SimpleNamespace(costs=SLOW, message=0.01)
    monkeypatch.setattr(link_, "connect", lambda coordinator, purpose: object())
    monkeypatch.setattr(tuners, "all_reduce_max", lambda values, group: values)
    monkeypatch.setattr(probe, "message_seconds", lambda *_: link.message)
    monkeypatch.setattr(probe, "measure_link", lambda *_: link.costs)
    monkeypatch.setattr(probe, "measure_codecs", lambda group, codecs, link, setup: link)
    coordinator = SimpleNamespace(rank=0, run_watched=lambda call, what, end: call())
    clock = Clock({"a": 0.10, "b": 0.12, "c": 0.05, "native": 0.3})
    compiling = SimpleNamespace(done=lambda: True, result=dict, stop=dict)
    places = Places((Device("gloo", Search(), ProbeSetup(clock, clock)),), (SLOW,))
    tuner = Tuner(places, compiling, coordinator)
    tuner.compiling = compiling

    def steps(count):
        taken = []
        for _ in range(count):
            taken.append(tuner.next(0).label)
            if tuner.observes:
                tuner.observe((), torch.empty(0), torch.empty(0).clone)
                for event in StepEvent:
                    tuner.mark(event)
            clock.now += clock.seconds[taken[-1]]
        return taken

    return tuner, steps, clock, link


def test_after_a_trial_the_choice_holds(scripted):
    tuner, steps, _, _ = scripted
    assert set(steps(WATCHED)) == {"native"}
    assert tuner.tried == ()
    assert set(steps(32)) == {"a", "b", "native"}  # the last one is out early
    assert set(steps(300)) == {"a"}
    assert [each.verdict for each in tuner.tried] == ["kept", "slower", "slower"]
    assert tuner.trial_seconds == pytest.approx(14 * 0.02 + 4 * 0.2)


def test_drift_leads_to_another_look_with_the_current_plan_to_beat(scripted):
    tuner, steps, clock, link = scripted
    steps(WATCHED + 32 + 3 * trial.WINDOW)
    link.costs, link.message = FAST, 0.001
    clock.seconds |= {"native": 0.06}
    taken = steps(3 * trial.WINDOW)
    assert set(taken[: trial.WINDOW]) == {"a"}  # the end of a window, and all of another
    assert set(taken) == {"a", "native", "c"}
    assert set(steps(200)) == {"c"}
    assert [each.plan for each in tuner.tried] == ["a", "native", "c"]


def test_a_look_in_vain_makes_patient(scripted):
    _, steps, clock, _ = scripted
    steps(WATCHED + 32 + trial.WINDOW)
    clock.seconds |= {"a": 0.14, "b": 0.17}
    trials = []
    for _ in range(40):
        trials.append(len(set(steps(trial.WINDOW))) > 1)
        clock.seconds |= {name: clock.seconds[name] * 1.3 for name in ("a", "b")}
        clock.seconds["native"] = 9.0
    first, second, third, *_ = (number for number, each in enumerate(trials) if each)
    assert third > second > first


def test_none_is_compared_with_after_close(scripted):
    tuner, steps, _, _ = scripted
    steps(WATCHED + 3)
    tuner.close()
    assert set(steps(50)) == {"a"}


def test_a_measurement_that_fails_is_not_waited_for(scripted):
    """Over NCCL, work with a peer that is gone would end at the time-out only."""
    tuner, steps, clock, _ = scripted
    told = []
    slots = SimpleNamespace(abort=lambda: told.append("abort"), close=lambda: told.append("close"))
    tuner._places = Places((Device("nccl", Search(), ProbeSetup(clock, clock, slots)),), (SLOW,))

    def lost(call, what, end):
        raise RankLost("rank 1 ended")

    tuner._coordinator.run_watched = lost
    with pytest.raises(RankLost, match="rank 1 ended"):
        steps(WATCHED)
    tuner.close()
    assert told == ["abort", "close"]


def test_waits_are_named_by_what_ranks_do_together(scripted):
    tuner, steps, clock, link = scripted
    names = set()

    def watched(call, what, end):
        names.add(what)
        return call()

    tuner._coordinator.run_watched = watched
    steps(WATCHED + 1)
    assert names == {
        "comparing the times of steps", "measuring compressors", "comparing the times of gradients"
    }  # fmt: skip
    names.clear()
    steps(32 + trial.WINDOW)
    link.costs, link.message = FAST, 0.001
    clock.seconds |= {"native": 0.06}
    steps(3 * trial.WINDOW)
    assert names == {"comparing the times of steps", "measuring the link"}


def test_complex_gradients_are_watched():
    """They were once taken for half as long as they are in a bucket."""
    memory = HostMemory()
    observer = Observer([Param("turn", 0, 50, (50,), torch.complex64, False)], memory)
    observer.begin()
    observer.observe((0,), torch.zeros(100))
    assert observer.steps == 0


def test_the_trial_waits_for_the_compiler(scripted):
    tuner, steps, _, _ = scripted
    tuner.compiling.done = lambda: False
    assert set(steps(40)) == {"native"}
    tuner.compiling.done = lambda: True
    assert set(steps(32)) == {"a", "b", "native"}


def test_no_codec_is_compiled_after_close():
    def compile_many(check):
        while True:
            check()

    compilation = Compilation(SimpleNamespace(compile=compile_many))
    assert not compilation.done()
    compilation.close()
    with pytest.raises(CancelledError):
        compilation.result()


def test_a_codec_that_does_not_compile_is_reported_when_needed(scripted):
    def fail():
        raise ConfigError("no compiler")

    tuner, steps, _, _ = scripted
    tuner.compiling.result = fail
    with pytest.raises(ConfigError, match="no compiler"):
        steps(10)
