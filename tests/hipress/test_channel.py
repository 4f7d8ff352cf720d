"""Halves of an average, and memory that is bounded for tensors of any length."""

from pathlib import Path

import pytest

from hipress.channel.channel import OVERLAP
from tests.hipress import channel_ranks as ranks
from tests.hipress import toy_way
from tests.hipress.launch import launch
from tests.patience import HANG


def test_push_and_pull_with_feedback():
    """Values that one bit leaves out come later: the error of eight steps is half of one step's."""
    results = launch(ranks.halves, 2, "onebit_group")
    for errors, untouched, copies, sizes, error in results:
        for first, all_steps in errors:
            assert all_steps < 0.5 * first
        assert untouched
        assert copies == results[0][2]
        # a worker's state is that of the whole tensor, an owner's that of its row
        assert sizes == [[6000], [3000]]
        assert error.kind == "ConfigError"
        assert "'gradients': pieces of 3000 elements for a tensor of 12" in error.message


def test_many_lengths_take_bounded_memory():
    for right, kept, keys in launch(ranks.many_lengths, 2):
        assert right
        assert kept <= 6  # 1 MB of tensors of 200 kB
        assert keys[1] <= keys[0] + 2  # notes are deleted once all have read them


def test_ranks_keep_the_same_programs():
    """A rank whose tensors overlapped once dropped programs that others kept, and then waited for
    them in the store."""
    for kept, right in launch(ranks.overlapping_on_a_rank, 2):
        assert right
        assert kept == 2


@pytest.mark.slow
def test_kinds_of_a_model_are_made_once():
    """They once went if their tensors had more than 256 MB together."""
    for made in launch(ranks.large_kinds, 2):
        assert made == [2, 2, 2]


def test_tensors_of_a_kind_travel_at_the_same_time():
    for sums, programs in launch(ranks.overlapping, 2):
        assert sums == [[2.0 * i + 1] for i in range(6)]
        assert programs == OVERLAP


def test_other_tensors_are_named():
    """Ranks that average different tensors of a length once got a mixture, without a word."""
    for first, later, shapes in launch(ranks.other_tensors, 2):
        assert first.kind == shapes.kind == "ConfigMismatch"
        assert "tensor of all_reduce: rank 0: a, rank 1: b" in first.message
        assert "shape [3, 2], rank 1: shape [2, 3]" in shapes.message
        for each in later:  # of payloads, and of a native sum
            assert "bucket 'a'" in each.message
            assert "bucket 'b'" in each.message


@pytest.mark.slow
def test_each_call_of_all_reduce_has_its_own_time_out():
    """Later ones once had that of the first."""
    kind, message, seconds = launch(ranks.later_time_out, 2)[0]
    assert kind == "AgreementTimeout"
    assert "peer 1" in message
    assert seconds < HANG / 4


def test_codecs_share_connections():
    assert launch(ranks.threads, 2) == [0, 0]


def test_a_way_in_is_a_file():
    """It imports nothing of hipress but the channel, and has feedback, state and report."""
    source = Path(toy_way.__file__).read_text()
    ours = [line for line in source.splitlines() if line.startswith("from hipress")]
    assert ours == ["from hipress.channel import Channel, Exchange, Piece"]
    results = launch(ranks.toy, 2)
    for mean, off, same, error, report in results:
        assert mean == results[0][0]
        assert off < 1e-5
        assert same
        assert error.kind == "StateError"
        assert "mean, scale: missing from the saved state" in error.message
        assert report.averages == 4
        assert 0 < report.bytes_sent < 4 * 4 * 2300 / 8
        assert report.state_bytes == 2 * 4 * 2300
