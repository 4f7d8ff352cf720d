"""A refusal of a strategy names strategies that work."""

import itertools
import re

import pytest

from casync.strategies import list_strategies, load, refuses
from tests.casync.fakes import Fake


def kinds():
    """A codec of every kind."""
    for additive, fixed, vote, again, rounds in itertools.product(
        (None, "float16"), (True, False), (True, False), (True, False), ((), ("a round",))
    ):
        codec = Fake()
        codec.additive, codec.fixed, codec.vote = additive, fixed, vote
        codec.reencodes, codec.rounds = again, rounds
        yield codec


@pytest.mark.parametrize("strategy", list_strategies())
def test_owners_with_another_codec_need_a_strategy_of_two_directions(strategy):
    """A codec that cannot encode twice is allowed if the owners have one that can."""
    up, down = Fake(), Fake()
    up.reencodes = False
    told = refuses(strategy, up, down)
    if load(strategy).TWO_WAY:
        assert told is None
        assert "cannot encode twice" in refuses(strategy, down, up)
    else:
        assert "has one direction" in told
        assert "use strategy 'gtopk' or 'hierarchical' or 'ps' or 'ring'" in told


@pytest.mark.parametrize("strategy", list_strategies())
def test_suggestions_of_errors_are_accepted(strategy):
    refused = 0
    for codec in kinds():
        told = refuses(strategy, codec)
        if told is None:
            continue
        refused += 1
        suggested = re.findall(r"'(\w+)'", told[told.index("use strategy") :])
        assert suggested
        for other in suggested:
            assert refuses(other, codec) is None, (told, vars(codec))
    assert refused


def test_every_codec_is_carried():
    for codec in kinds():
        assert any(refuses(name, codec) is None for name in list_strategies())


def test_partial_sums_of_float16_are_refused():
    """They were inf where the average of gradients was far from that."""
    half, single = Fake(), Fake()
    half.additive, single.additive = "float16", "float32"
    for strategy in "ring", "gtopk", "hierarchical":
        assert "partial sums" in refuses(strategy, half)
        assert refuses(strategy, single) is None
    assert refuses("ps", half) is None
