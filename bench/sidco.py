"""Accuracy of threshold estimators: (kept / n) / ratio on real gradients.

    python -m bench.sidco [--steps 150] [--output bench/results]

The gradients are those of the demo's word LSTM (smaller: 0.3 million parameters) that learns
the running Python's standard library, taken over the whole model. All estimators see the same
gradients, and each has its own residual; DGC runs without momentum. Writes a table, sidco.json and
sidco.png.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import compll
from bench.commands import RESULTS, given, refusing
from compll.tools.bench_report import about
from hipress.tools.demo import corpus, model
from hipress.tools.demo.command import check_output
from hipress.tools.demo.job import Workload

RATIOS = (0.1, 0.01, 0.001)
#: SIDCo's own adaptation; by default our specs correct the threshold by the number of kept elements
PUBLISHED = {"stages": 1, "correct": 0.0, "adapt": True}
#: by the name in the table: the spec, and its parameters besides the ratio
ESTIMATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "DGC": ("dgc", {"momentum": 0.0}),
    "RedSync": ("redsync", {"bound": 1e6}),
    "GaussianK": ("gaussiank", {"bound": 1e6, "tries": 3}),
    "E": ("sidco_e", {"bound": 1e6} | PUBLISHED),
    "P": ("sidco_p", {"bound": 1e6} | PUBLISHED),
    "GP": ("sidco_gp", {"bound": 1e6} | PUBLISHED),
    "E corr.": ("sidco_e", {"bound": 1e6}),
    "P corr.": ("sidco_p", {"bound": 1e6}),
    "GP corr.": ("sidco_gp", {"bound": 1e6}),
}


def gradients(steps: int, workload: Workload) -> Iterator[NDArray[np.float32]]:
    """The whole model's gradient, float32 [n], of every step of a training with SGD."""
    words = np.load(corpus.prepare(), mmap_mode="r")
    net, training = model.build(workload), model.OPTIMIZERS["sgd"]
    optimizer = training.make(net.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        net(model.batch(words, workload, 0, step)).backward()
        yield torch.cat([p.grad.flatten() for p in net.parameters()]).numpy()  # type: ignore[union-attr]
        torch.nn.utils.clip_grad_norm_(net.parameters(), training.clip)
        optimizer.step()


def shares(found: list[NDArray[np.float32]], name: str, ratio: float) -> list[float]:
    """(kept / n) / ratio of one estimator at every step."""
    spec, params = ESTIMATORS[name]
    codec, n = compll.compile(spec, "reference", ratio=ratio, **params), len(found[0])
    state = codec.init_state(n)
    payloads = (codec.encode(g, state=state, step=step) for step, g in enumerate(found))
    return [int(p[:4].view("<u4")[0]) / (n * ratio) for p in payloads]


def summary(values: list[float]) -> dict[str, float]:
    """Mean and 90% interval."""
    low, high = np.percentile(values, (5, 95))
    return {"mean": float(np.mean(values)), "low": float(low), "high": float(high)}


def show(rows: dict[float, dict[str, dict[str, float]]]) -> Table:
    """Mean [5%, 95%] of every estimator and ratio."""
    table = Table(title="(kept / n) / ratio: mean [5%, 95%]", title_justify="left", box=None)
    table.add_column("")
    for ratio in rows:
        table.add_column(f"ratio {ratio:g}", justify="right")
    for name in ESTIMATORS:
        cells = (row[name] for row in rows.values())
        table.add_row(
            name, *(f"{c['mean']:.2f} \\[{c['low']:.2f}, {c['high']:.2f}]" for c in cells)
        )
    return table


def draw(rows: dict[float, dict[str, dict[str, float]]], path: Path) -> None:
    """Draw means with their intervals on a logarithmic scale, with a panel per ratio."""
    figure = Figure(figsize=(11, 3.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (ratio, row) in zip(figure.subplots(1, len(rows)), rows.items(), strict=True):
        mean, low, high = (
            np.maximum([c[key] for c in row.values()], 1e-2) for key in ("mean", "low", "high")
        )
        at = np.arange(len(row))
        axes.vlines(at, low, high, color="#a1b4c9", linewidth=5)
        axes.plot(at, mean, "o", color="#e4572e")
        axes.axhline(1, color="#26303b", linewidth=0.8)
        axes.set(yscale="log", title=f"ratio {ratio:g}", ylim=(0.009, 30))
        axes.set_xticks(at, list(row), rotation=45, ha="right", rotation_mode="anchor")
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle("kept elements / wanted elements: mean and 90% interval")
    figure.savefig(path)


def main(
    steps: Annotated[int, typer.Option(help="training steps", min=1)] = 150,
    width: Annotated[int, typer.Option(help="width of embedding and LSTM")] = 64,
    vocabulary: Annotated[int, typer.Option(help="words of the vocabulary")] = 2000,
    output: Annotated[Path, typer.Option(help="folder of sidco.json and sidco.png")] = RESULTS,
) -> None:
    """Run the study and write its results."""
    with refusing():
        check_output(output)
    torch.set_num_threads(1)
    workload = Workload(vocabulary=vocabulary, width=width)
    found = list(gradients(steps, workload))
    values = {r: {name: shares(found, name, r) for name in ESTIMATORS} for r in RATIOS}
    rows = {r: {name: summary(v) for name, v in row.items()} for r, row in values.items()}
    Console(width=100).print(show(rows))
    facts = about() | {
        "torch": torch.__version__, "elements": len(found[0]), "steps": steps,
        "model": f"word LSTM, {vocabulary} words, width {width}, SGD",
        "command": given("bench.sidco"),
    }  # fmt: skip
    text = json.dumps(
        {"about": facts, "rows": {f"{r:g}": row for r, row in rows.items()}}, indent=1
    )
    (output / "sidco.json").write_text(text + "\n")
    draw(rows, output / "sidco.png")


if __name__ == "__main__":
    typer.run(main)
