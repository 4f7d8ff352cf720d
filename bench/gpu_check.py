"""Each compressor on a GPU against the CPU, bit for bit.

    python -m bench.gpu_check [NAMES...] [--sizes 1,1000,1048579,38600000] [--dtypes float32,...]
    python -m bench.gpu_check --rehearse      # the generated source on the CPU; needs g++

Checks encode with and without feedback, decode, add, several payloads at once, and the hop that
decodes, adds and encodes. Gradients of each dtype begin 0, 1 and 3 elements behind an aligned
address, payloads as many bytes; tables have one row and many. Each case runs several steps, whose
states go on. Results: gpu_check.json; the exit status is 1 if anything differs.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray

import compll
from bench.commands import RESULTS, check_codecs, command_line, now, refusing
from bench.gpu_memory import Place, on_cuda, on_shim, rounded
from compll.numerics.numbers import I64
from compll.runtime.batches import Incoming
from hipress.tools.refusals import check_output

SIZES = (1, 1000, (1 << 20) + 3, 38_600_000)
DTYPES = ("float32", "float16", "bfloat16")
OFFSETS = (0, 1, 3)
STEPS = 3
PAYLOADS = 3  # that one call adds
ROWS = 19  # of a table of many


@dataclass(frozen=True)
class Case:
    """A gradient: its compressor, dtype, elements, first element, and rows of its table."""

    spec: str
    dtype: str
    n: int
    offset: int
    many: bool

    def table(self) -> I64:
        """Tensors of unequal lengths, one behind the other; the first begins with the gradient."""
        cuts = np.random.default_rng(self.n).integers(0, self.n + 1, ROWS - 1)
        ends = np.array([*sorted(cuts), self.n]) if self.many else np.array([self.n])
        lengths = np.diff(ends, prepend=0)
        starts = ends - lengths
        number = np.arange(len(ends))
        return np.column_stack([starts + self.offset, lengths, number, 0 * starts, starts])

    def at(self, codec: compll.Codec) -> tuple[I64, int]:
        """First bytes of the payloads, one behind the other, and their total size."""
        sizes = [codec.payload_bytes(int(n)) for n in self.table()[:, 1]]
        ends = np.cumsum([self.offset, *sizes])
        return ends[:-1].astype(np.int64), int(ends[-1])


class Differs(Exception):
    """The GPU computed something else; the text describes the difference."""


class Run:
    """A case on the device, and on the CPU in float32, rounded where the device rounds."""

    def __init__(self, case: Case, codec: compll.Codec, cpu: compll.Codec, place: Place) -> None:
        self.case, self.codec, self.cpu, self.place = case, codec, cpu, place
        self.rows = case.table()
        begins, self.size = case.at(cpu)
        self.table, self.at = codec.hold(self.rows), codec.hold(begins)
        self.states = cpu.init_state(case.n, len(self.rows)) if cpu.stateful else None
        self.ours = self.states and {k: place.put(v.copy()) for k, v in self.states.items()}

    def steps(self, count: int) -> None:
        """Several steps, whose states go on. Raises Differs."""
        for step in range(count):
            rng = np.random.default_rng(1000 * self.case.n + step)
            values = 0.01 * rng.standard_normal(self.case.n + self.case.offset, np.float32)
            x = rounded(values, self.case.dtype)
            self.encode(x, None, None, step)
            payload, used = self.encode(x, self.states, self.ours, step)
            self.decode(x, payload, used, step)
            if self.cpu.reencodes and not self.cpu.rounds:
                self.hop(x, payload, used, step)

    def encode(
        self, x: NDArray[Any], state: Any, ours: Any, step: int
    ) -> tuple[NDArray[np.uint8], I64]:
        """Encode on the GPU, and check payload, lengths, states and gradient against the CPU's."""
        how: dict[str, Any] = {"seed": 7, "step": step, "scale": 0.5, "writeback": True}
        mine, out = self.place.gradient(x, self.case.dtype), self.place.zeros(self.size)
        used = self.codec.encode_batch(mine, self.table, out, self.at, state=ours, **how)
        its, want = x.copy(), np.zeros(self.size, np.uint8)
        wants = self.cpu.encode_batch(its, self.rows, want, np.array(self.at), state=state, **how)
        lengths, payload = self.place.host(used), self.place.host(out)
        self.same("lengths", lengths, wants)
        self.same("payload", payload, want)
        self.same("written back", self.values(mine), self.round(its))
        for name in state or ():
            self.same(f"state {name}", self.place.host(ours[name]), state[name])
        return want, wants

    def decode(self, x: NDArray[Any], payload: NDArray[np.uint8], used: I64, step: int) -> None:
        """Decode, add, and add several payloads at once."""
        data, lengths = self.place.put(payload), self.codec.hold(used)
        for add in (False, True):
            y, want = self.place.gradient(x, self.case.dtype), x.copy()
            self.codec.decode_batch(data, self.table, self.at, lengths, y, add=add, step=step)
            self.cpu.decode_batch(payload, self.rows, self.at, used, want, add=add, step=step)
            self.same("added" if add else "decoded", self.values(y), self.round(want))
        several = np.concatenate([payload] * PAYLOADS)
        at = np.array([np.array(self.at) + k * len(payload) for k in range(PAYLOADS)])
        y, want = self.place.gradient(x, self.case.dtype), x.copy()
        for _ in range(PAYLOADS):
            self.cpu.decode_batch(payload, self.rows, self.at, used, want, add=True, step=step)
            want = self.round(want)
        self.codec.decode_batch(
            self.place.put(several), self.table, self.codec.hold(at),
            self.codec.hold(np.array([used] * PAYLOADS)), y, add=True, step=step,
        )  # fmt: skip
        self.same(f"{PAYLOADS} payloads", self.values(y), want)
        self.codec.raise_found()

    def hop(self, x: NDArray[Any], payload: NDArray[np.uint8], used: I64, step: int) -> None:
        """Add an incoming payload, and encode the sum."""
        how: dict[str, Any] = {"seed": 9, "step": step, "writeback": True}
        mine, out = self.place.gradient(x, self.case.dtype), self.place.zeros(self.size)
        came = Incoming(self.place.put(payload), self.at, self.codec.hold(used))
        self.codec.encode_batch(mine, self.table, out, self.at, incoming=came, **how)
        its, want, at = x.copy(), np.zeros(self.size, np.uint8), np.array(self.at)
        if self.codec.fuses:
            same_payload = Incoming(payload, at, used)
            self.cpu.encode_batch(its, self.rows, want, at, incoming=same_payload, **how)
        else:  # the sum is rounded on its way
            self.cpu.decode_batch(payload, self.rows, at, used, its, add=True, step=step)
            its = self.round(its)
            self.cpu.encode_batch(its, self.rows, want, at, **how)
        self.same("hop", self.place.host(out), want)
        self.same("hop's gradient", self.values(mine), self.round(its))

    def round(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values rounded to the gradient's dtype, in float32."""
        return rounded(values, self.case.dtype)

    def values(self, array: Any) -> NDArray[np.float32]:
        """Values of a gradient on the device, in float32."""
        return self.place.values(array, self.case.dtype)

    def same(self, what: str, got: NDArray[Any], want: NDArray[Any]) -> None:
        """Raise Differs unless bits are equal; all NaNs are alike."""
        unequal = got != want
        if got.dtype.kind == "f":
            unequal &= ~(np.isnan(got) & np.isnan(want))
        if unequal.any():
            first = int(np.flatnonzero(unequal)[0])
            count = int(np.count_nonzero(unequal))
            raise Differs(f"{what}: {count} of {got.size}, first at {first}: "
                          f"{got.reshape(-1)[first]}, not {want.reshape(-1)[first]}")  # fmt: skip


def cases(spec: str, sizes: list[int], dtypes: list[str]) -> Iterator[Case]:
    """All cases of a spec; for the largest gradients only aligned ones with one row."""
    for n, dtype, offset, many in itertools.product(sizes, dtypes, OFFSETS, (False, True)):
        if n <= SIZES[2] or (offset == 0 and not many):
            yield Case(spec, dtype, n, offset, many and n > 1)


def check(
    spec: str, sizes: list[int], dtypes: list[str], make: Callable[[str], tuple[Any, Place]]
) -> dict[str, Any]:
    """A row: number of cases, seconds, and texts of the differences and failures."""
    begin, wrong, done = perf_counter(), list[str](), 0
    codec, place = make(spec)
    cpu = compll.compile(spec)
    for case in dict.fromkeys(cases(spec, sizes, dtypes)):
        try:
            Run(case, codec, cpu, place).steps(STEPS)
        except Exception as why:  # whatever it is, other cases are worth their time
            wrong.append(f"{case}: {type(why).__name__}: {why}")
        done += 1
    seconds = round(perf_counter() - begin, 2)
    return {"spec": spec, "cases": done, "seconds": seconds, "wrong": wrong}


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line of text."""
    bad = [row["spec"] for row in rows if row["wrong"]]
    count = sum(row["cases"] for row in rows)
    return f"{len(rows)} compressors, {count} cases, {STEPS} steps each: " + (
        f"{', '.join(bad)} differ" if bad else "all bits are the CPU's"
    )


def main(
    names: Annotated[list[str] | None, typer.Argument(help="compressors; all by default")] = None,
    sizes: Annotated[str, typer.Option(help="elements of gradients")] = ",".join(map(str, SIZES)),
    dtypes: Annotated[str, typer.Option(help="dtypes of gradients")] = ",".join(DTYPES),
    threads: Annotated[int, typer.Option(help="compressors at a time", min=1)] = 8,
    rehearse: Annotated[bool, typer.Option("--rehearse", help="run without a GPU")] = False,
    output: Annotated[Path, typer.Option(help="folder of the JSON file")] = RESULTS,
) -> None:
    """Compare all compressors with the CPU and write gpu_check.json."""
    with refusing():
        if not rehearse and not torch.cuda.is_available():
            raise ValueError("torch finds no CUDA device; --rehearse goes without")
        check_codecs(names or ())
        check_output(output)
        many = [int(size) for size in sizes.split(",")]
    make = on_shim if rehearse else on_cuda
    chosen, rows = names or compll.list_specs(), list[dict[str, Any]]()
    with ThreadPoolExecutor(1 if rehearse else threads) as pool:
        for row in pool.map(lambda spec: check(spec, many, dtypes.split(","), make), chosen):
            rows.append(row)
            outcome = row["wrong"][0] if row["wrong"] else "fine"
            print(f"{row['spec']}: {row['cases']} cases, {row['seconds']} s: {outcome}", flush=True)
            about = {"date": now(), "command": command_line("bench.gpu_check"), "steps": STEPS}
            text = json.dumps({"about": about, "rows": rows}, indent=1) + "\n"
            (output / "gpu_check.json").write_text(text)
    print(summary(rows))
    raise typer.Exit(int(any(row["wrong"] for row in rows)))


if __name__ == "__main__":
    typer.run(main)
