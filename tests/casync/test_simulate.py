"""The simulated timeline against times worked out by hand."""

import pytest

from casync.graph.graph import build
from casync.raw import RAW
from casync.topology import Topology
from tests.casync.fakes import CODECS, PAIRS, SIZES, graph_of
from tests.casync.simulate import Cluster, CodecSpeed, Link, simulate

LINK = 1000.0  # bytes per second
ALL = {name: CodecSpeed(1e4, 1e4) for name in CODECS}


def test_ps_of_two_ranks_by_hand():
    """Two chunks of 1000 bytes: encode .1, push 1, merge .1, encode .1, pull 1, decode .1."""
    graph = graph_of([500], "ps", "exact", 2, partitions=1, least_bytes=0, per_node=1)
    timeline = simulate([graph], Cluster(Link(LINK, 0.0), ALL))
    assert timeline.makespan == pytest.approx(2.4)
    assert timeline.link_seconds == pytest.approx((2.0, 2.0))
    assert timeline.compute_seconds == pytest.approx((0.4, 0.4))
    assert simulate([graph], Cluster(Link(LINK, 0.25), ALL)).makespan == pytest.approx(2.9)


def test_the_native_reduce_by_hand():
    graph = graph_of([250], "allreduce", RAW, 4, per_node=1)
    cluster = Cluster(Link(LINK, 0.01), {}, raw=CodecSpeed(1e4, 1e4))
    assert simulate([graph], cluster).makespan == pytest.approx(0.1 + 1.5 + 0.06)


def test_partitions_overlap():
    """Four times as many chunks: encode and transfer overlap."""
    cluster = Cluster(Link(LINK, 0.0), {"exact": CodecSpeed(1e3, 1e3)})
    graphs = [graph_of([4000], "ps", "exact", 2, k, least_bytes=0, per_node=1) for k in (1, 4)]
    few, many = (simulate([graph], cluster).makespan for graph in graphs)
    assert many < 0.8 * few


def test_a_later_bucket_waits_for_its_gradients():
    graph = graph_of([500], "ps", "exact", 2, partitions=1, least_bytes=0, per_node=1)
    timeline = simulate([graph, graph], Cluster(Link(LINK, 0.0), ALL), ready=[0.0, 5.0])
    assert timeline.finished == pytest.approx((2.4, 7.4))
    together = simulate([graph, graph], Cluster(Link(LINK, 0.0), ALL)).makespan
    assert 4.0 < together < 2 * 2.4


def test_less_payload_takes_less_time():
    graph = graph_of([4000], "exchange", "sparse", 3, per_node=1)
    full, tenth = (
        simulate([graph], Cluster(Link(LINK, 0.0), ALL, payload_share=share)).makespan
        for share in (1.0, 0.1)
    )
    assert tenth < 0.25 * full


@pytest.mark.parametrize("strategy, codec", PAIRS)
def test_every_task_happens_once_after_what_it_waits_for(strategy, codec):
    graph = graph_of(SIZES, strategy, codec, 3)
    timeline = simulate([graph], Cluster(Link(1e6, 1e-4), ALL))
    times = {text: (begin, end) for _, text, begin, end in timeline.events}
    assert len(timeline.events) == len(times) == len(graph.tasks)
    for task, after in zip(graph.tasks, graph.after, strict=True):
        begin, end = times[task.text()]
        assert begin <= end <= timeline.makespan
        if task.verb in ("encode", "decode", "merge"):
            assert all(times[graph.tasks[j].text()][1] <= begin for j in after)


def test_nothing_takes_no_time():
    cluster = Cluster(Link(LINK, 1.0), ALL)
    assert simulate([build((), Topology.flat(2), CODECS)], cluster).makespan == 0.0
    assert simulate([], cluster).makespan == 0.0


def test_nodes_with_slow_links_between_them():
    """Two nodes of two: half the bytes between nodes, and less than 0.7 of the time of `ps`."""
    cluster = Cluster(Link(1.25e7, 1e-4), {"exact": CodecSpeed(1e9, 1e9)}, inside=Link(1e9, 1e-5))
    flat, nodes = (
        simulate([graph_of([10**6], strategy, "exact", 4, per_node=2)], cluster)
        for strategy in ("ps", "hierarchical")
    )
    assert sum(nodes.link_seconds) == pytest.approx(sum(flat.link_seconds) / 2)
    assert nodes.makespan < 0.7 * flat.makespan


def test_one_direction_takes_the_time_of_its_payloads():
    """Signs up and numbers down, by hand: a chunk of 128 elements is 24 bytes up and 512 down."""
    graph = graph_of([256], "ps", "sign", 2, partitions=1, per_node=1, down="raw", least_bytes=0)
    fast = CodecSpeed(1e12, 1e12)
    cluster = Cluster(Link(LINK, 0.0), {"sign": fast}, raw=fast)
    assert simulate([graph], cluster).makespan == pytest.approx(0.024 + 0.512, rel=1e-3)
