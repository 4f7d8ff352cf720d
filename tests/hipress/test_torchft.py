"""Sites that torchft finds, or a double of it."""

import importlib.util

import pytest
import torch

import hipress
from tests.hipress import torchft_ranks as ranks
from tests.hipress.common import make
from tests.hipress.launch import DIED, launch
from tests.hipress.test_members import agreeing

needed = pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="needs torchft")


@pytest.mark.parametrize("nightly, refusing", [(False, [0, 1]), (True, [0, 1]), (False, [1])])
def test_quorums_of_both_kinds(nightly, refusing):
    """A round that one manager alone refuses was once committed at the other site, and the work of
    this one counted twice."""
    (first, undone), (second, again) = launch(ranks.faked, 2, nightly, refusing)
    assert agreeing(first, second)
    assert first.keys() == {*range(5)}
    assert undone == again == 1


def test_a_site_that_leaves_hands_over_what_it_has_not_delivered():
    for nightly in (False, True):
        (taken, rounds), (debts, last) = launch(ranks.leaves, 2, nightly)
        assert taken == debts
        assert any(map(any, debts))
        assert rounds == last == 4


def test_a_site_that_ends_leaves_no_other_in_doubt_on_the_last_round():
    """The other once undid it, since the store by which they decide had ended with the first."""
    first, second = launch(ranks.ends_first, 2)
    assert first == second


def test_a_round_that_one_site_knows_went_well_is_undone_by_none():
    """Its store ends with its keeper. A site that then undid the round delivered its part twice."""
    dead, first, second = launch(ranks.keeper_dies, 3, may_die=[0])
    assert dead == DIED
    assert (first, second) == (True, True)


def test_a_round_that_no_living_site_knows_to_have_gone_well_is_undone_by_all():
    """Its store ends with its keeper, the only site that did not have the average."""
    dead, first, second = launch(ranks.keeper_dies_untold, 3, may_die=[0])
    assert dead == DIED
    assert (first, second) == (False, False)


@pytest.mark.slow
def test_a_site_that_cannot_learn_how_a_round_ended_ends():
    """It once undid the round, which the others then committed: its part counted twice."""
    first, error, third = launch(ranks.keeper_stops, 3)
    assert (first, third) == (True, True)
    assert error.kind == "AgreementTimeout"
    assert "neither the quorum's store nor site 0, 2 answers" in error.message
    assert "start it again, and it gets the agreed weights" in error.message


def test_another_version_is_refused():
    with pytest.raises(hipress.ConfigError, match="object lacks start_quorum"):
        hipress.TorchftMembers(object())


def test_no_quorum_is_named():
    class Alone(ranks.FakeManager):
        def __init__(self):
            self._pg = None

        def start_quorum(self):
            raise TimeoutError("deadline")

    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with pytest.raises(hipress.HipressError, match=r"no quorum: deadline\. Is the lighthouse"):
        hipress.Outer(model, optimizer, members=hipress.TorchftMembers(Alone()))


@pytest.fixture
def lighthouse():
    from torchft.coordination import LighthouseServer

    made = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000)
    yield made.address()
    made.shutdown()


@needed
def test_sites_of_torchft_come_and_die(lighthouse):
    first, dead, third = launch(ranks.real, 3, lighthouse, may_die=[1])
    assert dead == DIED
    assert agreeing(first[0], third[0])
    assert 3 in first[1]
    assert first[1][-1] == third[1][-1] == 2


@needed
def test_a_site_with_another_model_is_refused_and_the_others_go_on(lighthouse):
    (first, sites, undone), (second, _, again), error = launch(ranks.real, 3, lighthouse, True)
    assert error.kind == "ConfigMismatch"
    assert "ranks disagree on" in error.message
    assert agreeing(first, second)
    assert undone == again >= 1
    assert sites[-1] == 2


@needed
def test_a_lighthouse_that_does_not_answer_is_named():
    (error,) = launch(ranks.lost_lighthouse, 1)
    assert error.kind == "HipressError"
    assert "torchft found no quorum" in error.message
    assert "Is the lighthouse (TORCHFT_LIGHTHOUSE) there?" in error.message
