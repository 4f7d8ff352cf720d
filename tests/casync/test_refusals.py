"""A refusal of a strategy names strategies that work."""

import itertools
import re

import pytest

from casync.strategies import list_strategies, load
from tests.casync.fakes import Fake


def kinds():
    """No codec, and a codec of every kind."""
    yield None
    for additive, fixed, vote, again, rounds in itertools.product(
        (None, "float16"), (True, False), (True, False), (True, False), ((), ("a round",))
    ):
        codec = Fake()
        codec.additive, codec.fixed, codec.vote = additive, fixed, vote
        codec.reencodes, codec.rounds = again, rounds
        yield codec


@pytest.mark.parametrize("strategy", list_strategies())
def test_what_a_refusal_suggests_is_accepted(strategy):
    refused = 0
    for codec in kinds():
        told = load(strategy).refuses(codec)
        if told is None:
            continue
        refused += 1
        suggested = re.findall(r"'(\w+)'", told[told.index("use strategy") :])
        assert suggested
        for other in suggested:
            assert load(other).refuses(codec) is None, (told, vars(codec))
    assert refused


def test_every_codec_is_carried():
    for codec in kinds():
        assert any(load(name).refuses(codec) is None for name in list_strategies())
