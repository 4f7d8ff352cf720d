"""Parts cover the bucket, stay where they are, and suit their strategy."""

import dataclasses
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from casync.building.parts import Choice, Tensor
from casync.errors import PlanError
from casync.graph.plan import partition
from casync.graph.shares import share_out
from casync.raw import RAW
from casync.strategies import list_strategies
from casync.topology import Topology
from tests.casync.fakes import CODECS, PAIRS, tensors_of
from tests.casync.whole_models import bert_large

lengths = st.lists(st.integers(0, 5000), max_size=12)
worlds = st.integers(1, 5)


def plan(tensors, choice, world_size, **options):
    choices = {t.name: choice for t in tensors}
    return partition(
        tensors, choices, Topology.flat(world_size), CODECS, least_bytes=4000, **options
    )


def test_strategies_are_found():
    found = (
        "allreduce",
        "exchange",
        "gossip",
        "gtopk",
        "hierarchical",
        "hierarchical_pull",
        "hierarchical_push",
        "ps",
        "pull",
        "push",
        "ring",
        "vote",
    )
    assert list_strategies() == found


@given(lengths, worlds, st.sampled_from(PAIRS), st.integers(1, 3), st.sampled_from([64, 10**7]))
def test_every_element_is_in_one_part(sizes, world_size, pair, partitions, batch_bytes):
    tensors = tensors_of(sizes)
    choice = Choice(pair[1], pair[0], partitions)
    parts = plan(tensors, choice, world_size, batch_bytes=batch_bytes)
    covered = sorted((row[0], row[0] + row[1]) for part in parts for row in part.rows)
    assert [begin for begin, _ in covered] == [0, *(end for _, end in covered)][:-1] or not covered
    assert sum(end - begin for begin, end in covered) == sum(sizes)
    assert [part.id for part in parts] == list(range(len(parts)))
    assert all(0 <= part.owner < world_size and part.elements > 0 for part in parts)


@given(lengths, worlds, st.integers(1, 3))
def test_rows_say_where_a_piece_is_in_its_tensor(sizes, world_size, partitions):
    tensors = tensors_of(sizes, first=3)
    parts = plan(tensors, Choice("sign", "ps", partitions), world_size)
    by_index = {t.index: t for t in tensors}
    for start, _, index, offset, state in (row for part in parts for row in part.rows):
        tensor = by_index[index]
        assert (start - tensor.start, state - tensor.state) == (offset, offset)
        assert offset % CODECS["sign"].align == 0


@given(st.permutations(range(8)), worlds, st.integers(1, 7))
def test_owners_do_not_depend_on_the_bucket(order, world_size, cut):
    """Owners do not move: see [Note: parts do not move]."""
    sizes = [1, 50, 3000, 7, 4999, 31, 2000, 33]
    model = tensors_of(sizes)
    numbers = share_out(sizes, world_size, least_bytes=4000)
    shares = {t.name: mine for t, mine in zip(model, numbers, strict=True)}

    def where(tensors):
        parts = plan(tensors, Choice("sign", "ps", 2), world_size, shares=shares)
        return {(*row[1:], part.owner) for part in parts for row in part.rows}

    def bucket(indices):
        starts = [sum(sizes[j] for j in indices[:i]) for i in range(len(indices))]
        return [
            dataclasses.replace(model[j], start=s) for j, s in zip(indices, starts, strict=True)
        ]

    assert where(bucket(order[:cut])) | where(bucket(order[cut:])) == where(model)


def test_a_big_tensor_is_spread_over_all_owners():
    parts = plan(tensors_of([10000]), Choice("sign", "ps", 2), 4)
    assert Counter(part.owner for part in parts) == {0: 2, 1: 2, 2: 2, 3: 2}


def test_a_gathered_tensor_is_cut_into_partitions_only():
    assert len(plan(tensors_of([10000]), Choice("sign", "exchange", 2), 4)) == 2


def test_pieces_of_one_owner_share_a_message():
    """Large and small tensors; with `partitions`, chunks have their own messages."""
    parts = plan(tensors_of([3000, 10, 3000, 10, 3000, 10]), Choice("sign", "ps"), 3)
    assert [part.owner for part in parts] == [0, 1, 2]
    assert sorted(row[2] for row in parts[0].rows) == [0, 2, 3, 4]
    parts = plan(tensors_of([6000, 6000]), Choice("sign", "ps", 2), 3)
    assert Counter(part.owner for part in parts) == {0: 2, 1: 2, 2: 2}


def test_a_message_has_one_piece_of_a_tensor():
    """A codec may have a state per tensor, which a device would update for all pieces at once."""
    tensors, shares = tensors_of([300]), {"t0": ((0, 1), (100, 0), (200, 1))}
    parts = partition(
        tensors, {"t0": Choice("exact", "ps")}, Topology.flat(2), CODECS, shares=shares
    )
    assert [(part.owner, part.rows[0][:2]) for part in parts] == [
        (1, (0, 100)), (0, (100, 100)), (1, (200, 100)),
    ]  # fmt: skip


@given(lengths, st.integers(2, 5))
def test_cuts_are_at_even_numbers_of_groups(sizes, world_size):
    parts = plan(tensors_of(sizes), Choice("sign", "ps"), world_size)
    assert all(row[3] % (2 * CODECS["sign"].align) == 0 for part in parts for row in part.rows)


def test_a_batch_closes_at_its_size():
    parts = plan(tensors_of([10] * 9), Choice("exact", "exchange"), 3, batch_bytes=120)
    assert [len(part.rows) for part in parts] == [3, 3, 3]


def test_adjacent_raw_tensors_become_a_run():
    tensors = tensors_of([5, 6, 7, 8])
    raw, coded = Choice(RAW, "allreduce"), Choice("exact", "ps")
    choices = dict(zip([t.name for t in tensors], (raw, raw, coded, raw), strict=True))
    parts = partition(tensors, choices, Topology.flat(2), CODECS)
    assert [part.rows[0][:2] for part in parts if part.codec == RAW] == [(0, 11), (18, 8)]


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (4, 3, 2, 1, 0), (2, 4, 0, 3, 1)])
@pytest.mark.parametrize("sizes", [(5, 0, 1, 0, 9), (0, 7, 0, 0, 3), (0, 0, 0, 0, 0)])
def test_a_tensor_without_elements_may_lie_anywhere(sizes, order):
    """Buckets hold tensors in any order, so an empty one may come before one of lower index."""
    starts = [sum(sizes[j] for j in order[:i]) for i in range(len(order))]
    tensors = [
        Tensor(f"t{j}", j, start, sizes[j], 0) for j, start in zip(order, starts, strict=True)
    ]
    for members in (tensors, tensors[::-1]):
        parts = plan(members, Choice("sign", "ps"), 2)
        rows = sorted(row[:3] for part in parts for row in part.rows)
        assert rows == [(t.start, t.length, t.index) for t in tensors if t.length]


def owned(sizes, world_size, strategy="ps", per_node=1):
    """Elements by owner, for a bucket with a whole model."""
    tensors, topology = tensors_of(sizes), Topology.even(world_size, per_node)
    shares = dict(zip([t.name for t in tensors], share_out(sizes, world_size), strict=True))
    choices = {t.name: Choice("sign", strategy) for t in tensors}
    loads = Counter()
    for part in partition(tensors, choices, topology, CODECS, shares=shares):
        loads[part.owner] += part.elements
    return [loads[rank] for rank in range(world_size)]


@pytest.mark.parametrize("world_size", [2, 16, 128, 1024])
@pytest.mark.parametrize("strategy, per_node", [("ps", 1), ("hierarchical", 2)])
def test_over_a_step_no_owner_has_much_more_than_another(strategy, per_node, world_size):
    loads = owned(bert_large(), world_size, strategy, per_node)
    assert max(loads) * world_size <= 1.1 * sum(loads)


def test_neighbours_in_turn_are_in_other_nodes_and_places():
    turns = Topology.even(128, 8).turns("nodes")
    assert sorted(turns) == list(range(128))
    assert len({rank // 8 for rank in turns[:16]}) == 16
    assert len({rank % 8 for rank in turns[8:16]}) == 8


@given(st.lists(st.integers(0, 10**7), max_size=20), st.integers(1, 40))
def test_shares_cover_a_tensor_and_leave_no_crumbs(sizes, owners):
    for length, shares in zip(sizes, share_out(sizes, owners), strict=True):
        begins = [begin for begin, _ in shares]
        assert all(0 <= turn < owners for _, turn in shares)
        if shares:
            assert begins[0] == 0
            lengths = [b - a for a, b in zip(begins, [*begins[1:], length], strict=True)]
            assert min(lengths) >= min(length, 1024)
        else:
            assert 4 * length >= owners * 512 * 1024


def test_small_tensors_have_one_owner():
    assert all(len(shares) == 1 for shares in share_out([1000, 5, 700] * 5, 8))
    spread = share_out([8000] * 64, 4)  # too few for large shares, but not for one owner
    assert Counter(turn for ((_, turn),) in spread) == {0: 16, 1: 16, 2: 16, 3: 16}


@pytest.mark.parametrize(
    "choice, words",
    [
        (Choice("once", "ps"), ["once", "ps", "exchange"]),
        (Choice("once", "ring"), ["once", "ring", "exchange"]),
        (Choice("sign", "allreduce"), ["sign", "allreduce", "'ps' or 'ring'"]),
        (Choice("once", "allreduce"), ["once", "allreduce", "'exchange'"]),
        (Choice("exact", "exchange", down="sign"), ["exchange", "one direction", "'ps'"]),
        (Choice("exact", "ps", down="once"), ["once", "ps", "encode twice"]),
        (Choice("exact", "ps", down="zip"), ["zip", "exact"]),
        (Choice("exact", "star"), ["star", "allreduce, exchange, gossip, gtopk, "]),
        (Choice("zip", "ps"), ["zip", "exact"]),
        (Choice("exact", "ps", 0), ["partitions 0"]),
    ],
)
def test_unsuited_choices_are_refused(choice, words):
    with pytest.raises(PlanError) as caught:
        plan(tensors_of([100]), choice, 2)
    assert all(word in str(caught.value) for word in words)


def test_bad_tensors_are_refused():
    with pytest.raises(PlanError, match="'b' overlaps"):
        plan([Tensor("a", 0, 0, 5, 0), Tensor("b", 1, 4, 5, 5)], Choice("exact", "ps"), 2)
    with pytest.raises(PlanError, match="no choice for tensor 't0'"):
        partition(tensors_of([3]), {}, Topology.flat(2), CODECS)
    with pytest.raises(PlanError, match="world size 0"):
        plan(tensors_of([3]), Choice("exact", "ps"), 0)
