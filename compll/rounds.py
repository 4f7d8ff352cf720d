"""Methods that aggregate in the middle: fields that the ranks combine one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from compll.ir import Field, Module
from compll.layout import field_bytes

#: of each earlier round: the summed payloads (uint8), and where each piece begins (int64 [m])
Before: TypeAlias = Sequence[tuple[Any, Any]]


@dataclass(frozen=True)
class Round:
    """A payload field that adds without decoding, n numbers of `dtype`, and how it is combined."""

    field: Field
    how: str
    module: Module

    @property
    def name(self) -> str:
        """The payload field's."""
        return self.field.name

    @property
    def dtype(self) -> str:
        """float32, float16 or bfloat16."""
        return self.field.storage

    def payload_bytes(self, n: int) -> int:
        """The bytes of this round for n elements."""
        return field_bytes(self.field, self.module, n, 0) if n else 0


def rounds(module: Module) -> tuple[Round, ...]:
    """The rounds of a spec, in order."""
    by_name = {f.name: f for f in module.fields}
    return tuple(Round(by_name[name], how, module) for name, how in module.rounds)
