"""Batches of pieces: their tables, incoming payloads, zero states, numbers known before data, and
the interface of backends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from compll.ir.expr import Expr
from compll.ir.layout import MOST, Before
from compll.ir.module import Module
from compll.ir.static import Number, depends, evaluate
from compll.numerics.numbers import F64, I64
from compll.runtime.arrays import Arrays, Memo

#: float32, or 16 bits a value: float16, and bfloat16 bits as uint16
State = Mapping[str, NDArray[Any]]

#: columns of a batch's table, a row per piece (see Codec.encode_batch)
START, LENGTH, TENSOR, OFFSET, STATE = range(5)


class Incoming(NamedTuple):
    """Payloads of a batch's pieces: uint8, the start of each, and the bytes of each (int64 [m])."""

    payload: Any
    at: Any
    used: Any


@dataclass(frozen=True)
class Encoding:
    """Options of encoding a batch's pieces; see Codec.encode_batch and encode_round.

    most: int64 [m], elements that each filter may keep of a piece; see ir/layout.py.
    """

    seed: int = 0
    step: int = 0
    scale: float = 1.0
    writeback: bool = False
    incoming: Incoming | None = None
    most: I64 | None = None
    workers: int = 1


def views(
    module: Module, state: State | None, first: int, length: int, tensor: int
) -> dict[str, NDArray[Any]] | None:
    """The parts of the state arrays that belong to one piece; None without a state."""
    if state is None:
        return None
    spans = {s.name: (tensor, 1) if s.shape == "scalar" else (first, length) for s in module.states}
    return {name: state[name][a : a + k] for name, (a, k) in spans.items()}


class Rows:
    """Values known before any data, a row for each piece."""

    def __init__(self, params: Mapping[str, Number]) -> None:
        self.params = dict(params)
        self.rows, self.stepping = Memo(), Memo()

    def follow_step(self, kernel: str, exprs: Sequence[Expr]) -> bool:
        """True if numbers of the kernel of this name depend on the step."""
        return bool(self.stepping.once(kernel, lambda: any("step" in depends(e) for e in exprs)))

    def of(
        self, kernel: str, exprs: Sequence[Expr], table: I64, step: int, most: I64 | None = None
    ) -> F64:
        """Rows for the kernel of this name, float64 [m, expressions]. most: see ir/layout.py."""
        if not exprs:
            return np.empty((len(table), 0))
        step = step if self.follow_step(kernel, exprs) else 0
        lengths = table[:, 1].tolist()
        cut = lengths if most is None else most.tolist()
        once, row = self.rows.once, self.row
        rows = [
            once((kernel, n, step, k), partial(row, exprs, n, step, k))
            for n, k in zip(lengths, cut, strict=True)
        ]
        return np.array(rows, np.float64).reshape(len(table), len(exprs))

    def row(self, exprs: Sequence[Expr], n: int, step: int, most: int) -> list[float]:
        """The row of a piece of n elements."""
        env = self.params | {"n": n, "step": step, MOST: most}
        return [float(evaluate(e, env)) for e in exprs]


def fresh(module: Module, table: I64) -> tuple[dict[str, tuple[str, int]], I64]:
    """Types and lengths of the zero states of a call without states, and a table for them."""
    table = np.array(table)
    table[:, STATE] = np.cumsum(table[:, LENGTH]) - table[:, LENGTH]
    size = {True: int(table[:, LENGTH].sum()), False: int(table[:, TENSOR].max(initial=0)) + 1}
    return {s.name: (s.dtype, size[s.per == "element"]) for s in module.states}, table


class Backend(Protocol):
    """The interface of a package in compll/backends: kernels over a batch of pieces."""

    #: memory of gradients, states and payloads
    arrays: Arrays
    #: true if encode_batch takes `incoming` payloads
    fuses: bool
    #: true if decode_batch adds k payloads of each piece at once, with `at` and `used` int64 [k, m]
    merges: bool

    def encode_batch(
        self, x: Any, table: I64, out: Any, at: I64, state: State | None, how: Encoding
    ) -> I64:
        """Encode every piece, after adding the decoded `incoming`; bytes used, int64 [m]."""

    def decode_batch(
        self, payload: Any, table: I64, at: I64, used: I64, out: Any, *, add: bool, step: int = 0
    ) -> None:
        """Decode every piece into out, or add it to out. Raises PayloadError before any write.

        step: that of the encode.

        A backend on a device does not wait: it skips a bad piece, and raise_found reports it.
        """

    def raise_found(self) -> None:
        """Raise PayloadError for a bad payload that an earlier decode found; may wait."""

    def encode_round(
        self,
        number: int,
        x: Any,
        table: I64,
        out: Any,
        at: I64,
        before: Before,
        state: State | None,
        how: Encoding,
    ) -> I64:
        """Encode a round's payload for every piece."""

    def decode_rounds(
        self, x: Any, table: I64, sums: Before, state: State | None, how: Encoding
    ) -> None:
        """Decode the sums of all rounds, and update the states."""
