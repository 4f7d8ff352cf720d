"""Specs that are computed an array at a time, on a device: see [Note: CUDA arrays].

Nothing here waits for the device; what a table needs is made in the first call with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from compll.backends.cuda.device import DeviceArrays
from compll.backends.cuda.domains import ArrayPlan, Domain
from compll.backends.cuda.launch import KEPT, Device, Launching, starts
from compll.backends.cuda.plans import Source
from compll.errors import UsageError
from compll.ir.layout import payload_bytes
from compll.ir.matrices import extents
from compll.ir.module import Module
from compll.ir.rounds import Before, rounds
from compll.ir.static import Number
from compll.numerics.types import I64
from compll.runtime.batches import Incoming


@dataclass
class Batch:
    """The device side of a table, for one plan. args: what is passed first; scratch: last."""

    args: tuple[Any, ...]
    scratch: tuple[Any, ...]
    blocks: list[int]
    lengths: tuple[int, ...]


class ArrayKernels(Launching[ArrayPlan]):
    """The backend's batch interface (see batches.ArrayBackend); arrays are the device's."""

    arrays = DeviceArrays()
    fuses = False

    def __init__(
        self,
        module: Module,
        params: Mapping[str, Number],
        make_device: Callable[[Source[Any]], Device],
        code: Source[ArrayPlan],
    ) -> None:
        super().__init__(module, params, make_device, code)
        self.rounds = rounds(module)
        self.batches: dict[tuple[str, bytes], Batch] = {}
        self.scratch: dict[bytes, dict[tuple[str, int, int], Any]] = {}

    def batch(self, name: str, table: I64) -> Batch:
        """The device side of a table, made once."""
        key = (name, table.tobytes())
        make = partial(self.make_batch, self.source.plans[name], table)
        found = self.kept(self.batches, key, make)
        if len(self.scratch) > KEPT:
            used = {table for _, table in self.batches}
            self.scratch = {table: s for table, s in self.scratch.items() if table in used}
        return found

    def forget(self) -> None:
        """What is kept for tables."""
        super().forget()
        self.batches.clear()
        self.scratch.clear()

    def make_batch(self, plan: ArrayPlan, table: I64) -> Batch:
        lengths = table[:, 1].tolist()
        for n in lengths:
            self.check_rooms(plan, n)
        domains = [[d.count(self.module, self.params, n) for n in lengths] for d in plan.domains]
        items = np.array(domains, np.int64).reshape(len(plan.domains), len(lengths))
        at = {d: items[k] for k, d in enumerate(plan.domains)}
        blocks = np.array([-(-at[g.domain] // g.per_block) for g in plan.grids], np.int64)
        firsts = starts(blocks.reshape(len(plan.grids), len(lengths)))
        sizes = [[s.count(self.module, self.params, n) for s in plan.sizes] for n in lengths]
        upload = self.device.upload
        return Batch(
            args=(
                upload(table.reshape(-1)),
                upload(firsts.reshape(-1)),
                upload(starts(items).reshape(-1)),
                upload(np.array(sizes, np.int64).reshape(-1)),
                np.int32(len(lengths)),
            ),
            scratch=self.take(plan, at, self.scratch.setdefault(table.tobytes(), {})),
            blocks=[int(b) for b in firsts[:, -1]],
            lengths=tuple(lengths),
        )

    def take(
        self, plan: ArrayPlan, at: Mapping[Domain, I64], pool: dict[tuple[str, int, int], Any]
    ) -> tuple[Any, ...]:
        """A plan's scratch memory. The plans of a table, which run one after the other, share it."""
        taken: Counter[tuple[str, int]] = Counter()
        found = []
        for m in plan.scratch:
            count = int((-(-at[m.domain] // m.each)).sum()) * m.factor
            key = (m.dtype, count, taken[m.dtype, count])
            taken[m.dtype, count] += 1
            if key not in pool:
                pool[key] = self.device.zeros(count, m.dtype)
            found.append(pool[key])
        return tuple(found)

    def check_rooms(self, plan: ArrayPlan, n: int) -> None:
        """Raise UsageError where a matrix and the elements of a piece do not fit each other."""
        for kind, dims in plan.rooms if n else ():
            rows, cols = extents(dims, n)
            if rows * cols < n:
                raise UsageError(
                    f"a matrix of {rows} x {cols} has no room for {n} elements"
                    if kind == "matrix"
                    else f"flat: a matrix of {rows * cols} elements, {n} are needed"
                )

    def launch(
        self, name: str, table: I64, given: tuple[Any, ...], gradient: str, *, seed: int, step: int
    ) -> None:
        """Run a plan over all pieces."""
        plan, b = self.source.plans[name], self.batch(name, table)
        args = (
            *b.args, self.statics(name, b.lengths, step), np.uint64(seed & (2**64 - 1)),
            np.uint64(step & (2**64 - 1)), self.tick, *given, *b.scratch,
        )  # fmt: skip
        with self.whole():
            for one in plan.steps:
                blocks = len(b.lengths) if one.grid < 0 else b.blocks[one.grid]
                if blocks:
                    self.device.launch(gradient, one.kernel, blocks, one.threads, args)

    def states(self, name: str, state: Mapping[str, Any] | None, table: I64) -> tuple[Any, ...]:
        """The states that a plan is given."""
        if state is None:
            return ()
        if any(s.shape == "scalar" for s in self.module.states):
            self.refuse_shared(table)
        return tuple(state[s] for s in self.source.plans[name].states)

    def encode_batch(
        self,
        x: Any,
        table: I64,
        out: Any,
        at: I64,
        state: Mapping[str, Any] | None,
        *,
        seed: int,
        step: int,
        scale: float,
        writeback: bool,
        incoming: Incoming | None = None,
    ) -> Any:
        """Encode all pieces, with themselves as the only rank; used bytes, int64 [m], on the device."""
        assert incoming is None
        fed = state is not None and bool(self.module.states)
        name, states = ("feed", state) if fed else ("encode", None)
        held = self.states(name, states, table)
        given = (x, out, self.place(at), np.float32(scale), np.int32(writeback), *held)
        self.launch(name, table, given, self.device.dtype(x), seed=seed, step=step)
        used = self.place(self.sizes(table))
        if writeback and not fed:
            self.decode_batch(out, table, at, used, x, add=False, step=step)
        return used

    def sizes(self, table: I64) -> I64:
        """Bytes of the payloads."""
        found = [payload_bytes(self.module, n, self.params) for n in table[:, 1].tolist()]
        return np.array(found, np.int64)

    def decode_batch(
        self, payload: Any, table: I64, at: I64, used: Any, out: Any, *, add: bool, step: int = 0
    ) -> None:
        """Decode all pieces into out, or add them."""
        sizes = self.place(used) if isinstance(used, np.ndarray) else used
        given = (payload, self.place(at), sizes, self.errors, out)
        name = "add" if add else "set"
        self.launch(name, table, given, self.device.dtype(out), seed=0, step=step)

    def encode_round(
        self,
        number: int,
        x: Any,
        table: I64,
        out: Any,
        at: I64,
        before: Before,
        state: Mapping[str, Any] | None,
        *,
        workers: int,
        seed: int,
        step: int,
    ) -> Any:
        """What a round adds up, for every piece; see Codec.encode_round."""
        name = (
            f"round{number}" if state is None or not self.module.states else f"round{number}_feed"
        )
        given = (
            x, out, self.place(at), np.float32(1), np.float32(workers),
            *self.sums(before, number), *self.states(name, state, table),
        )  # fmt: skip
        self.launch(name, table, given, self.device.dtype(x), seed=seed, step=step)
        found = [self.rounds[number].payload_bytes(n) for n in table[:, 1].tolist()]
        return self.place(np.array(found, np.int64))

    def sums(self, sums: Before, count: int) -> tuple[Any, ...]:
        """The first rounds' sums, and where pieces begin in them."""
        pairs = ((payload, self.place(at)) for payload, at in sums[:count])
        return tuple(value for pair in pairs for value in pair)

    def decode_rounds(
        self,
        x: Any,
        table: I64,
        sums: Before,
        state: Mapping[str, Any] | None,
        *,
        workers: int,
        seed: int,
        step: int,
    ) -> None:
        """What all ranks' sums decode to, and the states that follow; see Codec.decode_rounds."""
        name = "rounds" if state is None or not self.module.states else "rounds_feed"
        given = (
            x, np.float32(1), np.float32(workers), *self.sums(sums, len(self.rounds)),
            *self.states(name, state, table),
        )  # fmt: skip
        self.launch(name, table, given, self.device.dtype(x), seed=seed, step=step)
