"""Nodes of ranks, and a codec for each direction, end to end."""

from __future__ import annotations

import pytest
import torch

from casync.topology import Topology
from hipress.choose.plan import fixed_plan
from hipress.engine.residuals import Residuals
from hipress.errors import ConfigError
from hipress.model.params import describe
from hipress.options import Options
from hipress.ranks.nodes import topology_of
from tests.hipress import strategy_ranks
from tests.hipress.fakes import Int8
from tests.hipress.launch import launch
from tests.tiers import first_fast

FAST = [
    ("int4_group", {"strategy": "hierarchical", "topology": 2}),
    ("topk", {"ratio": 0.1, "strategy": "hierarchical", "topology": 2, "down": "int4_group"}),
    ("dgc", {"ratio": 0.1, "momentum": 0.0, "down": "onebit_group"}),  # encodes once, owners again
    ("none", {"strategy": "hierarchical", "topology": 2, "down": "none"}),
    ("topk", {"ratio": 0.1, "strategy": "gtopk"}),
]
OTHERS = [
    ("onebit_group", {"strategy": "hierarchical", "topology": [[0, 3], [1, 2]]}),
    ("int4_group", {"strategy": "hierarchical"}),  # all on one host: one node
    ("topk", {"ratio": 0.1, "down": "int4_group"}),
    ("none", {"down": "int4_group"}),
    ("terngrad", {"down": "none"}),
]


@pytest.mark.slow
@pytest.mark.parametrize("cases", first_fast([FAST, OTHERS]))
def test_nodes_and_directions_train(cases):
    results = launch(strategy_ranks.real, 4, cases)
    for number, (name, options) in enumerate(cases):
        trained = results[0][number]
        assert all(r[number].digest == trained.digest for r in results), (name, options)
        assert trained.losses[-1] < trained.losses[0], (name, options)
        lossless = name == "none" and options.get("down") == "none"
        assert trained.difference <= (1e-5 if lossless else 1.0), (name, options)
        assert 0.7 < trained.delivered < 1.3, (name, options, trained.delivered)


def test_bad_options_raise_on_every_rank():
    launch(strategy_ranks.refused, 2)


def places(*pairs):
    return [{"host": host, "local": local} for host, local in pairs]


@pytest.mark.parametrize(
    "found, nodes",
    [
        (places(("a", "2"), ("a", "2"), ("a", "2"), ("a", "2")), [[0, 1], [2, 3]]),
        (places(("a", None), ("b", None), ("a", None), ("b", None)), [[0, 2], [1, 3]]),
        (places(("a", "3"), ("a", "3"), ("a", "3"), ("b", "1")), [[0, 1, 2], [3]]),
        (places(("a", "x"), ("a", "x"), ("b", "x"), ("b", "x")), [[0, 1], [2, 3]]),
    ],
)
def test_nodes_are_found(found, nodes):
    """Nodes by torchrun's variables if all ranks have the same, otherwise by host names."""
    assert topology_of(None, found, range(4)) == Topology.of(nodes)


def test_a_group_within_the_job_has_nodes_of_its_own_ranks():
    """Global ranks 1, 2 and 3 of two nodes of two."""
    found = places(("a", "2"), ("b", "2"), ("b", "2"))
    assert topology_of(None, found, [1, 2, 3]) == Topology.of([[0], [1, 2]])


@pytest.mark.parametrize("asked", [3, ((0, 1),), ((0, 1), (1, 2, 3)), ((0, 1, 2, 3, 4),)])
def test_nodes_that_do_not_fit_are_refused(asked):
    with pytest.raises(ConfigError, match="topology"):
        topology_of(asked, places(*[("a", None)] * 4), range(4))


def test_a_state_tells_of_its_nodes():
    """Residuals are at leaders, so other nodes have them elsewhere."""
    params = describe(torch.nn.Linear(20, 30))
    wanted = Options("int8", strategy="hierarchical", min_size=0)
    schemes = {
        Residuals(params, fixed_plan(params, Int8(), wanted, Topology.of(nodes))).state_scheme(0)
        for nodes in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])
    }
    assert schemes == {
        "hierarchical over 2 nodes of 2", "hierarchical over nodes [0, 2], [1, 3]"
    }  # fmt: skip
