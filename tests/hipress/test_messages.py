"""Sizes of messages by the measured link; no process is needed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from casync.cost import CodecCost, Costs, Line, Transfer
from casync.graph.shares import LEAST_BYTES, SMALL_BYTES
from casync.topology import Topology
from hipress import options
from hipress.channel.records import GRADIENTS, check_record
from hipress.choose.plan import fixed_plan, restored
from hipress.choose.search import Registry, Search, least_share
from hipress.engine.buckets import BucketPlans
from hipress.engine.residuals import Residuals
from hipress.engine.saving import export
from hipress.model.params import describe
from hipress.options import Options
from tests.hipress.fakes import Int8

CODEC = Int8()  # 1.25 bytes of payload for 4 of gradient
MANY = 1024


def costs(one: Line, all_: Line | None = None, peers: int = 3) -> Costs:
    """Costs of a fast codec, with one peer at a time and with all at once."""
    fast = CodecCost(*[Line(1e-6, 1e-12)] * 3)
    slow = Transfer(Line(1e-4, 1e-7))
    exchange = {1: Transfer(one), peers: Transfer(all_ or one)}
    return Costs(exchange, {"float32": slow}, {"int8_fake": fast})


@pytest.mark.parametrize("latency, per_byte", [(5e-5, 1e-9), (2e-5, 3e-10), (1e-4, 1e-9)])
@pytest.mark.parametrize("peers", [1, 3, 1023])
def test_a_message_of_the_least_size_takes_the_link_as_long_as_its_latency(
    latency, per_byte, peers
):
    """The line is that of an exchange with all peers at once; a message's latency is its share of
    that, plus the engine's 10 microseconds."""
    line = Line((latency - 1e-5) * peers, per_byte)
    least = least_share(Costs({peers: Transfer(line)}, {}), CODEC, peers + 1)
    payload = CODEC.payload_bytes(least // 4)
    assert 0.5 * latency < per_byte * payload <= latency
    assert least & (least - 1) == 0


def test_the_least_size_has_bounds():
    quick, slow = Line(1e-7, 1e-8), Line(1.0, 1e-9)
    assert least_share(costs(quick), CODEC, MANY) == SMALL_BYTES
    assert least_share(costs(slow), CODEC, MANY) == LEAST_BYTES
    assert least_share(costs(Line(1e-4, 0.0)), CODEC, MANY) == LEAST_BYTES


def test_latency_shared_by_all_peers_counts_once():
    """Over NCCL the launch of a group takes the same time for any number of peers."""
    line = Line(3e-4, 2e-9)
    assert least_share(costs(line, line, peers=31), CODEC, 32) == SMALL_BYTES
    assert least_share(costs(line), CODEC, 2) > SMALL_BYTES


def searched(params, link, topology, **wanted):
    given = options.make("auto", strategy="ps", optimizer="sgd", min_size=0)
    codecs = Registry({"int8_fake": CODEC}, given)
    return Search(params, codecs, given, topology, **wanted).plans(link)


@pytest.fixture
def params():
    return describe(torch.nn.Sequential(*(torch.nn.Linear(1000, 500) for _ in range(40))))


def sizes(params, plan):
    """Gradient bytes of each owner's share of a quarter of the parameters, as one bucket."""
    made = BucketPlans(params, plan, Options("auto", min_size=0), 0)
    program = made.plan_for(tuple(range(len(params) // 4))).program
    return [4 * part.elements for part in program.parts]


def test_auto_goes_by_the_link(params):
    """20 MB for 256 owners: all get a little; if a message costs much, some get more."""
    topology, found = Topology.flat(256), []
    for latency in (1e-5, 2.0):
        link = costs(Line(latency, 1e-8), peers=255)
        made, *_ = searched(params, link, topology)
        assert made.compresses
        assert made.least == least_share(link, CODEC, 256)
        found.append(sizes(params, made))
    assert len(found[0]) == 256 > 3 * len(found[1])
    assert sum(found[0]) == sum(found[1])


def test_fixed_plans_go_by_a_constant(params):
    assert fixed_plan(params, CODEC, Options("auto"), Topology.flat(4)).least == LEAST_BYTES


def test_a_plan_comes_back_from_a_state_with_its_shares(params):
    plan = fixed_plan(params, CODEC, Options("auto", min_size=0), Topology.flat(4))
    of_today = {name: way[:3] for name, way in plan.by_name.items()}
    assert plan.by_name == of_today
    measured = dataclasses.replace(plan, least=1 << 20)
    for each in (plan, measured):
        again = restored(each.by_name, params, plan.codecs, plan.topology)
        assert again.facts() == each.facts()
        check_record(export([0, 4], Residuals(params, each), 1), GRADIENTS)
    assert measured.facts() != plan.facts()


def test_owners_stay_as_a_plan_is_made_again(params):
    plan = fixed_plan(params, CODEC, Options("auto", min_size=0), Topology.flat(4))
    before = dataclasses.replace(plan, least=1 << 20)
    assert plan.owned_as(before).least == 1 << 20
    assert plan.owned_as(dataclasses.replace(before, decisions=())).least == LEAST_BYTES
    others = BucketPlans(params, before, Options("auto", min_size=0), 0)
    assert not BucketPlans(params, plan, Options("auto", min_size=0), 0).adopt(others)
