"""The executor over the memory transport: results, pipelining, errors."""

import gc
import re
import subprocess
import sys
import threading
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from casync.building.parts import Choice
from casync.errors import (
    CasyncError,
    ExecutorClosed,
    PayloadError,
    PeerTimeout,
    PlanError,
    TransportAborted,
    TransportError,
)
from casync.graph.graph import build
from casync.raw import RAW, with_raw
from casync.runtime import threads
from casync.runtime.calls import mix_seed
from casync.runtime.counters import Counters
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.testing import Hub
from casync.topology import Topology
from tests.casync.fakes import (
    CODECS,
    EVERY,
    MANY,
    MEANS,
    PAIRS,
    SIZES,
    Exact,
    Sparse,
    assert_identical,
    each_strategy,
    gradients,
    graph_of,
    in_worlds,
    jitter,
    planned,
    run,
    slices,
    states_of,
    tensors_of,
    world,
)
from tests.casync.proofs.dry_run import dry_run
from tests.patience import HANG
from tests.tiers import first_fast

TOTAL = sum(SIZES)
#: PAIRS, of which the fast tests take MANY
EACH_ONCE = [pytest.param(*pair, marks=() if pair in MANY else pytest.mark.slow) for pair in PAIRS]
LOSSLESS = [pair for pair in MEANS if pair[1] != "sign"]


@pytest.mark.parametrize(
    "strategy, codec, world_size", in_worlds(LOSSLESS, LOSSLESS, [(4,), (2,), (3,), (5,)])
)
def test_the_bucket_becomes_the_mean(strategy, codec, world_size):
    graph = graph_of(SIZES, strategy, codec, world_size)
    buckets = gradients(TOTAL, world_size, seed=world_size)
    mean = torch.stack(buckets).mean(0)
    with world(world_size) as executors:
        results = run(executors, graph, buckets)
    assert all(result is bucket for result, bucket in zip(results, buckets, strict=True))
    assert_identical(buckets)
    tolerance = 4e-3 if codec == "half" else 1e-6
    torch.testing.assert_close(buckets[0], mean, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strategy, codec", each_strategy(LOSSLESS))
def test_each_size_alone(strategy, codec, size):
    graph = graph_of([size], strategy, codec, 3, partitions=1)
    buckets = gradients(size, 3, seed=size)
    mean = torch.stack(buckets).mean(0)
    with world(3) as executors:
        run(executors, graph, buckets)
    assert_identical(buckets)
    tolerance = 4e-3 if codec == "half" else 1e-6
    torch.testing.assert_close(buckets[0], mean, rtol=tolerance, atol=tolerance)


def encode(x, residual):
    """The sign codec on one piece, in plain torch: (decoded, residual)."""
    total = x + residual
    decoded = CODECS["sign"].unpack(np.frombuffer(CODECS["sign"].pack(total), np.uint8), len(x))
    return decoded, total - decoded


def expected_ps(xs, worker, aggregator, owner, world_size=None):
    total = xs[owner].copy()
    for rank in range(len(xs)):
        if rank != owner:
            decoded, worker[rank] = encode(xs[rank], worker[rank])
            total += decoded
    share = np.float32(1 / (world_size or len(xs)))
    mean, aggregator[owner] = encode(total * share, aggregator[owner])
    return mean


def expected_ring(xs, worker, aggregator, owner):
    n = len(xs)
    total = np.zeros_like(xs[0])
    for hop in range(1, n):
        rank = (owner + hop) % n
        total, worker[rank] = encode(xs[rank] + total, worker[rank])
    mean, aggregator[owner] = encode((xs[owner] + total) * np.float32(1 / n), aggregator[owner])
    return mean


def expected_exchange(xs, worker, aggregator, owner):
    parts = []
    for rank, x in enumerate(xs):
        decoded, worker[rank] = encode(x * np.float32(1 / len(xs)), worker[rank])
        parts.append(decoded)
    return sum(parts[1:], parts[0].copy())


def expected_hierarchical(xs, worker, aggregator, owner):
    """Sums of nodes of two, averaged as by `ps` among leaders at the owner's place."""
    topology = Topology.even(len(xs), 2)
    place = topology.nodes[topology.node_of[owner]].index(owner)
    leaders = [node[place % len(node)] for node in topology.nodes]
    sums = [xs[leader].copy() for leader in leaders]
    for total, node, leader in zip(sums, topology.nodes, leaders, strict=True):
        for rank in node:
            if rank != leader:
                total += xs[rank]
    inner = [[side[leader] for leader in leaders] for side in (worker, aggregator)]
    mean = expected_ps(sums, *inner, leaders.index(owner), len(xs))
    for side, values in zip((worker, aggregator), inner, strict=True):
        for leader, value in zip(leaders, values, strict=True):
            side[leader] = value
    return mean


def expected_gtopk(xs, worker, aggregator, owner):
    """A binomial tree by recursion: a place and those behind it, up to twice its distance."""
    n = len(xs)

    def total(place, distance):
        rank = (owner + place) % n
        below, step = xs[rank].copy(), 1
        while step < distance and place + step < n:
            below += total(place + step, step)
            step *= 2
        side = worker
        if place == 0:
            below, side = below * np.float32(1 / n), aggregator
        decoded, side[rank] = encode(below, side[rank])
        return decoded

    return total(0, n)


EXPECTED = {
    "ps": expected_ps,
    "ring": expected_ring,
    "exchange": expected_exchange,
    "hierarchical": expected_hierarchical,
    "gtopk": expected_gtopk,
}


@pytest.mark.parametrize("world_size", first_fast([3, 2, 5]))
@pytest.mark.parametrize("strategy", EXPECTED)
def test_error_feedback_is_that_of_the_plain_algorithm(strategy, world_size):
    """Three steps, results and residuals bit for bit, against a loop over pieces."""
    graph = graph_of(SIZES, strategy, "sign", world_size)
    states = [states_of(TOTAL) for _ in range(world_size)]
    worker = [np.zeros(TOTAL, np.float32) for _ in range(world_size)]
    aggregator = [np.zeros(TOTAL, np.float32) for _ in range(world_size)]
    programs = slices(graph)
    with world(world_size, delay=jitter(1)) as executors:
        for step in range(3):
            buckets = gradients(TOTAL, world_size, seed=step)
            xs = [bucket.numpy().copy() for bucket in buckets]
            run(executors, programs, buckets, states, step)
            for part in graph.parts:
                for start, length, *_ in part.rows:
                    at = slice(start, start + length)
                    pieces = [[a[at] for a in side] for side in (worker, aggregator)]
                    mean = EXPECTED[strategy]([x[at] for x in xs], *pieces, part.owner)
                    for side, arrays in zip((worker, aggregator), pieces, strict=True):
                        for rank in range(world_size):
                            side[rank][at] = arrays[rank]
                    assert np.array_equal(buckets[0].numpy()[at], mean)
            assert_identical(buckets)
    for rank in range(world_size):
        assert np.array_equal(states[rank]["sign", "worker"]["residual"], worker[rank])
        assert np.array_equal(states[rank]["sign", "aggregator"]["residual"], aggregator[rank])


def both_ways(codec, down):
    """A graph with a codec for each direction, and states by the workers' codec's name."""
    graph = graph_of(SIZES, "ps", codec, 3, down=down)
    sides = {"worker": CODECS[codec], "aggregator": CODECS[down]}
    states = [{(codec, s): c.init_state(TOTAL) for s, c in sides.items()} for _ in range(3)]
    return graph, states


def test_owners_have_a_codec_and_feedback_of_their_own():
    """Up: a codec that encodes once, without loss; down: signs, with a residual at the owners."""
    graph, states = both_ways("once", "sign")
    residual = np.zeros(TOTAL, np.float32)
    with world(3, delay=jitter(2)) as executors:
        for step in range(3):
            buckets = gradients(TOTAL, 3, seed=step)
            xs = [bucket.numpy().copy() for bucket in buckets]
            run(executors, graph, buckets, states, step)
            assert_identical(buckets)
            for part in graph.parts:
                for start, length, *_ in part.rows:
                    at = slice(start, start + length)
                    order = [part.owner, *(r for r in range(3) if r != part.owner)]
                    total = sum((xs[rank][at] for rank in order[1:]), xs[order[0]][at])
                    mean, residual[at] = encode(total * np.float32(1 / 3), residual[at])
                    assert np.array_equal(buckets[0].numpy()[at], mean)
    kept = sum(state["once", "aggregator"]["residual"] for state in states)
    assert np.array_equal(kept, residual)
    sent = [executor.counters.bytes_sent for executor in executors]
    assert sum(sent) < 3 * sum(dry_run(graph).bytes_sent)


def test_one_direction_may_go_uncompressed():
    """Owners send the mean uncompressed, as in MXNet."""
    graph, states = both_ways("sign", "raw")
    worker = [np.zeros(TOTAL, np.float32) for _ in range(3)]
    buckets = gradients(TOTAL, 3, seed=0)
    xs = [bucket.numpy().copy() for bucket in buckets]
    with world(3) as executors:
        run(executors, graph, buckets, states)
    assert_identical(buckets)
    for part in graph.parts:
        for start, length, *_ in part.rows:
            at = slice(start, start + length)
            total = xs[part.owner][at].copy()
            for rank in (r for r in range(3) if r != part.owner):
                decoded, worker[rank][at] = encode(xs[rank][at], worker[rank][at])
                total += decoded
            assert np.array_equal(buckets[0].numpy()[at], total * np.float32(1 / 3))
    for rank in range(3):
        assert np.array_equal(states[rank]["sign", "worker"]["residual"], worker[rank])


@pytest.mark.parametrize("strategy, codec", EVERY)
def test_one_rank_changes_nothing(strategy, codec):
    bucket = gradients(TOTAL, 1, seed=0)[0]
    before = bucket.clone()
    graph = graph_of(SIZES, strategy, codec, 1)
    with world(1) as executors:
        assert run(executors, graph, [bucket])[0] is bucket
        assert executors[0].counters.wire_bytes == 0
    assert torch.equal(bucket, before)


def test_an_empty_bucket_is_done_at_once():
    with world(2) as executors:
        graph = build((), Topology.flat(2), CODECS)
        assert executors[0].submit(graph.slice(0), torch.zeros(0), {}, 0).done()


@pytest.mark.parametrize("seed", range(3))
def test_many_buckets_in_flight(seed):
    """Different strategies at once, submitted before any is done, with random delays."""
    kinds = [("ps", "sign"), ("ring", "sparse"), ("allreduce", RAW), ("exchange", "once")]
    graphs = [graph_of([50, 4000, 70000], s, c, 3) for s, c in kinds] * 2
    programs = [[graph.slice(rank) for rank in range(3)] for graph in graphs[:4]] * 2
    with world(3) as executors:
        alone = [gradients(74050, 3, seed=i) for i in range(8)]
        for i, buckets in enumerate(alone):
            run(executors, graphs[i], buckets)
    with world(3, delay=jitter(seed)) as executors:
        together = [gradients(74050, 3, seed=i) for i in range(8)]
        futures = [
            e.submit(programs[i][r], together[i][r], {}, 0)
            for r, e in enumerate(executors)
            for i in range(8)
        ]
        torch.futures.wait_all(futures)
    for got, want in zip(together, alone, strict=True):
        assert_identical([*got, want[0]])


def test_a_tensor_with_another_choice_in_the_same_bucket():
    tensors = tensors_of([10, 20000, 30, 40000, 50])
    kinds = [("exact", "ps"), (RAW, "allreduce"), ("sparse", "ring"), ("exact", "exchange")]
    pairs = [*kinds, (RAW, "allreduce")]
    choices = {t.name: Choice(c, s, 2) for t, (c, s) in zip(tensors, pairs, strict=True)}
    graph = planned(tensors, choices, 4, CODECS)
    dry_run(graph)
    buckets = gradients(60090, 4, seed=5)
    mean = torch.stack(buckets).mean(0)
    with world(4, delay=jitter(9)) as executors:
        run(executors, graph, buckets)
    assert_identical(buckets)
    torch.testing.assert_close(buckets[0], mean, rtol=1e-6, atol=1e-6)


def test_not_a_number_reaches_everybody():
    graph = graph_of([1000], "ps", "exact", 3)
    buckets = gradients(1000, 3, seed=0)
    buckets[1][17] = float("nan")
    buckets[2][18] = float("inf")
    with world(3) as executors:
        run(executors, graph, buckets)
    assert_identical(buckets)
    assert buckets[0][17].isnan()
    assert buckets[0][18].isinf()


@pytest.mark.parametrize("strategy, codec", EACH_ONCE)
def test_counters_agree_with_the_dry_run(strategy, codec):
    graph = graph_of(SIZES, strategy, codec, 4)
    report, codecs = dry_run(graph), with_raw(CODECS)
    fixed = all(codecs[task.codec].fixed for task in graph.tasks)
    with world(4) as executors:
        run(executors, graph, [torch.ones(TOTAL) for _ in range(4)])
        for rank, executor in enumerate(executors):
            counters = executor.counters
            compare = int.__eq__ if fixed else int.__le__
            assert compare(counters.bytes_sent, report.bytes_sent[rank])
            assert compare(counters.bytes_received, report.bytes_received[rank])
            assert counters.messages_sent == counters.messages_received == report.messages[rank]
            # a payload is whole words of eight bytes, a raw run in the bucket is not
            assert 0 <= report.bytes_reduced[rank] - counters.bytes_reduced < 8
            assert counters.jobs == 1
            assert counters.encode_seconds > 0
            assert counters.job_seconds >= counters.wait_seconds >= 0


def test_only_used_bytes_are_counted():
    graph = graph_of([80000], "exchange", "once", 2, partitions=1)
    buckets = [torch.zeros(80000) for _ in range(2)]
    buckets[0][5] = 1.0
    with world(2) as executors:
        run(executors, graph, buckets)
        assert [e.counters.bytes_sent for e in executors] == [16, 8]
        assert [e.counters.bytes_received for e in executors] == [8, 16]


def test_trace_has_every_task_of_the_rank():
    graph = graph_of([1000, 50000], "ps", "exact", 2)
    trace = []
    with world(2, trace=trace) as executors:
        run(executors, graph, gradients(51000, 2, seed=0))
    tasks = sorted(event.task.text() for event in trace if event.task is not None)
    assert tasks == sorted(t.text() for t in graph.tasks)
    assert all(event.begin <= event.end for event in trace)
    jobs = [event for event in trace if event.task is None]
    assert len(jobs) == 2  # of two ranks
    assert max(job.end for job in jobs) == max(event.end for event in trace)


def test_seeds_and_steps_reach_the_codec():
    seen = []

    class Spy(Exact):
        def encode_batch(self, x, table, out, at, **options):
            seen.append((options["seed"], options["step"]))
            return super().encode_batch(x, table, out, at, **options)

    graph = graph_of([10], "ps", "exact", 2)
    with world(2, codecs={"exact": Spy()}, seed=7) as executors:
        run(executors, graph, gradients(10, 2, seed=0), step=41)
    owner = graph.parts[0].owner
    expected = [mix_seed(7, 1 - owner, "worker"), mix_seed(7, owner, "aggregator")]
    assert seen == [(seed, 41) for seed in expected]


def test_mixed_seeds_differ():
    sides = ("worker", "aggregator")
    seeds = {mix_seed(s, r, side) for s in range(20) for r in range(50) for side in sides}
    assert len(seeds) == 2000
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_results_of_a_program_are_forgotten_with_it():
    """DDP rebuilds its buckets: buffers of the old ones must be freed."""
    with world(2) as executors:
        graph = graph_of([100], "ps", "exact", 2)
        program = graph.slice(0)
        executors[0].prepare(program)
        alive = weakref.ref(program)
        del program
        gc.collect()
        assert alive() is None


# Errors


class Breaks(Exact):
    """Raises in the n-th call of one kind."""

    def __init__(self, kind):
        self.kind = kind

    def encode_batch(self, *args, **options):
        if self.kind == "encode":
            raise ZeroDivisionError("broken encode")
        return super().encode_batch(*args, **options)

    def decode_batch(self, *args, **options):
        if self.kind == "decode":
            raise ValueError("broken payload")
        return super().decode_batch(*args, **options)


@pytest.fixture
def one_broken():
    """Two ranks; rank 1's codec is broken in the given way. Collects the futures' errors."""

    def go(kind):
        graph = graph_of([50000], "ps", "exact", 2)
        ends = Hub(2).endpoints()
        executors = [
            Executor(ends[0], CODECS, RunOptions(timeout=HANG)),
            Executor(ends[1], {"exact": Breaks(kind)}, RunOptions(timeout=HANG)),
        ]
        programs = [graph.slice(rank) for rank in range(2)]
        errors = []
        futures = [
            e.submit(p, b, {}, 0)
            for e, p, b in zip(executors, programs, gradients(50000, 2, 0), strict=True)
        ]
        for future in futures:
            with pytest.raises(CasyncError) as caught:
                future.wait()
            errors.append(caught.value)
        again = []
        for executor, program in zip(executors, programs, strict=True):
            with pytest.raises(CasyncError) as caught:
                executor.submit(program, torch.zeros(50000), {}, 1)
            again.append(caught.value)
            executor.close()
        assert list(map(repr, again)) == list(map(repr, errors))
        return errors

    return go


def test_a_broken_decode_fails_both_ranks(one_broken, caplog):
    other, own = one_broken("decode")
    assert type(own) is PayloadError
    assert re.search(
        r"rank 1, peer 0, task `(merge|decode) rank=1 .*`: ValueError: broken payload", str(own)
    )
    assert type(other) is TransportError
    assert re.search(r"rank 0, peer 1, task `(recv|send) rank=0", str(other))
    assert not caplog.text  # reported once, by the future


def test_a_broken_encode_fails_both_ranks(one_broken):
    other, own = one_broken("encode")
    assert re.search(r"rank 1, task `encode .*`: ZeroDivisionError: broken encode", str(own))
    assert isinstance(other, TransportError)


class Flips(Sparse):
    """A codec that sends an index out of range."""

    def pack(self, x):
        return np.int32(len(x)).tobytes() + np.float32(1).tobytes()

    def unpack(self, data, n):
        # It accepts its own: a rank that fails might close before the other has its message.
        return np.zeros(n, np.float32)

    def encode_batch(self, x, table, out, at, **options):
        for row, place in zip(table, at, strict=True):
            out[place : place + 8] = np.frombuffer(self.pack(x[: row[1]]), np.uint8)
        return np.full(len(table), 8, np.int64)


def test_a_corrupt_payload_names_rank_peer_and_task():
    graph = graph_of([100], "exchange", "sparse", 2)
    ends = Hub(2).endpoints()
    good, bad = Executor(ends[0], CODECS), Executor(ends[1], {"sparse": Flips()})
    future = good.submit(graph.slice(0), torch.ones(100), {}, 0)
    bad.submit(graph.slice(1), torch.ones(100), {}, 0)
    with pytest.raises(
        PayloadError, match=r"rank 0, peer 1, task `(merge|decode) .*index out of range"
    ):
        future.wait()
    good.close()
    bad.close()


@pytest.mark.parametrize("message", [b"", b"\1\0\0\0\0\0\0\0", b"\377" * 8, b"\20" + b"\0" * 7])
def test_a_message_of_a_wrong_length_is_refused(message):
    """The peer is a bare transport that sends malformed messages."""
    graph = graph_of([100], "exchange", "sparse", 2)
    ends = Hub(2).endpoints()
    with Executor(ends[0], CODECS) as executor:
        future = executor.submit(graph.slice(0), torch.ones(100), {}, 0)
        data = (
            torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0)
        )
        ends[1].post_send(data.to(torch.uint8), 0, 0)
        with pytest.raises(PayloadError, match=r"rank 0, peer 1, task `recv"):
            future.wait()


@pytest.mark.parametrize("strategy, codec", [("ps", "exact"), ("allreduce", RAW)])
def test_a_silent_peer_times_out(strategy, codec):
    graph = graph_of([50000], strategy, codec, 2)
    with world(2, timeout=0.1) as executors:
        future = executors[0].submit(graph.slice(0), torch.ones(50000), {}, 0)
        with pytest.raises(PeerTimeout, match=r"rank 0.*task `re.*timed out after 0.1 s"):
            future.wait()


class Echoing:
    """A handle that fails as gloo's do: if one wait times out, all others here are cut off."""

    def __init__(self, cut, echo):
        self.cut, self.echo = cut, echo

    def wait(self, timeout):
        if self.echo:
            self.cut.set()
            raise TransportAborted("cut off")
        self.cut.wait(timeout)
        raise PeerTimeout("the real one")


def test_an_echo_of_a_time_out_leaves_it_the_word(monkeypatch):
    cut = threading.Event()
    end = Hub(2).endpoints()[0]
    monkeypatch.setattr(end, "post_recv", lambda data, peer, channel: Echoing(cut, channel == 1))
    program = graph_of([50000], "ps", "exact", 2, partitions=1).slice(0)
    with Executor(end, CODECS, RunOptions(timeout=HANG)) as executor:
        with pytest.raises(PeerTimeout, match="the real one"):
            executor.submit(program, torch.ones(50000), {}, 0).wait()


def test_a_peer_that_leaves_is_named():
    graph = graph_of([50000], "ps", "exact", 3)
    ends = Hub(3).endpoints()
    with Executor(ends[0], CODECS, RunOptions(timeout=HANG)) as executor:
        future = executor.submit(graph.slice(0), torch.ones(50000), {}, 0)
        ends[2].close()
        with pytest.raises(TransportError, match="rank 0, peer 2"):
            future.wait()


class Stuck:
    """A receive whose bytes were moving when the connection ended: it does not notice that."""

    def __init__(self):
        self.free = threading.Event()

    def wait(self, timeout):
        assert self.free.wait(HANG)
        raise PeerTimeout("too late")


def on_look(monkeypatch, executor, call):
    """Call `call` whenever a watch is about to look at the tasks that wait for its peer."""
    wait = executor._ended.wait
    monkeypatch.setattr(executor._ended, "wait", lambda seconds: (call(), wait(seconds))[1])


def test_a_peer_that_dies_amid_a_message_is_noticed(monkeypatch):
    monkeypatch.setattr(threads, "LOOK", 0.01)
    graph, hub, stuck = graph_of([50000], "exchange", "exact", 3, partitions=1), Hub(3), Stuck()
    ends = hub.endpoints()
    receive = ends[0].post_recv
    monkeypatch.setattr(ends[0], "post_recv", lambda *a: stuck if a[1] == 2 else receive(*a))
    with Executor(ends[0], CODECS, RunOptions(timeout=HANG, watch=True)) as executor:
        future = executor.submit(graph.slice(0), torch.ones(50000), {}, 0)
        while not hub.mail[0, 2, 0]:
            pass
        ends[2].abort()
        with pytest.raises(TransportError, match=r"rank 0, peer 2, task `recv .* closed by rank 2"):
            future.wait()
        stuck.free.set()


def test_a_peer_that_dies_amid_a_native_reduce_is_noticed(monkeypatch):
    """It was once noticed only at the time-out. Data on its way through other ranks has time."""
    monkeypatch.setattr(threads, "LOOK", 0.01)
    ends, stuck, looks = Hub(3).endpoints(), Stuck(), []
    monkeypatch.setattr(ends[0], "post_reduce", lambda *a: stuck)
    program = graph_of([50000], "allreduce", RAW, 3).slice(0)
    with Executor(ends[0], CODECS, RunOptions(timeout=HANG, watch=True)) as executor:
        on_look(monkeypatch, executor, lambda: looks.append(1))
        future = executor.submit(program, torch.ones(50000), {}, 0)
        ends[2].abort()
        with pytest.raises(TransportError, match=r"rank 0, task `reduce .* closed by rank 2"):
            future.wait()
        stuck.free.set()
    assert len(looks) > threads.REDUCE_LOOKS


def test_a_native_reduce_goes_on_without_a_peer_that_has_done_its_part(monkeypatch):
    monkeypatch.setattr(threads, "LOOK", 0.01)
    ends, stuck, looks = Hub(3).endpoints(), Stuck(), threading.Semaphore(0)
    monkeypatch.setattr(ends[0], "post_reduce", lambda *a: stuck)
    program = graph_of([50000], "allreduce", RAW, 3).slice(0)
    options = RunOptions(timeout=HANG, watch=True, finished=lambda peer: peer == 2)
    with Executor(ends[0], CODECS, options) as executor:
        on_look(monkeypatch, executor, looks.release)
        future = executor.submit(program, torch.ones(50000), {}, 0)
        ends[2].abort()
        for _ in range(threads.REDUCE_LOOKS + 3):
            assert looks.acquire(timeout=HANG)
        assert not executor.failed
        stuck.free.set()
        with pytest.raises(PeerTimeout, match="too late"):
            future.wait()


def test_a_peer_may_leave_when_it_has_done_its_part(monkeypatch):
    """Rank 0 has its message, and waits for another rank's."""
    monkeypatch.setattr(threads, "LOOK", 0.01)
    graph = graph_of([50000], "exchange", "exact", 3, partitions=1)
    looks = threading.Semaphore(0)
    before = {*threading.enumerate()}
    with world(3, timeout=HANG, watch=True) as executors:
        on_look(monkeypatch, executors[0], looks.release)
        for rank in (0, 2):
            executors[rank].submit(graph.slice(rank), torch.ones(50000), {}, 0)
        while not all(executors[rank].counters.messages_received for rank in (0, 2)):
            pass
        executors[2].close()
        for _ in range(4):
            assert looks.acquire(timeout=HANG)
        assert not executors[0].failed
    assert {*threading.enumerate()} <= before


def test_all_jobs_fail_with_the_first_error():
    program = graph_of([50000], "ps", "exact", 2).slice(0)
    with world(2) as executors:
        futures = [executors[0].submit(program, torch.ones(50000), {}, i) for i in range(3)]
        executors[1].abort(ValueError("over"))
        messages = set()
        for future in futures:
            with pytest.raises(TransportError) as caught:
                future.wait()
            messages.add(str(caught.value))
        assert len(messages) == 1


def test_close_fails_what_is_under_way_and_ends_all_threads():
    before = {*threading.enumerate()}
    graph = graph_of([50000], "ps", "exact", 2)
    with world(2) as executors:
        future = executors[0].submit(graph.slice(0), torch.ones(50000), {}, 0)
    with pytest.raises(ExecutorClosed):
        future.wait()
    with pytest.raises(ExecutorClosed):
        executors[0].submit(graph.slice(0), torch.ones(50000), {}, 0)
    executors[0].close()
    assert {*threading.enumerate()} <= before


def test_a_callback_may_fail():
    """Callbacks run on the executor's threads; an error in one stays in its own future."""
    graph = graph_of([100], "ps", "exact", 2)
    programs = [graph.slice(rank) for rank in range(2)]
    buckets = gradients(100, 2, seed=0)

    def explode(_):
        raise KeyError("mine")

    with world(2) as executors:
        first = [
            e.submit(p, b, {}, 0) for e, p, b in zip(executors, programs, buckets, strict=True)
        ]
        chained = first[0].then(explode)
        with pytest.raises(RuntimeError, match="KeyError: 'mine'"):
            chained.wait()
        torch.futures.wait_all(first)
        run(executors, graph, buckets)


@pytest.mark.parametrize(
    "bucket",
    [
        torch.zeros(99),
        torch.zeros(100, dtype=torch.float64),
        torch.zeros(10, 10),
        torch.zeros(200)[::2],
    ],
)
def test_bad_buckets_are_refused(bucket):
    graph = graph_of([100], "ps", "exact", 2)
    with world(2) as executors:
        with pytest.raises(PlanError, match="flat contiguous float32 tensor on cpu"):
            executors[0].submit(graph.slice(0), bucket, {}, 0)
        with pytest.raises(PlanError, match="a program for rank 1 of 2 on rank 0 of 2"):
            executors[0].submit(graph.slice(1), torch.zeros(100), {}, 0)


def test_counters_can_be_copied():
    with world(2) as executors:
        assert replace(executors[0].counters) == executors[0].counters


AT_WORK = """
import threading
import torch
from casync.runtime.executor import Executor
from casync.runtime.options import RunOptions
from casync.testing import Hub
from tests.casync.fakes import CODECS, graph_of

begun, a = threading.Event(), torch.ones(800, 800)

def work(task):
    begun.set()
    for _ in range(5):
        torch.mm(a, a)

executor = Executor(Hub(2).endpoints()[0], CODECS, RunOptions(delay=work))
executor.submit(graph_of([100], "exchange", "sparse", 2).slice(0), torch.ones(100), {}, 0)
begun.wait()
"""


@pytest.mark.slow
def test_a_process_may_end_while_a_lane_is_at_work():
    """A process ends cleanly: see [Note: exit] in shutdown.py."""
    done = subprocess.run(
        [sys.executable, "-c", AT_WORK], capture_output=True, text=True, timeout=HANG, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_job_may_end_before_its_submit_does():
    graph = graph_of([7], "exchange", "exact", 2)
    with world(2, timeout=HANG) as executors:
        lanes, running = executors[0]._lanes, executors[0]._running
        issue = lanes.issue

        def issue_all(job, ready):
            issue(job, ready)
            while threading.current_thread() is threading.main_thread() and running:
                pass

        lanes.issue = issue_all
        other = executors[1].submit(graph.slice(1), torch.ones(7), {}, 0)
        bucket = torch.ones(7)
        assert executors[0].submit(graph.slice(0), bucket, {}, 0).wait() is bucket
        other.wait()


def test_sums_of_two_executors_of_a_rank():
    one = Counters(4, jobs=2, bytes_sent=10, encode_seconds=0.5, bytes_unused={"a": 1})
    other = Counters(4, jobs=1, bytes_sent=5, encode_seconds=0.25, bytes_unused={"a": 2, "b": 3})
    both = Counters(4, jobs=3, bytes_sent=15, encode_seconds=0.75, bytes_unused={"a": 3, "b": 3})
    assert one + other == both


def test_lanes_keep_denormal_numbers_whatever_the_thread_that_makes_them_does():
    """Ranks that differ in flushing would decode a payload to different bits."""
    graph = graph_of([300], "exchange", "exact", 2)
    buckets = [torch.full((300,), 1e-40) for _ in range(2)]
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor always keeps them")
    try:
        with world(2, timeout=HANG) as executors:
            averages = [average.clone() for average in run(executors, graph, buckets)]
    finally:
        torch.set_flush_denormal(False)
    for average in averages:
        assert (average > 0).all()
