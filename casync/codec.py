"""What casync asks of a codec; any class with these members is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any, Literal, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = [
    "FLOAT_BYTES",
    "OPERATIONS",
    "Bytes",
    "Codec",
    "CodecDefaults",
    "DeviceCodec",
    "Floats",
    "Ints",
    "Operation",
    "Round",
    "State",
]

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Ints: TypeAlias = npt.NDArray[np.int64]
#: float32, or 16 bits a value: float16, and bfloat16 as the uint16 of its bits
State: TypeAlias = Mapping[str, npt.NDArray[Any]]

#: what a native all-reduce does
Operation: TypeAlias = Literal["sum", "max"]
OPERATIONS: tuple[Operation, ...] = ("sum", "max")

FLOAT_BYTES = 4  # gradients are float32


class Round(Protocol):
    """One all-reduce of a codec that aggregates in the middle."""

    @property
    def dtype(self) -> str:
        """float32, float16, bfloat16 or uint8: what the payload consists of, and nothing else."""
        ...

    @property
    def op(self) -> Operation:
        """What the all-reduce does."""
        ...

    def payload_bytes(self, n: int) -> int:
        """Exact bytes of the round's payload of n elements."""
        ...


class Codec(Protocol):
    """Encodes pieces of a flat float32 array into bytes, and back; many pieces in one call.

    A `table` is int64 [m, 5] with a row per piece: START (first element in the array), LENGTH,
    TENSOR (index of the tensor in the model: random stream, per-tensor state), OFFSET (index of
    the piece's first element inside its tensor), STATE (first element in the flat state arrays).
    """

    @property
    def name(self) -> str:
        """Such as "onebit_group"."""
        ...

    @property
    def digest(self) -> str:
        """Hash of specification and parameters, compared between ranks."""
        ...

    @property
    def params(self) -> Mapping[str, Any]:
        """Values of its parameters by name, for messages and reports."""
        ...

    @property
    def align(self) -> int:
        """A partition starts at a multiple of this many elements (group size, else 1)."""
        ...

    @property
    def fixed(self) -> bool:
        """Whether a payload is always exactly payload_bytes(n) long."""
        ...

    @property
    def cuts(self) -> bool:
        """Whether encode_batch takes `capacity`: what does not fit stays in its state."""
        ...

    @property
    def additive(self) -> str | None:
        """float32, float16 or bfloat16: n such numbers, which add without decoding."""
        ...

    @property
    def vote(self) -> bool:
        """Whether decoded values of all ranks add up and the sum is encoded again, stateless."""
        ...

    @property
    def reencodes(self) -> bool:
        """Whether it may encode again at an aggregator or a ring hop."""
        ...

    @property
    def fuses(self) -> bool:
        """Whether encode_batch decodes and adds `incoming` payloads in the same kernel."""
        ...

    @property
    def stateful(self) -> bool:
        """Whether it keeps a residual or other state."""
        ...

    @property
    def rounds(self) -> Sequence[Round]:
        """Its all-reduces, in order, if it is a casync.rounds.RoundsCodec; else ()."""
        ...

    def for_shape(self, shape: Sequence[int]) -> Codec:
        """The codec for a parameter of this shape: itself where the shape does not matter."""
        ...

    def suits(self, n: int) -> bool:
        """Whether it is worth using for n elements."""
        ...

    def prepare(self) -> None:
        """Compile now what aggregators need, rather than at its first use."""
        ...

    def payload_bytes(self, n: int) -> int:
        """Upper bound of the payload of n elements, of all rounds, known before any data."""
        ...

    def init_state(self, n: int, tensors: int = 1) -> dict[str, npt.NDArray[Any]]:
        """Zeroed state: flat [n], or float32 [tensors] per tensor; {} if stateless."""
        ...

    def encode_batch(
        self,
        x: Floats,
        table: Ints,
        out: Bytes,
        at: Ints,
        *,
        state: State | None = None,
        seed: int = 0,
        step: int = 0,
        scale: float = 1.0,
        writeback: bool = False,
        incoming: Any = None,
        capacity: Ints | None = None,
    ) -> Ints:
        """Encode x * scale piece by piece into `out` at bytes `at`; return int64 [m] used bytes.

        `writeback` overwrites each piece of x by decode(encode(x)) in the same pass. A given
        `state` is applied (error feedback) and updated. `incoming`: (payload, at, used) of a batch
        that is decoded and added to x first; without `writeback` x then holds nothing of use.
        `capacity`: int64 [m], bytes of each payload at most, where it `cuts`; else None.
        """
        ...

    def decode_batch(
        self,
        payload: Bytes,
        table: Ints,
        at: Ints,
        used: Ints,
        out: Floats,
        *,
        add: bool = False,
        step: int = 0,
    ) -> None:
        """Decode each piece into `out` (adding when `add`); raises on a bad payload.

        step: that of the encode, for codecs that draw again what encode drew.
        """
        ...


class DeviceCodec(Codec, Protocol):
    """What is asked of a codec on a device, besides: its decodes do not wait."""

    def hold(self, numbers: Ints) -> Ints:
        """Numbers to give as table, at, used or capacity, which do not change: what the device
        needs of them is made once, and lives as long as the array that is returned."""
        ...

    def view(self, x: Any) -> Any:
        """An array as calls take it quickest, with the same memory."""
        ...

    @property
    def merges(self) -> bool:
        """Whether decode_batch adds k payloads of each piece at once, at and used int64 [k, m]."""
        ...

    @property
    def repeats(self) -> bool:
        """Whether nothing that the host computes for a call follows from `step`."""
        ...

    def ticking(self, tick: Any) -> AbstractContextManager[None]:
        """Calls within add an int64 [1] in their memory to `step` when they run, or run again."""
        ...

    def raise_found(self) -> None:
        """Raise for a bad payload that an earlier decode met; may wait."""
        ...


class CodecDefaults:
    """What most codecs answer to the members of Codec that describe special cases; to inherit."""

    cuts = False
    repeats = True
    merges = False
    params: Mapping[str, Any] = MappingProxyType({})
    align: int = 1
    additive: str | None = None
    vote: bool = False
    fuses: bool = False
    stateful: bool = False
    rounds: Sequence[Round] = ()

    def init_state(self, n: int, tensors: int = 1) -> dict[str, npt.NDArray[Any]]:
        """None."""
        return {}

    def for_shape(self, shape: Sequence[int]) -> Self:
        """See Codec."""
        return self

    def suits(self, n: int) -> bool:
        """See Codec."""
        return True

    def hold(self, numbers: Ints) -> Ints:
        """See DeviceCodec."""
        return numbers

    def view(self, x: Any) -> Any:
        """See DeviceCodec."""
        return x

    def ticking(self, tick: Any) -> AbstractContextManager[None]:
        """See Codec; what takes no notice of the step."""
        return nullcontext()

    def prepare(self) -> None:
        """See Codec."""

    def raise_found(self) -> None:
        """See DeviceCodec."""
