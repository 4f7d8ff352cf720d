"""The text that has tiles of results written past the cache; see [Note: past the cache].

A tile goes to a small room that stays in the cache, and a block of tiles from there to memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from compll.backends.cpu.prefetch import PART, Ahead

#: bytes of a line of the cache
LINE = 64
#: elements that are written past the cache at once, and those of a tile, at least
AT_ONCE, LEAST_TILE = 1024, 128


@dataclass(frozen=True)
class Poured:
    """A result of n values: the array that it is, and how the names of its variables end.

    items: of the array, a value: one float32, or some bytes.
    """

    array: str
    name: str = ""
    items: int = 1
    dtype: str = "float32"

    @property
    def width(self) -> int:
        """Bytes of a value."""
        return self.items if self.dtype == "uint8" else 4

    @property
    def line(self) -> int:
        """Items of a line."""
        return LINE * self.items // self.width


class Pouring(Ahead):
    """Emits walks over the tiles of a result."""

    @property
    def pourable(self) -> bool:
        """Whether tiles are long enough: shorter ones take as long to compute as to write."""
        return self.tile >= LEAST_TILE and self.tile % LINE == 0

    @property
    def block_size(self) -> int:
        """Elements that are written past the cache at once, of whole tiles."""
        return self.tile * max(1, AT_ONCE // self.tile)

    def make_room(self, x: Poured) -> None:
        """Where blocks of tiles stand before they are written."""
        size = 2 * self.block_size * x.items + 3 * x.line
        self.add(f"room{x.name} = np.empty({size}, np.{x.dtype})")

    @contextmanager
    def pouring(self, *results: Poured) -> Iterator[None]:
        """A walk over all tiles of these results."""
        with ExitStack() as stack:
            for x in results:
                stack.enter_context(self.poured_walk(x))
            yield

    @contextmanager
    def poured_walk(self, x: Poured) -> Iterator[None]:
        name, block = x.name, self.block_size * x.items
        self.add(f"past{name} = past_cache(n * {x.width})")
        self.add(f"into{name} = written_to({x.array}, room{name}, past{name})")
        self.add(f"gone{name}, stop{name} = 0, {block} if past{name} else 0")
        yield
        with self.block(f"if past{name}:"):
            done = f"(n - n % {self.tile})" + f" * {x.items}" * (x.items > 1)
            self.add(f"settle({x.array}, {done}, room{name}, {block})")

    def open_tile(self, results: Sequence[Poured], *streams: str) -> None:
        """Begin a tile that prefetches, unless its first result is written past the cache."""
        if results and self.tile < 2 * PART:
            with self.block(f"if not past{results[0].name}:"):
                self.open_ahead(*streams)
            return
        self.open_ahead(*streams)
        if results and self.streams:
            x = results[0]
            self.add(f"ahead = ahead_end if past{x.name} else ahead")

    def pour(self, x: Poured) -> None:
        """After a full tile: write a block past the cache if it is full, and if it should be."""
        stop, block = f"stop{x.name}", self.block_size * x.items
        end = f"o + {self.tile}" if x.items == 1 else f"{x.items} * (o + {self.tile})"
        with self.block(f"if {end} == {stop}:"):
            self.add(f"write_past({x.array}, {stop}, room{x.name}, {block})")
            self.add(f"gone{x.name} = {stop} - ({stop} // {block} & 1) * {block + x.line}")
            self.add(f"{stop} += {block}")
