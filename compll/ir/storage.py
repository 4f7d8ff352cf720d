"""Payload types: the bytes of a field's values, and the most bytes that they take. Counts are ints;
but for positions, they may be Numbers of a program, too (see numerics/traced.py).

A type is a class or an instance here. Its reading and writing is in reference/fields.py for the
reference, in cpu/instructions.py for the CPU, and in a module of routines (routines/streams.py) for
types of varying length.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Storage:
    """A type whose values have bytes of their own.

    bits: of one value in bytes of its own or among codes; 2 for trits, which take 8/5. whole: for
    integers, the range they are clamped to; None for floats.
    """

    name: str = "float32"
    bits: int = 32
    whole: tuple[int, int] | None = None

    #: true if several values share a byte; true for positions of a selection
    packed = positions = False
    #: true if the payload stores the field's length in bytes
    varying = False
    #: true if it holds values 0, 1 and 2, five in a byte: [Note: trits] in reference/fields.py
    trits = False

    @property
    def recoded(self) -> bool:
        """True if its bytes are made from an array of all codes: runs and Huffman codes."""
        return self.packed and self.varying

    @property
    def parts(self) -> bool:
        """True if a value takes some bits of a byte and shares it with other values."""
        return self.name == "uint" and self.bits < 8

    def tile_bytes(self, count: int) -> int:
        """Bytes of a tile of `count` values."""
        return count * (self.bits // 8)

    def most_bytes(self, count: int, n: int, tile: int) -> int:
        """The most bytes of `count` values from a tensor of n elements."""
        if not self.packed:
            return self.tile_bytes(count)
        return count // tile * self.tile_bytes(tile) + self.tile_bytes(count % tile)

    def formula(self, count: str, tile: int) -> str:
        """Bytes of `count` values, as a formula to read."""
        return f"{count} * {self.bits // 8}"


@dataclass(frozen=True)
class Codes(Storage):
    """Numbers of `bits` bits, from 0 (see [Note: packing] in layout.py)."""

    name: str = "uint"
    packed = True

    def tile_bytes(self, count: int) -> int:
        return (count * self.bits + 7) // 8

    def formula(self, count: str, tile: int) -> str:
        return f"ceil({count} * {self.bits} / 8)" if self.bits < 8 else count


@dataclass(frozen=True)
class Trits(Storage):
    """Values 0, 1 and 2, five in a byte (see [Note: trits] in reference/fields.py).

    varying: runs of the byte of ones are shortened.
    """

    varying: bool = False
    packed = trits = True

    def tile_bytes(self, count: int) -> int:
        return (count + 4) // 5

    def formula(self, count: str, tile: int) -> str:
        full = f"{self.tile_bytes(tile)} * floor({count} / {tile}) + ceil({count} % {tile} / 5)"
        return f"at most {full}" if self.varying else full


class Gaps(Storage):
    """Ascending positions, each stored as the number of elements skipped: 7 bits a byte, and the
    eighth says that more follow (LEB128). Decode refuses a gap of more bytes than it needs."""

    positions = varying = True

    def most_bytes(self, count: int, n: int, tile: int = 0) -> int:
        """Gaps sum to less than n, so at most n / 128 of them need a second byte."""
        return count + sum(min(count, n >> shift) for shift in (7, 14, 21, 28, 35))

    def formula(self, count: str, tile: int) -> str:
        return f"{count} + the gaps above 127"


def rice_parameter(count: int, n: int) -> int:
    """floor(log2(.9624 n / count)): see [Note: bit streams] in routines/streams.py."""
    return max(0, (9624 * n // (10000 * max(count, 1))).bit_length() - 1)


class Golomb(Storage):
    """Ascending positions, with their gaps in Golomb-Rice codes."""

    positions = varying = True

    def most_bytes(self, count: int, n: int, tile: int = 0) -> int:
        """The maximum over every parameter b: b is used only for few enough positions, which have
        at most n >> b ones."""
        least = rice_parameter(count, n)
        bits = [0]
        for b in range(least, least + max(n, 1).bit_length() + 1):
            most = min(count, 9624 * n // (10000 << b)) if b > least else count
            bits.append(most * (1 + b) + (n >> b))
        return 1 + (max(bits) + 7) // 8

    def formula(self, count: str, tile: int) -> str:
        return f"at most 1 + ({count} * (1 + b) + n / 2**b) / 8, b = log2(.96 n / {count})"


#: codes of a tile of a Huffman field, and the most bits of one
HUFFMAN_TILE, HUFFMAN_LONGEST = 1024, 12


@dataclass(frozen=True)
class Huffman(Storage):
    """Numbers of at most `bits` bits, from 0, in Huffman codes of their own frequencies (see
    [Note: huffman] in routines/huffman.py)."""

    name: str = "huffman"
    packed = varying = True

    def head(self, count: int) -> int:
        """Bytes before the codes: four bits a number, and 16 bits a tile."""
        return (1 << self.bits) // 2 + 2 * ((count + (HUFFMAN_TILE - 1)) // HUFFMAN_TILE)

    def most_bytes(self, count: int, n: int, tile: int = 0) -> int:
        """Codes take at most `bits` bits on average, and each tile ends a byte."""
        tiles = (count + (HUFFMAN_TILE - 1)) // HUFFMAN_TILE
        return self.head(count) + (count * self.bits + 7 * tiles) // 8

    def formula(self, count: str, tile: int) -> str:
        tiles = f"ceil({count} / {HUFFMAN_TILE})"
        return f"at most {(1 << self.bits) // 2} + {count} * {self.bits} / 8 + 2.875 * {tiles}"


#: types that are declared with their bits, as NAME[bits][n]
WITH_BITS: dict[str, type[Storage]] = {"uint": Codes, "huffman": Huffman}
#: storage types by name; those with bits are made by Field.layout
STORAGES: dict[str, Storage] = {
    storage.name: storage
    for storage in (
        Storage("float32"),
        Storage("float16", 16),
        Storage("bfloat16", 16),
        Storage("float8_e4m3", 8),
        Storage("int32", whole=(-(2**31), 2**31 - 1)),
        Storage("uint32", whole=(0, 2**32 - 1)),
        Storage("uint16", 16, (0, 2**16 - 1)),
        Storage("byte", 8, (0, 255)),  # `uint8` of one number, or one per group
        Trits("trit", 2),
        Trits("runs", 2, varying=True),
        Huffman(bits=8),
        Gaps("gaps"),
        Golomb("golomb"),
    )
}
FLOAT32, INT32 = STORAGES["float32"], STORAGES["int32"]
#: types of varying length: backends have routines of these names, which store and load them
VARYING = tuple(name for name, storage in STORAGES.items() if storage.varying)
