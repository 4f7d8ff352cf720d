"""A type-checked spec as data: its payload fields, states and selections."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from compll.errors import Span
from compll.ir.expr import Expr, Pool, walk
from compll.ir.storage import STORAGES, WITH_BITS, Storage

#: states of feedback: of errors, and of differences; MEAN is that of all ranks' references, which
#: whoever averages payloads updates
RESIDUAL, REFERENCE, MEAN = "residual", "reference", "mean"
#: storages of positions, of varying length
POSITIONS = tuple(name for name, storage in STORAGES.items() if storage.positions)
PACKED = ("uint", *(name for name, storage in STORAGES.items() if storage.packed))
TRITS = tuple(name for name, storage in STORAGES.items() if storage.trits)
#: storages of integers that are not packed
WHOLE = tuple(name for name, storage in STORAGES.items() if storage.whole)
#: NumPy's types of 16-bit states: NumPy has no bfloat16, so its bits are kept as integers
HALVES = {"float16": "float16", "bfloat16": "uint16"}


@dataclass(frozen=True)
class Field:
    """A payload field or state. bits: of a uint, or of a trit while it is a code.

    storage: float32 float16 bfloat16 float8_e4m3 int32 uint32 uint16 byte uint trit runs huffman
    gaps golomb. shape is a level; for `kept`, `of` names the selection; for `matrix`, `dims`
    are its rows and columns. `expr` is the value that encode stores.
    """

    name: str
    storage: str
    bits: int
    shape: str
    of: str = ""
    expr: Expr | None = None
    dims: tuple[Expr, ...] = ()
    #: the largest code, if bytes must hold sums of codes; 0: the largest that the bits hold
    most: int = 0
    #: gradient that was not sent yet, of which a unit of this state is; 0 for a residual, too
    gradient: float = 0.0

    @property
    def layout(self) -> Storage:
        """The storage type, which lays the values out in bytes."""
        if self.storage in WITH_BITS:
            return WITH_BITS[self.storage](bits=self.bits)
        return STORAGES.get(self.storage, Storage())

    @property
    def item_bits(self) -> int:
        """Bits of one value in the payload."""
        return self.layout.bits

    @property
    def dtype(self) -> str:
        """NumPy's type of the array that holds a state."""
        return HALVES.get(self.storage, "float32")

    @property
    def per(self) -> str:
        """Values of a state: per "element" of a tensor, or one per "tensor"."""
        return "tensor" if self.shape == "scalar" else "element"

    @property
    def fate(self) -> str:
        """Meaning of a state between ranks. "owed": gradient that was not sent yet, and may be
        added to any later one; "same": equal on all ranks; "mean": ranks may take their mean."""
        if self.name == RESIDUAL:
            return "owed"
        return "same" if self.name == MEAN or self.shape == "matrix" else "mean"

    @property
    def packed(self) -> bool:
        """True if values are packed in bytes (see [Note: packing] in layout.py)."""
        return self.layout.packed


#: the payload's last byte: 1 if the gradient was not finite, and no field tells
STATUS = Field("(status)", "byte", 8, "scalar")


@dataclass(frozen=True)
class Selection:
    """A set of elements. kind `top`: the largest keys; kind `filter`: the first true ones.

    Kind `drawn`: `limit` elements, drawn at random without data, the same on all ranks.
    of: the drawn selection among whose elements it chooses; "": among all.
    """

    name: str
    kind: str
    key: Expr
    limit: Expr
    threshold: Expr | None = None
    of: str = ""

    @property
    def dynamic(self) -> bool:
        """True if the number of kept elements is known only at run time."""
        return self.kind == "filter"

    @property
    def unlimited(self) -> bool:
        """True if it keeps every element that meets its condition."""
        limit = self.limit.args[0] if self.limit.op == "float" else self.limit
        return self.dynamic and limit.op == "param" and limit.value == "n"


@dataclass(frozen=True)
class Module:
    """A type-checked spec, the input of every backend."""

    name: str
    group: int
    fields: tuple[Field, ...]
    states: tuple[Field, ...]
    selections: tuple[Selection, ...]
    decode: Expr
    updates: dict[str, Expr]
    feedback: bool
    status: bool
    bindings: dict[str, Expr]
    pool: Pool
    #: decode(encode(g)) as an expression of the input; None if it is not an elementwise function
    decoded: Expr | None = None
    merge: str = "decode"
    #: true: the residual subtracts what this rank's own payload decodes to, not what all ranks' do
    own: bool = False
    #: true: payloads are of differences from a reference, whose mean receivers hold
    differences: bool = False
    #: factor by which the residual is multiplied before it is added, or the decoded difference
    #: before the reference takes it up
    decay: float = 1.0
    #: payload fields that all ranks combine, in order, each with "sum" or "max"
    rounds: tuple[tuple[str, str], ...] = ()
    #: condition on n for tensors that are worth compressing; None: all are
    when: Expr | None = None
    #: the spec's claim that the mean of decode(encode(g)) over all seeds is g
    unbiased: bool = False
    #: derived parameters that choose the type of states (see feedback.py)
    kept_as: Mapping[str, str] = field(default_factory=dict)
    about: str = ""
    source: str = ""
    #: the spec's file, and the places of its names, as "section.name"
    path: str = ""
    spans: Mapping[str, Span] = field(default_factory=dict)

    @property
    def parts(self) -> tuple[Field, ...]:
        """The payload behind its header: the fields, and the status byte."""
        return (*self.fields, STATUS) if self.status else self.fields

    @property
    def feedback_state(self) -> str:
        """The state of feedback."""
        return REFERENCE if self.differences else RESIDUAL

    @property
    def follows_step(self) -> bool:
        """True if an expression contains `step`. Random draws depend on the step anyway."""
        selections = [e for s in self.selections for e in (s.key, s.limit, s.threshold)]
        fields = (f.expr for f in self.fields)
        roots = [self.decode, *self.updates.values(), *fields, *selections]
        result = walk(*(e for e in roots if e is not None))
        return any(e.op == "param" and e.value == "step" for e in result)

    def among(self, selection: str) -> str:
        """The selection among whose elements one chooses; "": among all, or no selection."""
        return next((s.of for s in self.selections if s.name == selection), "")
