"""The CPU backend: serial kernels of tile programs that release the GIL, compiled once and then cached
on disk.

Parallelism comes from the caller's own threads, a batch each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compll.backends.cpu import interface, jit
from compll.backends.cpu.interface import GIVEN, SLACK, passed, signature
from compll.errors import PayloadError, UsageError
from compll.ir.layout import Before, is_fixed, payload_bytes, rounds
from compll.ir.module import Module
from compll.ir.static import Number
from compll.ir.tile import Kernel, text
from compll.numerics.numbers import F32, I64, U8
from compll.passes import lower
from compll.runtime.arrays import HostArrays, Memo
from compll.runtime.batches import Encoding, Rows, State, fresh


class TileKernels:
    """The backend's batch interface; see batches.Backend."""

    arrays = HostArrays()
    merges = False

    def __init__(self, module: Module, params: Mapping[str, Number]) -> None:
        self.module, self.params = module, dict(params)
        self.parts = lower.kernels(module)
        self.by_name = {k.name: k for part in self.parts.values() for k in part}
        self.rows = Rows(params)
        self.sizes, self.array_sizes = Memo(), Memo()
        self.rounds = rounds(module)
        self.fixed = is_fixed(module)
        self.fuses = bool(self.parts.get("hop"))
        self.libraries: list[jit.Library] = []
        self.functions: dict[str, Callable[..., None]] = {}
        self.load(self.parts["first"])

    def load(self, part: list[Kernel]) -> None:
        """Load the functions that are compiled together, unless they are loaded."""
        # no lock, which a fork would copy as held: two threads may load the same functions
        if part[0].name not in self.functions:
            result = library(self.module.name, part)
            self.libraries.append(result)
            self.functions |= result.functions

    def function(self, name: str) -> Callable[..., None]:
        """A kernel. On first use its part is compiled."""
        if name not in self.functions:
            kernel = self.by_name[name]
            self.load(next(part for part in self.parts.values() if kernel in part))
        return self.functions[name]

    def text(self) -> str:
        """The tile programs."""
        return "\n".join(text(k) for part in self.parts.values() for k in part)

    def call(self, name: str, given: Mapping[str, Any], arrays: list[NDArray[Any]]) -> None:
        """Run a kernel. given: arrays and numbers, by names of parameters; arrays: states, then
        sums over ranks and starts of pieces in them."""
        kernel = self.by_name[name]
        given = {**given, **self.scratch(kernel, given["table"])}
        self.function(name)(*[passed(given.get(n, 0)) for n in GIVEN], *map(passed, arrays))

    def scratch(self, kernel: Kernel, table: I64) -> dict[str, Any]:
        """Scratch memory for one piece; untouched pages cost nothing."""
        if not (kernel.scratch or kernel.matrices):
            return {}
        most = max((self.array_bytes(kernel, n) for n in set(table[:, 1].tolist())), default=0)
        size = most * interface.array_count(kernel) + SLACK
        try:
            return {"scratch": np.empty(size, np.uint8), "array_bytes": most}
        except MemoryError as why:
            longest = int(table[:, 1].max())
            raise UsageError(
                f"{self.module.name}: a tensor of {longest} elements needs {size >> 20} MiB beside it, "
                "for which there is no memory; encode it in parts"
            ) from why

    def array_bytes(self, kernel: Kernel, n: int) -> int:
        """The most bytes that an array of a kernel takes for n elements. Raises UsageError."""
        key, make = (kernel.name, n), lambda: interface.array_bytes(kernel, n)
        result: int = self.array_sizes.once(key, make)
        return result

    def statics(self, name: str, table: I64, step: int, most: I64 | None = None) -> Any:
        """Host-computed values of every piece."""
        return self.rows.of(name, self.by_name[name].statics, table, step, most)

    def encode_batch(
        self, x: F32, table: I64, out: U8, at: I64, state: State | None, how: Encoding
    ) -> I64:
        """Encode all pieces in one call."""
        if state is None and "encode" not in self.by_name:
            wanted, table = fresh(self.module, table)
            state = {name: np.zeros(size, dtype) for name, (dtype, size) in wanted.items()}
        if not math.isfinite(np.float32(how.scale)):
            x, how = self.scaled(x, table, how)
        fed = state is not None and bool(self.module.states)
        incoming = how.incoming
        kind = "cut_" if how.most is not None else "hop_" if incoming is not None else ""
        name = kind + ("encode_feed" if fed else "encode")
        states = [state[s.name] for s in self.by_name[name].states] if state is not None else []
        back = how.writeback and self.by_name[name].writes_back
        used = np.zeros(len(table), np.int64)
        given = {
            "x": x, "table": table, "rows": len(table), "payload": out, "at": at, "used": used,
            "statics": self.statics(name, table, how.step, how.most), "seed": signed(how.seed),
            "step": how.step, "scale": how.scale, "back": back,
        }  # fmt: skip
        if incoming is not None:
            given |= {"data": incoming.payload, "data_at": incoming.at, "data_used": incoming.used}
        self.call(name, given, states)
        if how.writeback and not back:
            self.decode_batch(out, table, at, used, x, add=False, step=how.step)
        elif back and self.module.status:
            self.write_flagged(x, table, out, at, used)
        return used

    def scaled(self, x: F32, table: I64, how: Encoding) -> tuple[F32, Encoding]:
        """The same encoding of x, multiplied by the scale already: zeros behind a tile's end, which
        kernels multiply by it, would be NaN."""
        x = x if how.writeback else x.copy()
        if how.incoming is not None:
            payload, at, used = how.incoming
            self.decode_batch(payload, table, at, used, x, add=True, step=how.step)
        for start, n in table[:, :2].tolist():
            with np.errstate(all="ignore"):
                x[start : start + n] *= np.float32(how.scale)
        return x, replace(how, scale=1.0, incoming=None)

    def write_flagged(self, x: F32, table: I64, out: U8, at: I64, used: I64) -> None:
        """Decode payloads whose status byte is set, into x: encode knows it only after it has
        written x back."""
        rows = np.flatnonzero(used)
        rows = rows[out[at[rows] + used[rows] - 1] != 0]  # the status bytes
        if len(rows):
            self.decode_batch(out, table[rows], at[rows], used[rows], x, add=False)

    def decode_batch(
        self, payload: U8, table: I64, at: I64, used: I64, out: F32, *, add: bool, step: int = 0
    ) -> None:
        """Check all pieces, then decode them in one call."""
        for n, size in zip(table[:, 1].tolist(), used.tolist(), strict=True):
            if (self.fixed or n == 0) and size != self.size(n):
                name = self.module.name
                raise PayloadError(f"{name}: {size} bytes are no payload of {n} elements")
        name = "decode_add" if add else "decode_set"
        bad = np.zeros(1, np.int64)
        given = {
            "x": out, "table": table, "rows": len(table), "payload": payload, "at": at,
            "used": used, "statics": self.statics(name, table, step), "bad": bad, "step": step,
        }  # fmt: skip
        self.call(name, given, [])
        if bad[0] < 0:
            n, size = int(table[-bad[0] - 1, 1]), int(used[-bad[0] - 1])
            raise PayloadError(f"{self.module.name}: {size} bytes are no payload of {n} elements")
        if bad[0]:
            n = int(table[bad[0] - 1, 1])
            raise PayloadError(
                f"{self.module.name}: an index lies outside the tensor of {n} elements, or is not "
                "above the one before it"
            )

    # rounds

    def encode_round(
        self, number: int, x: F32, table: I64, out: U8, at: I64, before: Before,
        state: State | None, how: Encoding
    ) -> I64:  # fmt: skip
        """Encode a round's payload for every piece; see Codec.encode_round."""
        return self.round(f"round{number}", x, table, (out, at), before[:number], state, how)

    def decode_rounds(
        self, x: F32, table: I64, sums: Before, state: State | None, how: Encoding
    ) -> None:
        """Decode all ranks' sums and update the states; see Codec.decode_rounds."""
        given = (np.zeros(1, np.uint8), np.zeros(len(table), np.int64))
        self.round("rounds", x, table, given, sums[: len(self.rounds)], state, how)

    def round(
        self, name: str, x: F32, table: I64, payload: tuple[U8, I64], sums: Before,
        state: State | None, how: Encoding
    ) -> I64:  # fmt: skip
        """Run a kernel of a round. payload: the payload, and starts of pieces in it."""
        name += "_feed" * (state is not None and bool(self.module.states))
        kernel, used, (out, at) = self.by_name[name], np.zeros(len(table), np.int64), payload
        given = {
            "x": x, "table": table, "rows": len(table), "payload": out, "at": at, "used": used,
            "statics": self.statics(name, table, how.step), "seed": signed(how.seed),
            "step": how.step, "scale": how.scale, "back": True, "workers": float(how.workers),
        }  # fmt: skip
        by_name = {r.name: pair for r, pair in zip(self.rounds, sums, strict=False)}
        pairs = [by_name[a.name] for a in kernel.sums]
        held = [] if state is None else [state[s.name] for s in kernel.states]
        self.call(name, given, [*held, *(array for pair in pairs for array in pair)])
        return used

    def size(self, n: int) -> int:
        """The bytes of a payload of n elements."""
        result: int = self.sizes.once(n, lambda: payload_bytes(self.module, n, self.params))
        return result

    def raise_found(self) -> None:
        """Do nothing: a call raises for a bad payload itself."""


def library(name: str, part: list[Kernel]) -> jit.Library:
    """Kernels that are compiled together."""
    image = jit.stored(name, "".join(map(text, part)), lambda: _printed(name, part))
    return jit.Library(image, {k.name: signature(k) for k in part})


def _printed(name: str, part: list[Kernel]) -> str:
    """The LLVM IR of a part's kernels."""
    # slower to import than an object is to load
    from compll.backends.cpu.kernels import module_text

    return module_text(name, part)


def signed(seed: int) -> int:
    """A seed's 64 bits as ctypes takes them."""
    return seed - (1 << 64) if seed >> 63 else seed


def build(module: Module, params: Mapping[str, Number]) -> TileKernels:
    """The backend's entry point. Raises SpecError for a spec that it does not compile."""
    return TileKernels(module, params)


def source(module: Module) -> str:
    """The LLVM IR of all of a spec's kernels. Raises SpecError."""
    parts = lower.kernels(module).values()
    return _printed(module.name, [kernel for part in parts for kernel in part])
