"""The outer loop: rounds of sites that train alone."""

import pytest
import torch

import compll
import hipress
from hipress import ConfigError
from tests.hipress import outer_ranks as ranks
from tests.hipress.common import make
from tests.hipress.launch import launch
from tests.tiers import first_fast

ELEMENTS = sum(parameter.numel() for parameter in make().parameters())


def test_a_round_in_every_step_averages_gradients():
    assert max(launch(ranks.every_step, 2)) < 1e-6


@pytest.mark.parametrize(
    "name", first_fast(["onebit_group", "int4_group", "topk", "onebit", "dgc"])
)
def test_sites_agree_bit_for_bit(name):
    for options in ({}, {"fragments": 2}, {"clip": "median", "keep": "bfloat16"}):
        (first, weights, rounds, apart), *others = launch(ranks.trained, 3, name, options)
        assert rounds == 3 * options.get("fragments", 1)
        assert apart > 0.01
        for found, theirs, _, _ in others:
            assert found == first
            assert theirs == weights or "fragments" in options


@pytest.mark.parametrize("mix", [None, 0.5])
def test_averages_are_used_after_the_delay(mix):
    for wrong, apart in launch(ranks.streamed, 2, mix):
        assert wrong < 1e-6
        assert apart > 1e-3


@pytest.mark.parametrize("name", first_fast(["onebit_group", "int4_group", "dgc"]))
def test_a_portable_state_goes_on_at_another_number_of_sites(name):
    portable = launch(ranks.saved, 2, name, {"fragments": 2})[0]
    for difference, most, rounds in launch(ranks.moved, 3, portable):
        assert difference < 1e-6 * most
        assert most > 0
        assert rounds == portable["counter"]


@pytest.mark.parametrize("name", first_fast(["topk", "onebit_group", "sparseloco", "int4_group"]))
def test_a_portable_state_is_all_that_a_site_that_has_trained_on_owes(name):
    for options in ({}, {"fragments": 2}):
        for back, new in launch(ranks.rolled_back, 2, name, options):
            assert back == new


@pytest.mark.parametrize("name", first_fast(["onebit_group", "topk", "sparseloco", "dgc", "ef21"]))
def test_a_refused_round_is_undone_bit_for_bit(name):
    for kept, changed, undone, rounds in launch(ranks.refused, 2, name):
        assert kept
        assert changed == [True]
        assert undone == (1, 1)
        assert rounds == 2


@pytest.mark.slow
def test_every_codec_with_feedback_is_undone_bit_for_bit():
    codecs = {name: compll.compile(name, "reference") for name in compll.list_specs()}
    names = [name for name, codec in codecs.items() if codec.states]
    assert len(names) > 20
    for found in launch(ranks.undone, 2, names):
        for name, (kept, changed, undone, rounds) in found.items():
            assert kept, name
            assert changed == [True], name
            assert (undone, rounds) == ((1, 1), 2), name


def test_mistakes_are_named():
    launch(ranks.errors, 2)


def test_a_ddp_that_is_put_around_the_model_later_is_refused():
    for error in launch(ranks.wrapped_later, 2):
        assert error.kind == "ConfigError"
        assert "a DistributedDataParallel averages this model's gradients" in error.message


def test_a_site_that_has_diverged_does_not_spread_it():
    (other, first), (own, second) = launch(ranks.diverges, 2)
    assert own.kind == "SyncError"
    assert "'scale' has an infinity or NaN: training at this site" in own.message
    assert other.kind == "RankLost"
    assert own.message in other.message
    for values in (*first, *second):
        assert values.isfinite().all()


def test_states_of_other_rounds_are_refused():
    """Rounds once ended for good without a word: steps began to count beyond the next one."""
    for found, unknown in launch(ranks.wrong_states, 2):
        for error in found:
            assert error.kind == "StateError"
            assert "rounds with every=4, fragments=1, delay=2, mix=None, not ev" in error.message
        for error in unknown:
            assert error.kind == "StateError"
            assert "not a state of hipress.state_dict" in error.message


def test_what_hipress_does_not_synchronize_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"expected a DistributedData.*wrap\(model\) makes one"):
        hipress.Stateful(make())  # it once failed only as it was saved
    (found,) = launch(ranks.distance_of_no_module, 1)
    assert found.kind == "ConfigError"
    assert "the model must be a torch.nn.Module, got <hipress.ways.outer" in found.message


def test_a_checkpoint_amid_a_round_says_so_at_other_sites(tmp_path):
    path = str(tmp_path / "checkpoint")
    launch(ranks.amid_by_dcp, 2, path, False)
    (found,) = launch(ranks.amid_by_dcp, 1, path, True)
    assert found.kind == "StateError"
    assert "while a round of the outer loop was under way: it goes on only at 2" in found.message


def test_the_report_tells_the_memory():
    for name, wide, states in (("onebit_group", 4, 2), ("int4_group", 2, 0)):
        options = {"keep": "bfloat16"} if wide == 2 else {}
        for during, after, text in launch(ranks.memory, 2, name, options):
            size = 4 * ELEMENTS
            assert after == during | {"round": 0}
            assert after["agreed"] == wide * ELEMENTS
            assert after["momentum"] == size
            assert after["states"] == states * size  # of workers, and as long a one of owners
            assert after["undelivered"] == 0
            assert during["round"] == 2 * size
            assert "1 rounds, 0 undone" in text


@pytest.mark.slow
def test_a_checkpoint_goes_on_at_another_number_of_sites(tmp_path):
    path = str(tmp_path / "checkpoint")
    saved = launch(ranks.moved_by_dcp, 2, path, False)[0][0]
    for sites in (1, 3):
        found = launch(ranks.moved_by_dcp, sites, path, True)
        assert len({digest for _, digest in found}) == 1
        for state, _ in found:
            assert state["counter"] == saved["counter"] > 0
            for name in ("agreed", "momentum"):
                assert str(state["more"][name]) == str(saved["more"][name])
            for name, values in saved["undelivered"].items():
                assert values.any()
                assert torch.allclose(state["undelivered"][name], values, atol=1e-6)


def test_loops_of_torch_go_on_as_they_are():
    (first, scale), (second, lower) = launch(ranks.scaled, 2)
    assert first == second
    assert lower < scale


def test_sites_of_shards():
    found = launch(ranks.sharded, 4)
    for one, two in ((0, 2), (1, 3)):
        assert found[one][0] == found[two][0]
    assert found[0][0] != found[1][0]
    assert all(rounds == 2 and apart > 1e-3 for _, rounds, apart in found)


def test_sites_of_several_ranks():
    """A step within a site, and all ranks alike after a round."""
    first, second, third, fourth = launch(ranks.within_sites, 4)
    assert first == second
    assert third == fourth
    assert [a == b for a, b in zip(first, third, strict=True)] == [False, True, False, True, False]


@pytest.mark.parametrize("name, strategy", first_fast([("topk", "gtopk"), ("int4_group", "ring")]))
def test_threads_of_a_site_are_those_of_its_strategy(name, strategy):
    """A site watches its neighbours: two on a ring; those 1, 2, 4, ... away in trees, of which each
    tensor has its own."""
    found = launch(ranks.by_strategy, 6, name, strategy)
    away = {"ring": (1, 5), "gtopk": (1, 2, 4, 5)}[strategy]
    for rank, (weights, peers) in enumerate(found):
        assert weights == found[0][0]
        assert peers == sorted((rank + step) % 6 for step in away)


@pytest.mark.gpu
def test_agreed_weights_of_a_model_on_a_gpu_are_pinned():
    (first, pinned, far), (second, also, apart) = launch(ranks.on_a_gpu, 2)
    assert first == second
    assert pinned
    assert also
    assert max(far, apart) < 0.1  # own steps since
