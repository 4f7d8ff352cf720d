"""The second day on a GPU, in about ten minutes: what two ranks do on one card, and what is new.

    python -m bench.gpu_second [--rehearse] [--nccl LIBNCCL.so.2.xz] [--output FOLDER] [--only A,B]

Phases follow each other; the lanes of a phase run side by side, and the steps of a lane follow each
other. Every step has a time limit, and a red one ends nothing. After each step
FOLDER/gpu_second.json holds all results so far, and FOLDER/logs.tgz all that was printed; both are
useful if the day is cut off.

--nccl: a libnccl from 2.30 on takes the place of torch's own for this machine, so that two ranks
can share its GPU. --rehearse: without a GPU, with doubles, small sizes, and few cases. --only:
some steps, separated by commas; NCCL is probed in any case, for it says how the others run.
"""

from __future__ import annotations

import importlib.util
import json
import lzma
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer

import compll
from bench.commands import RESULTS, command_line, now, refusing
from bench.gpu_check import DTYPES
from bench.gpu_nccl import SHARING, SOCKETS
from hipress.tools.refusals import check_output

ROOT = Path(__file__).parents[1]
CHECKS = 4  # processes that compare compressors with the CPU
LEAST = 5.0  # seconds of the day that must be left for a step
BANDWIDTH = 125_000_000  # bytes a second of a throttled rank: 1 Gbit/s
METHODS = "ddp-fp32,hipress:auto,hipress:int4_group"
MOMENTUM = "ddp-fp32,hipress:auto:optimizer=adamw,momentum:onebit_fine:freeze=4"
ON_GPU, SMALL = ("--device", "cuda", "--steps", "20"), ("--steps", "2")
STEPS = ("int4_group", "onebit_group", "--ranks", "2,8", "--repeat", "11", "--samples")
SIZES = "1,1000,1048579"
BINDINGS = ("tests/casync/test_nccl_gpu.py", "tests/casync/test_nccl_alone.py")
PAIR = "tests/hipress/test_gpus.py"
#: words in the names of its tests, by step; all others are of the step `transports`
LOST, MODELS, GRAPHS = "lost or late or again", "shards or replicas or models or pinned", "graphs"
ELSEWHERE = f"{LOST} or {MODELS} or {GRAPHS}"
#: other tests that need a GPU, by name: files beside them import what a bare machine lacks
OTHERS = ("tests/casync/test_device.py", "tests/casync/test_memory.py",
          "tests/hipress/test_device_plans.py", "tests/hipress/test_devices.py",
          "tests/compll/test_cuda.py", "tests/compll/test_cuda_device.py")  # fmt: skip
#: a machine's own plugins, and warnings of its packages, are not ours: one of them may end a run
PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "xdist", "-p", "timeout",
          "-W", "default", "-o", "addopts=--import-mode=importlib")  # fmt: skip
BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
#: packages that the day needs, and those that some of its tests need
NEEDED = ("torch", "numpy", "cupy", "llvmlite", "networkx", "yaml", "platformdirs", "typer",
          "rich", "jinja2", "pytest", "pytest_timeout", "xdist", "hypothesis")  # fmt: skip
USED = ("nccl", "pynccl", "numba", "matplotlib", "transformers", "sklearn")


@dataclass(frozen=True)
class Step:
    """A command of Python's. limit: seconds. env: beside that of all steps."""

    name: str
    limit: int
    command: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)


Lane = Sequence[Step]


def in_tests(name: str, limit: int, chosen: str, *files: str, processes: int = 0) -> Step:
    """Tests whose names `chosen` selects, in several processes if there are any."""
    spread = ("-n", str(processes), "--dist", "loadgroup") if processes else ()
    return Step(name, limit, (*PYTEST, *files, "-k", chosen, *spread), BARE)


def training(
    name: str, limit: int, folder: Path, methods: str, env: dict[str, str], *more: str
) -> Step:
    """Step times of methods on two ranks that share this machine's GPU."""
    (folder / name).mkdir(exist_ok=True)
    optimizer = "adamw" if "adamw" in methods else "sgd"
    return Step(name, limit, (
        "-m", "bench.training", "--group", "loopback", "--methods", methods, "--optimizer",
        optimizer, "--rounds", "1", "--output", str(folder / name), *(more or ON_GPU),
    ), env)  # fmt: skip


def check(folder: Path, number: int, specs: Sequence[str]) -> Lane:
    """Some compressors against the CPU, bit by bit."""
    name = f"check_{number}"
    (folder / name).mkdir(exist_ok=True)
    output = ("--output", str(folder / name))
    return [Step(name, 300, ("-m", "bench.gpu_check", *specs, "--sizes", SIZES, *output))]


def day(folder: Path, throttle: str) -> list[list[Lane]]:
    """Phases. throttle: the library of slow_sockets.c, or "" """
    out = ("--output", str(folder))
    alone = dict.fromkeys(SHARING, "")  # without these NCCL refuses ranks that share a GPU
    slow = {"LD_PRELOAD": throttle, "SLOW_SOCKETS": str(BANDWIDTH)}
    specs = compll.list_specs()
    return [
        [
            [Step("facts", 90, ("-m", "bench.gpu_facts", *out))],
            [Step("nccl", 90, ("-m", "bench.gpu_nccl", *out))],
            [Step("kernels", 200, ("-m", "bench.gpu_kernels", "--dtypes", ",".join(DTYPES)))],
        ],
        [
            *(check(folder, number, specs[number::CHECKS]) for number in range(CHECKS)),
            [in_tests("faults", 150, LOST, PAIR, processes=6)],
        ],
        [
            [in_tests("bindings", 150, "gpu", *BINDINGS, processes=3)],
            [in_tests("transports", 150, f"gpu and not ({ELSEWHERE})", PAIR, processes=3)],
            [in_tests("gpt2", 200, "gpu", "tests/hipress/test_gpt2.py", processes=4)],
        ],
        [
            [training("auto_slow", 150, folder, METHODS, alone | slow)],
            [training("momentum_slow", 150, folder, MOMENTUM, alone | slow)],
            [training("auto_nccl_slow", 150, folder, METHODS, SOCKETS | slow)],
        ],
        [
            [
                training("auto_nccl", 90, folder, METHODS, {}),
                training("auto_staged", 90, folder, METHODS, alone),
            ],
        ],
        [[Step("speed", 150, ("-m", "bench.gpu", "--sizes", "16,256", "--repeat", "7", *out))]],
        [
            [in_tests("others", 200, "gpu and not bad_access and not measured", *OTHERS,
                      processes=12)],
            [in_tests("models", 200, MODELS, PAIR, "tests/hipress/test_outer.py", processes=3)],
            [in_tests("graphs", 200, GRAPHS, PAIR, processes=3)],
        ],
        [[Step("step", 170, ("-m", "bench.gpu_step", *STEPS, *out))]],
        [[Step("peak", 150, ("-m", "bench.gpu_peak", *out), alone)]],
    ]  # fmt: skip


def rehearsal(folder: Path, throttle: str) -> list[list[Lane]]:
    """The same phases in small."""
    out = ("--rehearse", "--output", str(folder))
    slow = {"LD_PRELOAD": throttle, "SLOW_SOCKETS": str(BANDWIDTH)}
    small = ("nf4", "--sizes", "1,1000", "--dtypes", "float32")
    return [
        [
            [
                Step("facts", 400, ("-m", "bench.gpu_facts", *out)),
                Step("kernels", 300, ("-m", "bench.gpu_kernels", "int8_group")),
                Step("nccl", 300, ("-m", "bench.gpu_nccl", *out)),
            ],
        ],
        [
            [
                in_tests("bindings", 500, "ranks", BINDINGS[0]),
                in_tests("transports", 500, "bit_by_bit and onebit_group", PAIR),
                in_tests("gpt2", 300, "emulated and topk", "tests/hipress/test_gpt2.py"),
            ],
        ],
        [
            [
                in_tests("faults", 500, "late", PAIR),
                Step("check_0", 500, ("-m", "bench.gpu_check", *small, *out)),
                training("auto_slow", 400, folder, "ddp-fp32", slow, *SMALL),
            ],
        ],
        [
            [
                in_tests("speed", 300, "not slow", "tests/bench/test_gpu.py"),
                in_tests("others", 300, "gpu", *OTHERS),
                in_tests("models", 300, MODELS, PAIR, "tests/hipress/test_outer.py"),
                in_tests("graphs", 300, "fails", "tests/hipress/test_captured.py"),
                in_tests("step", 300, "not slow", "tests/bench/test_gpu_step.py"),
                Step("peak", 300, ("-m", "bench.gpu_peak", "--steps", "8", *out)),
            ],
        ],
    ]


def select(phases: Sequence[Sequence[Lane]], only: str) -> list[list[Lane]]:
    """Phases with the steps that `only` names, and that which probes NCCL."""
    names = {*only.split(","), "nccl"}
    known = {step.name for phase in phases for lane in phase for step in lane}
    if unknown := sorted(names - known):
        raise ValueError(f"no steps {unknown}; choose from {', '.join(sorted(known))}")
    left: list[list[Lane]] = []
    for phase in phases:
        lanes = [[step for step in lane if step.name in names] for lane in phase]
        left.append([lane for lane in lanes if lane])
    return [phase for phase in left if phase]


class Day:
    """Runs phases, and keeps what they found."""

    def __init__(
        self, folder: Path, output: Path, env: dict[str, str], seconds: float, about: dict[str, Any]
    ) -> None:
        """folder: of files of steps. output: of the results."""
        self._folder, self._output, self._env, self._about = folder, output, env, about
        self._begin, self._end = monotonic(), monotonic() + seconds
        self._rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def run(self, phases: Sequence[Sequence[Lane]]) -> list[dict[str, Any]]:
        """All results."""
        for phase in phases:
            with ThreadPoolExecutor(len(phase)) as pool:
                list(pool.map(self._lane, phase))
            self._take_environment()
        return self._rows

    def _take_environment(self) -> None:
        """NCCL's way is that which the probe found."""
        path = self._folder / "gpu_nccl.json"
        if path.exists():
            self._env |= json.loads(path.read_text())["env"]

    def _lane(self, lane: Lane) -> None:
        for step in lane:
            self._keep(self._done(step))

    def _done(self, step: Step) -> dict[str, Any]:
        begin = monotonic()
        left = self._end - begin
        limit = min(step.limit, left)
        row: dict[str, Any] = {"step": step.name, "at": round(begin - self._begin)}
        if left < LEAST:
            return {**row, "green": False, "told": "left out: no time was left"}
        env = {key: value for key, value in (self._env | step.env).items() if value}
        both = [each["LD_PRELOAD"] for each in (step.env, self._env) if each.get("LD_PRELOAD")]
        env |= {"LD_PRELOAD": ":".join(both)} if both else {}
        log = self._folder / f"{step.name}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, *step.command], cwd=ROOT, env=env, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
            try:
                status: int | str = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = f"killed after {limit:.0f} s"
            try_to_end(process.pid)  # and what it started
            process.wait()
        took = round(monotonic() - begin, 1)
        row |= {"green": status == 0, "status": status, "seconds": took}
        return row | summarize(log, status)

    def _keep(self, row: dict[str, Any]) -> None:
        with self._lock:
            self._rows.append(row)
            color = "green" if row["green"] else "RED"
            print(f"{row['step']}: {color}, {row.get('seconds', 0)} s: {row['told']}", flush=True)
            facts = {**self._about, "steps": self._rows, "files": read_results(self._folder)}
            (self._output / "gpu_second.json").write_text(json.dumps(facts, indent=1) + "\n")
            with tarfile.open(self._output / "logs.tgz", "w:gz") as archive:
                for path in sorted(self._folder.rglob("*")):
                    if path.suffix in (".log", ".json", ".md") and path.is_file():
                        archive.add(path, path.relative_to(self._folder))


def try_to_end(group: int) -> None:
    """Kill the processes of a session that are left."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def summarize(log: Path, status: int | str) -> dict[str, Any]:
    """The last line of a log; its failures, and its end, if the step is red."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    summary: dict[str, Any] = {"told": lines[-1][:300] if lines else ""}
    if status != 0:
        summary["failed"] = [x[:400] for x in lines if re.match(r"(FAILED|ERROR) |E  ", x)][:60]
        summary["end"] = lines[-25:]
    return summary


def read_results(folder: Path) -> dict[str, Any]:
    """The JSON files of steps, by their paths."""
    results = {}
    for path in sorted(folder.rglob("*.json")):
        try:
            results[str(path.relative_to(folder))] = json.loads(path.read_text())
        except ValueError:  # it is being written
            continue
    return results


def refuse_missing() -> None:
    """End if a package is missing, before anything takes its time; tell those that some tests
    need."""
    missing = {name: importlib.util.find_spec(name.split(".")[0]) is None for name in NEEDED + USED}
    print(f"missing: {', '.join(name for name in missing if missing[name]) or 'nothing'}")
    if any(missing[name] for name in NEEDED):
        raise typer.Exit(2)


def put_nccl(packed: Path, scratch: Path) -> dict[str, str]:
    """The environment in which a packed libnccl is used: it takes the place of torch's, or is
    loaded before it where that cannot be written."""
    library = scratch / "libnccl.so.2"
    with lzma.open(packed) as source, library.open("wb") as target:
        while part := source.read(1 << 22):
            target.write(part)
    own = importlib.util.find_spec("nvidia.nccl")
    places = list(own.submodule_search_locations or ()) if own else []
    try:
        old = Path(places[0], "lib", "libnccl.so.2")
        old.unlink()  # a process that runs keeps it
        shutil.move(library, old)
        return {"NUMBA_NCCLLIB": str(old.parent)}
    except (IndexError, OSError) as why:
        print(f"libnccl is loaded first, since torch's stays: {why}")
        return {"NUMBA_NCCLLIB": str(scratch), "LD_PRELOAD": str(library)}


def build_throttle(scratch: Path) -> str:
    """The library that slows sockets; "" if there is no compiler."""
    library = scratch / "slow_sockets.so"
    source = str(ROOT / "bench" / "slow_sockets.c")
    command = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), source, "-ldl", "-lpthread"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"no throttle: {done.stderr}")
    return "" if done.returncode else str(library)


def main(
    rehearse: Annotated[bool, typer.Option("--rehearse", help="run without a GPU")] = False,
    nccl: Annotated[Path | None, typer.Option(help="a packed libnccl, from 2.30 on")] = None,
    output: Annotated[Path, typer.Option(help="folder of results")] = RESULTS,
    seconds: Annotated[float, typer.Option(help="the whole day's limit")] = 590.0,
    only: Annotated[str, typer.Option(help="steps, such as gpt2,faults; nccl runs always")] = "",
) -> None:
    """Run the day and write gpu_second.json and logs.tgz."""
    refuse_missing()
    with refusing():
        check_output(output)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        env |= put_nccl(nccl, folder) if nccl else {}
        about = {"date": now(), "command": command_line("bench.gpu_second"), "rehearsed": rehearse}
        with refusing():
            phases = (rehearsal if rehearse else day)(folder, build_throttle(folder))
            phases = select(phases, only) if only else phases
        rows = Day(folder, output, env, 3600 if rehearse else seconds, about).run(phases)
    raise typer.Exit(int(not all(row["green"] for row in rows)))


if __name__ == "__main__":
    typer.run(main)
