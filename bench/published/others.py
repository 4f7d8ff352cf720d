"""Espresso's 64 GPUs, SIDCo over TCP's efficiency, 1-bit Adam, SDP4Bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from bench.published.data import Cell, Data, Number
from bench.published.hipress_paper import Paper, kernels, model_of, plain
from bench.published.systems import Kernels, Stack, Training, byteps, hipress, inline, ring
from hipress.tools.simulate.cluster import Cluster, Link

__all__ = ["Sidco", "espresso", "link_of", "onebit_adam", "sdp4bit", "sidco"]

TCP = (0.05, 0.08, 0.12, 0.2, 0.27, 0.4, 0.52, 0.7, 0.85)  # shares of 25 Gbit/s


def espresso(data: Data, paper: Paper) -> Iterator[Cell]:
    """float32 by BytePS, and HiPress, with the numbers that were fitted to HiPress's own table."""
    for model, row in data["models"].items():
        nodes, gpus = int(data["nodes"].value), int(data["gpus_a_node"].value)
        batch, bound = row["batch"].value, row["bound"].value
        work = Training.of(model_of(model), nodes * gpus * batch / bound)
        for system in ("fp32", "HiPress"):
            step = _espresso_step(data, paper, row, work, system)
            number, got = row[system], nodes * gpus * batch / step
            seconds = nodes * gpus * batch / number.value
            exposed = (1e3 * (seconds - work.step), 1e3 * (step - work.step))
            yield Cell("espresso", model, system, number.value, got, number.kind, exposed)


def _espresso_step(data: Data, paper: Paper, row: Data, work: Training, system: str) -> float:
    fit, nodes = plain(paper.data["fit"]), int(data["nodes"].value)
    served = [fit[f"byteps_{name}"] for name in ("share", "message", "slows")]
    ours = (fit["ring_share"], fit["byteps_message"], fit["ring_slows"])
    cluster = paper.cluster(nodes, *(served if system == "fp32" else ours))
    cluster = replace(cluster, between=link_of(cluster.between, row["nic"].value, data))
    if row["nvlink"] == "no":
        cluster = replace(cluster, inside=Link(data["pcie_inside"].value, 1e-5))
    if system == "fp32":
        return byteps(work, cluster, Stack(server=fit["byteps_server"]))
    own = kernels(row["codec"], paper.data["cluster"]["memory"].value)
    return hipress(work, cluster, Stack(), replace(own, encode=data["encode"].value), "ps")


def link_of(fitted: Link, bandwidth: float, data: Data) -> Link:
    """The link of a stack: no faster than the fitted one; of a slower link, a share."""
    reach = min(data["reach"].value, fitted.speed / bandwidth)
    return replace(fitted, bandwidth=bandwidth, reach=reach)


@dataclass(frozen=True)
class Sidco:
    """SIDCo's speed-ups over the others at an efficiency of TCP."""

    share: float
    over_none: float
    over_dgc: float


def sidco(data: Data) -> tuple[Sidco, ...]:
    """Speed-ups over a range of efficiencies."""
    return tuple(_sidco(plain(data), share) for share in TCP)


def _sidco(c: Data, share: float) -> Sidco:
    from hipress.tools.models.device_speeds import DEVICES

    work = Training.of(model_of(c["model"]), c["step"])
    device, hop = replace(DEVICES["v100"], slows=0.1), c["collective"] / (2 * (c["workers"] - 1))
    link = Link(c["nic"], 5e-5, share, hop)
    cluster = Cluster(int(c["workers"]), 1, device, link, link)
    stack, rate = Stack(most=0.0), 2 * c["ratio"]  # a value and its position
    none = ring(work, cluster, stack)
    steps = [
        inline(work, cluster, stack, Kernels(rate, encode, 1e-13), 6, 8e-6)
        for encode in (c["sidco_encode"] / c["memory"], c["dgc_encode"])
    ]
    return Sidco(share, none / steps[0], steps[1] / steps[0])


def sidco_cells(data: Data) -> Iterator[Cell]:
    """The published factors ("up to"), at the lowest efficiency of TCP in the curve."""
    nearest = min(sidco(data), key=lambda each: abs(each.share - 0.08))
    for column, got in (("over_none", nearest.over_none), ("over_dgc", nearest.over_dgc)):
        number = data[column]
        row = f"LSTM, TCP at {nearest.share:.0%}"
        yield Cell("sidco", row, column, number.value, got, number.kind)


def onebit_adam(data: Data) -> Iterator[Cell]:
    """The compressed phase: 1 of 16 bits, in a reduce-scatter and an all-gather of payloads."""
    c, number = plain(data), data["speed_up"]
    nodes, size = int(c["nodes"]), 2.0 * model_of(c["model"]).numel
    sent = 2 * (nodes - 1) / nodes * size / c["nic"]
    computed = sent * (1 / c["all_reduce_share"] - 1)
    got = (sent + computed) / (sent / 16 + computed)
    yield Cell("1-bit Adam", c["model"], "speed-up", number.value, got, number.kind)


def sdp4bit(data: Data) -> Iterator[Cell]:
    """Predictions from bytes alone.

    Without communication all sizes of a cluster would compute equally fast, at a speed fitted to
    the smallest; the share of waiting follows from the baseline.
    """
    ratio = data["compressed_bits"].value / data["bits"].value
    for cluster, rows in data["clusters"].items():
        first = next(iter(rows.values()))
        alone = _alone(first[0].value, first[1].value, ratio)
        for size, (base, number) in rows.items():
            assert isinstance(number, Number)
            got = alone / (1 + ratio * (alone / base.value - 1))
            yield Cell("SDP4Bit", cluster, size, number.value, got, number.kind)


def _alone(base: float, compressed: float, ratio: float) -> float:
    """Solve alone / compressed = 1 + ratio (alone / base - 1) for alone."""
    return (1 - ratio) / (1 / compressed - ratio / base)
