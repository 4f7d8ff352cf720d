"""The planner's prediction of a wrapped module's step, as spans."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from casync.codec import FLOAT_BYTES
from casync.cost import Costs, Transfer
from casync.predict.timeline import Event, Load
from casync.stages import WORK
from hipress.choose.places import Places
from hipress.choose.plan import Decision
from hipress.choose.search import Registry, Search, Way
from hipress.choose.workload import TimedBucket, Workload, estimate
from hipress.ranks.groups import Agreement
from hipress.session import Session
from hipress.tools.objective import Objective
from hipress.tools.tracing.spans import BACKWARD, BUCKET, DECODE, ENCODE, WIRE, Point, Span

POINTS = 12  # points of a sweep on either side of the measured bandwidth


def measure_costs(session: Session) -> Costs:
    """Measure the link and the plan's codecs. Every rank must call this between two steps."""
    plan, placement = session.current_plan, session.placement
    registry = Registry(plan.codecs, session.options, placement.target)
    search = Search(session.params, registry, session.options, plan.topology)
    places = Places.of(search, session.coordinator, placement)
    link = Agreement(session.coordinator, "trace")
    try:
        measured = link.run(places.measure, "measuring the link")
    finally:
        places.close()
    return measured.costs[0]


def predict(session: Session, costs: Costs, alone: float, recorded: Sequence[Span]) -> list[Span]:
    """The spans of a predicted step.

    alone: seconds of a backward pass without synchronization. recorded: the spans of a real step,
    which give the times at which gradients are ready.
    """
    load = workload(session, alone, recorded)
    first = alone - load.backward  # seconds until the first bucket is ready
    ways = [_way(decision) for decision in session.current_plan.decisions]
    objective = _objective(session, costs, load)
    loads = objective.loads(ways)
    step = objective.simulated(ways, events=True)
    starts = [bucket.ready for bucket in load.buckets]
    spans = [Span(BACKWARD, 0.0, first + step.backward)]
    spans += _spans(step.events, loads, starts, first)
    return spans


def sweep(
    session: Session, costs: Costs, alone: float, recorded: Sequence[Span], rest: float
) -> list[Point]:
    """Predicted steps on links of 1/100 to 100 times the measured bandwidth.

    rest: seconds of a step besides its backward pass.
    """
    load = workload(session, alone, recorded)
    around = alone - load.backward + rest
    ways = [_way(decision) for decision in session.current_plan.decisions]
    native = [None] * len(ways)
    measured = costs.to(1).line.per_byte or 1e-12
    points = []
    for power in range(-POINTS, POINTS + 1):
        factor = 10 ** (2 * power / POINTS)
        slower, half = _with_link(costs, factor), _with_link(costs, factor / 2)
        seconds, fp32, bf16 = (
            _objective(session, each, load).simulated(chosen).seconds + around
            for each, chosen in ((slower, ways), (slower, native), (half, native))
        )
        points.append(Point(1 / (measured * factor), seconds, fp32, bf16))
    return points


def _objective(session: Session, costs: Costs, load: Workload) -> Objective:
    plan = session.current_plan
    kinds = [(param,) for param in session.params]
    chains = max(1, len(load.buckets))
    least = dict.fromkeys(plan.codecs, plan.least)
    return Objective(kinds, plan.codecs, plan.topology, costs, load, loads=chains, least=least)


def _with_link(costs: Costs, factor: float) -> Costs:
    """Costs if a byte takes `factor` times as long on the links."""

    def scaled(each: Transfer) -> Transfer:
        return replace(each, line=replace(each.line, per_byte=each.line.per_byte * factor))

    exchange = {peers: scaled(each) for peers, each in costs.exchange.items()}
    reduce = {kind: scaled(each) for kind, each in costs.reduce.items()}
    return replace(costs, exchange=exchange, reduce=reduce)


def _way(decision: Decision) -> Way | None:
    return None if decision.codec is None else Way(decision.codec, decision.strategy)


def workload(session: Session, alone: float, recorded: Sequence[Span]) -> Workload:
    """DDP's buckets, ready as in the recorded step if that has equally many.

    A recorded backward pass is slowed down by work beside it, so its times are scaled to `alone`.
    """
    ready = sorted(span.begin for span in recorded if span.what == BUCKET)
    over = max(span.end for span in recorded if span.what == BACKWARD)
    buckets = estimate(session.params).buckets
    if len(buckets) != len(ready):
        ready = [over * (number + 1) / len(buckets) for number in range(len(buckets))]
    scaled = [at * alone / over for at in ready]
    first = scaled[0] if scaled else 0.0
    timed = (
        TimedBucket(each.indices, at - first) for each, at in zip(buckets, scaled, strict=True)
    )
    return Workload(tuple(timed), alone - first, payloads=_payloads(session))


def _payloads(session: Session) -> dict[tuple[str, int], float]:
    """Payload bytes sent per gradient byte, less those elided as repeats in the steps so far."""
    counters = session.engine.counters if session.engine else None
    if counters is None or not counters.bytes_sent:
        return {}
    sent_share = 1 - counters.bytes_spared / counters.bytes_sent
    return {
        (key, param.index): sent_share
        * codec.payload_bytes(param.numel)
        / (FLOAT_BYTES * param.numel)
        for key, codec in session.current_plan.codecs.items()
        for param in session.params
        if codec.suits(param.numel)
    }


def _spans(
    events: Sequence[Event], loads: Sequence[Load], starts: Sequence[float], first: float
) -> Iterator[Span]:
    ends: dict[int, float] = {}
    for event in events:
        load = loads[event.load]
        bucket = min(bisect_left(starts, load.ready - 1e-9), len(starts) - 1)
        ends[bucket] = max(ends.get(bucket, 0.0), event.end)
        yield Span(_what(event, load), first + event.begin, first + event.end, bucket)
    for bucket, end in ends.items():
        yield Span(BUCKET, first + starts[bucket], first + end, bucket)


def _what(event: Event, load: Load) -> str:
    if event.lane != WORK:
        return WIRE
    last = max(number for number, stage in enumerate(load.stages) if stage.lane == WORK)
    return DECODE if event.stage == last else ENCODE  # an owner's last merge is part of its encode
