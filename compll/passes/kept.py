"""Values of selected elements that are captured for the walks over them."""

from __future__ import annotations

from typing import Any

from compll.ir.module import Field, Selection
from compll.ir.tile import Value, order


class Kept:
    """Arrays that collect a selection's elements. values: a Values.

    late: ids of the piece's values that are known only after the walk that selects.
    """

    def __init__(self, selection: Selection, values: Any) -> None:
        self.selection, self.values = selection, values
        self.parts: dict[int, tuple[Field, Value]] = {}
        self.late: set[int] = set()

    def load(self, value: Value) -> Value:
        """An element's value in a walk over the selected elements: captured, or computed again if
        it needs a value that is known only after the selection."""
        if value.level == "piece":
            return value
        if any(id(v) in self.late for v in order([value])):
            args = [self.load(a) for a in value.args]
            again: Value = self.values.make(value.op, args, value.kind, value.level, value.attr)
            return again
        if value.kind == "bool":
            found: Value = self.values.truth(self.load(self.values.whole(value)))
            return found
        if id(value) not in self.parts:
            name = f"{self.selection.name}.{len(self.parts)}"
            storage = {"f32": "float32", "i32": "int32"}[value.kind]
            f = Field(name, storage, 0, "kept", self.selection.name)
            self.parts[id(value)] = f, value
        f = self.parts[id(value)][0]
        loaded: Value = self.values.make("load", (), value.kind, "lane", f)
        return loaded
