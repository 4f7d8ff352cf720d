"""Methods that aggregate in the middle of a step: ranks combine payload fields, one after the
other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from compll.ir.expr import walk
from compll.ir.layout import field_bytes, limit
from compll.ir.module import Field, Module

#: for each earlier round: the summed payloads (uint8), and the start of each piece (int64 [m])
Before: TypeAlias = Sequence[tuple[Any, Any]]


@dataclass(frozen=True, repr=False)
class Round:
    """A payload field that adds up without decoding, n numbers of `dtype`, and the way it is
    combined."""

    field: Field
    how: str
    module: Module

    def __repr__(self) -> str:
        return f"Round({self.name!r}, how={self.how!r}, dtype={self.dtype!r})"

    @property
    def name(self) -> str:
        """The payload field's name."""
        return self.field.name

    @property
    def dtype(self) -> str:
        """float32, float16, bfloat16 or uint8."""
        return "uint8" if self.field.storage == "uint" else self.field.storage

    @property
    def op(self) -> str:
        """The all-reduce: sum or max."""
        return "max" if self.how == "max" else "sum"

    @property
    def most_workers(self) -> int:
        """The most ranks whose sum of codes fits a byte; 0: any number."""
        return 255 // self.field.most if self.field.most else 0

    def payload_bytes(self, n: int) -> int:
        """Bytes of this round for n elements."""
        return field_bytes(self.field, self.module, n, {self.field.of: self.kept(n)}) if n else 0

    def kept(self, n: int) -> int:
        """Elements of the field's drawn selection; 0 for other fields."""
        known = {s.name: s for s in self.module.selections}
        return limit(known[self.field.of], {}, n) if self.field.of in known else 0


def draws(module: Module) -> bool:
    """True if decode repeats random draws of encode."""
    return any(e.op in ("indices", "in", "shared", "random_matrix") for e in walk(module.decode))


def rounds(module: Module) -> tuple[Round, ...]:
    """The rounds of a spec, in order."""
    by_name = {f.name: f for f in module.fields}
    return tuple(Round(by_name[name], how, module) for name, how in module.rounds)


def refused(rounds: Sequence[Round], workers: int) -> str | None:
    """The reason why `workers` ranks cannot add up payloads of a round; None if they can."""
    for one in rounds:
        if one.most_workers and workers > one.most_workers:
            sent = one.field.most
            return (
                f"{workers} ranks add up codes of 0 to {sent} to {workers * sent}, "
                f"and a byte holds 255: at most {one.most_workers} ranks, or fewer bits"
            )
    return None
