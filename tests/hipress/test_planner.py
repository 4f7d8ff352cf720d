"""Plans from given measurements; no process is needed."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import compll
from casync.cost import CodecCost, Copies, Costs, Line, Transfer, fit
from casync.runtime.counters import Counters
from casync.topology import Topology
from hipress import options, session
from hipress.choose import planner, probe
from hipress.choose.plan import check_patterns, fixed_plan
from hipress.choose.search import FAR, TRIED, Registry, Search, candidates
from hipress.choose.workload import TimedBucket, Workload, estimate, timed
from hipress.codecs import partitions
from hipress.engine.reduction import Traffic
from hipress.errors import ConfigError
from hipress.model.params import Param, describe
from hipress.reporting.measured import measure_of
from hipress.reporting.report import Report
from hipress.reporting.tables import describe_plan, probe_table
from hipress.tools.models.own import by_elements
from hipress.tools.models.work import Speed
from tests.hipress.common import Net
from tests.hipress.fakes import Halves, Int8, Sparse

TWO, FOUR = Topology.flat(2), Topology.flat(4)

CODECS = {"half_fake": Halves(), "int8_fake": Int8()}


def costs(link: float, codec: float, latency: float = 1e-4) -> Costs:
    """A link and codecs with these rates, in bytes a second."""
    wire, work = Transfer(Line(latency, 1 / link)), Line(1e-6, 1 / codec)
    twice = Transfer(Line(latency, 2 / link))  # a ring
    return Costs(
        exchange={1: wire},
        reduce={"float32": twice, "float16": twice},
        codecs=dict.fromkeys(CODECS, CodecCost(work, work, Line(1e-6, 2 / codec))),
    )


@pytest.fixture
def params():
    model = torch.nn.Sequential(torch.nn.Linear(1000, 2000), torch.nn.LayerNorm(2000))
    return describe(model)


def search(params, codecs=CODECS, topology=FOUR, **wanted):
    made = options.make("auto", **wanted)
    return Search(params, Registry(codecs, made), made, topology)


def plans(params, costs, codecs=CODECS, topology=FOUR, workload=None, **wanted):
    """Tried plans, by predicted seconds."""
    return search(params, codecs, topology, **wanted).plans(costs, workload)


def plan(*args, **wanted):
    """The plan that is tried first."""
    return plans(*args, **wanted)[0]


def test_slow_link_compresses_most(params):
    made = plan(params, costs(link=1e7, codec=1e10))
    assert {d.codec for d in made.decisions} == {"int8_fake"}
    assert set(made.codecs) == {"int8_fake"}
    assert [d.name for d in made.decisions] == [p.name for p in params]  # three of one length
    large = made.decisions[0]
    assert large.why == "gains time"


def test_the_fastest_predictions_are_tried_and_the_native_all_reduce(params, monkeypatch):
    monkeypatch.setattr("hipress.choose.search.FAR", 9.0)
    made = plans(params, costs(link=1e7, codec=1e10))
    assert len(made) == TRIED + 1
    assert [each.compresses for each in made] == [True, True, True, False]
    assert len({each.label for each in made}) == 4
    assert made[-1].label == "no compression"
    assert made[-1].seconds > 2 * made[0].seconds
    assert "a step is predicted to take" in made[0].why


def test_at_most_two_of_what_is_tried_have_one_codec(params):
    """Three ways of one codec are predicted before other codecs; all may be wrong alike."""
    rates = costs(link=1e7, codec=1e10)
    shares = {"int8_fake": 0.2, "half_fake": 0.12}  # which an all-reduce sends twice
    payloads = {(key, p.index): share for key, share in shares.items() for p in params}
    work = dataclasses.replace(estimate(params), payloads=payloads)
    made = plans(params, rates, workload=work, topology=TWO)
    found = [each.decisions[0].codec for each in made]
    assert found == ["int8_fake", "int8_fake", "half_fake", None]


def test_slow_codec_leaves_everything_alone(params):
    (made,) = plans(params, costs(link=1e8, codec=1e7))
    assert not made.compresses
    assert "no compressor nearly as little" in made.why


@pytest.mark.parametrize("link, found", [(1e7, {"half_fake", "int8_fake"}), (1e12, set())])
def test_before_anything_is_compiled_the_link_says_what_may_pay(params, link, found):
    assert set(search(params).promising(costs(link=link, codec=1.0)).codecs) == found


def test_nothing_is_tried_where_there_is_nothing_to_gain(params):
    assert not search(params[1:]).promising(costs(link=1e8, codec=1e12)).codecs


def test_far_slower_plans_are_not_tried(params, monkeypatch):
    made = plans(params, costs(link=1e7, codec=1e10))
    best = made[0].seconds
    assert all(each.seconds <= 1.1 * FAR * best for each in made if each.compresses)
    monkeypatch.setattr("hipress.choose.search.FAR", 1.05)
    made = plans(params, costs(link=1e7, codec=1e10))
    assert all("int8_fake" in each.label for each in made[:-1])
    assert not made[-1].compresses


def test_gradients_that_are_ready_last_decide(params):
    """A codec that uses the backward pass's core delays them; one beside it does not."""
    buckets = (TimedBucket((1, 2, 3), 0.0), TimedBucket((0,), 0.01))
    rates = costs(link=1e7, codec=4e7)
    slow, fast = (
        plans(params, dataclasses.replace(rates, overlap=gain), workload=Workload(buckets, 0.5))
        for gain in (0.0, 1.0)
    )
    assert fast[0].seconds < slow[0].seconds <= slow[-1].seconds


def test_payloads_are_as_long_as_they_were_measured(params):
    """A codec whose bound promises no gain, and whose measured payloads are short."""
    rates, whole = costs(link=1e7, codec=1e10), estimate(params)
    short = dataclasses.replace(whole, payloads={("half_fake", p.index): 0.01 for p in params})
    made = plan(params, rates, workload=short)
    assert {d.codec for d in made.decisions} >= {"half_fake"}
    assert made.seconds < 0.2 * plan(params, rates).seconds


def test_lossless_codecs_are_ranked_by_their_known_length(params):
    """Its bound is longer than the gradient."""
    codecs = candidates(options.make("auto"), "reference", only=["lossless"])
    assert codecs["lossless"].payload_bytes(1 << 20) > 4 << 20
    rates = costs(link=1e6, codec=1e10)
    assert list(search(params, codecs).promising(rates).codecs) == ["lossless"]
    best = plans(params, dataclasses.replace(rates, codecs=rates.codecs | {
        "lossless": CodecCost(*[Line(0.0, 1e-10)] * 3)}), codecs)[0]  # fmt: skip
    assert {each.codec for each in best.decisions} >= {"lossless"}


def test_entropy_codes_pay_where_the_link_is_slow(params):
    """They travel as packed codes do, and lengths are those that gradients showed."""
    keys = ["int4_group", "int4_group entropy=True"]
    codecs = candidates(options.make("auto"), "reference", only=keys)
    work, slow = CodecCost(*[Line(0.0, 1e-10)] * 3), CodecCost(*[Line(0.0, 1e-9)] * 3)
    lengths = {
        (key, p.index): n for key, n in zip(keys, (0.133, 0.115), strict=True) for p in params
    }
    workload = dataclasses.replace(estimate(params), payloads=lengths)
    for link, found in ((1e7, 1), (1e9, 0)):
        rates = dataclasses.replace(
            costs(link=link, codec=1.0), codecs=dict(zip(keys, (work, slow), strict=True))
        )
        best = plan(params, rates, codecs, workload=workload)
        assert best.decisions[0].codec == keys[found]
        assert best.decisions[0].strategy in ("ps", "ring")


def test_payloads_travel_over_nccl_at_their_bound_unless_they_are_far_shorter(params):
    """Entropy codes save nothing there."""
    keys = ["int4_group", "int4_group entropy=True", "lossless"]
    wanted = options.make("auto")
    codecs = Registry(candidates(wanted, "reference", only=keys), wanted)
    lengths = {(key, 0): share for key, share in zip(keys, (0.05, 0.1, 0.5), strict=True)}
    for slots, left in ((False, {*lengths}), (True, {("lossless", 0)})):
        made = Search(params, codecs, wanted, FOUR, slots=slots)
        work = made.expecting(dataclasses.replace(estimate(params), payloads=lengths))
        assert work.payloads.keys() & lengths.keys() == left


def test_lossless_bf16_is_for_bfloat16_gradients():
    codecs = candidates(options.make("auto"), "reference", only=["lossless_bf16"])
    rates = costs(link=1e6, codec=1e10)
    rates = dataclasses.replace(rates, codecs={"lossless_bf16": CodecCost(*[Line(0.0, 1e-10)] * 3)})
    model = torch.nn.Sequential(torch.nn.Linear(900, 1000), torch.nn.Linear(1000, 900).bfloat16())
    found = search(describe(model), codecs)
    assert list(found.promising(rates).codecs) == ["lossless_bf16"]
    assert [each.codec for each in found.plans(rates)[0].decisions][::2] == [None, "lossless_bf16"]
    assert not search(describe(model[0]), codecs).promising(rates).codecs


def test_each_parameter_has_the_factors_of_its_own_shape():
    """A one-dimensional parameter stays uncompressed among others of the same size and choice."""
    shapes = [(200, 500)] * 12 + [(2, 50_000)]
    model = torch.nn.ParameterList([torch.ones(shape) for shape in shapes])
    wanted = {"optimizer": "plain-sgd", "accept_loss": 0.01}
    codecs = candidates(options.make("auto", **wanted), "reference", only=["powersgd rank=4"])
    work = {"powersgd rank=4": CodecCost(*[Line(0.0, 1e-10)] * 3)}
    rates = dataclasses.replace(costs(link=1e6, codec=1e10), codecs=work)
    best, native = plans(describe(model), rates, codecs, **wanted)
    *others, flat = best.decisions
    assert {each.codec for each in others} == {"powersgd rank=4(columns=500)"}
    assert flat.codec is None
    assert flat.why == "powersgd would not pay at this size"
    assert best.label == "powersgd rank=4 (allreduce)"
    assert best.codecs.keys() == {"powersgd rank=4(columns=500)"}
    assert best.seconds < native.seconds
    assert best.decisions[0].why.startswith("gains time, within accept_loss=0.01: loss +0.3%")


def test_the_watched_step_is_what_a_native_step_is_predicted_to_be(params):
    work = Workload((TimedBucket((0, 1, 2, 3), 0.2),), 1.0, step=1.7)
    best, *_, native = plans(params, costs(link=1e7, codec=1e10), workload=work)
    assert native.seconds == 1.7
    assert 1.0 < best.seconds < 1.7


def test_all_but_the_last_bucket_hides_behind_the_backward_pass(params):
    """A step on a link as slow as that takes what the link does."""
    buckets = (TimedBucket((1, 2, 3), 0.0), TimedBucket((0,), 1.0))
    large, small = 2e6, 4e3 + 4e3  # elements
    for link, hidden in ((1e7, 1.0), (1e3, 2 * 4 * small / 1e3)):
        made = search(params).seconds(None, costs(link, 1.0, 0.0), Workload(buckets, 1.0))
        share = large / (large + small)
        assert made == pytest.approx(hidden + share * 2 * 4 * (large + small) / link, rel=0.01)


def random_costs(rng):
    """A profile: links of 10 MB/s to 10 GB/s that keep some cores busy, faster codecs, copies."""

    def line(fastest=-11, slowest=-9):
        return Line(rng.choice([0.0, 1e-5, 1e-3]), 10.0 ** rng.uniform(fastest, slowest))

    def transfer():
        return Transfer(line(-10, -7), rng.choice([0.0, 0.3, 1.0, 2.5]))

    return Costs(
        {int(peers): transfer() for peers in rng.integers(1, 8, 3)},
        {name: transfer() for name in ("float32", "float16")},
        {name: CodecCost(line(), line(), line()) for name in CODECS},
        transfer(), rng.choice([0.0, 0.5, 1.0]),
        Copies(line(), line(), bool(rng.integers(2))) if rng.integers(2) else None,
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_no_prediction_is_below_a_step_without_communication(seed):
    """Random profiles, models and steps; the native step is not below its time on the link."""
    rng = np.random.default_rng(seed)
    rates, step = random_costs(rng), 10.0 ** rng.uniform(-2, 1)
    sizes = 10 ** rng.uniform(2, 6.5, rng.integers(1, 30))
    some = [Param(f"p{i}", i, int(n), (int(n),), torch.float32, False) for i, n in enumerate(sizes)]
    topology = Topology.even(*[(2, 1), (4, 1), (6, 3)][seed % 3])
    made = plans(some, rates, topology=topology, workload=worked(some, step))
    link = 4 * sum(p.numel for p in some) * rates.reduce["float32"].line.per_byte
    assert min(each.seconds for each in made) >= step * (1 - 1e-9)
    assert made[-1].seconds >= link * (1 - 1e-9)


def worked(params, seconds):
    """A step without communication; gradients take times in proportion to their elements."""
    alone = by_elements("a model", params).timed(Speed(1e12, 1e12)).scaled(seconds)
    return timed([*reversed(params)], alone.ready, alone.forward)


def test_many_buckets_are_as_one_after_the_other():
    model = torch.nn.ModuleList(torch.nn.Linear(1000, 1000) for _ in range(70))
    params = describe(model)
    work = worked(params, 3.0)
    assert len(work.buckets) > 8
    assert [i for each in work.buckets for i in each.indices] == [*reversed(range(len(params)))]
    assert work.buckets[0].ready == 0.0
    assert work.buckets[-1].ready == pytest.approx(work.backward) == pytest.approx(2.0, rel=0.05)
    assert work.backward + work.rest == pytest.approx(3.0)
    made = plans(params, costs(link=1e9, codec=1e10), workload=work)
    assert made[-1].seconds == pytest.approx(3.0, rel=0.2)


def test_tensors_that_a_codec_would_slow_down_stay_as_they_are(params):
    """A chunk of a small tensor pays the latency of many messages."""

    class Choosy(Int8):
        def suits(self, numel):
            return numel == params[0].numel

    made = plan(params, costs(link=1e8, codec=1e12), codecs={"int8_fake": Choosy()})
    assert [d.codec for d in made.decisions] == ["int8_fake", None, None, None]
    assert {d.why for d in made.decisions[1:]} == {"int8_fake would not pay at this size"}


def test_one_quantization_where_it_costs_as_little_as_two(params):
    """An exchange of all payloads moves N-1 times a payload, the way through owners less than
    twice; but owners encode once more."""
    rates = costs(link=1e7, codec=1e10)
    for ranks, strategy in ((2, "exchange"), (16, "ps")):
        codecs, topology = {"int8_fake": Int8()}, Topology.flat(ranks)
        made = plan(params, rates, codecs=codecs, topology=topology)
        assert made.decisions[0].strategy == strategy
        asked = plan(params, rates, codecs=codecs, topology=topology, strategy="ps")
        assert made.seconds <= 1.1 * asked.seconds


def test_nodes_whose_ranks_share_a_link_are_tried_as_such(params):
    """Only 1/4 of the bytes of flat strategies crosses between the nodes."""
    rates = dataclasses.replace(costs(link=1e7, codec=1e10), inside=Transfer(Line(1e-5, 1e-10)))
    nodes = Topology.of([range(4), range(4, 8)])
    first, *others = plans(params, rates, codecs={"int8_fake": Int8()}, topology=nodes)
    assert first.decisions[0].strategy == "hierarchical"
    assert not any("ring" in each.label for each in others)  # of a codec with feedback
    flat = plans(params, rates, codecs={"int8_fake": Int8()}, topology=Topology.flat(8))
    assert not any("hierarchical" in each.label for each in flat)


def test_a_biased_codec_goes_around_no_long_ring(params):
    """Its errors add up: bf16 of values near 100 errs by 0.5% on 16 ranks."""
    rates = costs(link=1e7, codec=1e10)
    names = {"a": "int8_dettmers", "b": "lossless"}
    rounds = {key: compll.compile(name, "reference") for key, name in names.items()}
    rates = dataclasses.replace(rates, codecs=dict.fromkeys(rounds, rates.codecs["int8_fake"]))
    for ranks, keys in ((4, {"a", "b"}), (8, {"b"}), (16, {"b"})):
        made = search(params, rounds, Topology.flat(ranks))
        assert {each.codec for each in made._ways() if each.strategy == "ring"} == keys
        assert {each.codec for each in made._ways() if each.strategy == "ps"} == {"a", "b"}
    asked = plans(params, rates, {"a": rounds["a"]}, Topology.flat(16), strategy="ring")
    assert not any(each.compresses for each in asked)


def test_a_biased_codec_that_is_to_go_around_a_long_ring_is_a_warning(params, caplog):
    made = options.make("int8_dettmers", strategy="ring")
    codec = compll.compile("int8_dettmers", "reference")
    for ranks, many in ((4, 0), (8, 1)):
        session._tell_swamped(fixed_plan(params, codec, made, Topology.flat(ranks)), ranks)
        assert len(caplog.messages) == many
    assert "int8_dettmers by ring rounds growing sums at each of 8 ranks" in caplog.messages[0]


def test_a_strategy_without_a_formula_needs_a_compressor_that_is_named():
    with pytest.raises(ConfigError, match="cannot predict strategy 'vote'"):
        candidates(options.make("auto", strategy="vote"))


def test_float32_is_reduced_as_fast_as_16_bit_numbers():
    points = [(4096.0, 2.0), (1e6, 9.0)], [(4096.0, 1.0), (1e6, 5.0), (4e6, 17.0)]
    slow, fast = (probe._Curve(each, 0.5) for each in points)
    found = probe._fit_reduces({"bfloat16": fast, "float32": slow}, share=2.0)
    assert found["float32"] == found["bfloat16"] == Transfer(fit(points[1]), 1.0)
    other = probe._fit_reduces({"bfloat16": slow, "float32": fast}, share=1.0)
    assert other["bfloat16"].line == fit(points[0])


def test_exclusion_and_types(params):
    made = plan(params, costs(link=1e7, codec=1e10), exclude="0.weight")
    assert made.decisions[0].why == "excluded by '0.weight'"
    double = [dataclasses.replace(p, dtype=torch.float64) for p in params]
    assert not plan(double, costs(link=1e7, codec=1e10)).compresses


@pytest.mark.parametrize("name", ["threshold", "adaptive_threshold", "adacomp", "inceptionn"])
def test_a_payload_that_is_rarely_long_is_taken(name):
    params = describe(torch.nn.Linear(300, 300))
    made = fixed_plan(params, compll.compile(name), options.make(name), TWO)
    assert [d.codec for d in made.decisions if d.name.endswith("weight")] == [name]


def test_more_ranks_than_a_byte_holds_codes_of_are_refused(params):
    codec = compll.compile("thc", bits=4)
    assert fixed_plan(params, codec, options.make("thc"), Topology.flat(17)).compresses
    with pytest.raises(ConfigError, match=r"codec 'thc': 18 ranks .* at most 17 ranks, or fewer"):
        fixed_plan(params, codec, options.make("thc"), Topology.flat(18))


def test_fixed_plans():
    params = describe(Net())
    sizes = {p.name: p.numel for p in params}
    everything = fixed_plan(params, Int8(), options.make(Int8()), TWO)
    assert all(d.codec == "int8_fake" for d in everything.decisions)
    large = fixed_plan(params, Sparse(), options.make(Sparse()), TWO)
    assert {d.name for d in large.decisions if d.codec} == {"second.weight"}
    chosen = fixed_plan(params, Sparse(), options.make(Sparse(), min_size=900), TWO)
    assert {d.name for d in chosen.decisions if d.codec} == {
        name for name, size in sizes.items() if size >= 900
    }
    with pytest.raises(ConfigError, match=r"'lost\.\*' matches no parameter of scale"):
        check_patterns(params, options.make(Int8(), exclude="lost.*"))


def test_parameters_without_elements_are_left_alone():
    params = describe(torch.nn.ParameterList([torch.ones(0), torch.ones(0, 5), torch.ones(2000)]))
    fixed = fixed_plan(params, Int8(), options.make(Int8(), min_size=0), TWO)
    auto = plan(params, costs(link=1e5, codec=1e10))
    for made in (fixed, auto):
        assert [d.codec for d in made.decisions] == [None, None, "int8_fake"]
        assert [d.why for d in made.decisions][:2] == ["no elements"] * 2


class Wide(Sparse):
    def payload_bytes(self, n):
        return 5 * n + 9


def test_a_bound_that_data_decide_is_no_reason_to_leave_a_tensor_alone():
    params = describe(Net())
    codec = Wide()
    made = fixed_plan(params, codec, options.make(codec, min_size=100), TWO)
    sizes = {p.name: p.numel for p in params}
    assert {d.name for d in made.decisions if d.codec} == {
        name for name, size in sizes.items() if size >= 100
    }


@pytest.mark.parametrize("name", compll.list_specs())
def test_every_spec_compresses_what_it_is_asked_to(name):
    codec = compll.compile(name, "reference")
    (param,) = describe(torch.nn.Linear(1 << 9, 1 << 8, bias=False))
    decision = fixed_plan([param], codec, options.make(codec), TWO).decisions[0]
    assert str(decision.codec).partition("(")[0] == name, decision.why


def test_partitions_follow_size_and_codec():
    assert partitions(100, Int8(), "ps", 2) == 1
    assert partitions(8 << 20, Int8(), "ps", 2) == 4
    assert partitions(8 << 20, Halves(), "allreduce", 2) == 8
    assert partitions(8 << 20, Sparse(), "exchange", 2) == 1


def test_fit_is_exact_on_a_line_and_never_negative():
    line = fit([(x, 1e-4 + 2e-9 * x) for x in (4e3, 1e6, 4e6)])
    assert line.latency == pytest.approx(1e-4, rel=1e-6)
    assert line.per_byte == pytest.approx(2e-9, rel=1e-6)
    falling = fit([(1.0, 2.0), (2.0, 1.0)])
    assert falling.per_byte == 0
    assert falling.latency > 0


def test_report_without_a_step(params):
    made = plan(params, costs(link=1e10, codec=1e9))
    why = describe_plan(made, params)
    report = Report(0, 4, False, why, {}, made.decisions, None, None)
    assert report.bytes_sent == 0
    assert report.bytes_per_step == 1.5 * 4 * sum(p.numel for p in params)
    assert "the native all-reduce remains" in str(report)
    assert report.to_dict()["decisions"][0]["codec"] is None


def test_a_report_tells_what_lengths_that_are_known_beforehand_cost():
    counters = Counters(2, bytes_sent=4_000_000, bytes_unused={"wangni": 3e6, "threshold": 250_000})
    measured = measure_of(Traffic(steps=2), counters, 2)
    assert measured.unused_bytes == {"threshold": 125_000, "wangni": 1.5e6}
    text = str(Report(0, 2, True, "", {}, (), measured, None, {"threshold": True}))
    assert re.search(r"threshold .* by the last step; the rest waits .* 0\.125", text)
    assert re.search(r"wangni .* for the largest payload .* 1\.5", text)


def test_a_report_groups_parameters_of_one_codec_and_reason():
    model = torch.nn.ModuleList(torch.nn.Linear(300, 400) for _ in range(50))
    params = describe(model)
    wanted = options.make(Int8(), exclude=["[0-4].*"], min_size=1000)
    made = fixed_plan(params, Int8(), wanted, TWO)
    report = Report(0, 2, True, describe_plan(made, params), {}, made.decisions, None, None)
    rows = [re.split(" {2,}", row) for row in str(report).partition("----")[2].splitlines()[1:]]
    assert rows == [
        ["int8_fake", "ps", "asked for", "5.weight", "45", f"{45 * 120000:,}"],
        ["-", "allreduce", "excluded by '[0-4].*'", "0.weight", "10", f"{5 * 120400:,}"],
        ["-", "allreduce", "fewer than 1000 elements", "5.bias", "45", f"{45 * 400:,}"],
    ]


def test_a_model_without_eligible_tensors_is_told_why():
    model = torch.nn.ParameterList([torch.ones(2000, dtype=torch.complex64), torch.ones(3)])
    made = fixed_plan(describe(model), Sparse(), options.make(Sparse()), TWO)
    assert not made.compresses
    assert made.why.startswith("no tensor is eligible for 'sparse_fake': ")
    assert "type complex64 is not compressed (1)" in made.why
    assert "fewer than 1024 elements (1)" in made.why


@pytest.mark.parametrize(("strategy", "ahead"), [("ps", 1), ("ring", 1), ("exchange", 0)])
def test_codecs_are_compiled_ahead_by_strategy(params, monkeypatch, strategy, ahead):
    codec, prepared = compll.compile("int8_group", "reference"), []
    monkeypatch.setattr(codec, "prepare", lambda: prepared.append(1), raising=False)
    planner.compile_ahead(fixed_plan(params, codec, options.Options(strategy=strategy), TWO))
    assert len(prepared) == ahead


class Shared(torch.nn.Module):
    """A parameter under one name, and one under two names."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.first = torch.nn.Linear(3, 3)
        self.second = torch.nn.Linear(3, 3)
        self.second.weight = self.first.weight


@pytest.mark.parametrize(
    "ignored, names",
    [
        (["first.bias", "first.weight"], ["scale", "second.weight", "second.bias"]),
        (["scale"], ["scale", "first.weight", "first.bias", "second.bias"]),
        ([".scale", "second.weight"], ["first.weight", "first.bias", "second.bias"]),
    ],
)
def test_parameters_that_ddp_ignores_are_ignored(ignored, names):
    """DDP looks names up with a dot before those of the outermost module, and under every alias."""
    model = Shared()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    assert [param.name for param in describe(model)] == names


def test_the_shard_of_a_distributed_parameter_counts():
    model = torch.nn.Linear(8, 8, bias=False)
    model.weight.to_local = lambda: torch.zeros(4, 8)  # as a DTensor's
    assert [str(param) for param in describe(model)] == ["weight 4x8 float32"]


def test_a_report_tells_what_copies_take():
    measured = costs(1e9, 1e9)
    assert "copies" not in str(probe_table(probe.Probe(measured, 0.1)))
    copies = Copies(Line(1e-5, 1 / 12e9), Line(2e-5, 1 / 6e9), gradients=True)
    text = str(probe_table(probe.Probe(dataclasses.replace(measured, copies=copies), 0.1)))
    assert re.search(r"copies to the host +0\.01 +12\.000", text)
    assert re.search(r"copies to the GPU +0\.02 +6\.000", text)
