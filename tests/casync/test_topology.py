"""Nodes of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casync.errors import PlanError
from casync.topology import Topology

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=6)


@given(sizes, st.randoms())
def test_turns_are_even_over_nodes(counts, random):
    ranks = list(range(sum(counts)))
    random.shuffle(ranks)
    starts = [sum(counts[:i]) for i in range(len(counts))]
    nodes = [ranks[at : at + n] for at, n in zip(starts, counts, strict=True)]
    topology = Topology.of(nodes)
    assert sorted(map(set, nodes), key=min) == [set(node) for node in topology.nodes]
    assert [rank in topology.nodes[n] for rank, n in enumerate(topology.node_of)] == [True] * len(
        ranks
    )
    turns = topology.turns("nodes")
    assert set(turns) == set(ranks)
    shares = [sum(topology.node_of[rank] == n for rank in turns) for n in range(len(nodes))]
    assert shares == [topology.largest] * len(nodes)
    assert list(topology.turns("ranks")) == sorted(ranks)
    assert not topology.turns("")


def test_texts_are_short_and_tell_topologies_apart():
    assert str(Topology.flat(3)) == "3 nodes of 1"
    assert str(Topology.even(1024, 8)) == "128 nodes of 8"
    assert str(Topology.even(3, 2)) == "2 nodes of 2"
    assert str(Topology.of([[2], [0, 1]])) == "2 nodes of 2"
    assert str(Topology.of([[0, 2], [1]])) == "nodes [0, 2], [1]"


@pytest.mark.parametrize("nodes", [(), ((),), ((0,), ()), ((0, 0),), ((1,),), ((0, 2),)])
def test_ranks_are_all_there_and_each_once(nodes):
    with pytest.raises(PlanError, match="each rank once"):
        Topology(nodes)


def test_a_world_has_ranks():
    with pytest.raises(PlanError, match="world size 0"):
        Topology.flat(0)
