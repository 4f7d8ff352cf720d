"""Places of a payload's fields, computed from its counts and lengths, as text."""

from __future__ import annotations

from typing import Any

from compll.ir.layout import header
from compll.ir.module import Field
from compll.ir.storage import Storage
from compll.ir.tile import STATUS

#: incoming and outgoing payloads: the array, and the start of the piece's payload in it
PLACES = {"in": ("data", "at_in[p]"), "out": ("out", "at[p]")}


class PayloadFields:
    """Fields of an incoming or outgoing payload (see PLACES) in the kernel `body` (a Body)."""

    def __init__(self, body: Any, prefix: str) -> None:
        self.body, self.prefix = body, prefix
        self.data, self.at = PLACES[prefix]
        self.module, self.tile = body.plan.module, body.plan.shape.tile
        self.head = header(self.module)

    def place(self, name: str, *, length: bool) -> str:
        """Pointer to a selection's count or a field's length in the payload."""
        counted, lengths = self.head
        index = len(counted) + lengths.index(name) if length else counted.index(name)
        return f"{self.data} + {self.at} + {4 * index}"

    def offset(self, number: int) -> str:
        """Start of field `number`; after the last field, of the status byte."""
        name = f"{self.prefix}_at{number}"
        if number == 0:
            begin = f"{self.at} + {4 * sum(map(len, self.head))}"
            return str(self.body.hoist(name, f"const i64 {name} = {begin};"))
        before = self.offset(number - 1)
        size = self.size(self.module.fields[number - 1])
        return str(self.body.hoist(name, f"const i64 {name} = {before} + {size};"))

    def end(self) -> str:
        """Start of the status byte."""
        return self.offset(len(self.module.fields))

    def pointer(self, name: str) -> str:
        """Pointer to a field."""
        number = [*(one.name for one in self.module.fields), STATUS.name].index(name)
        return f"({self.data} + {self.offset(number)})"

    def size(self, f: Field) -> str:
        """Bytes of a field."""
        if f.layout.varying:
            return self.length(f)
        if f.shape == "table":
            return str(4 * int(f.of))
        if f.shape == "scalar":
            return str(f.item_bits // 8)
        if f.shape == "matrix":
            rows, cols = map(self.body.dim, f.dims)
            return self.bytes(f.layout, f"({rows} * {cols})")
        count = self.kept(f.of)
        if f.shape == "group":
            return f"({count} + {self.tile - 1}) / {self.tile} * {f.item_bits // 8}"
        return self.bytes(f.layout, count)

    def bytes(self, storage: Storage, count: str) -> str:
        """Bytes of `count` values."""
        if not storage.packed:
            return f"{count} * {storage.bits // 8}"
        rest = f"({count} % {self.tile}"
        rest = f"{rest} + 4) / 5" if storage.trits else f"{rest} * {storage.bits} + 7) / 8"
        return f"({count} / {self.tile} * {storage.tile_bytes(self.tile)} + {rest})"

    def length(self, f: Field) -> str:
        """Bytes of a field of varying length."""
        if self.prefix == "out":
            return str(self.body.slot(("length", f.name), "i64"))
        return self.header_number(f"length_{f.name}", self.place(f.name, length=True))

    def among(self, selection: str) -> str:
        """Number of elements among which the selection chooses."""
        return self.kept(self.module.among(selection))

    def kept(self, selection: str) -> str:
        """Elements of a selection; "": of the piece."""
        if not selection:
            return str(self.body.given("n"))
        if selection not in self.head[0]:
            return str(self.body.value(self.body.plan.limits[selection]))
        if self.prefix == "out":
            return str(self.body.slot(("count", selection), "i64"))
        return self.header_number(f"count_{selection}", self.place(selection, length=False))

    def header_number(self, name: str, place: str) -> str:
        """A number of an incoming payload's header; 0 if the payload is too short for it."""
        size = 4 * sum(map(len, self.head))
        text = f"const i64 {name} = used_in[p] < {size} ? 0 : load_uint32({place});"
        return str(self.body.hoist(name, text))
