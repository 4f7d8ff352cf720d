"""The codec interface of casync: any class with these members is a codec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self, TypeAlias, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

__all__ = [
    "FLOAT_BYTES",
    "OPERATIONS",
    "Bytes",
    "Codec",
    "CodecDefaults",
    "DecodeOptions",
    "DeviceCodec",
    "EncodeOptions",
    "Fate",
    "Floats",
    "Ints",
    "Operation",
    "Round",
    "State",
    "StateField",
    "one_piece",
]

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int64]
#: float32, or 16 bits a value: float16, and bfloat16 as the uint16 of its bits
State: TypeAlias = Mapping[str, npt.NDArray[Any]]

#: the operator of a native all-reduce
Operation: TypeAlias = Literal["sum", "max"]
OPERATIONS: tuple[Operation, ...] = ("sum", "max")

FLOAT_BYTES = 4  # gradients are float32


def one_piece(n: int) -> tuple[Ints, Ints]:
    """Table and bytes `at` of a batch that is one piece of n elements."""
    return np.array([[0, n, 0, 0, 0]], np.int64), np.zeros(1, np.int64)


class Round(Protocol):
    """An all-reduce of a codec that aggregates in rounds."""

    @property
    def dtype(self) -> str:
        """Type of all numbers of the payload: float32, float16, bfloat16 or uint8."""
        ...

    @property
    def op(self) -> Operation:
        """Operator of the all-reduce: "sum" or "max"."""
        ...

    def payload_bytes(self, n: int) -> int:
        """Exact bytes of the round's payload of n elements."""
        ...


#: what becomes of a state between ranks: "owed" is gradient that was not sent yet, and may be added
#: to any later gradient; "mean": ranks' values may be replaced by their mean; "same": values are
#: equal on all ranks
Fate: TypeAlias = Literal["owed", "mean", "same"]


@dataclass(frozen=True)
class StateField:
    """A state that a codec keeps between steps, zero at first."""

    name: str
    dtype: str = "float32"  # of its array: float32, float16, or uint16 with bits of bfloat16
    per: Literal["element", "tensor"] = "element"  # of a tensor, or one value a tensor
    fate: Fate = "owed"
    #: for another fate: gradient that was not sent yet, of which a unit of the state is
    gradient: float = 0.0


class EncodeOptions(TypedDict, total=False):
    """Options of `Codec.encode_batch`."""

    seed: int  # of random draws, with `step`; both are 0 by default
    step: int
    scale: float  # factor of x; 1 by default
    writeback: bool  # overwrite each piece of x by decode(encode(x)) in the same pass
    #: (payload, at, used) of a batch that is decoded and added to x first, if the codec `fuses`;
    #: without `writeback` the contents of x are undefined afterwards
    incoming: Any
    capacity: Ints | None  # int64 [m], payloads' largest bytes, if the codec `cuts`


class DecodeOptions(TypedDict, total=False):
    """Options of `Codec.decode_batch`."""

    add: bool  # add to `out` rather than overwrite it
    step: int  # the encode's, for codecs whose decode repeats its random draws; 0 by default


class Codec(Protocol):
    """Encodes pieces of a flat float32 array into bytes, and back; many pieces in one call.

    A `table` is int64 [m, 5] with a row per piece: START (first element in the array), LENGTH,
    TENSOR (index of the tensor in the model: random stream, per-tensor state), OFFSET (index of
    the piece's first element inside its tensor), STATE (first element in the flat state arrays).
    """

    @property
    def name(self) -> str:
        """Name of the codec, such as "onebit_group"."""
        ...

    @property
    def digest(self) -> str:
        """Hash of specification and parameters, compared between ranks."""
        ...

    @property
    def params(self) -> Mapping[str, Any]:
        """Values of the codec's parameters by name, for messages and reports."""
        ...

    @property
    def align(self) -> int:
        """A partition starts at a multiple of this many elements (group size, else 1)."""
        ...

    @property
    def fixed(self) -> bool:
        """True if a payload is always exactly payload_bytes(n) long."""
        ...

    @property
    def cuts(self) -> bool:
        """True if encode_batch takes `capacity`; values that do not fit stay in the state."""
        ...

    @property
    def additive(self) -> str | None:
        """Type of payloads that add without decoding (float32, float16, bfloat16), or None."""
        ...

    @property
    def vote(self) -> bool:
        """True if the owner adds all decoded values and encodes their sum without state."""
        ...

    @property
    def reencodes(self) -> bool:
        """True if an aggregator or a ring hop may encode again."""
        ...

    @property
    def difference(self) -> float | None:
        """Share of a decoded difference that references take up, if payloads are of differences
        from the state "reference", whose mean over the ranks the state "mean" holds; else None."""
        ...

    @property
    def fuses(self) -> bool:
        """True if encode_batch decodes and adds `incoming` payloads in the same kernel."""
        ...

    @property
    def states(self) -> Sequence[StateField]:
        """The states that the codec keeps; () if it is stateless."""
        ...

    @property
    def rounds(self) -> Sequence[Round]:
        """All-reduces in order if the codec is a casync.rounds.RoundsCodec; else ()."""
        ...

    def for_shape(self, shape: Sequence[int]) -> Codec:
        """The codec for a parameter of this shape; itself if the shape does not matter."""
        ...

    def suits(self, n: int) -> bool:
        """True if the codec is worth using for n elements."""
        ...

    def prepare(self) -> None:
        """Compile the kernels of aggregators now, rather than at their first use."""
        ...

    def payload_bytes(self, n: int) -> int:
        """Upper bound in bytes of the payload of n elements, over all rounds."""
        ...

    def encode_batch(
        self,
        x: Floats,
        table: Ints,
        out: Bytes,
        at: Ints,
        *,
        state: State | None = None,
        **options: Unpack[EncodeOptions],
    ) -> Ints:
        """Encode x * scale piece by piece into `out` at bytes `at`; return int64 [m] used bytes.

        A given `state` is applied (error feedback) and updated.
        """
        ...

    def decode_batch(
        self,
        payload: Bytes,
        table: Ints,
        at: Ints,
        used: Ints,
        out: Floats,
        **options: Unpack[DecodeOptions],
    ) -> None:
        """Decode each piece into `out`; raises ValueError on a bad payload."""
        ...


class DeviceCodec(Codec, Protocol):
    """Further members of a codec on a device; its decodes do not wait."""

    def hold(self, numbers: Ints) -> Ints:
        """Prepare numbers that do not change for use as table, at, used or capacity. Their copy on
        the device is made once and lives as long as the returned array."""
        ...

    def view(self, x: Any) -> Any:
        """The same memory as the array type that calls take fastest."""
        ...

    def scratch_bytes(self, n: int) -> int:
        """Memory that calls for a tensor of n elements need besides payloads and states; all
        tensors share it."""
        ...

    @property
    def merges(self) -> bool:
        """True if decode_batch adds k payloads of each piece at once; at, used: int64 [k, m]."""
        ...

    @property
    def repeats(self) -> bool:
        """True if the host computes nothing from `step`: a captured call may be replayed."""
        ...

    def ticking(self, tick: Any) -> AbstractContextManager[None]:
        """Within the context, calls that this thread captures add to `step` the int64 [1] `tick` in
        device memory, read at each replay."""
        ...

    def raise_found(self) -> None:
        """Raise the error of a bad payload that an earlier decode found; may wait."""
        ...


class CodecDefaults:
    """Defaults of the members of Codec that describe special cases; a base class."""

    cuts = False
    repeats = True
    merges = False
    params: Mapping[str, Any] = MappingProxyType({})
    align: int = 1
    additive: str | None = None
    vote: bool = False
    difference: float | None = None
    fuses: bool = False
    states: Sequence[StateField] = ()
    rounds: Sequence[Round] = ()

    def init_state(self, n: int, tensors: int = 1) -> dict[str, npt.NDArray[Any]]:
        """Zeroed states of n elements of a number of tensors, in host memory."""
        sizes = {"element": n, "tensor": tensors}
        return {state.name: np.zeros(sizes[state.per], state.dtype) for state in self.states}

    def for_shape(self, shape: Sequence[int]) -> Self:
        """Implements Codec.for_shape."""
        return self

    def suits(self, n: int) -> bool:
        """Implements Codec.suits."""
        return True

    def scratch_bytes(self, n: int) -> int:
        """Implements DeviceCodec.scratch_bytes: none."""
        return 0

    def hold(self, numbers: Ints) -> Ints:
        """Implements DeviceCodec.hold."""
        return numbers

    def view(self, x: Any) -> Any:
        """Implements DeviceCodec.view."""
        return x

    def ticking(self, tick: Any) -> AbstractContextManager[None]:
        """Implements DeviceCodec.ticking for a codec that ignores the step."""
        return nullcontext()

    def prepare(self) -> None:
        """Implements Codec.prepare."""

    def raise_found(self) -> None:
        """Implements DeviceCodec.raise_found."""
