"""A payload's layout as values of the piece, of which ir/layout.py has the sums.

A payload begins with a header of counts and lengths: a kernel that is given the payload loads them,
one that stores it has them from its steps.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from compll.ir.exclusive import families
from compll.ir.layout import starts
from compll.ir.module import Field
from compll.ir.storage import STORAGES
from compll.ir.tile import USED, WRONG, Array, Domain, Role, Store, Value
from compll.numerics.traced import Number
from compll.passes import selections
from compll.passes.arrays import Arrays


class Payload:
    """The payload that a kernel stores or is given. Its sums are of Numbers, whose instructions it
    makes values (see numerics/traced.py)."""

    def __init__(self, values: Arrays) -> None:
        self.values, self.kernel, self.module = values, values.kernel, values.kernel.module
        self.role: Role = "incoming" if self.kernel.decodes else "payload"
        #: bytes of the header so far
        self.head = 0

    def lay_out(self) -> None:
        """Set the kernel's counts, sizes and starts. Have it store the payload's header and length,
        or check them."""
        kernel, values = self.kernel, self.values
        kernel.counts = {"": values.make("size", (), "i64", "piece")}
        for s in self.module.selections:
            most = selections.limit(values, s)
            kernel.counts[s.name] = self.of_header("counted", s.name) if s.dynamic else most
        for f in self.module.fields:
            if f.layout.varying:
                kernel.sizes[Array.of(f, self.role)] = self.of_header("length", f.name)
                if kernel.decodes or f.layout.recoded:
                    array = values.contents(f)
                    kernel.sizes[array] = self.value(self.bytes(array))
        *begins, end = starts(self.module, self.head, lambda f: self.bytes(Array.of(f, self.role)))
        for role in (self.role, "incoming") if kernel.kind == "hop" else (self.role,):
            for f, start in zip(self.module.parts, begins, strict=True):
                kernel.starts[Array.of(f, role)] = self.value(start)
        if kernel.kind == "check":
            kernel.steps.append(Store(WRONG, self.misfit(self.value(end))))
        elif not kernel.decodes and kernel.kind != "rounds":
            kernel.steps.append(Store(USED, self.value(end)))

    def of_header(self, op: str, name: str) -> Value:
        """The header's next number: loaded, or stored once a step has made it. Payloads of rounds,
        which are added up, have no header."""
        start, make = self.head, self.values.make
        if self.kernel.decodes:
            self.head += 4
            return make("header", (), "i64", "piece", start)
        found = make(op, (), "i64", "piece", name)
        if self.kernel.kind in ("round", "rounds"):
            return found
        self.head += 4
        array = Array(f"{op} {name}", "payload", STORAGES["uint32"], Domain("scalar"))
        self.kernel.starts[array] = self.value(start)
        self.kernel.steps.append(Store(array, found))
        return found

    def misfit(self, end: Value) -> Value:
        """1 for a payload that does not end where its header says, or with more selected elements
        or bytes of codes than there can be; else 0."""
        kernel, values = self.kernel, self.values
        pairs = [
            (kernel.counts[s.name], selections.limit(values, s))
            for s in self.module.selections if s.dynamic
        ]  # fmt: skip
        pairs += [
            (kernel.sizes[Array.of(f, "incoming")], self.value(self.most(f)))
            for f in self.module.fields if f.layout.recoded
        ]  # fmt: skip
        for family in families(self.module):  # of which an element is in one
            together = reduce(add, (self.number(kernel.counts[name]) for name in family))
            pairs.append((self.value(together), kernel.counts[""]))
        used = values.make("used", (), "i64", "piece")
        wrong = [values.make("ne", (used, end), "bool", "piece")]
        wrong += [values.make("gt", pair, "bool", "piece") for pair in pairs]
        return values.whole(reduce(lambda a, b: values.make("or", (a, b), "bool", "piece"), wrong))

    # sums

    def most(self, field: Field) -> Any:
        """The most bytes of a field whose bytes are made from an array of all codes."""
        count = self.items(self.values.contents(field).domain)
        return field.layout.most_bytes(count, 0, self.kernel.tile)

    def items(self, domain: Domain) -> Any:
        """Items of a domain."""
        if domain.kind == "matrix":
            return self.number(self.values.extents(domain.dims).size)
        if domain.kind in ("scalar", "table"):
            return int(domain.of or 1)
        count, tile = self.number(self.kernel.counts[domain.of]), self.kernel.tile
        return (count + (tile - 1)) // tile if domain.kind == "group" else count

    def bytes(self, array: Array) -> Any:
        """Bytes of an array."""
        if array in self.kernel.sizes:
            return self.number(self.kernel.sizes[array])
        return array.storage.most_bytes(self.items(array.domain), 0, self.kernel.tile)

    def number(self, value: Value) -> Any:
        """A value as a term of sums."""
        return Number(self, value, "i64")

    def value(self, number: Any) -> Value:
        """A sum as a value."""
        return self.const("i64", number) if isinstance(number, int) else number.value

    def const(self, kind: str, number: float, like: Any = None) -> Value:
        """A constant."""
        return self.values.make("const", (), kind, "piece", number)

    def emit(self, op: str, kind: str, *args: Value) -> Value:
        """An instruction."""
        return self.values.make(op, args, kind, "piece")
