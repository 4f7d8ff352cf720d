"""The planner's timeline against times worked out by hand, and against the simulated graph."""

from __future__ import annotations

import pytest

from casync.building.tasks import Encode, members
from casync.cost import CodecCost, Copies, Costs, Line, Transfer
from casync.graph.joining import Bulk, join_tasks
from casync.graph.plan import BATCH_BYTES
from casync.predict.timeline import PREDICTED, Load, native, simulate_step, stages_of
from casync.stages import ENTER, INSIDE, LEAVE, TASK, WIRE, WORK, Item, Stage
from casync.topology import Topology
from tests.casync.fakes import CODECS, graph_of
from tests.casync.simulate import Cluster, simulate

TWO, FOUR = Topology.flat(2), Topology.flat(4)
NOTHING = Line(0.0, 0.0)


def work(seconds):
    return Stage(WORK, seconds)


def wire(seconds, **more):
    return Stage(WIRE, seconds, **more)


def seconds(*loads, backward=0.0, overlap=0.0):
    return simulate_step(loads, backward, overlap).seconds


def test_stages_follow_one_another():
    assert seconds(Load(0.0, (work(1), wire(2), work(3)))) == pytest.approx(6)
    assert seconds() == 0
    assert seconds(backward=5.0) == pytest.approx(5)


def test_pieces_overlap_work_and_transfers():
    """Two pieces: work 0-1 and 1-2, transfers 1-2.5 and 2.5-4."""
    assert seconds(Load(0.0, (work(2), wire(3)), pieces=2)) == pytest.approx(4)
    assert seconds(Load(0.0, (work(2), wire(3)))) == pytest.approx(5)


def test_a_delay_leaves_the_link_free():
    """Messages end at 1 and 2, and arrive at 6 and 7."""
    load = Load(0.0, (wire(1, delay=5.0), work(0.5)))
    assert seconds(load, load) == pytest.approx(7.5)


def test_work_within_the_backward_pass_is_hidden():
    load = Load(2.0, (wire(3),))
    assert seconds(load, backward=10.0) == pytest.approx(10)
    assert seconds(load, backward=4.0) == pytest.approx(5)


def test_loads_may_be_ready_after_the_backward_pass():
    loads = [Load(at, (wire(0.01),)) for at in (0.0, 0.1, 0.2, 0.3)]
    assert seconds(*loads) == pytest.approx(0.31)
    assert seconds(*loads, backward=0.15) == pytest.approx(0.31)
    found = simulate_step([Load(3.0, (work(1),))], 2.0, 0.0)
    assert (found.backward, found.seconds) == (pytest.approx(2), pytest.approx(4))


def test_lanes_of_any_name_work_side_by_side():
    """Shelves: 0-2 and 2-4; the wire: 2-5 and 5-8."""
    load = Load(0.0, (Stage("shelf", 2), wire(3)))
    found = simulate_step([load, load], 0.0, 0.0, events=True)
    assert (found.seconds, found.done) == (pytest.approx(8), pytest.approx((5, 8)))
    assert dict(found.busy) == pytest.approx({"shelf": 4, "wire": 6})
    told = [(e.lane, e.load, e.stage, e.begin, e.end) for e in found.events]
    assert told == [
        ("shelf", 0, 0, 0, 2), ("shelf", 1, 0, 2, 4), ("wire", 0, 1, 2, 5), ("wire", 1, 1, 5, 8)
    ]  # fmt: skip
    assert not simulate_step([load], 0.0, 0.0).events


def test_a_collective_that_slows_the_pass_delays_what_follows():
    """At a quarter of its speed for 4 seconds, the pass loses 3."""
    found = simulate_step([Load(0.0, (wire(4, slows=0.75),))], 8.0, 0.0)
    assert (found.backward, found.seconds) == (pytest.approx(11), pytest.approx(11))
    second = Load(2.0, (wire(1),))
    found = simulate_step([Load(0.0, (wire(4, slows=1.0),)), second], 8.0, 0.0)
    assert found.done == pytest.approx((4, 7))


def test_urgent_tasks_run_first():
    first, urgent = Load(0.0, (wire(2),)), Load(0.0, (wire(1),), urgency=-1.0)
    assert simulate_step([first, first, urgent], 0.0, 0.0).done == pytest.approx((3, 5, 1))


def test_a_codec_on_the_backward_pass_s_core_delays_it():
    """Each at half speed from 2 to 6, when 2 of work and 4 of 8 of the pass are done."""
    load = Load(2.0, (work(2), wire(1)))
    assert seconds(load, backward=8.0) == pytest.approx(10)
    assert seconds(load, backward=8.0, overlap=1.0) == pytest.approx(8)
    assert seconds(load, backward=8.0, overlap=0.5) == pytest.approx(4 + 2 / 3 + 4)
    found = simulate_step([load], 8.0, 0.0)
    assert (found.backward, found.seconds) == (pytest.approx(10), pytest.approx(10))


def test_so_does_a_transfer_that_keeps_a_core_busy():
    """1.5 cores are wanted, one exists: the pass runs at 2/3, the transfer at 5/6."""
    assert seconds(Load(0.0, (wire(3, cores=0.5),)), backward=8.0) == pytest.approx(9.2)


def test_later_gradients_are_delayed_as_well():
    """The second bucket would be ready at 4; work on the first delays it by 2."""
    first, second = Load(2.0, (work(2),)), Load(4.0, (wire(10),))
    assert seconds(first, second, backward=4.0) == pytest.approx(16)


def test_tasks_that_others_wait_for_run_first():
    """At 1 the last stage of the first chain and the first of the second are both ready."""
    first = Load(0.0, (wire(1), work(4)))
    second = Load(0.0, (wire(0.5, delay=0.5), work(1), wire(6)))
    assert seconds(second, first) == pytest.approx(8.0)


LINK, SPEED = 1e6, 4e6  # bytes a second


@pytest.mark.parametrize("topology", [TWO, FOUR])
@pytest.mark.parametrize("strategy", ["ps", "ring", "exchange", "gtopk", "push", "pull"])
def test_as_the_graph_is_simulated(strategy, topology):
    """Four buckets, one after the other; every task is simulated."""
    n, elements = topology.world_size, 40_000
    graph = graph_of([elements], strategy, "exact", n, 2, least_bytes=0, per_node=1)
    cluster = Cluster(LINK, SPEED, SPEED)
    line = Line(-TASK, 1 / SPEED)  # tasks cost nothing there
    each = Transfer(Line(0.0, 1 / LINK))
    costs = Costs({1: each, 3: each}, {}, {"exact": CodecCost(line, line, Line(-TASK, 2 / SPEED))})
    payload = max(sizes["exact"] for sizes in graph.message_bytes) * len(graph.parts)
    item = Item(4.0 * elements, payload, len(graph.parts))
    chain = stages_of(strategy, item, costs.codecs["exact"], topology, costs)
    for apart in (0.1, 0.5, 2.0):  # so that buckets wait for links, and links for buckets
        ready = [apart * number for number in range(4)]
        whole = simulate([graph] * 4, cluster, ready)
        loads = [Load(at, chain, pieces=4) for at in ready]
        assert simulate_step(loads, 0.0, 1.0).seconds == pytest.approx(whole, rel=0.1)
        assert simulate_step(loads, ready[-1], 1.0).seconds == pytest.approx(whole, rel=0.1)


def transferred(strategy, topology, payload=100.0, gradient=1000.0):
    """Seconds of the link for a payload, at a byte a second between nodes, and none inside."""
    costs = Costs({1: Transfer(Line(0, 1.0))}, {"float32": Transfer(Line(0, 2.0))})
    item = Item(gradient, payload, 4)
    chain = stages_of(strategy, item, CodecCost(NOTHING, NOTHING), topology, costs)
    return sum(stage.seconds for stage in chain if stage.lane == WIRE)


def test_transfers_within_a_node_take_their_own_lane():
    costs = Costs({1: Transfer(Line(0, 1.0))}, {}, inside=Transfer(Line(0.5, 2.0), slows=0.25))
    nodes = Topology.even(8, 4)
    chain = stages_of("ps", Item(8.0, 8.0, 8), CodecCost(NOTHING, NOTHING), nodes, costs)
    inside = [stage for stage in chain if stage.lane == INSIDE]
    assert [each.seconds for each in inside] == pytest.approx([2.0 * 7 * 3 / 7] * 2)
    assert {(each.delay, each.slows) for each in inside} == {(1.5, 0.25)}
    chain = stages_of("hierarchical", Item(8.0, 8.0, 8), CodecCost(NOTHING, NOTHING), nodes, costs)
    assert [stage.lane for stage in chain if stage.lane != WORK] == [INSIDE, WIRE, WIRE, INSIDE]


def test_bytes_on_the_link():
    assert transferred("ps", FOUR) == pytest.approx(2 * 3 / 4 * 100)
    assert transferred("ring", FOUR) == pytest.approx(2 * 3 / 4 * 100)
    assert transferred("push", FOUR) == transferred("pull", FOUR) == pytest.approx(3 / 4 * 100)
    assert transferred("exchange", FOUR) == pytest.approx(3 * 100)
    assert transferred("allreduce", FOUR) == pytest.approx(2 * 100)
    assert transferred("gtopk", FOUR) == transferred("ps", FOUR)
    nodes = Topology.even(8, 4)
    assert transferred("hierarchical", nodes) == pytest.approx(2 * 1 / 2 * 100 / 4)
    assert transferred("ps", nodes) == pytest.approx(2 * 7 / 8 * 100 * 4 / 7)
    for half in ("hierarchical_push", "hierarchical_pull"):
        assert transferred(half, nodes) == pytest.approx(1 / 2 * 100 / 4)


@pytest.mark.parametrize("strategy", PREDICTED)
def test_work_of_a_rank(strategy):
    """In gradients: ps encodes and decodes the others' parts, adds and encodes its own."""
    wanted = {"ps": 2 * 3 / 4 + 2 / 4 + 10 / 4, "ring": 1 / 4 + 3 / 4 * 10 + 3 / 4,
              "exchange": 1 + 4, "allreduce": 2, "hierarchical": 1 / 4 + 10 / 4 + 1,
              "hierarchical_push": 2 * 1 / 4, "hierarchical_pull": 1 / 4 + 3 / 4,
              "gtopk": 2 / 4 + 1 / 4 + 2 / 4 * 10 + 3 / 4,
              "push": 2 * 3 / 4, "pull": 1 / 4 + 3 / 4}[strategy]  # fmt: skip
    costs = Costs({1: Transfer(NOTHING)}, {"float32": Transfer(NOTHING)})
    once = Line(-TASK, 1.0)
    codec = CodecCost(once, once, Line(-TASK, 10.0))
    topology = Topology.even(4, 2) if strategy.startswith("hierarchical") else FOUR
    chain = stages_of(strategy, Item(1.0, 1.0, 4), codec, topology, costs)
    total = sum(stage.seconds for stage in chain if stage.lane == WORK)
    assert total == pytest.approx(wanted)


@pytest.mark.parametrize("strategy", ["ps", "exchange", "allreduce"])
@pytest.mark.parametrize("lengths, cut", [([3000] * 40, 4), ([100_000] * 40, 8)])
def test_calls_of_an_encode_are_those_of_the_joined_program(strategy, lengths, cut):
    """Parts of a bucket that are encoded together, up to 4 MB of gradient."""
    graph = graph_of(lengths, strategy, "exact", 4, cut, per_node=1, least_bytes=4000)
    program = join_tasks(graph.slice(0), CODECS, Bulk(BATCH_BYTES), lambda task: False)
    first = [task for task, waits in zip(program.tasks, program.waits, strict=True) if not waits]
    calls = sum(type(members(task)[0]) is Encode for task in first)
    costs = Costs({1: Transfer(NOTHING)}, {"float32": Transfer(NOTHING)})
    item = Item(4.0 * sum(lengths), 1.0, len(graph.parts))
    chain = stages_of(strategy, item, CodecCost(NOTHING, NOTHING), FOUR, costs)
    assert chain[0].seconds / TASK == pytest.approx(calls, abs=1)


def test_latencies_of_a_ring_add_up():
    costs = Costs({1: Transfer(Line(0.5, 0.0))}, {"float32": Transfer(Line(2.0, 1.0), 0.25)})
    chain = stages_of("ring", Item(1.0, 1.0, 4), CodecCost(NOTHING, NOTHING), FOUR, costs)
    assert sum(stage.delay for stage in chain) == pytest.approx(2 * 3 * 0.5)
    assert native(3.0, costs) == (Stage(WIRE, 3.0, 2.0, 0.25, 3.0),)


def test_copies_either_way_have_lanes_of_their_own():
    """Out 0-2 and 2-4, work 2-3 and 4-5, in 3-5 and 5-7; no copy delays the pass."""
    load = Load(0.0, (Stage(LEAVE, 2), work(1), Stage(ENTER, 2)))
    assert seconds(load, load, backward=6.0, overlap=1.0) == pytest.approx(7)
    assert simulate_step([load], 6.0, 1.0).backward == pytest.approx(6)


@pytest.mark.parametrize("gradients", [False, True])
def test_copies_to_and_from_a_device_are_of_gradients_or_messages(gradients):
    """Gradients are copied once each way if the host compresses; otherwise each message is."""
    wires = {1: Transfer(Line(0, 1.0)), 3: Transfer(Line(0, 1.0))}
    copies = Copies(Line(0.5, 0.01), Line(0.25, 0.02), gradients)
    costs = Costs(wires, {"float32": Transfer(Line(0, 2.0))}, copies=copies)
    chain = stages_of("ps", Item(1000.0, 100.0, 4), CodecCost(NOTHING, NOTHING), FOUR, costs)
    lanes = [stage.lane for stage in chain]
    sizes = [1000.0] if gradients else [75.0, 75.0]
    out, back = ([s.seconds for s in chain if s.lane == lane] for lane in (LEAVE, ENTER))
    assert out == pytest.approx([0.5 + 0.01 * size for size in sizes])
    assert back == pytest.approx([0.25 + 0.02 * size for size in sizes])
    travels = [LEAVE, WIRE, ENTER]
    inner = [WORK, WIRE, WORK, WIRE, WORK]
    assert lanes == (
        [LEAVE, *inner, ENTER] if gradients else [WORK, *travels, WORK, *travels, WORK]
    )
    assert [stage.lane for stage in native(8.0, costs)] == travels
