"""Step times of the demo's workload: the figures of docs/measurements/steps.md.

    python -m bench.training                      # every group, about half an hour on two cores
    python -m bench.training --group hosts2       # one of them
    python -m bench.training --group slow --steps 20 --rounds 1 --output somewhere
    python -m bench.training --group hosts2 --against ../before    # beside another checkout

On a cluster: `hipress bench`.

The methods of a group take turns, round after round, so that a slow minute of the machine falls on
all of them; a figure is the median over the timed steps of all rounds. Links are emulated
(hipress/tools/run/netns.py). Writes GROUP.json, as `hipress bench` does, and GROUP.md.

With --against each method is run here and by the other checkout's own bench.training, one after the
other, in turns; prints ratios, and writes nothing.
"""

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bench.commands import RESULTS, command_line, refusing
from hipress.tools.bench.measure import Suite, measure, predictions
from hipress.tools.refusals import check_device, check_output
from hipress.tools.results import Results
from hipress.tools.run import methods as methods_
from hipress.tools.run import runner
from hipress.tools.run.ending import orderly_end
from hipress.tools.run.figures import Report, markdown
from hipress.tools.run.jobs import trained_by
from hipress.tools.run.methods import ALONE, DEFAULTS
from hipress.tools.run.netns import parse_rate

_STEPS = (
    *(*ALONE, *(name for name in DEFAULTS if name not in ALONE)),
    *("hipress:auto", "sync:onebit_group"),
)
_DGC = "dgc:ratio=0.01:bits=16"


GROUPS = {
    "hosts2": Suite(_STEPS),
    "hosts4": Suite(_STEPS, hosts=4),
    "slow": Suite(
        (*ALONE, "ddp-fp16", "powersgd", f"hipress:{_DGC}", f"sync:{_DGC}", "hipress:auto"),
        rate="100mbit",
    ),
    "loopback": Suite(("ddp-fp32", "hipress:auto"), loopback=True, steps=40, rounds=5),
}


def write(name: str, report: Report, folder: Path) -> None:
    """Write the JSON and the table."""
    Results([report]).write(folder / f"{name}.json")
    lines = [f"# {name}: {report.place}", "", f"`{report.command}`, {report.date}", ""]
    lines += [", ".join(f"{key} {value}" for key, value in report.versions.items()), ""]
    lines += [markdown(report), *predictions(report.results), ""]
    (folder / f"{name}.md").write_text("\n".join(lines) + "\n")


def times(name: str, method: str, group: Suite, root: Path) -> list[float]:
    """Seconds of a round's timed steps, by the checkout at `root`. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"group": name, "methods": method, "steps": group.steps, "rounds": 1,
                   "rate": group.rate, "device": group.device, "optimizer": group.optimizer,
                   "output": folder}  # fmt: skip
        arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
        program = [sys.executable, "-m", "bench.training", *arguments]
        subprocess.run(
            program, cwd=root, env=os.environ | {"PYTHONPATH": str(root)},
            stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        data = json.loads(Path(folder, f"{name}.json").read_text())
    (result,) = data.get("reports", [data])[0]["results"]  # release 0.2 wrote a report alone
    if result["error"]:
        raise ValueError(f"{root}: {method}: {result['error']}")
    return list(result["seconds"])


def compare(name: str, group: Suite, other: Path) -> Iterator[str]:
    """A line for each method: its step time here and in another checkout, and their ratio by round.
    Which of them begins changes from round to round."""
    here = Path(__file__).parents[1]
    for method in group.methods:
        medians: dict[Path, list[float]] = {here: [], other: []}
        for number in range(group.rounds):
            for root in (here, other) if number % 2 else (other, here):
                medians[root].append(statistics.median(times(name, method, group, root)))
        ratios = sorted(new / old for new, old in zip(medians[here], medians[other], strict=True))
        rows = medians[here], medians[other], ratios
        new, old, ratio = map(statistics.median, rows)
        yield (
            f"{name} {method}: {1e3 * new:.1f} ms a step, {1e3 * old:.1f} in {other.name}; "
            f"ratio {ratio:.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f} by round"
        )


def main(
    group: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(GROUPS)}.")] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated methods.")] = "",
    steps: Annotated[int | None, typer.Option(help="Steps of a method.", min=2)] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds of the group.", min=1)] = None,
    rate: Annotated[str, typer.Option(help="Speed of links.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda: where the model trains.")] = "cpu",
    optimizer: Annotated[str, typer.Option(help="sgd (rate 1, clipping .25) or adamw.")] = "sgd",
    output: Annotated[Path, typer.Option(help="Folder for JSON and tables.")] = RESULTS,
    against: Annotated[Path | None, typer.Option(help="Another checkout to compare with.")] = None,
) -> None:
    """Measure groups of methods."""
    chosen_methods = tuple(part.strip() for part in methods.split(",") if part.strip())
    with refusing():  # before the others take their time
        optimizer = trained_by(optimizer)
        _check(group or (), chosen_methods, optimizer, rate, device)
        check_output(output)
    for name in group or GROUPS:
        usual = GROUPS[name]
        chosen = dataclasses.replace(
            usual,
            methods=chosen_methods or usual.methods,
            steps=steps or usual.steps,
            rounds=rounds or usual.rounds,
            rate=rate or usual.rate,
            device=device,
            optimizer=optimizer,
        )
        if against is not None:
            with refusing():
                for line in compare(name, chosen, against.resolve()):
                    print(line, flush=True)
        else:
            _measure_and_write(name, chosen, output)


def _check(
    groups: Sequence[str], methods: Sequence[str], optimizer: str, rate: str, device: str
) -> None:
    """Raise ValueError for an unknown group, rate or device, or a method that cannot be used."""
    for name in groups:
        if name not in GROUPS:
            raise ValueError(f"unknown group {name!r}; choose from: {', '.join(GROUPS)}")
    methods_.check([methods_.parse(text) for text in methods], optimizer)
    if rate:
        parse_rate(rate)
    check_device(device)


def _measure_and_write(name: str, group: Suite, output: Path) -> None:
    where = group.place()
    print(f"{name}: {where.sentence}")
    if not where.emulated and not group.loopback:
        print(f"{name}: skipped, its links cannot be emulated here")
        return
    with where.enter() as entered:
        results = measure(group, lambda job: runner.run(entered, job))
    links = dataclasses.replace(group, rate="none" if group.loopback else group.rate)
    report = links.report(where.sentence, results, command_line("bench.training"))
    write(name, report, output)
    print(markdown(report))


if __name__ == "__main__":
    with orderly_end("bench.training"):
        typer.run(main)
