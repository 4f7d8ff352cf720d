"""Gossip: neighbours, graphs that complete, and copies that hold the same bits."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from casync.building.parts import Choice
from casync.building.tasks import Recv, Send
from casync.errors import PlanError
from casync.estimates import OWN, Estimate, copy_of
from casync.graph.graph import build, build_program
from casync.graph.plan import partition
from casync.strategies.gossip import LINKS, grid
from casync.topology import Topology
from tests.casync.fakes import CODECS, gradients, replay, tensors_of, world
from tests.casync.proofs.dry_run import dry_run
from tests.casync.rendezvous import Meeting
from tests.patience import HANG

SIZES = (1, 33, 5000, 70001)
TOTAL = sum(SIZES)
PAIRS = [(links, n) for links in LINKS for n in (2, 3, 4, 6, 9) if links != "torus" or n > 3]


def estimates(links, n, codec, rank):
    return {codec: Estimate(CODECS[codec], grid(links, n).neighbours(rank))}


def parts_of(links, n, codecs):
    tensors = tensors_of(SIZES)
    choices = {t.name: Choice(*codecs, f"gossip:{links}", 2) for t in tensors}
    return partition(tensors, choices, Topology.flat(n), codecs, least_bytes=4000)


@pytest.mark.parametrize("links, n", PAIRS)
def test_neighbours_are_mutual_and_as_many_everywhere(links, n):
    ranks = grid(links, n)
    found = [ranks.neighbours(rank) for rank in range(n)]
    assert len({len(each) for each in found}) == 1
    for rank, each in enumerate(found):
        assert rank not in each
        assert len(set(each)) == len(each)
        assert all(rank in found[other] for other in each)
    expected = {"ring": min(2, n - 1), "complete": n - 1, "torus": {4: 2, 6: 3, 9: 4}.get(n)}
    assert len(found[0]) == expected[links]


def test_a_single_rank_has_no_neighbours():
    assert [grid(links, 1).neighbours(0) for links in LINKS] == [[], [], []]


@pytest.mark.parametrize("n", [2, 3, 7])
def test_a_world_size_without_a_torus_is_refused(n):
    with pytest.raises(PlanError, match=f"{n} ranks make no torus.*use a ring"):
        grid("torus", n)
    with pytest.raises(PlanError, match=r"unknown links 'star'.*one of ring, torus, complete"):
        grid("star", n)


@pytest.mark.parametrize("links, n", PAIRS)
def test_graphs_get_through_with_and_without_tags(links, n):
    codecs = estimates(links, n, "sparse", 0)
    parts = parts_of(links, n, codecs)
    graph = build(parts, Topology.flat(n), codecs)
    for semantics in ("gloo", "rendezvous"):
        assert len(dry_run(graph, semantics).order) == len(graph.tasks)
    for rank in range(n):
        own, slice_ = build_program(parts, Topology.flat(n), codecs, rank), graph.slice(rank)
        assert (own.tasks, own.waits, own.unlocks) == (slice_.tasks, slice_.waits, slice_.unlocks)
    for kind in (Send, Recv):
        places = [(t.rank, t.part, t.slot) for t in graph.tasks if isinstance(t, kind)]
        assert len(set(places)) == len(places)  # in a slot one of each
        degree = len(grid(links, n).neighbours(0))
        assert len(places) == n * degree * len(parts)


def test_gradients_are_not_for_gossip():
    choices = {"t0": Choice("exact", "gossip:ring")}
    with pytest.raises(PlanError, match=r"averages parameters.*see hipress\.Gossip"):
        partition(tensors_of([5]), choices, Topology.flat(2), CODECS)


@pytest.mark.parametrize("codec", ["sign", "sparse"])
@pytest.mark.parametrize("links, n", [("ring", 3), ("torus", 4), ("complete", 2)])
def test_copies_hold_the_bits_of_estimates_and_parameters_stay(links, n, codec):
    """`sign` has feedback, which is unused here. Estimates improve step by step."""
    codecs = [estimates(links, n, codec, rank) for rank in range(n)]
    programs = [
        build_program(parts_of(links, n, own), Topology.flat(n), own, rank)
        for rank, own in enumerate(codecs)
    ]
    states = [{(codec, "worker"): own[codec].init_state(TOTAL)} for own in codecs]
    parameters = gradients(TOTAL, n, seed=1)
    buckets = [each.clone() for each in parameters]
    far = []
    with world(n, codecs=codecs[0]) as executors:
        for step in range(3):
            futures = [
                executor.submit(*each, step)
                for executor, *each in zip(executors, programs, buckets, states, strict=True)
            ]
            torch.futures.wait_all(futures)
            owns = [state[codec, "worker"][OWN] for state in states]
            pairs = zip(buckets, owns, strict=True)
            far.append(sum(np.linalg.norm(bucket.numpy() - own) for bucket, own in pairs))
    assert all(torch.equal(*pair) for pair in zip(parameters, buckets, strict=True))
    assert far == sorted(far, reverse=True)
    assert far[-1] < far[0] or codec == "sparse"  # which is exact
    for rank, state in enumerate(states):
        for other in grid(links, n).neighbours(rank):
            copy = state[codec, "worker"][copy_of(other)]
            assert copy.tobytes() == owns[other].tobytes()


def test_without_tags_the_same_is_followed():
    codecs = [estimates("ring", 2, "exact", rank) for rank in range(2)]
    ends, buckets = Meeting(2, HANG).endpoints(), gradients(TOTAL, 2, seed=2)
    states = [{("exact", "worker"): own["exact"].init_state(TOTAL)} for own in codecs]

    def run(rank):
        program = build_program(
            parts_of("ring", 2, codecs[rank]), Topology.flat(2), codecs[rank], rank
        )
        replay(program, ends[rank], codecs[rank], buckets[rank], states[rank])

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, range(2)))
    for rank in range(2):
        arrays = states[rank]["exact", "worker"]
        assert np.array_equal(arrays[OWN], buckets[rank].numpy())
        assert np.array_equal(arrays[copy_of(1 - rank)], buckets[1 - rank].numpy())
