"""From buckets to programs; no process is needed."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import compll
from casync.runtime.deferral import as_torch
from casync.topology import Topology
from hipress.choose.plan import fixed_plan
from hipress.engine.buckets import BucketPlans
from hipress.model.params import describe
from hipress.options import Options
from tests.hipress.fakes import Int8


@pytest.fixture(params=["tensor", "bucket"])
def plans(request):
    codec, wanted = Int8(), Options("auto", scope=request.param, min_size=0)
    params = describe(torch.nn.Sequential(*(torch.nn.Linear(20, 30) for _ in range(2))))
    return BucketPlans(params, fixed_plan(params, codec, wanted, Topology.flat(2)), wanted, 0)


def test_a_bucket_is_compiled_once(plans):
    first, second = plans.plan_for((3, 2)), plans.plan_for((1, 0))
    assert plans.plan_for((3, 2)) is first
    assert plans.plan_for((1, 0)) is second


def test_programs_of_former_buckets_are_dropped(plans):
    programs = [weakref.ref(plans.plan_for(bucket).program) for bucket in [(3,), (2, 1), (0,)]]
    plans.plan_for((3, 2))  # as if DDP had made new buckets
    gc.collect()
    assert [program() is None for program in programs] == [True, True, False]
    plans.plan_for((1, 0))
    gc.collect()
    assert programs[2]() is None


def test_uncompressed_buckets_of_one_length_have_programs_of_their_own(plans):
    """A captured program is launched where it was captured: one bucket's averages were copied over
    another's."""
    programs = []
    for bucket in [(3,), (1,)]:
        plans.plan_for(bucket)
        programs.append(plans.raw(bucket).program)
        assert plans.raw(bucket).program is programs[-1]
    assert programs[0] is not programs[1]
    left = [*map(weakref.ref, programs)]
    del programs
    plans.plan_for((3, 2))  # as if DDP had made new buckets
    gc.collect()
    assert [program() is None for program in left] == [True, False]


def test_a_residual_counts_once_however_often_its_tensor_is_encoded():
    """An owner's is a share of the mean."""
    params = describe(torch.nn.Linear(200, 300, bias=False))
    wanted = Options("auto", strategy="ps", min_size=0)
    plan = fixed_plan(params, Int8(), wanted, Topology.flat(2))
    residuals = BucketPlans(params, plan, wanted, 0).residuals
    pieces = residuals.arrays(0)
    pieces["worker"]["residual"][:] = 1
    pieces["aggregator"]["residual"][:30000] = 0.5
    assert residuals.undelivered(0).tolist() == [2.0] * 30000 + [1.0] * 30000


@pytest.mark.parametrize("strategy", ["ps", "ring", "hierarchical"])
def test_an_aggregator_keeps_state_of_its_own_elements_alone(strategy):
    """Every rank had an arena for all elements, which takes as much memory on a GPU."""
    sizes = (400, 300), (300, 70), (70, 900)
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in sizes))
    params, topology = describe(model), Topology(((0, 1), (2, 3)))
    wanted = Options("auto", strategy=strategy, min_size=0)
    plan = fixed_plan(params, Int8(), wanted, topology)
    times = [torch.zeros(param.numel) for param in params]
    for rank in range(4):
        plans = BucketPlans(params, plan, wanted, rank)
        made = [plans.plan_for(bucket) for bucket in [(5, 4, 3), (2, 1, 0)]]
        (state,) = (each for (_, side), each in made[0].states.items() if side == "aggregator")
        kept = state["residual"]
        for index, count in enumerate(times):
            plans.residuals.arrays(index)["aggregator"]["residual"][:] = 1
            count += plans.residuals.whole(index)["aggregator"]["residual"]
        assert kept.all()
        assert kept.size < 0.5 * sum(map(len, times))
        rows = [
            range(first, first + row[1])
            for one in made
            for part in one.program.parts
            for row, first in zip(part.rows, part.owned, strict=False)
        ]
        assert sorted(place for row in rows for place in row) == [*range(kept.size)]
    assert all(bool((count == 1).all()) for count in times)


@pytest.mark.parametrize("kinds", [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_residual_of_another_type_is_owed_and_not_read_as_if_it_were_alike(kinds):
    params = describe(torch.nn.Linear(200, 300, bias=False))
    wanted = Options("auto", min_size=0)
    codecs = [compll.compile("topk", "reference", residual=kind) for kind in kinds]
    before, after = (
        BucketPlans(params, fixed_plan(params, codec, wanted, Topology.flat(2)), wanted, 0)
        for codec in codecs
    )
    before.plan_for((0,))
    as_torch(before.residuals.arrays(0)["worker"]["residual"]).fill_(0.5)
    assert after.adopt(before) == set()
    assert before.residuals.undelivered(0).sum() == 0.5 * 60000
    assert not after.residuals.arrays(0)["worker"]["residual"].any()
