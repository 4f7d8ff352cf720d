"""The plans that "auto" tries beside a search for each tensor, and beside a rule without costs.

    python -m bench.choices    # about 3 minutes; writes choices.json

Places are this repository's emulated hosts, and the clusters and models of bench/published, also on
other links. Each choice is judged by the simulated timeline: the step of the fastest plan among
those that it would try, over the step of the plan that a search by the timeline finds. The search
begins with the fastest codec and strategy for all tensors, and then changes the choice of each of
the largest eight tensors, and of the others by length, as long as a step gets faster: to one of the
six that are fastest for all, or to none.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import ranks
from bench.commands import RESULTS, refusing
from bench.published import data as data_
from bench.published.emulated import Emulated, params_of, read_places
from bench.published.hipress_paper import Paper, plain
from bench.published.others import link_of
from casync.codec import Codec
from casync.cost import Costs
from hipress import options
from hipress.choose.search import Registry, Search, Way, candidates
from hipress.choose.workload import Workload, kinds, timed
from hipress.model.params import Param
from hipress.tools.models import own
from hipress.tools.objective import Objective
from hipress.tools.refusals import check_output
from hipress.tools.run.figures import markdown_table, percentile
from hipress.tools.simulate.cluster import Cluster, Link
from hipress.tools.simulate.compared import Method
from hipress.tools.simulate.costs import codec_costs, costs

EMULATED, PUBLISHED, LINKS = "emulated hosts", "published clusters", "16 x 8 V100, other links"
NODES = (1, 2, 4, 8, 16)
GIGABITS = (1, 5, 10, 25, 50, 200, 400)
CHOICES = {
    "tried": 'tried by "auto": three by a formula, or no compression',
    "first": "the first of these, or no compression",
    "rule": "fewest bits, or no compression",
}
WAYS = 6  # that the search tries for each tensor
LIMIT = 1.02  # ratio above which a cell counts as lost


@dataclass(frozen=True)
class Site:
    """A model on a cluster."""

    group: str
    name: str
    optimizer: str
    params: Sequence[Param]
    codecs: dict[str, Codec]
    cluster: Cluster
    costs: Costs
    workload: Workload


@dataclass(frozen=True)
class Row:
    """A site's predicted seconds of a step, by choice."""

    group: str
    name: str
    search: float
    native: float
    tried: float
    first: float
    rule: float


def _candidates(optimizer: str) -> dict[str, Codec]:
    return candidates(options.make("auto", optimizer=optimizer), "reference")


def emulated() -> Iterator[Site]:
    """This repository's emulated hosts, by the cells of bench/results."""
    data = data_.load()["emulated"]
    hosts, known = Emulated.of(data), set[tuple[object, ...]]()
    for place in read_places(data):
        key = (place.hosts, place.rate, place.optimizer, place.kind, place.late)
        if key in known or not place.rate:
            continue
        known.add(key)
        codecs = _candidates(place.optimizer)
        methods = {key: Method(key, codec) for key, codec in codecs.items()}
        cluster = hosts.cluster(place)
        priced = costs(cluster, {key: hosts.cost(each, place) for key, each in methods.items()})
        works = [hosts.workload(place, each) for each in methods.values()]
        payloads = {key: share for work in works for key, share in work.payloads.items()}
        work = replace(works[0], payloads=payloads)
        name = f"{place.hosts} hosts, {place.rate}, {place.kind}, {place.optimizer}"
        yield Site(
            EMULATED, name, place.optimizer, params_of(place.kind), codecs, cluster, priced, work
        )


def published() -> Iterator[Site]:
    """The models and clusters of HiPress and Espresso, and HiPress's with other links."""
    data = data_.load()
    paper, espresso = Paper(data["hipress"]), data["espresso"]
    fit = plain(paper.data["fit"])

    def cluster(nodes: int) -> Cluster:
        made = paper.cluster(nodes, fit["ring_share"], fit["byteps_message"], fit["ring_slows"])
        return replace(made, pcie=None)

    for model in paper.models:
        for nodes in NODES:
            name = f"{model}, {nodes} x 8"
            yield _site(PUBLISHED, name, cluster(nodes), model, paper.single(model))
        for gigabits in GIGABITS:
            slower = cluster(NODES[-1]).with_bandwidth(gigabits * 1.25e8)
            name = f"{model}, {gigabits} Gbit/s"
            yield _site(LINKS, name, slower, model, paper.single(model))
    nodes, gpus = int(espresso["nodes"].value), int(espresso["gpus_a_node"].value)
    for model, row in espresso["models"].items():
        made = cluster(nodes)
        made = replace(made, between=link_of(made.between, row["nic"].value, espresso))
        if row["nvlink"] == "no":
            made = replace(made, inside=Link(espresso["pcie_inside"].value, 1e-5))
        alone = nodes * gpus * row["batch"].value / row["bound"].value
        yield _site(PUBLISHED, f"Espresso's {model}", made, model, alone)


def _site(group: str, name: str, cluster: Cluster, model: str, alone: float) -> Site:
    """A model on a cluster. alone: seconds of a step without communication."""
    description = own.find(model)
    timing = description.model.timed(cluster.device.speed).scaled(alone)
    work = timed(description.backwards, timing.ready, timing.forward)
    codecs = _candidates("sgd")
    priced = costs(cluster, codec_costs(cluster, codecs))
    return Site(group, name, "sgd", description.params, codecs, cluster, priced, work)


class Judge:
    """Simulated steps of a site's plans."""

    def __init__(self, site: Site) -> None:
        made = options.make("auto", optimizer=site.optimizer)
        registry = Registry(site.codecs, made)
        self.search = Search(
            site.params, registry, made, site.cluster.topology, slots=not site.cluster.device.host
        )
        self.site, self.kinds = site, kinds(site.params)
        self.work = self.search.expecting(site.workload)
        self._objective = Objective(
            self.kinds, site.codecs, site.cluster.topology, site.costs, self.work
        )

    def step(self, ways: Sequence[Way | None]) -> float:
        """Seconds of a step with these ways of the kinds."""
        return self._objective.step(ways).seconds

    def everywhere(self, way: Way) -> list[Way | None]:
        """The way for all kinds that it suits."""
        return [
            way if self.search.codecs.refuses(way.codec, kind[0]) is None else None
            for kind in self.kinds
        ]

    def by_tensor(self, ways: Sequence[Way]) -> float:
        """The fastest step of a search from the fastest way for all on."""
        native: list[Way | None] = [None] * len(self.kinds)
        some = sorted(ways, key=lambda way: self.step(self.everywhere(way)))[:WAYS]
        best = min([native, *map(self.everywhere, some)], key=self.step)
        changed = True
        while changed:
            changed = False
            for number in range(len(self.kinds)):
                for way in (None, *some):
                    if way is not None and self.everywhere(way)[number] is None:
                        continue
                    other = [*best[:number], way, *best[number + 1 :]]
                    if self.step(other) < 0.999 * self.step(best):
                        best, changed = other, True
        return self.step(best)


def judge(site: Site) -> Row:
    """The steps of a site by choice."""
    at = Judge(site)
    ways = at.search.ranked(site.costs, at.work)
    native = at.step([None] * len(at.kinds))
    tried = [at.step(at.everywhere(way)) for way in ways]
    few = min(site.codecs, key=lambda key: (" " in key, site.codecs[key].payload_bytes(1 << 20)))
    strategy = "hierarchical" if site.cluster.topology.nested else "ps"
    return Row(
        site.group, site.name, at.by_tensor(at.search.ways), native, min([native, *tried]),
        min([native, *tried[:1]]), min(native, at.step(at.everywhere(Way(few, strategy)))),
    )  # fmt: skip


def read(results: Path) -> list[Row]:
    """The recorded rows."""
    text = (results / "choices.json").read_text("utf-8")
    return [Row(**each) for each in json.loads(text)["rows"]]


def table(rows: Sequence[Row]) -> str:
    """A row for each group and choice, as Markdown."""
    lines = []
    for group in dict.fromkeys(row.group for row in rows):
        some = [row for row in rows if row.group == group]
        for key, text in CHOICES.items():
            ratios = [getattr(row, key) / row.search for row in some]
            ends = (statistics.median(ratios), percentile(ratios, 0.9), max(ratios))
            lost = sum(ratio > LIMIT for ratio in ratios)
            lines.append(
                (f"{group} ({len(some)})", text, *(f"{each:.3f}" for each in ends), str(lost))
            )
    head = ("places", "choice", "median", "90%", "worst", f"above {LIMIT:g}")
    return markdown_table(head, lines)


def main(
    output: Annotated[Path, typer.Option(help="Folder of choices.json.")] = RESULTS,
) -> None:
    """Judge the choices in all places."""
    with refusing():
        check_output(output)
    rows: list[dict[str, Any]] = []
    for site in (*emulated(), *published()):
        rows.append(vars(judge(site)))
        print(" ".join(f"{key}={value:.4g}" if isinstance(value, float) else value
                       for key, value in rows[-1].items()), flush=True)  # fmt: skip
    text = table([Row(**each) for each in rows])
    ranks.record(output, "bench.choices", "Choices beside a search", text, rows=rows)


if __name__ == "__main__":
    typer.run(main)
