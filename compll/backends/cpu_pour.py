"""The text that has decoded tiles written past the cache; see [Note: past the cache].

A tile goes to a small room that stays in the cache, and a block of tiles from there to memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from compll.backends.cpu_ahead import PART, Ahead

#: elements of a line of the cache
LINE = 16
#: elements that are written past the cache at once, and those of a tile, at least
AT_ONCE, LEAST_TILE = 1024, 128


class Pouring(Ahead):
    """Emits walks over the tiles of a result."""

    #: whether the result is added to what is there
    adding: bool

    @property
    def pours(self) -> bool:
        """Whether tiles may be written past the cache.

        Shorter ones take as long to compute as to write.
        """
        whole = self.tile >= LEAST_TILE and self.tile % LINE == 0
        return whole and not self.adding and self.module.decode.op != "scatter"

    @property
    def block_size(self) -> int:
        """Elements that are written past the cache at once, of whole tiles."""
        return self.tile * max(1, AT_ONCE // self.tile)

    def make_room(self) -> None:
        """Where blocks of tiles stand before they are written."""
        self.add(f"room = np.empty({2 * self.block_size + 3 * LINE}, np.float32)")

    @contextmanager
    def pouring(self) -> Iterator[None]:
        """A walk over the tiles of ys."""
        if not self.pours:
            yield
            return
        self.add("past = past_cache(n)")
        self.add("into = written_to(ys, room, past)")
        self.add(f"gone, stop = 0, {self.block_size} if past else 0")
        yield
        with self.block("if past:"):
            self.add(f"settle(ys, n - n % {self.tile}, room, {self.block_size})")

    def ask_for_output(self) -> None:
        """Prefetch what is written, unless it is written past the cache."""
        if not self.pours:
            return self.open_ahead("ys")
        if self.tile < 2 * PART:
            with self.block("if not past:"):
                self.open_ahead("ys")
            return None
        self.open_ahead("ys")
        return self.add("ahead = ahead_end if past else ahead")

    @contextmanager
    def full_tile_written(self) -> Iterator[None]:
        """o_: where a full tile's values go, straight away or past the cache."""
        if self.pours:
            self.add(f"o_ = into[o - gone : o - gone + {self.tile}]")
        else:
            self.add(f"o_ = ys[o : o + {self.tile}]")
        yield
        if self.pours:
            with self.block(f"if o + {self.tile} == stop:"):
                self.add(f"write_past(ys, stop, room, {self.block_size})")
                self.add(
                    f"gone = stop - (stop // {self.block_size} & 1) * {self.block_size + LINE}"
                )
                self.add(f"stop += {self.block_size}")
