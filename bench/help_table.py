"""Does it help me? Predicted steps by link and model, for README.md and docs/start/help.md.

`python -m bench.pages` writes both tables: HELP, the answers, and HAND, the arithmetic beside them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bench.commands import RESULTS
from hipress.tools.models import own
from hipress.tools.run.figures import markdown_table
from hipress.tools.simulate import cluster as clusters
from hipress.tools.simulate import compared, sharded
from hipress.tools.simulate.cluster import FSDP2, HSDP, Cluster
from hipress.tools.simulate.compared import BASELINE
from hipress.tools.simulate.simulation import PAYS, Simulation

__all__ = [
    "CASES",
    "Answer",
    "Case",
    "answer",
    "arithmetic",
    "by_hand",
    "host_milliseconds",
    "links",
    "simulation",
    "table",
]

CLUSTERS = Path(__file__).parents[1] / "examples" / "clusters"
MODELS = {"gpt2": "GPT-2 124M", "llama-1b": "Llama 1B", "llama-8b": "Llama 8B"}
DDP = "DDP"
#: columns: how a model is trained, and the compressors there
COLUMNS = (
    *((model, DDP, "int4_group") for model in MODELS),
    *((model, FSDP2, "int4_group+int8_group") for model in MODELS),
    ("llama-8b", HSDP, "int4_group"),
)
#: rows: a file of CLUSTERS, and the rate between its nodes in Mbit/s
ROWS = (
    *(("nodes_of_8", rate) for rate in (1_000, 10_000, 25_000, 100_000)),
    *(("single_machines", rate) for rate in (100, 1_000)),
)
#: links between single machines, as docs/start/slow.md names them, and their Mbit/s
LINKS = {
    "Wi-Fi": 300,
    "Ethernet": 1_000,
    "Ethernet or USB": 2_500,
    "Ethernet, Thunderbolt by IP": 10_000,
    "Thunderbolt or USB4 by IP, at best": 20_000,
    "Ethernet of a data centre": 25_000,
    "ConnectX-7, as of DGX Spark": 200_000,
}
MEGABIT = 1.25e5  # bytes
TOKENS = 1 << 19  # of a step, on all ranks together
BITS = {"bf16": 16.0, "int4_group": 4.25, "int8_group": 8.0625}  # of an element, on the wire


@dataclass(frozen=True)
class Case:
    """A cell of the table. rate: Mbit/s of a node's link."""

    file: str
    rate: int
    model: str
    way: str  # DDP, fsdp2 or hsdp
    method: str


@dataclass(frozen=True)
class Answer:
    """Predicted seconds of a step in 16 bits, by our method, and of the same work on one node."""

    common: float
    ours: float
    one_node: float

    def text(self, host: float) -> str:
        """The answer: yes if a step is shorter with so many seconds of the host's work besides, and
        shorter than on one node."""
        shorter = self.common >= PAYS * (self.ours + host)
        told = "**yes**" if shorter else "no"
        if self.one_node < self.ours + host:
            told = "no, one node alone is faster"
        return f"{told}: {figure(self.common)} to {figure(self.ours)} (p)"


CASES = tuple(Case(*row, *column) for row in ROWS for column in COLUMNS)


@cache
def _cluster(file: str) -> Cluster:
    return clusters.read(CLUSTERS / f"{file}.yaml")


@cache
def simulation(file: str, model: str, way: str, method: str) -> Simulation:
    """A model's step on a cluster, in 16 bits and by the method."""
    texts, cluster, description = (BASELINE, method), _cluster(file), own.find(model)
    batches = TOKENS // (cluster.ranks * description.model.batch)
    if way == DDP:
        methods = [compared.parse(each) for each in texts]
        return Simulation(cluster, description, methods, micro_batches=batches)
    return sharded.simulation(way, cluster, description, texts, micro_batches=batches)


def answer(case: Case) -> Answer | str:
    """The predicted steps, or the reason why there are none."""
    cluster = _cluster(case.file)
    if case.way == HSDP and cluster.ranks_per_node == 1:
        return "-"
    predicted = simulation(case.file, case.model, case.way, case.method)
    if predicted.memory(case.method, None) > cluster.device.holds:
        return "does not fit"
    rate = MEGABIT * case.rate
    common, ours = (predicted.outcome(each, rate).step for each in (BASELINE, case.method))
    return Answer(common, ours, cluster.nodes * predicted.alone_seconds)


def host_milliseconds(results: Path = RESULTS) -> list[float]:
    """Milliseconds that the host needs more than with DDP for a step of GPT-2 small by int4_group
    on an H100 without graphs, in all measurements, sorted."""
    data = json.loads((results / "gpu_step.json").read_text())
    return sorted(
        _host(run["rows"], "int4_group", ranks) - _host(run["rows"], "ddp", ranks)
        for run in (data, data["again"])
        for ranks in data["ranks"]
    )


def _host(rows: list[dict[str, Any]], codec: str, ranks: int) -> float:
    (found,) = (
        float(row["host_ms"])
        for row in rows
        if row["codec"] == codec and row["ranks"] == ranks and not row["captured"]
    )
    return found


def table() -> str:
    """Answers, a row for each link."""
    ways = {DDP: DDP, FSDP2: "FSDP2", HSDP: "HSDP"}
    head = ["link between", *(f"{MODELS[model]}, {ways[way]}" for model, way, _ in COLUMNS)]
    return markdown_table(head, [[_place(*row), *_cells(*row)] for row in ROWS])


def links(file: str = "single_machines") -> str:
    """Answers by kind of link, for DDP on two machines of one GPU."""
    ways = [column for column in COLUMNS if column[1] == DDP and column[0] != "llama-8b"]
    head = ["link", "rate", *(f"{MODELS[model]}, DDP" for model, _, _ in ways)]
    rows = [[name, rate_text(rate), *_cells(file, rate, ways)] for name, rate in LINKS.items()]
    return markdown_table(head, rows)


def _place(file: str, rate: int) -> str:
    cluster = _cluster(file)
    each = f"nodes of {cluster.ranks_per_node}" if cluster.ranks_per_node > 1 else "machines of one"
    return f"{each} {cluster.device.name.upper()}, {rate_text(rate)}"


def figure(value: float) -> str:
    """Three digits, or a whole number."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def rate_text(rate: int) -> str:
    """A rate in Mbit/s as text: 25 Gbit/s."""
    return f"{rate / 1000:g} Gbit/s" if rate >= 1000 else f"{rate} Mbit/s"


def _cells(
    file: str, rate: int, columns: Sequence[tuple[str, str, str]] = COLUMNS
) -> Iterator[str]:
    host = 1e-3 * host_milliseconds()[-1]
    for column in columns:
        found = answer(Case(file, rate, *column))
        yield found if isinstance(found, str) else found.text(host)


def arithmetic(file: str = "nodes_of_8", rate: int = 25_000) -> str:
    """A row of the table by hand: bytes, seconds of the link and of the computation, and the
    prediction."""
    head = (
        "model",
        "method",
        "micro-batches",
        "GB a node",
        "s of the link",
        "s alone",
        "predicted",
    )
    rows = []
    for model, way, method in COLUMNS:
        case = Case(file, rate, model, way, method)
        found = answer(case)
        if isinstance(found, Answer):
            for text, step in ((BASELINE, found.common), (method, found.ours)):
                sent, link, alone = by_hand(case, text)
                name = f"{MODELS[model]}, {way.upper()}"
                batches = str(simulation(file, model, way, method).micro_batches)
                figures = (figure(each) for each in (1e-9 * sent, link, alone, step))
                rows.append([name, f"`{text}`", batches, *figures])
    return markdown_table(head, rows)


def by_hand(case: Case, text: str) -> tuple[float, float, float]:
    """Bytes that a node sends in a step, seconds of its link for them, and seconds of computation,
    by the formulas of docs/start/help.md. text: the method, or bf16."""
    cluster = _cluster(case.file)
    predicted = simulation(case.file, case.model, case.way, case.method)
    elements, root = sizes(case.model)
    # PyTorch's FSDP2 and DDP go around all ranks, ours around the nodes
    n = cluster.ranks if text == BASELINE and case.way != HSDP else cluster.nodes
    gradients, _, weights = text.partition("+")
    share, bits = (n - 1) / n / 8, BITS[gradients]
    sent = 2 * share * bits * elements
    if case.way == FSDP2:
        gathered = predicted.micro_batches * (2 * elements - root)
        sent = share * (bits * elements + BITS[weights or gradients] * gathered)
    link = sent / (MEGABIT * case.rate * cluster.between.reach)
    return sent, link, predicted.alone_seconds


def sizes(model: str) -> tuple[int, int]:
    """Elements of a model, and of its root: all that belongs to no numbered layer."""
    gradients = own.find(model).model.gradients
    root = [g.numel for g in gradients if not any(p.isdigit() for p in g.name.split("."))]
    return sum(g.numel for g in gradients), sum(root)
