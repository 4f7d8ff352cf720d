"""Tables of docs/measurements, made from bench/results by `python -m bench.pages`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import loss_cells, outer
from bench.loss_cells import FP32, MOMENTUM, SHARDED, TRIAL, Cell
from bench.loss_tables import Row
from bench.loss_workloads import ALL
from bench.time_to_loss import WINDOW, Reached, Times, reach, reached
from hipress.tools.run.figures import FINAL, markdown_table

Data = dict[str, Any]
SLACK = 0.015  # above float32's loss, for times to a loss
#: methods that have a table apart from compressors of gradients, by the beginning of their names
WAYS = {MOMENTUM: "momentum", SHARDED: "`hipress.shard`", TRIAL: "with a trial of `auto`"}
VARIANTS = {"refresh": "v refreshed", "follow": "divisor follows the momentum"}
#: kernels of the table of speeds on GPUs
KERNELS = ("bf16", "int8_group", "int4_group", "int3_group", "int3_entropy", "onebit_group", "topk",
           "dgc", "powersgd", "mxfp4", "nvfp4", "nf4")  # fmt: skip


def of_ways(rows: Sequence[Row]) -> str:
    """Losses of all that is not an average of compressed gradients."""
    head = ("what", "workload", "ranks", "steps", "seeds", "loss against fp32's")
    order = [*ALL]
    lines = [
        (
            f"{about} `{row.method.removeprefix(way)}`", row.workload, str(ALL[row.workload].ranks),
            str(row.steps), str(row.seeds), _difference(row),
        )
        for way, about in WAYS.items()
        for row in sorted(rows, key=lambda r: (order.index(r.workload), r.method, r.steps))
        if row.method.startswith(way)
    ]  # fmt: skip
    return markdown_table(head, lines)


def _difference(row: Row) -> str:
    if row.difference != row.difference:
        return "**diverged**"
    spread = f" ({row.spread[0]:+.1%} to {row.spread[1]:+.1%})" if row.seeds > 1 else ""
    return f"{row.difference:+.1%}{spread}"


def of_gpt2(results: Path) -> str:
    """Losses of GPT-2 small: bench/results/gpt2_losses.jsonl, once a GPU has written it."""
    path = results / "gpt2_losses.jsonl"
    if not path.exists():
        return "Not measured yet."
    cells = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    base = fmean(each["loss"] for each in cells if each["method"].startswith("wrap:bf16"))
    head = ("method", "seed", "loss", "to 16 bits", "bits an element", "ms a step", "host ms")
    rows = [
        (
            f"`{c['method']}`", str(c["seed"]), f"{c['loss']:.3f}", f"{c['loss'] / base - 1:+.2%}",
            f"{c['bits']:.2f}", f"{c['ms']:.0f}", f"{c['host_ms']:.0f}",
        )
        for c in cells
    ]  # fmt: skip
    first = cells[0]
    about = f"{first['steps']} steps of {first['tokens']:,} tokens on {first['device']}"
    return f"{markdown_table(head, rows)}\n{about}, {first['words']:,} words, {first['date']}."


def frozen(results: Path) -> str:
    """Variants of Adam after the freeze of v: bench/results/freezes.jsonl."""
    lines = map(json.loads, (results / "freezes.jsonl").read_text("utf-8").splitlines())
    head = ("workload", "steps", "seed", "after the freeze", "ranks clipped to",
            "loss against fp32's")  # fmt: skip
    return markdown_table(
        head,
        [
            (d["workload"], str(d["steps"]), str(d["seed"]), _variant(d), f"{d['clip']:g}",
             f"{d['difference']:+.1%}")
            for d in sorted(lines, key=lambda d: (d["workload"], d["steps"], d["seed"]))
        ],
    )  # fmt: skip


def _variant(line: Data) -> str:
    parts = [text for name, text in VARIANTS.items() if line[name]]
    parts += ["from the first step on"] if not line["freeze"] else []
    parts += ["from half on ranks also step alone"] if line["local"] < 1 else []
    return ", ".join(parts or ["v stays"])


def times_to_loss(results: Path, names: Sequence[str]) -> str:
    """Minutes until a training is within SLACK of float32's loss after 1000 steps, by link."""
    workload = "lstm-adamw"
    cells = loss_cells.read(results / loss_cells.CELLS.name)
    rows: list[tuple[str, ...]] = []
    for name in names:
        for times in Times.read(results / f"{name}.json"):
            if (alone := times.seconds.get("")) is not None:
                rows.append((_link(times), "no communication", f"{1e3 * alone:.0f}", "", ""))
            every = [*reach(cells, workload, 1000, times, SLACK)]
            every += outer.reach_by_rounds(cells, workload, times, SLACK)
            rows += [(_link(times), *_told(each)) for each in every]
    return markdown_table(("link", "method", "ms a step", "steps, by seed", "minutes"), rows)


def _link(times: Times) -> str:
    rate = times.place.rpartition(" ")[2]
    return rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")


def _told(each: Reached) -> tuple[str, ...]:
    method, *rest = each.row
    return (f"`{short(method)}`", *rest)


def short(loop: str) -> str:
    """A method without the numbers of an outer loop that are usual."""
    return re.sub(r":delay=0(?=:)|:fragments=1(?=:)|:lr=1:momentum=0$", "", loop)


def sites(results: Path) -> str:
    """Losses of sites that average weights in rounds, and of ranks that average in each step."""
    cells = loss_cells.read(results / loss_cells.CELLS.name)
    lines = [json.loads(line) for line in (results / "outer.jsonl").read_text().splitlines()]
    by_key: dict[tuple[str, str, int], dict[int, list[float]]] = {}
    for cell in cells:
        if cell.steps == 1000 and cell.method in (FP32, f"{MOMENTUM}onebit_fine"):
            by_key.setdefault((cell.workload, cell.method, 1000), {})[cell.seed] = cell.curve
    for line in lines:
        loop = outer.Loop(**{name: line[name] for name in outer.Loop.__dataclass_fields__})
        key = line["workload"], short(loop.method), line["steps"]
        by_key.setdefault(key, {})[line["seed"]] = line["curve"]
    wanted = {line["workload"] for line in lines}
    plain = {(c.workload, c.seed): c for c in cells if (c.method, c.steps) == (FP32, 1000)}
    rows = [
        row
        for key in sorted(by_key, key=lambda key: ([*ALL].index(key[0]), key[1] != FP32))
        if key[0] in wanted
        for row in _site_row(key, by_key[key], plain)
    ]
    head = ("workload", "method", "of a training of", "steps to the loss, by seed", "end")
    return markdown_table(head, rows)


def _site_row(
    key: tuple[str, str, int],
    curves: dict[int, list[float]],
    plain: dict[tuple[str, int], Cell],
) -> Iterator[tuple[str, ...]]:
    """A row of `sites`: steps to the loss, and the mean end against float32's after 1000 steps."""
    workload, method, steps = key
    needed, ends = [], []
    for seed in sorted(curves):
        if (workload, seed) in plain:
            goal = _end(plain[workload, seed].curve)
            at = reached(curves[seed], goal * (1 + SLACK))
            needed.append("never" if at is None else str(at))
            ends.append(_end(curves[seed]) / goal - 1)
    if needed:
        yield workload, f"`{method}`", str(steps), ", ".join(needed), f"{fmean(ends):+.1%}"


def _end(curve: Sequence[float]) -> float:
    return fmean(curve[-WINDOW // FINAL :])


def recorded(path: Path) -> list[str]:
    """The tables of a Markdown file of bench/results."""
    return [part.strip() for part in path.read_text("utf-8").split("\n\n") if part[:1] == "|"]


def ablation(results: Path) -> str:
    """Milliseconds of each part of the engine: bench/results/ablation.json."""
    rows = json.loads((results / "ablation.json").read_text())["rows"]
    return markdown_table(
        ("variant", "ms", "quartiles", "tasks of a rank"),
        [
            (name.replace("allgather", "exchange"), f"{ms[1]:.0f}", f"{ms[0]:.0f} to {ms[2]:.0f}",
             str(row["tasks"]))
            for name, row in rows.items()
            for ms in [row["ms"]]
        ],
    )  # fmt: skip


def gpu_steps(results: Path) -> str:
    """A step of GPT-2 small on an H100, with all but the wire: bench/results/gpu_step.json."""
    data = json.loads((results / "gpu_step.json").read_text())
    runs, ranks = (data, data["again"]), data["ranks"]
    head = ["ms a step", *(f"{n} ranks, {run['date']}" for n in ranks for run in runs)]
    kinds = dict.fromkeys((row["codec"], row["captured"]) for row in data["rows"])
    return markdown_table(head, [_gpu_step(kind, runs, ranks) for kind in kinds])


def _gpu_step(kind: tuple[str, bool], runs: Sequence[Data], ranks: Sequence[int]) -> list[str]:
    codec, captured = kind
    found = {
        (place, row["ranks"]): f"{row['ms']:.0f}"
        for place, run in enumerate(runs)
        for row in run["rows"]
        if (row["codec"], row["captured"]) == kind
    }
    name = "DDP" if codec == "ddp" else f"`{codec}`"
    cells = (found.get((place, n), "") for n in ranks for place in range(len(runs)))
    return [f"{name}, `capture=True`" if captured else name, *cells]


def gpu_choices(results: Path) -> str:
    """Steps of the demo's LSTM on two ranks that share an H100: bench/results/gpu_second.json."""
    data = json.loads((results / "gpu_second.json").read_text())
    steps = dict.fromkeys(row["step"] for row in data["training"])
    by_step: dict[str, dict[str, Data]] = {name: {} for name in steps}
    for row in data["training"]:
        name = next((n for n in ("ddp", "auto", "int4_group") if n in row["method"]), "")
        by_step[row["step"]][name] = row
    rows = [
        (step, *(f"{each[n]['ms']:.0f}" if n in each else "" for n in ("ddp", "auto")),
         _kept(each["auto"]), f"{each['int4_group']['ms']:.0f}" if "int4_group" in each else "")
        for step, each in by_step.items()
    ]  # fmt: skip
    return markdown_table(("links", "DDP", '`"auto"`', "its plan", "`int4_group`"), rows)


def _kept(row: Data) -> str:
    kept = [each["plan"] for each in row["tried"] if each["verdict"] == "kept"]
    return kept[0] if kept else "no compression"


def gpu_speeds(results: Path) -> str:
    """The time of a copy as a share of a kernel's, for 256 MB, on an H100 and an H200."""
    tables = {}
    for name, key in (("gpu_second", "speeds"), ("gpu", "rows")):
        data = json.loads((results / f"{name}.json").read_text())
        tables[name] = {row["codec"]: row for row in data[key] if row["megabytes"] == 256}
    head = ("compressor", "encode, H100", "encode, H200", "decode-add, H100", "decode-add, H200")
    return markdown_table(
        head,
        [
            (f"`{codec}`", *(_share(tables[where].get(codec, {}), job)
                             for job in ("encode", "decode_add") for where in tables))
            for codec in KERNELS
        ],
    )  # fmt: skip


def _share(row: Data, job: str) -> str:
    return f"{row[job]['share_of_copy_time']:.0%}" if job in row else ""


def gpu_bounds(results: Path) -> str:
    """Encodes whose instructions take longer than a copy of their bytes: gpu_code.json."""
    rows = json.loads((results / "gpu_code.json").read_text())["rows"]
    bound = [
        (row["share_of_copy_time_at_most"], row["spec"])
        for row in rows
        if row["what"] == "encode" and row["share_of_copy_time_at_most"] < 0.995
    ]
    return ", ".join(f"`{spec}` {share:.0%}" for share, spec in sorted(bound)) + "."


def weight_speeds(results: Path) -> str:
    """Sizes and speeds of versions of weights, beside copies of all of them."""
    head = ("rate", "changed", "version", "bits", "times fewer", "publish, MB/s", "apply, MB/s")
    rows = json.loads((results / "weights.json").read_text("utf-8"))["speeds"]
    return markdown_table(
        head,
        [
            (f"{d['rate']:g}", f"{d['changed']:.2%}", d["version"], f"{d['bits']:.3g}",
             f"{d['fewer']:.1f}", f"{d['publish']:.0f}", f"{d['apply']:.0f}")
            for d in rows
        ],
    )  # fmt: skip


def weight_links(results: Path) -> str:
    """Seconds until a worker's model has new weights, by link and rate."""
    rows = json.loads((results / "weights.json").read_text("utf-8"))["links"]
    rates = [key for key in rows[0] if key not in ("link", "broadcast")]
    head = ("link", *(f"rate {float(rate):g}" for rate in rates), "broadcast of all weights")
    return markdown_table(
        head,
        [(d["link"], *(f"{d[each]:.2f} s" for each in (*rates, "broadcast"))) for d in rows],
    )
