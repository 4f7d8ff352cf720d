"""Asking for memory before it is needed.

[Note: prefetch] A processor prefetches along a page and begins anew at the next, and a tile is
about a page long: left alone, the first loop over every tile waits for memory while the others
leave it idle. So the loops over one tile ask for the next, a part before each of them; all at once
would fill the queue in which their own reads wait. onebit_group with feedback: 1.4 to 2.2 times as
fast.

Tiles of one array are brought to the first level of the cache. That holds 32 KB on some processors
(AMD's), where two or more arrays' tiles, and what is computed of them, push each other out: those
are brought to the second level, and EARLIER (cpu/memory.py). On an EPYC of family 25 the encodes with
feedback were 1.2 to 1.7 times as fast without any prefetch as with all to the first level, and
those without state .7 to .8 times; so they have both. Where the first level is larger (48 KB on the
Xeon that the figure above is of), everything goes there.
"""

from __future__ import annotations

from compll.backends.cpu.values import Values

#: elements that one call asks for
COUNTS = (512, 256, 128, 64)
#: of those, and of numbers of arrays, what there is as one call that looks where to end
ASKED, ARRAYS = (256, 128, 64), (1, 2, 3, 4)
#: elements between what is computed and what is asked for, at least
DISTANCE = 1024
#: elements asked for before a loop over a tile, or before a part of it where that is long
PART, LITTLE = 256, 64
#: parts of a loop that computes much
CHUNKS = 4


class Ahead(Values):
    """Emits walks over tiles that prefetch; see [Note: prefetch]."""

    #: the arrays, as long as the tensor, that the walk reads
    streams: tuple[str, ...] = ()
    #: whether one of the walk's loops over a tile is long, and asks many times for little
    evenly = False

    def open_ahead(self, *streams: str) -> None:
        """Begin a tile; `ahead` is the first element not yet asked for."""
        self.streams = streams
        several = " + EARLIER" if len(streams) > 1 else ""
        self.add(f"ahead = o + {max(self.tile, DISTANCE)}{several}")
        self.add(f"ahead_end = ahead + {self.tile}")
        if self.tile < 2 * PART:
            self.ask(self.tile)
            self.streams = ()

    def ahead(self, count: int = PART) -> None:
        """Before a loop: ask for so many elements of the next tile."""
        count = min(count, LITTLE) if self.evenly else count
        if self.streams and count in ASKED and len(self.streams) in ARRAYS:
            self.add(f"ahead = {self.asking(count)}")
        elif self.streams:
            with self.block("if ahead < ahead_end:"):
                self.ask(count)
                self.add(f"ahead += {count}")

    def asking(self, count: int) -> str:
        """The call that asks for so many elements, and gives those after them."""
        return f"ask{count}_{len(self.streams)}(ahead, ahead_end, {', '.join(self.streams)})"

    def close_ahead(self) -> None:
        """End a tile: ask for what is left."""
        if self.streams:
            with self.block("while ahead < ahead_end:"):
                self.ahead()
        self.streams = ()

    def chunks(self, turns: int) -> int:
        """In how many parts a loop of so many turns, all of a tile, is cut to ask in between."""
        return CHUNKS if self.streams and turns % (8 * CHUNKS) == 0 else 1

    def ask(self, count: int, streams: tuple[str, ...] = ()) -> None:
        """Ask for so many elements of the walk's arrays, or of these."""
        size = next((c for c in COUNTS if c <= count), COUNTS[-1])
        arrays = streams or self.streams
        how = "prefetch" if len(arrays) == 1 else "near"
        for at in range(0, count, size):
            for array in arrays:
                self.add(f"{how}{size}({array}, ahead + {at})")
