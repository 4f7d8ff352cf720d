"""Messages without repeats: a block that only repeats the eight bytes before it does not travel.

The gradient of an embedding is zero except for the rows of the batch's words, and a codec of fixed
length encodes zeros to the same few bytes again and again. OmniReduce (Fei et al., SIGCOMM'21)
sends no blocks of zeros; payloads may repeat any eight bytes, and nothing is lost.

A message begins with an int64 mark. PLAIN: the message follows unchanged. Otherwise the mark is its
length in bytes, followed by a bit per block (1: kept) in whole words, the kept blocks, and the rest
after the last block. A block is BLOCK bytes; the first one is always kept.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from casync.codec import Bytes
from casync.errors import PayloadError

__all__ = ["MARK", "PLAIN", "expand", "extent", "promises", "squeeze"]

MARK = 8  # bytes
PLAIN = 0
BLOCK = 64
_WORD = 8
_WORDS = BLOCK // _WORD
_LEAST = 64  # blocks: smaller messages are not sampled
_SAMPLED = 64  # blocks of a sample
_WORTH = 4  # one of this many blocks must repeat to pay on a link as fast as memory
_ALL = np.uint64(0x0101010101010101)  # eight times True

_Words = npt.NDArray[np.uint64]
_Bools = npt.NDArray[np.bool_]


def promises(message: Bytes) -> bool:
    """True if enough of a few sampled blocks repeat. message: aligned, in whole words (8 bytes)."""
    count = len(message) // BLOCK
    if count < _LEAST:
        return False
    step = max(2, count // _SAMPLED)
    blocks = message[: count * BLOCK].view(np.uint64).reshape(-1, _WORDS)
    some = blocks[step - 1 :: step]
    before = blocks[step - 2 :: step, -1:][: len(some)]
    return bool(np.count_nonzero((some == before).all(axis=1)) * _WORTH >= len(some))


def squeeze(message: Bytes, wire: Bytes) -> int:
    """Write the squeezed message into `wire`; return its bytes with mark, or 0 if it does not pay.

    For a message that `promises`. wire: as long as the message and its mark.
    """
    end = len(message) // BLOCK * BLOCK
    blocks = _blocks(message[:end])
    changed = _changes(blocks.reshape(-1))
    first, last, size = _places(len(message), int(np.count_nonzero(changed)))
    if size > len(message) - len(message) // _WORTH:
        return 0
    wire[:MARK].view(np.int64)[0] = len(message)
    bits = np.packbits(changed)
    wire[MARK : MARK + len(bits)] = bits
    wire[MARK + len(bits) : first] = 0
    np.compress(changed, blocks, axis=0, out=_blocks(wire[first:last]))
    wire[last:size] = message[end:]
    return size


def extent(wire: Bytes, room: int) -> int:
    """Bytes of the squeezed message in `wire`, for a message of at most `room` bytes.

    Raises PayloadError for an invalid one.
    """
    length = int(wire[:MARK].view(np.int64)[0])
    if not BLOCK <= length <= room or length % _WORD:
        raise PayloadError(
            f"a squeezed message of {length} bytes; expected whole words, {BLOCK} to {room} bytes"
        )
    first, *_ = _places(length, 0)
    changed = _bits(wire, length) if first <= len(wire) else np.zeros(1, np.bool_)
    *_, size = _places(length, int(np.count_nonzero(changed)))
    if not changed[0] or size > len(wire):
        raise PayloadError(f"the blocks of a squeezed message of {length} bytes do not fit it")
    return size


def expand(wire: Bytes, message: Bytes) -> int:
    """Expand a `wire` that `extent` has checked into `message`; return the message's bytes."""
    length = int(wire[:MARK].view(np.int64)[0])
    changed = _bits(wire, length)
    first, last, size = _places(length, int(np.count_nonzero(changed)))
    whole, values = _blocks(message[: len(changed) * BLOCK]), _blocks(wire[first:last])
    whole[:] = values[np.cumsum(changed) - 1, -1:]  # as if all repeated; then the others
    whole[changed] = values
    message[len(changed) * BLOCK : length] = wire[last:size]
    return length


def _changes(words: _Words) -> _Bools:
    """Per block, True if some word of it differs from the one before."""
    same = np.empty(len(words), np.bool_)
    same[0] = False
    np.equal(words[1:], words[:-1], out=same[1:])
    changes: _Bools = same.view(np.uint64) != _ALL
    return changes


def _bits(wire: Bytes, length: int) -> _Bools:
    """Per block of a squeezed message, True if it was kept."""
    blocks = length // BLOCK
    return np.unpackbits(wire[MARK : MARK + -(-blocks // 8)], count=blocks).view(np.bool_)


def _blocks(array: Bytes) -> _Words:
    return array.view(np.uint64).reshape(-1, _WORDS)


def _places(length: int, count: int) -> tuple[int, int, int]:
    """First and last byte of the kept blocks on the wire, and the wire's end."""
    blocks = length // BLOCK
    first = MARK + -(-blocks // (8 * _WORD)) * _WORD
    last = first + count * BLOCK
    return first, last, last + length - blocks * BLOCK
