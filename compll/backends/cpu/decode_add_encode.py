"""Decode, add and encode in one kernel: what a ring hop and a parameter server do with a payload.

The encode kernel's tile of gradients is made of the gradient's and the payload's, so that neither
the sum nor the decoded values go through memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from compll.backends.cpu.declare import APART
from compll.backends.cpu.decode import Decoder
from compll.backends.cpu.emit import Encoder
from compll.ir.expr import Expr
from compll.ir.layout import tile_of
from compll.ir.module import Module
from compll.ir.program import Pass
from compll.passes.schedule import hops, schedule

#: the smallest tile for which one kernel was measured to be faster (onebit_group: by 14%; with
#: tiles of 64 the calls cost more than the memory traffic that they save)
LEAST_TILE = 512


def fuses(module: Module) -> bool:
    """Whether one kernel is possible and pays: codecs of several passes would decode in each."""
    if tile_of(module) < LEAST_TILE or not hops(module) or any(f.trits for f in module.fields):
        return False
    return len(schedule(module, feed=bool(module.states)).passes) == 1


class Merging(Decoder):
    """Emits `merge_tile`: y[0 : tile] becomes tile t of x + decode(payload), zero beyond it."""

    parts: Mapping[str, str] = MappingProxyType({"part": "o_", "into": "y"})

    def __init__(self, module: Module) -> None:
        super().__init__(module, add=False)

    @property
    def pours(self) -> bool:
        return False

    def kernel(self) -> str:
        """The text of `merge_tile`."""
        decode = self.module.decode
        with self.block(f"def {APART}(data, base, used, n, p, t, st, ys, y):"):
            self.statics_here()
            self.add(f"tiles = (n + {self.tile - 1}) // {self.tile}")
            self.add(f"o = t * {self.tile}")
            self.add(f"m = min({self.tile}, n - o)")
            self.layout()
            if self.module.status:
                with self.block("if data[base + used - 1] != 0:"):
                    with self.block(f"for i in range({self.tile}):"):
                        self.add("y[i] = NAN if i < m else ZERO")
                    self.add("return")
            self.scalars()
            for f in self.packed:
                self.add(f"w_{f.name} = at_{f.name} + t * {self.tile * f.bits // 8}")
            self.prepare(decode)
            with self.block(f"if m == {self.tile}:"):
                if len({f.bits for f in self.packed}) > 1:
                    self.code_buffers()
                self.add(f"o_ = ys[o : o + {self.tile}]")
                self.full_tile(decode)
            with self.block("else:"):
                self.code_buffers()
                self.unpack_short()
                self.output(decode, "m", "i")
                with self.block(f"for i in range(m, {self.tile}):"):
                    self.add("y[i] = ZERO")
        return str(self)

    def output(self, decode: Expr, turns: str, index: str, tile: str = "") -> None:
        source = f"{tile}[i]" if tile else f"ys[o + {index}]"
        target = "into[i]" if tile == "part" else f"y[{index}]"
        with self.block(f"for i in range({turns}):"):
            self.add(f"{target} = {source} + {self.text(decode, index)}")


class Hopping(Encoder):
    """Emits the encode kernel that takes a payload in."""

    extra = ", data, at_in, used_in, st_in"

    def inputs(self) -> None:
        """The tile's gradients by way of a buffer, its states as ever."""
        self.add(f"{APART}(data, at_in[p], used_in[p], n, p, t, st_in, xs, g_tail)")
        self.add("g_ = g_tail")
        with self.block(f"if m == {self.tile}:"):
            self.slices(self.elementwise)
        with self.block("else:"):
            for s in self.elementwise:
                self.copy_tail(s, f"s_{s}")

    def write_tail(self, one: Pass) -> None:
        super().write_tail(one)
        if any(s.kind == "back" for s in one.sinks):
            with self.block(f"for i in range(m if back and m == {self.tile} else 0):"):
                self.add("xs[o + i] = g_[i]")
